"""Stages on a GPU as CUDA graphs: one launch per stage, answers copied to pinned memory, events to wait for.

In: a network and its frozen stages. Single images run in slots, whose memory and graphs are made once; batches run layer by
layer. At batch 1 a GPU waits for layers, not for arithmetic, so the whole network in one graph may take hardly longer than
its first stage: where that is so (measured at the start), both are launched side by side, stage 1's answer is taken from
the one and the others' from the other. A graph that is launched cannot be stopped: it takes less than a millisecond.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from nestling.export.fold import fold
from nestling.export.freeze import Frozen, freeze_whole
from nestling.export.torchstage import TorchStage
from nestling.nets import NestedNet
from nestling.runtime.engine import Floats, Stop
from nestling.runtime.engines.eager import EXACT, EagerEngine, NamedTensors

SLOTS = 5
WORTH_IT = 0.9  # side by side if the last answer then comes in at most this share of the stages' time


class GraphEngine:
    """Runs stages as CUDA graphs."""

    name = "cuda graphs"
    stops = jumps = False
    places = 1

    def __init__(
        self,
        net: NestedNet,
        stages: Sequence[Frozen],
        shapes: Mapping[str, tuple[int, ...]],
        device: torch.device | str = "cuda",
        slots: int = SLOTS,
        side_by_side: bool | None = None,
    ) -> None:
        """`side_by_side` None: whichever gives the last answer sooner on this device."""
        self.device = torch.device(device)
        self.eager = EagerEngine(stages, shapes, self.device)
        self.modules = [TorchStage(stage).to(self.device) for stage in stages]
        self.whole = TorchStage(fold((freeze_whole(net),))[0]).to(self.device)
        self.row_bytes, self.most = self.eager.row_bytes, slots
        shape, answer = shapes["input"], shapes[stages[-1].head]
        with torch.cuda.device(self.device):
            self.free = [GraphSlot(self, shape, answer) for _ in range(slots)]
        self.side_by_side = self.measure() if side_by_side is None else side_by_side

    @property
    def stages(self) -> int:
        return len(self.modules)

    def start(self, x: Floats) -> "HeldSlot | NamedTensors":
        if len(x) > 1 or not self.free:
            return self.eager.start(x)
        held = HeldSlot(self.free.pop(), self.give_back)
        held.slot.x_host.copy_(torch.from_numpy(x))
        return held

    def step(
        self, stage: int, state: "HeldSlot | NamedTensors", stop: Stop
    ) -> tuple[Floats, "HeldSlot | NamedTensors"]:
        with torch.cuda.device(self.device):
            if not isinstance(state, HeldSlot):
                return self.eager.step(stage, state, stop)
            stop.check()
            return state.slot.run(stage, self.side_by_side), state

    def take(self, state: "HeldSlot | NamedTensors", places: Sequence[int]) -> "HeldSlot | NamedTensors":
        assert not isinstance(state, HeldSlot), "a slot holds one image: there is nothing to choose from"
        return self.eager.take(state, places)

    def close(self) -> None:
        self.free.clear()
        self.modules.clear()

    def give_back(self, slot: "GraphSlot") -> None:
        if self.modules:
            self.free.append(slot)

    def measure(self, repeats: int = 20) -> bool:
        """Whether all answers come sooner side by side than stage after stage."""
        slot, last = self.free[0], len(self.modules)
        slot.x_host.zero_()

        def best(side_by_side: bool) -> float:
            times = []
            for _ in range(repeats):
                began = time.perf_counter()
                for stage in range(1, last + 1):
                    slot.run(stage, side_by_side)
                times.append(time.perf_counter() - began)
            return sorted(times)[repeats // 2]

        return best(True) <= WORTH_IT * best(False)


class GraphSlot:
    """Memory and graphs for one image: of every stage, and of all stages at once."""

    def __init__(self, engine: GraphEngine, shape: tuple[int, ...], answer: tuple[int, ...]) -> None:
        device, count = engine.device, len(engine.modules)
        self.x_host = torch.empty(1, *shape, pin_memory=True)
        self.x = torch.zeros(1, *shape, device=device)
        self.logits_host = torch.empty(count, 1, *answer, pin_memory=True)
        self.first, self.second = torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device)
        self.arrived, self.done, self.all_done = torch.cuda.Event(), torch.cuda.Event(), torch.cuda.Event()
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.outputs: list[Tensor] = []  # each stage's logits, where its graph leaves them
        values: dict[str, Tensor] = {"input": self.x}
        for module in engine.modules:
            state = [values[name] for name in module.frozen.takes]
            graph, (logits, *given) = capture(lambda module=module, state=state: module(*state))  # type: ignore[misc]
            values |= dict(zip(module.frozen.gives, given, strict=True))
            self.graphs.append(graph)
            self.outputs.append(logits)
        self.values = values  # the graphs' memory: it must live as long as they do
        self.whole_graph, [self.all_logits] = capture(lambda: (torch.stack(engine.whole(self.x)),))

    def run(self, stage: int, side_by_side: bool) -> Floats:
        """The logits of one stage; stages must be asked for in order."""
        host = self.logits_host
        if stage == 1:
            with torch.cuda.stream(self.first):
                self.x.copy_(self.x_host, non_blocking=True)
                self.arrived.record()
        if stage == 1 or not side_by_side:
            with torch.cuda.stream(self.first):
                self.graphs[stage - 1].replay()
                host[stage - 1].copy_(self.outputs[stage - 1], non_blocking=True)
                self.done.record()
        if stage == 1 and side_by_side and len(self.graphs) > 1:
            with torch.cuda.stream(self.second):
                self.second.wait_event(self.arrived)
                self.whole_graph.replay()
                host[1:].copy_(self.all_logits[1:], non_blocking=True)
                self.all_done.record()
        (self.all_done if side_by_side and stage > 1 else self.done).synchronize()  # without the interpreter's lock
        found: Floats = np.array(host[stage - 1].numpy())
        return found


def capture(function: Callable[[], Sequence[Tensor]]) -> tuple[torch.cuda.CUDAGraph, Sequence[Tensor]]:
    """A function without arguments as a CUDA graph, and the tensors in which the graph leaves its results."""
    side = torch.cuda.Stream()
    best = torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False)
    with torch.inference_mode(), EXACT, best:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # kernels are chosen and libraries set up outside the capture
                function()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other runtimes may be at work
            results = function()
    return graph, results


class HeldSlot:
    """A slot in use. When the last reference to this goes, the slot is free again."""

    __slots__ = ("give_back", "slot")

    def __init__(self, slot: GraphSlot, give_back: Callable[[GraphSlot], None]) -> None:
        self.slot, self.give_back = slot, give_back

    def __del__(self) -> None:
        self.give_back(self.slot)
