"""Images on their way through the stages: an ImageWork is one image, a Work those that go on together.

An image knows its best logits so far and where its work stands; a work holds the images, the engine's state and how many
stages are behind them. A work that is queued or running knows its images; a resting one does not, so that it and its state
are freed with the last answer that could be refined. Who runs them, and when, is worker.py's business.
"""

from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nestling.runtime.engine import EngineState, Floats, Stop

ImageArray = NDArray[np.float32] | NDArray[np.uint8]


class Trail:
    """When a question was asked, how slow the machine was then, and the seconds until each stage (or a later one) was done."""

    __slots__ = ("began", "counts", "done", "first", "slowdown")

    def __init__(self, began: float, slowdown: float, counts: bool = True) -> None:
        """`counts`: forecasts learn from it; measuring is not asking."""
        self.began, self.slowdown, self.counts = began, slowdown, counts
        self.done: list[float] = []
        self.first = 1  # the stage it began with


class Listener(Protocol):
    """Whoever is told: a mailbox, or what stands for one."""

    def put(self, item: Any) -> None: ...


class Collected(list["News"]):
    """A listener that keeps what it is told and wakes nobody."""

    def put(self, item: "News | None") -> None:
        if item is not None:
            self.append(item)


class ImageWork:
    """One image."""

    __slots__ = (
        "best",
        "deadline",
        "due",
        "error",
        "final",
        "listeners",
        "place",
        "thresholds",
        "told",
        "trail",
        "tried",
        "waited",
        "work",
    )

    def __init__(self, deadline: float, thresholds: tuple[float, ...] = ()) -> None:
        self.deadline = deadline  # on the clock: somebody waits for more until then, and looks then, a margin early
        self.due = inf  # where that is later: whoever has an answer by then looks then
        self.thresholds = thresholds  # per stage: a probability that is sure enough to stop
        self.best: tuple[int, Floats | None] = (0, None)  # stage and logits; replaced whole, so reading needs no lock
        self.final = False
        self.tried = "sure"  # what the last stage was (promise.TRIED)
        self.told = inf  # when its last stage was told to end, if it was
        self.waited = 0.0  # seconds that its caller's thread waited for a processor
        self.error: Exception | None = None
        self.listeners: tuple[tuple[Listener, bool], ...] = ()  # and whether they want every stage's news
        self.work: Work | None = None
        self.place = 0  # in its work
        self.trail: Trail | None = None  # of a single question, until nobody goes on with it

    def tell(self, news: "News | None") -> None:
        for listener, every in self.listeners:
            if every or news is None or news.final:  # waking a thread for nothing costs the stages time
                listener.put(news)

    def fail(self, error: Exception) -> None:
        self.error, self.final, self.work = error, True, None
        self.tell(None)


@dataclass(frozen=True, eq=False, slots=True)
class News:
    """An image finished a stage."""

    image: ImageWork
    stage: int
    logits: Floats
    final: bool
    at: float  # on the clock


class Work:
    """Images that go through the next stage together: they have the same stages behind them."""

    __slots__ = (
        "__weakref__",
        "done",
        "first",
        "images",
        "pick",
        "queued",
        "running",
        "state",
        "stop",
        "straight",
        "x",
    )

    def __init__(
        self,
        images: list[ImageWork],
        x: ImageArray,
        state: EngineState = None,
        done: int = 0,
        first: int | None = None,
        straight: bool = False,
    ) -> None:
        self.images = images
        self.x = x  # (n,C,H,W); kept until the last stage, in case the state has to go
        self.first = first  # the number of the first in its batch, while they are as they were given; None: normalised
        self.state = state  # None before stage 1, or when it had to go
        self.pick: list[int] | None = None  # which images of the state these are; None = all, in order
        self.done = done
        self.straight = straight  # nobody looks before the best there will be: stages may be skipped
        self.queued = self.running = False
        self.stop = Stop()
        for place, image in enumerate(images):
            image.work, image.place = self, place

    def deadline(self) -> float:
        return max((image.deadline for image in self.images if not image.final), default=-inf)

    def part(self, places: list[int]) -> "Work":
        """Some of the images as a work of their own, which shares this one's state; the others stay here."""
        other = Work(
            [self.images[place] for place in places], self.x[places], self.state, self.done, self.first, self.straight
        )
        if self.state is not None:
            other.pick = [self.pick[place] for place in places] if self.pick is not None else list(places)
        return other

    def rest(self) -> bool:
        """Forget the images (they know this work) and say whether any of them may come back."""
        unfinished = any(image.work is self for image in self.images)
        self.images = []
        return unfinished

    def resume(self, image: ImageWork) -> "Work":
        """A resting work for one of its images: itself if that is all it holds, else a work of its own."""
        if len(self.x) == 1:
            self.images = [image]
            return self
        place = image.place  # valid for ever: nothing is taken out of x or the state, only copied
        first = None if self.first is None else self.first + place
        other = Work([image], self.x[place : place + 1], self.state, self.done, first, self.straight)
        if self.state is not None:
            other.pick = [place if self.pick is None else self.pick[place]]
        return other

    def forget(self) -> None:
        """Let the state go; if the images come back, they begin anew."""
        self.state, self.pick, self.done = None, None, 0
