"""Whose turn it is: works that wait for a stage, and those that rest with their state until somebody wants more of them.

Whoever has least goes first: everybody gets stage 1 before anybody gets stage 2, among equals the earliest deadline. A stage
that cannot be in time is put off while others wait. First stages of so little work that a turn of its own would cost as much
are run together. The newest `keep` states of unfinished images are kept. Runs nothing, and is used under the worker's lock.
"""

import heapq
import itertools
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np

from nestling.runtime.forecast import Recent
from nestling.runtime.news import remember
from nestling.runtime.pace import Pace
from nestling.runtime.work import Work

COMPACT = 0.75  # a batch is cut down when at most this share of it still has time: cutting copies the state
LITTLE = 0.3e-3  # seconds that first stages may take together; to take turns costs a tenth of a millisecond each


class Turns:
    """The queues, and what rests beside them."""

    def __init__(self, pace: Pace, keep: int, clock: Callable[[], float], recent: Recent) -> None:
        self.pace, self.keep, self.clock, self.recent = pace, max(1, keep), clock, recent
        self.fresh: list[tuple[float, int, Work]] = []  # heaps: without any stage yet, by deadline
        self.begun: list[tuple[int, float, int, Work]] = []  # by stages done, then deadline
        self.late: list[tuple[float, int, Work]] = []  # given up while others waited; tried again when nobody does
        self.order = itertools.count()
        self.parked: deque[tuple[weakref.ref[Work], int]] = deque()  # oldest first, with how many images each holds
        self.parked_images = self.begun_images = 0

    def __bool__(self) -> bool:
        """Whether anybody waits. May be asked without the lock, as whether there are fresh ones may."""
        return bool(self.fresh or self.begun or self.late)

    def push(self, work: Work) -> None:
        work.queued = True
        if work.done:
            heapq.heappush(self.begun, (work.done, work.deadline(), next(self.order), work))
            self.begun_images += len(work.images)
        else:
            heapq.heappush(self.fresh, (work.deadline(), next(self.order), work))

    def full(self, images: int) -> bool:
        """Whether the states of begun images already fill the memory, so that new ones must wait."""
        return bool(self.begun) and self.begun_images + images > self.keep

    def pop(self, first: bool = False) -> Work | None:
        """The next work in turn, whether or not it still has time. `first`: of those that have nothing yet."""
        work: Work | None = None
        if self.fresh and not self.full(len(self.fresh[0][-1].images)):
            work = heapq.heappop(self.fresh)[-1]
        elif self.begun and not first:
            work = heapq.heappop(self.begun)[-1]
            self.begun_images -= len(work.images)
        elif self.late and not first:
            work = heapq.heappop(self.late)[-1]
        if work is not None:
            work.queued = False
        return work

    def choose(self, first: bool = False) -> Work | None:
        """The work to run now; those that have no time left are put aside."""
        while self.late and self.late[0][0] <= self.clock():  # they must not pile up while there is always other work
            expired = heapq.heappop(self.late)[-1]
            expired.queued = False
            if expired.deadline() > self.clock():  # somebody asked for more meanwhile
                self.push(expired)
            else:
                self.park(expired)
        while (work := self.pop(first)) is not None:
            now, others = self.clock(), bool(self.fresh or self.begun)
            alive = [place for place, image in enumerate(work.images) if image.deadline > now and not image.final]
            if not alive:
                self.park(work)
            elif others and now + self.pace.predict(work.done + 1, len(alive)) > work.deadline():
                work.queued = True
                heapq.heappush(self.late, (work.deadline(), next(self.order), work))
            elif len(alive) <= COMPACT * len(work.images):
                idle, work = work, work.part(alive)
                self.park(idle)
                return work
            else:
                return self.together(work)
        return None

    def together(self, work: Work) -> Work:
        """A first stage with those of others, where they take little."""
        group = [work]
        while self.fresh and all(single(each) for each in (work, self.fresh[0][-1])):
            taken = self.pace.predict(1, len(group) + 1)
            if not 0 < taken <= LITTLE or self.full(len(group) + 1):
                break
            group.append(heapq.heappop(self.fresh)[-1])
            group[-1].queued = False
        if len(group) == 1:
            return work
        images = [each.images[0] for each in group]
        return Work(images, np.concatenate([each.x for each in group]), straight=all(each.straight for each in group))

    def park(self, work: Work) -> None:
        """Keep a work for later; of those that were kept before, let the oldest states go if there are too many."""
        for image in work.images:
            remember(image, self.clock(), self.recent)
        if work.rest() and work.state is not None:
            self.parked.append((weakref.ref(work), len(work.x)))
            self.parked_images += len(work.x)
        while self.parked_images > self.keep:
            reference, count = self.parked.popleft()
            self.parked_images -= count
            old = reference()
            if old is not None and not (old.queued or old.running):
                old.forget()

    def clear(self) -> list[Work]:
        """Those that wait; nothing is left here."""
        waiting = [entry[-1] for heap in (self.fresh, self.begun, self.late) for entry in heap]
        for queue in (self.fresh, self.begun, self.late, self.parked):
            queue.clear()
        return waiting


def single(work: Work) -> bool:
    """One image, of which nothing was done and that is ready to be run."""
    return len(work.images) == 1 and work.state is None and work.first is None
