"""An engine that gives D_s at once: one engine for every s to begin with, and the later stages after it.

In: engines whose first stage is D_1, D_2, ... of the same network. Which of them works on a question is decided by its first
step: `step(s, engine.start(x), stop)` is D_s straight from the image. From there stages go on one by one, in the same engine:
what they pass on may be laid out in another way than after another beginning. Knows no deadline.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from nestling.runtime.engine import Engine, EngineState, Floats, JoiningEngine, Stop

Fitting = TypeVar("Fitting", bound=Engine)
ROUNDS, TURN = 4, 3  # of timing several engines against each other: the first round warms up


@dataclass(slots=True)  # not frozen: that takes three times as long to make
class Begun:
    """Where a question stands: before its first step the images, then the engine that it has begun with and its state."""

    x: Floats | None
    first: int = 0
    state: EngineState = None


class JumpEngine:
    """Runs stages one by one, or begins with any of them. `beginnings[s - 1]` has the stages s to n."""

    most = 0
    jumps = True

    def __init__(self, beginnings: Sequence[JoiningEngine]) -> None:
        self.beginnings = list(beginnings)
        self.stages, self.name, self.stops = beginnings[0].stages, beginnings[0].name, beginnings[0].stops
        self.places = beginnings[0].places
        self.row_bytes = max(engine.row_bytes for engine in beginnings)

    def start(self, x: Floats) -> Begun:
        return Begun(x)

    def step(self, stage: int, state: Begun, stop: Stop) -> tuple[Floats, Begun]:
        first = state.first or stage
        engine = self.beginnings[first - 1]
        inner = state.state if state.x is None else engine.start(state.x)
        logits, inner = engine.step(stage - first + 1, inner, stop)
        return logits, Begun(None, first, inner)

    def take(self, state: Begun, places: Sequence[int]) -> Begun:
        if state.x is not None:
            return Begun(state.x[list(places)])
        return Begun(None, state.first, self.beginnings[state.first - 1].take(state.state, places))

    def join(self, parts: Sequence[tuple[Begun, int]]) -> Begun:
        """Of images that began with the same stage: others are laid out differently."""
        [first] = {state.first for state, _ in parts}
        if not first:
            return Begun(np.stack([state.x[place] for state, place in parts if state.x is not None]))
        return Begun(None, first, self.beginnings[first - 1].join([(state.state, place) for state, place in parts]))

    def close(self) -> None:
        for engine in self.beginnings:
            engine.close()


def soonest(engines: Sequence[Fitting], shape: tuple[int, ...]) -> Fitting:
    """The engine whose first stage is done soonest on a black image; the others are closed."""
    if len(engines) == 1:
        return engines[0]
    x = np.zeros((1, *shape), np.float32)
    seen: list[list[float]] = [[] for _ in engines]
    for turn in range(ROUNDS):
        for engine, times in zip(engines, seen, strict=True):
            for _ in range(TURN):
                state, began = engine.start(x), time.perf_counter()
                engine.step(1, state, Stop())
                times.extend([time.perf_counter() - began] * bool(turn))
    best = min(engines, key=lambda engine: statistics.median(seen[engines.index(engine)]))
    for engine in engines:
        if engine is not best:
            engine.close()
    return best
