"""The simple rival of a nest: several independent networks, of which the largest is run that lately was in time.

In: networks from the smallest to the largest, or the folders of their runs. Out: Answers as a Runtime gives them, whose stage is
the number of the network. It remembers the last times of each and runs the largest whose quantile fits into the time there
is, the smallest if none does, in the caller's thread. Nothing is stopped or shared: a network that takes longer than it
did is late, and who has an answer of one network and wants a better one begins another from nothing.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from nestling.errors import NestlingError
from nestling.export.spec import Spec
from nestling.runtime.answer import Answer, softmax
from nestling.runtime.engine import Engine, Floats, Stop
from nestling.runtime.inputs import Intake, seconds
from nestling.runtime.runtime import NetSource, open_source

KEPT_TIMES = 60  # of each network
USUALLY = 0.9  # a network fits if this share of its last times do


class Chooser:
    """`Chooser([small, middle, large])`: answers by choosing a network. Thread-safe; close it, or use it as a context manager."""

    def __init__(
        self,
        sources: Sequence[NetSource],
        device: str = "auto",
        engine: str = "auto",
        threads: int = 1,
        spec: Spec | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Each source is what a Runtime takes; of a nest, the last stage answers. `spec` says more about bare networks."""
        if not sources or isinstance(sources, str):
            raise NestlingError(f"found {sources!r}; expected networks to choose from, the smallest first")
        opened = [open_source(source, device, engine, threads)[:2] for source in sources]
        self.engines = [engine for engine, _ in opened]
        self.spec = spec or together([known for _, known in opened])
        if self.spec.stages != len(self.engines) or any(known.shape != self.spec.shape for _, known in opened):
            raise NestlingError(
                f"the spec of {self.spec.name} is of {self.spec.stages} networks for images {self.spec.shape}; found "
                f"{len(self.engines)}, for images {[known.shape for _, known in opened]}"
            )
        if self.spec.output or any(known.answer != self.spec.answer for _, known in opened):
            raise NestlingError(
                f"the spec of {self.spec.name} is of {len(self.spec.classes)} classes; found answers of shapes "
                f"{[known.answer for _, known in opened]}; a Chooser takes networks that answer with these classes"
            )
        self.intake, self.clock, self.lock = Intake(self.spec), clock, threading.Lock()
        black = np.zeros((1, *self.spec.shape), np.float32)
        self.times: list[deque[float]] = [deque(maxlen=KEPT_TIMES) for _ in self.engines]
        for number in range(1, self.spec.stages + 1):
            for _ in range(6):
                self.run(number, black)
            self.times[number - 1].popleft()  # the first run allocates

    def answer(self, x: Any, *, deadline: float | None = None) -> Answer:
        """The Answer to an image (C,H,W) of the largest network that usually takes at most `deadline` seconds; None: the last."""
        began = self.clock()
        limit = seconds(deadline)
        image = self.intake.one(x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else x)
        return self._answer(image, 1, began, limit)

    def choose(self, left: float, least: int = 1) -> int:
        """The number of the largest network that usually fits, from `least` on; that if none does."""
        fitting = (number for number in range(self.spec.stages, least, -1) if self.usual(number) <= left)
        return next(fitting, least)

    def usual(self, number: int) -> float:
        """The time in which most runs of a network are done, by the last of them."""
        order = sorted(self.times[number - 1])
        return order[int(USUALLY * len(order))]

    def run(self, number: int, image: Floats) -> Floats:
        """The logits of one network (1, classes)."""
        with self.lock:
            if not self.engines:
                raise NestlingError(f"this chooser of {self.spec.name} is closed; make a new one")
            began = self.clock()
            logits = run_last(self.engines[number - 1], image)
            self.times[number - 1].append(self.clock() - began)
        if not np.isfinite(logits).all():
            raise NestlingError(f"the logits of network {number} of {self.spec.name} are not numbers")
        return logits

    def close(self) -> None:
        with self.lock:
            for engine in self.engines:
                engine.close()
            self.engines.clear()

    def _answer(self, image: Floats, least: int, began: float, limit: float) -> Answer:
        number = self.spec.stages if limit == inf else self.choose(began + limit - self.clock(), least)
        logits = self.run(number, image)[0]
        label, size = int(logits.argmax()), self.spec.sizes[number - 1]
        final, refine = number == self.spec.stages, partial(self._refine, image, number)
        elapsed = self.clock() - began
        name = self.spec.classes[label]
        return Answer(label, name, number, size, elapsed, final, partial(softmax, logits), refine, logits)

    def _refine(self, image: Floats, number: int, deadline: float | None) -> Answer:
        """A larger network from nothing; the next if none usually fits: there is an answer already, so that may be late."""
        return self._answer(image, number + 1, self.clock(), seconds(deadline))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def run_last(engine: Engine, image: Floats) -> Floats:
    """The last stage's logits, the shortest way."""
    state = engine.start(image)
    for stage in range(engine.stages if engine.jumps else 1, engine.stages + 1):
        logits, state = engine.step(stage, state, Stop())
    return logits


def together(specs: Sequence[Spec]) -> Spec:
    """One spec of several networks, which must agree in everything but what each is worth."""
    first = specs[0]
    for other in specs[1:]:
        for what in ("shape", "classes", "mean", "std"):
            if getattr(other, what) != getattr(first, what):
                raise NestlingError(
                    f"{other.name} has another {what} than {first.name}; choose from networks that answer the same question"
                )
    errors = tuple(spec.errors[-1] for spec in specs if spec.errors)
    known = errors if len(errors) == len(specs) else ()
    return replace(first, sizes=tuple(spec.sizes[-1] for spec in specs), errors=known)
