"""What runs stages: the contract between the deadline's worker and ONNX Runtime, eager torch or a CUDA graph.

An engine is used by as many threads at a time as it has `places`, mostly one. State is opaque to everybody else and goes
back to its engine when nothing refers to it any more. A step that is told to stop raises Abandoned as soon as it can, and
leaves the state it was given usable; an engine that cannot stop in the middle just finishes. Knows no deadline.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nestling.errors import NestlingError

Floats = NDArray[np.float32]
EngineState = Any  # the engine's own


class Abandoned(Exception):
    """A stage stopped half-way because nobody waits for it any more."""


class Stop:
    """Asks a running step to end early, from any thread."""

    __slots__ = ("asked", "hook")

    def __init__(self) -> None:
        self.asked = False
        self.hook: Callable[[], None] | None = None

    def set(self) -> None:
        self.asked = True
        hook = self.hook
        if hook is not None:
            hook()

    def call(self, hook: Callable[[], None]) -> None:
        """Have `hook` called when the step shall end; at once if that has been asked already."""
        self.hook = hook
        if self.asked:
            hook()

    def check(self) -> None:
        """For engines that go layer by layer."""
        if self.asked:
            raise Abandoned


class Engine(Protocol):
    """Runs the stages of one network, 1 to `stages`."""

    @property
    def name(self) -> str: ...

    @property
    def stages(self) -> int: ...

    @property
    def row_bytes(self) -> int:
        """Most memory that the state of one image takes."""

    @property
    def most(self) -> int:
        """How many states it can hold at a time; 0 = as many as there is memory for."""

    @property
    def stops(self) -> bool:
        """Whether a step that is told to stop ends soon, in the middle of a stage."""

    @property
    def jumps(self) -> bool:
        """Whether the first step of an image may be any stage: D_s at once, sooner than the stages one by one."""

    @property
    def places(self) -> int:
        """How many threads may run steps at the same time, each on a core of its own."""

    def start(self, x: Floats) -> EngineState:
        """State before stage 1 of normalised images (n,C,H,W)."""

    def step(self, stage: int, state: EngineState, stop: Stop) -> tuple[Floats, EngineState]:
        """Run one stage on the state that the stage before left, or D_stage at once where the engine jumps and nothing was run
        yet: logits (n,classes) and the state after it."""

    def take(self, state: EngineState, places: Sequence[int]) -> EngineState:
        """State of some of the images; the given state stays as it is."""

    def close(self) -> None: ...


class JoiningEngine(Engine, Protocol):
    """An engine that can also put images of several questions together: a server needs that."""

    def join(self, parts: Sequence[tuple[EngineState, int]]) -> EngineState:
        """State of one image of each state, in this order; they have the same stages behind them, and stay as they are."""


def warm_up(engine: Engine, shape: tuple[int, ...], repeats: int = 6) -> list[float]:
    """Run every stage a few times on an image of zeros; how long each takes by itself, in seconds, when little
    else is going on (lower quartile)."""
    x = np.zeros((1, *shape), np.float32)
    seen: list[list[float]] = [[] for _ in range(engine.stages)]
    for _ in range(repeats):
        state = engine.start(x)
        for stage in range(1, engine.stages + 1):
            began = time.perf_counter()
            try:
                _, state = engine.step(stage, state, Stop())
            except NestlingError:
                raise  # it says itself what to do
            except Exception as error:  # engines have no one kind of error
                raise NestlingError(
                    f"stage {stage} fails on a black image: {error}; make or export it again"
                ) from error
            seen[stage - 1].append(time.perf_counter() - began)
    return [quiet(times) for times in seen]


def warm_jumps(engine: Engine, shape: tuple[int, ...], repeats: int = 6) -> list[float]:
    """How long D_2, D_3, ... take at once, as in `warm_up`; nothing if the engine does not jump."""
    x, found = np.zeros((1, *shape), np.float32), []
    for stage in range(2, engine.stages + 1) if engine.jumps else ():
        times = []
        for _ in range(repeats):
            state, began = engine.start(x), time.perf_counter()
            engine.step(stage, state, Stop())
            times.append(time.perf_counter() - began)
        found.append(quiet(times))
    return found


def quiet(times: Sequence[float]) -> float:
    """The lower quartile, but for the first run, which allocates."""
    later = sorted(times[1:])
    return later[len(later) // 4]
