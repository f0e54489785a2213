"""Works that wait for their next stage: who has least goes first, among equals the earliest deadline.

In: works, and how many images may keep their state. Out: the next work in turn. A first answer is worth more than a better one,
so states of works that have one give way to images that have none and a deadline. Runs nothing; used under the worker's lock,
but for `somebody`, `anything` and `crowd`, which may be read at any moment.
"""

import heapq
import itertools
from math import inf

from nestling.runtime.work import Work


class Queues:
    """Works that are queued."""

    def __init__(self, keep: int) -> None:
        self.keep = keep  # images whose states there is memory for
        self.fresh: list[tuple[float, int, Work]] = []  # heaps: without any stage yet, by deadline
        self.begun: list[tuple[int, float, int, Work]] = []  # by stages done, then deadline
        self.late: list[tuple[float, int, Work]] = []  # given up while others waited; tried again when nobody does
        self.begun_images = 0
        self.order = itertools.count()

    @property
    def somebody(self) -> bool:
        """Whether anybody waits who was not given up."""
        return bool(self.fresh or self.begun)

    @property
    def anything(self) -> bool:
        return bool(self.fresh or self.begun or self.late)

    @property
    def crowd(self) -> bool:
        """Whether there is work for one more thread: a first stage, or part of a batch."""
        return bool(self.fresh) or any(len(entry[-1].images) > 1 for entry in self.begun)

    def push(self, work: Work) -> None:
        work.queued = True
        if work.done:
            heapq.heappush(self.begun, (work.done, work.deadline(), next(self.order), work))
            self.begun_images += len(work.images)
        else:
            heapq.heappush(self.fresh, (work.deadline(), next(self.order), work))

    def push_late(self, work: Work) -> None:
        """Give up a work while others wait."""
        work.queued = True
        heapq.heappush(self.late, (work.deadline(), next(self.order), work))

    def pop(self, all_of_them: bool = True) -> Work | None:
        """The next work in turn, whether or not it still has time; or the next that is worth one more thread."""
        # New images wait when the states of begun ones already fill the memory, unless they have a deadline.
        full = bool(self.begun and self.fresh) and self.begun_images + len(self.fresh[0][-1].images) > self.keep
        if full and self.fresh[0][0] < inf:
            self.make_room(len(self.fresh[0][-1].images))
            full = False
        work: Work | None = None
        if self.fresh and not full:
            work = heapq.heappop(self.fresh)[-1]
        elif (entry := self.next_begun(all_of_them)) is not None:
            self.begun.remove(entry)
            heapq.heapify(self.begun)
            work = entry[-1]
            self.begun_images -= len(work.images)
        elif self.late and all_of_them:
            work = heapq.heappop(self.late)[-1]
        if work is not None:
            work.queued = False
        return work

    def next_begun(self, all_of_them: bool) -> tuple[int, float, int, Work] | None:
        if all_of_them:
            return self.begun[0] if self.begun else None
        return min((entry for entry in self.begun if len(entry[-1].images) > 1), default=None)

    def pop_expired(self, now: float) -> Work | None:
        """A work that was given up and has no time left: they must not pile up while there is always other work."""
        if not self.late or self.late[0][0] > now:
            return None
        expired = heapq.heappop(self.late)[-1]
        expired.queued = False
        return expired

    def make_room(self, images: int) -> None:
        """Let the states of works go that have most stages behind them, until there is room for so many images more. They begin
        anew when nobody else waits."""
        while self.begun and self.begun_images + images > self.keep:
            most = max(self.begun)
            self.begun.remove(most)
            self.begun_images -= len(most[-1].images)
            most[-1].forget()
            self.push_late(most[-1])
        heapq.heapify(self.begun)

    def clear(self) -> list[Work]:
        """All of them, in no order."""
        left = [entry[-1] for heap in (self.fresh, self.begun, self.late) for entry in heap]
        for heap in (self.fresh, self.begun, self.late):
            heap.clear()
        self.begun_images = 0
        return left
