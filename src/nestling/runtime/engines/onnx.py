"""Exported stages in ONNX Runtime: the default engine on CPUs.

In: one graph per stage with the names of the values it takes and gives, and their shapes. The values of one question live
in a `Slot`, one block of memory in which every stage finds its inputs and leaves its outputs; slots are bound to the graphs
once and used again, so that running a stage copies nothing. All stages share one pool of threads: pools of their own would
spin against each other. Needs numpy and onnxruntime only.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import onnxruntime

from nestling.errors import NestlingError
from nestling.runtime.engine import Abandoned, Floats, Stop
from nestling.runtime.external import has_external_data

ALIGNED = 64  # bytes: a cache line, and the widest vector register
BINDINGS = 32 * 1024  # bytes, about, that ONNX Runtime needs to remember where the values of one slot are
FLOAT = "tensor(float)"  # ONNX Runtime's name for them
UNSAID = ("gpu_graph_id", "-1")  # ONNX Runtime 1.31 asks for it before every run, and 45 us pass if it is not there
FREE_BATCHES = 2  # slots of batches kept for later


@dataclass(frozen=True)
class StageGraph:
    """One stage: an ONNX model and the names of the values that pass through its ends."""

    model: bytes
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    optimised: bool = False  # already, for this machine: it is run as it is


class Pool:
    """The threads all sessions of this process share. ONNX Runtime makes them once and for all."""

    lock = threading.Lock()
    size = 1

    @classmethod
    def share(cls, threads: int) -> int:
        """Ask for so many threads (0: all cores); returns how many there are. The first to ask for more than one decides,
        and then everybody shares these, also who wants only one: ONNX Runtime allows no sessions with their own any more."""
        threads = threads or cores()
        with cls.lock:
            if threads > 1 and cls.size == 1:
                try:
                    onnxruntime.set_global_thread_pool_sizes(threads, 1)
                except Exception as error:  # somebody else in this process was first
                    raise NestlingError(
                        f"cannot share {threads} threads: {error}; another part of this process has made ONNX Runtime's "
                        "shared threads; use threads=1"
                    ) from error
                cls.size = threads
            return cls.size


class OnnxEngine:
    """Runs stages in ONNX Runtime. One image at a time it is fastest; batches of any size work."""

    name = "onnxruntime"
    most = 0
    stops = True
    jumps = False

    def __init__(
        self,
        graphs: Sequence[StageGraph],
        shapes: Mapping[str, tuple[int, ...]],
        answer: tuple[int, ...],
        threads: int = 1,
    ) -> None:
        """`shapes`: of the values between stages, `answer`: of an answer, both without the batch. threads=0: all cores."""
        self.threads = Pool.share(threads)
        self.graphs, self.shapes, self.answer = tuple(graphs), dict(shapes), answer
        self.sessions = [open_session(graph, self.threads, number) for number, graph in enumerate(graphs, start=1)]
        for number, (session, graph) in enumerate(zip(self.sessions, self.graphs, strict=True), start=1):
            check_ends(session, graph, self.shapes, answer, number)
        self.layout = Places({"input": self.shapes["input"]} | {n: self.shapes[n] for g in graphs for n in g.gives})
        self.single: list[Slot] = []  # free ones, of one image
        self.free: list[Slot] = []  # of batches

    @property
    def stages(self) -> int:
        return len(self.graphs)

    @property
    def places(self) -> int:
        return cores() if self.threads == 1 else 1

    @property
    def row_bytes(self) -> int:
        return self.layout.bytes + BINDINGS

    def start(self, x: Floats) -> "SlotInUse":
        held = self.hold(len(x))
        np.copyto(held.slot.values["input"], x)
        return held

    def step(self, stage: int, state: "SlotInUse", stop: Stop) -> tuple[Floats, "SlotInUse"]:
        slot = state.slot
        binding = slot.bindings[stage - 1]
        if binding is None:
            binding = slot.bindings[stage - 1] = self.bind(stage, slot)
        options = onnxruntime.RunOptions()  # one per run: a late request to end must not hit the next
        options.add_run_config_entry(*UNSAID)
        stop.call(lambda: setattr(options, "terminate", True))
        try:
            self.sessions[stage - 1].run_with_iobinding(binding, options)
        except RuntimeError as error:
            if stop.asked:
                raise Abandoned from error
            raise
        state.done = stage
        return slot.logits.copy(), state

    def take(self, state: "SlotInUse", places: Sequence[int]) -> "SlotInUse":
        held = self.hold(len(places), state.done)
        for name in self.needed(state.done):
            np.take(state.slot.values[name], places, axis=0, out=held.slot.values[name], mode="clip")
        return held

    def join(self, parts: Sequence[tuple["SlotInUse", int]]) -> "SlotInUse":
        held = self.hold(len(parts), parts[0][0].done)
        for name in self.needed(held.done):
            for at, (state, place) in enumerate(parts):
                held.slot.values[name][at] = state.slot.values[name][place]
        return held

    def needed(self, done: int) -> set[str]:
        """The values that there are after so many stages and that a later one takes."""
        made = {"input", *(name for graph in self.graphs[:done] for name in graph.gives)}
        return made & {name for graph in self.graphs[done:] for name in graph.takes}

    def close(self) -> None:
        self.single.clear()
        self.free.clear()
        self.sessions.clear()

    def hold(self, images: int, done: int = 0) -> "SlotInUse":
        """A slot for so many images: one that is free, or a new one."""
        if images == 1:
            with suppress(IndexError):
                return SlotInUse(self.single.pop(), self.give_back, done)
        for slot in self.free.copy():
            if slot.images == images:
                with suppress(ValueError):  # another thread has just taken it
                    self.free.remove(slot)
                    return SlotInUse(slot, self.give_back, done)
        return SlotInUse(Slot(self.layout, images, self.answer, self.stages), self.give_back, done)

    def give_back(self, slot: "Slot") -> None:
        """Called when nothing refers to a state any more, by whichever thread let it go."""
        if not self.sessions:
            return
        if slot.images == 1:
            self.single.append(slot)
        elif len(self.free) < FREE_BATCHES:
            self.free.append(slot)

    def bind(self, stage: int, slot: "Slot") -> onnxruntime.IOBinding:
        binding = self.sessions[stage - 1].io_binding()
        graph = self.graphs[stage - 1]
        for name in graph.takes:
            array = slot.values[name]
            binding.bind_input(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
        for name, array in (("logits", slot.logits), *((name, slot.values[name]) for name in graph.gives)):
            binding.bind_output(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
        return binding


class Places:
    """Where each value of one question lies in its memory."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = dict(shapes)
        self.bytes = sum(self.room(shape) for shape in self.shapes.values())

    def room(self, shape: tuple[int, ...], images: int = 1) -> int:
        """Bytes of a value, filled up so that the next one is aligned."""
        return -(-4 * images * int(np.prod(shape)) // ALIGNED) * ALIGNED


class Slot:
    """The memory of one question, and the bindings of each stage to it."""

    def __init__(self, layout: Places, images: int, answer: tuple[int, ...], stages: int) -> None:
        total = sum(layout.room(shape, images) for shape in layout.shapes.values())
        block = np.empty(total + ALIGNED, np.uint8)
        place = -block.ctypes.data % ALIGNED
        self.images = images
        self.values: dict[str, Floats] = {}
        for name, shape in layout.shapes.items():
            count = 4 * images * int(np.prod(shape))
            self.values[name] = block[place : place + count].view(np.float32).reshape(images, *shape)
            place += layout.room(shape, images)
        self.logits: Floats = np.empty((images, *answer), np.float32)
        self.bindings: list[onnxruntime.IOBinding | None] = [None] * stages


class SlotInUse:
    """A slot in use. When the last reference to this goes, the slot is free again."""

    __slots__ = ("done", "give_back", "slot")

    def __init__(self, slot: Slot, give_back: Callable[[Slot], None], done: int = 0) -> None:
        self.slot, self.give_back, self.done = slot, give_back, done

    def __del__(self) -> None:
        self.give_back(self.slot)


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def session_options(threads: int, optimised: bool = False) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if threads > 1:
        options.use_per_session_threads = False
    else:
        options.intra_op_num_threads = options.inter_op_num_threads = 1
    if optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options


def open_session(graph: StageGraph, threads: int, stage: int) -> onnxruntime.InferenceSession:
    options = session_options(threads, graph.optimised)
    try:
        if not has_external_data(graph.model):
            return onnxruntime.InferenceSession(graph.model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises a dozen kinds, none with a common parent
        raise NestlingError(f"the graph of stage {stage} cannot be read: {error}; export the run again") from error
    raise NestlingError(
        f"the graph of stage {stage} keeps tensors in other files, which its checksum does not cover; "
        "export the run again, or save the graph with its data inside"
    )


def end(value: onnxruntime.NodeArg) -> tuple[str, tuple[int | str | None, ...], str]:
    """A graph's input or output: its name, shape without the batch, and type."""
    return value.name, tuple((value.shape or ())[1:]), value.type


def check_ends(
    session: onnxruntime.InferenceSession,
    graph: StageGraph,
    shapes: Mapping[str, tuple[int, ...]],
    answer: tuple[int, ...],
    stage: int,
) -> None:
    """The graph must take and give what was said of it: names, shapes and numbers of 32 bits."""
    found, given = ([end(each) for each in ends] for ends in (session.get_inputs(), session.get_outputs()))
    wanted = [(name, shapes.get(name, ()), FLOAT) for name in graph.takes]
    promised = [("logits", answer, FLOAT), *((name, shapes.get(name, ()), FLOAT) for name in graph.gives)]
    for what, ours, theirs in (("takes", wanted, found), ("gives", promised, given)):
        if sorted(ours, key=repr) != sorted(theirs, key=repr):
            different = sorted(set(ours) ^ set(theirs), key=repr)[0]
            raise NestlingError(
                f"the graph of stage {stage} is not the one described: it {what} {len(theirs)} values, expected "
                f"{len(ours)}; they differ at {different}; export the run again"
            )
