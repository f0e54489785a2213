"""Which images go through which stage next: stage 1 for everybody, then slack to those who can use it.

In: tickets (one image each, with a deadline) and the time. Out: batches that go through a stage together, and the tickets for
which nothing better can come in time. Those with the fewest stages go first (see `level`), of them the earliest deadline.
Whoever cannot be in time waits until nobody else does, and whoever has no time left is never run. Nothing here knows a
clock, a thread or an engine: the same calls at the same times give the same batches.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

import numpy as np

from nestling.runtime.answer import softmax
from nestling.runtime.engine import Floats

CAUTION = 1.1  # a stage is reckoned to take so many times what is predicted
WORTH_JOINING = 0.8  # images go together where one more costs at most this part of one alone
SHARE = 0.25  # and where the batch takes at most this part of the time that the most urgent of them has
AT_ONCE = 1.5  # the last stage is computed at once where everybody who waits could have it, even if it took so many times as long
LAST_CALL = 2.0  # and given up where it is not done this many times the first stage's time before the deadline
STALE = 64  # entries of tickets that have left, after which the heaps are made anew


class Paces(Protocol):
    """What is asked of a runtime.pace.Pace."""

    def predict(self, stage: int, images: int = 1, straight: bool = False) -> float:
        """Seconds that a stage will take on so many images; `straight`: D_stage at once, from the image."""


class Full(Exception):
    """There is no room for more tickets now."""


def tell_nobody() -> None:
    """Of tickets that nobody waits for."""


@dataclass(eq=False, slots=True)
class Ticket:
    """One image on its way through the stages."""

    x: Any  # the image, normalised, (1,C,H,W)
    deadline: float  # on the clock; inf = none
    confident: tuple[float, ...] = ()  # per stage: a probability that is sure enough to stop
    latest: float = 0.0  # until when it waits for a first answer, if that is later
    tell: Callable[[], None] = tell_nobody  # for whoever runs the stages: there is news of this ticket
    best: tuple[int, Floats | None] = (0, None)  # stage and logits; replaced whole, so reading needs no lock
    trail: list[tuple[int, Floats, float]] | None = (
        None  # the same of every stage, and when; None = nobody wants to know
    )
    final: bool = False  # nothing better will ever come: the last stage answered, or one that was sure enough
    over: bool = False  # nothing better will come in time
    error: Exception | None = None
    failed: int = 0  # the stage that did, if there is an error
    began: float | None = None  # when its first stage was begun
    ran: list[tuple[int, float, float]] = field(
        default_factory=list
    )  # stages that were done: which, from when, until when
    done: int = 0  # stages that its state has behind it
    state: Any = None  # the engine's; shared by tickets that went through a stage together
    place: int = 0  # of this image in that state,
    beside: int = 1  # which is that of so many
    running: bool = False
    order: int = -1  # of arrival; -1 = not with the scheduler


@dataclass(frozen=True, eq=False, slots=True)
class StageBatch:
    """Jobs that go through a stage together: they have the same stages behind them."""

    tickets: tuple[Ticket, ...]
    stage: int
    late: bool = False  # hardly in time; run because nobody else waits
    straight: bool = False  # D_stage at once, without the answers before it


Heap = list[tuple[float, int, Ticket]]  # by deadline, then arrival


class Scheduler:
    """The tickets of one engine. Not thread-safe."""

    def __init__(
        self, pace: Paces, stages: int, room: int = 256, keep: int = 64, most: int = 64, jumps: bool = False
    ) -> None:
        """`room`: tickets at a time; `keep`: of these may hold the state of a begun image; `most` go together; `jumps`: the
        engine can compute the last stage at once, and be stopped."""
        self.pace, self.stages, self.room, self.keep, self.most = pace, stages, room, max(1, keep), most
        self.jumps = jumps and stages > 1
        self.waiting: list[Heap] = [[] for _ in range(stages)]  # by stages done
        self.again: Heap = []  # whose state had to go; they begin anew when there is time
        self.late: Heap = []  # without any stage, and hardly in time
        self.order = itertools.count()
        self.open = self.holding = self.stale = 0

    # --- tickets come and go ----------------------------------------------------------------------------------------

    def add(self, tickets: Sequence[Ticket]) -> None:
        """All of them, or none: raises Full."""
        if self.open + len(tickets) > self.room:
            raise Full
        for ticket in tickets:
            ticket.order, ticket.over = next(self.order), False
            self.open += 1
            self.holding += ticket.state is not None
            if not ticket.running:  # else it comes back with its batch
                self.push(ticket)

    def leave(self, ticket: Ticket) -> None:
        """Nobody waits for this ticket any more. It keeps what it has, and may be added again."""
        if ticket.order < 0:
            return
        self.stale += not ticket.running
        self.remove(ticket)
        if self.stale > self.open + STALE:
            self.sweep()

    def clear(self) -> list[Ticket]:
        """Everybody goes; those who did."""
        everybody = [
            ticket
            for heap in (*self.waiting, self.again, self.late)
            for _, order, ticket in heap
            if order == ticket.order
        ]
        for ticket in everybody:
            ticket.over = True
            self.leave(ticket)
        return everybody

    def waits(self) -> int:
        """How many tickets have no stage yet."""
        return sum(ticket.order == order for heap in (self.waiting[0], self.late) for _, order, ticket in heap)

    # --- batches come and go -------------------------------------------------------------------------------------

    def turn(self, now: float) -> tuple[StageBatch | None, list[Ticket]]:
        """The next batch, if any, and the tickets that are over: out of time, or without enough for another stage."""
        over: list[Ticket] = []
        for heap in (*self.waiting, self.again, self.late):
            self.skim(heap, now, over)
        if any(self.waiting):
            if self.at_once(now):
                return self.gather(self.waiting[0], 1, self.stages), over
            return self.gather(*self.level(now)), over
        for heap in (self.again, self.late):
            if heap:
                return self.gather(heap, 1), over
        return None, over

    def finish(self, batch: StageBatch, state: Any, logits: Floats, now: float) -> list[Ticket]:
        """A batch went through its stage; the tickets of which there is news."""
        news = []
        for place, ticket in enumerate(batch.tickets):
            if self.learn(ticket, batch.stage, logits[place], now):
                news.append(ticket)
            held = ticket.state is not None
            if ticket.order >= 0 or len(batch.tickets) == 1:  # who has left would keep the states of all others
                ticket.place, ticket.beside, ticket.done = place, len(batch.tickets), batch.stage
                ticket.state = state
            if ticket.final:
                ticket.state = None
            ticket.running = False  # last: whoever reads that without a lock finds the state
            if ticket.order < 0:
                continue
            self.holding += (ticket.state is not None) - held
            if ticket.final or ticket.deadline < now + self.rest(ticket):
                ticket.over = True
                self.remove(ticket)
            else:
                if self.holding > self.keep:
                    self.forget(ticket)
                self.push(ticket)
        return news

    def return_unfinished(self, batch: StageBatch) -> None:
        """A batch was stopped half-way: its tickets are where they were."""
        for ticket in batch.tickets:
            ticket.running = False
            if ticket.order >= 0:
                self.push(ticket)

    def fail(self, batch: StageBatch, error: Exception) -> None:
        for ticket in batch.tickets:
            self.remove(ticket)
            ticket.running, ticket.error, ticket.final, ticket.over, ticket.state = False, error, True, True, None
            ticket.failed = batch.stage

    def yields(self, batch: StageBatch, began: float, now: float) -> bool:
        """Whether a running batch must be stopped: for somebody who waits for stage 1, behind others, and would be late
        otherwise; because nobody in it waits any more; or what is computed at once takes so long that only stage 1 fits."""
        if all(ticket.order < 0 for ticket in batch.tickets):
            return True
        if batch.straight and any(now >= self.last_call(ticket.deadline) for ticket in batch.tickets):
            return True
        if not self.waiting[0] or (batch.stage == 1 and not batch.late):
            return False
        ends = max(now, began + self.takes(batch.stage, len(batch.tickets), batch.straight))
        fresh = sorted(entry for entry in self.waiting[0] if entry[1] == entry[2].order)
        for count, (deadline, _, _) in enumerate(fresh, start=1):
            first = self.takes(1, count)  # for everybody up to this one
            if now + first <= deadline and (batch.late or deadline < ends + first):
                return True
        return False

    # --- what these share ----------------------------------------------------------------------------------------

    def takes(self, stage: int, images: int = 1, straight: bool = False) -> float:
        return CAUTION * self.pace.predict(stage, images, straight)

    def rest(self, ticket: Ticket) -> float:
        """What a ticket's next answer takes: one stage, or all up to it where its state had to go."""
        return sum(self.takes(stage) for stage in range(ticket.done + 1, ticket.best[0] + 2))

    def push(self, ticket: Ticket) -> None:
        heap = self.again if ticket.done < ticket.best[0] else self.waiting[ticket.done]
        due = ticket.deadline if ticket.best[0] else max(ticket.deadline, ticket.latest)
        heapq.heappush(heap, (due, ticket.order, ticket))

    def remove(self, ticket: Ticket) -> None:
        if ticket.order >= 0:
            self.open -= 1
            self.holding -= ticket.state is not None
            ticket.order = -1

    def forget(self, ticket: Ticket) -> None:
        """There is no memory for another state."""
        self.holding -= ticket.state is not None
        ticket.state, ticket.done = None, 0

    def learn(self, ticket: Ticket, stage: int, logits: Floats, now: float) -> bool:
        """Write down what a stage said; False if that is no news."""
        if stage <= ticket.best[0]:
            return False
        if not np.isfinite(logits).all():
            ticket.error = ArithmeticError(
                "its logits are not numbers (NaN or infinite); check the weights and the image"
            )
            ticket.final, ticket.failed = True, stage
            return True
        ticket.best = (stage, logits)
        if ticket.trail is not None:
            ticket.trail.append((stage, logits, now))
        ticket.final = stage == self.stages or bool(
            ticket.confident and softmax(logits).max() >= ticket.confident[stage - 1]
        )
        return True

    def skim(self, heap: Heap, now: float, over: list[Ticket]) -> None:
        """Take out those at the top that have left or have too little time; those without any stage are put aside."""
        while heap:
            deadline, order, ticket = heap[0]
            if order != ticket.order:
                self.stale -= 1
            elif deadline > now and (heap is self.late or deadline >= now + self.rest(ticket)):
                return
            elif deadline > now and not ticket.best[0]:
                heapq.heappush(self.late, heap[0])
            else:
                ticket.over = True
                self.remove(ticket)
                over.append(ticket)
            heapq.heappop(heap)

    def level(self, now: float) -> tuple[Heap, int]:
        """Whose turn it is, and how many go together: the most there are, among equals those with the fewest stages. Where
        images go one by one that is stage 1 for everybody first; where they go together, those without any stage may
        wait for others, as long as they are in time afterwards."""
        sizes = [self.together(heap, stage, now) if heap else 0 for stage, heap in enumerate(self.waiting, start=1)]
        done = sizes.index(max(sizes))
        fresh = self.waiting[0]
        if done and fresh:
            before = self.takes(done + 1, sizes[done]) + self.takes(1, min(len(fresh), self.most))
            done = 0 if fresh[0][0] < now + before else done
        return self.waiting[done], sizes[done]

    def together(self, heap: Heap, stage: int, now: float) -> int:
        """How many of a heap go through a stage together. Times are taken to grow evenly with each image."""
        one = self.pace.predict(stage)
        more = self.pace.predict(stage, 2) - one
        limit = SHARE * (heap[0][0] - now) / CAUTION
        if more > WORTH_JOINING * one or limit < one + more:
            return 1
        fits = 1 + int((limit - one) / more) if more > 0 and limit < inf else self.most
        return min(len(heap), fits, self.most)

    def last_call(self, deadline: float) -> float:
        """When somebody without any answer must begin with stage 1 at the latest."""
        return deadline - LAST_CALL * self.takes(1)

    def at_once(self, now: float) -> bool:
        """Whether the most urgent gets the last stage at once, without the answers before it: where that is sooner, nobody wants
        to see these, and there is time to do so for everybody who waits for a first answer."""
        fresh = self.waiting[0]
        if not self.jumps or not fresh or any(self.waiting[1:]) or self.together(fresh, 1, now) > 1:
            return False
        last = self.takes(self.stages, straight=True)
        if last >= sum(self.takes(stage) for stage in range(1, self.stages + 1)):
            return False
        end = now
        for _, _, ticket in sorted(entry for entry in fresh if entry[1] == entry[2].order):
            end += last
            if ticket.trail is not None or ticket.confident or ticket.deadline < now + AT_ONCE * (end - now):
                return False
        return True

    def gather(self, heap: Heap, count: int, straight: int = 0) -> StageBatch:
        """The most urgent tickets of a heap, as many as there are of so many; `straight`: a stage to compute at once."""
        tickets: list[Ticket] = []
        while heap and len(tickets) < count:
            _, order, ticket = heapq.heappop(heap)
            if order == ticket.order:
                ticket.running = True
                tickets.append(ticket)
            else:
                self.stale -= 1
        return StageBatch(tuple(tickets), straight or tickets[0].done + 1, heap is self.late, bool(straight))

    def sweep(self) -> None:
        """Make the heaps anew, without those that have left."""
        for heap in (*self.waiting, self.again, self.late):
            heap[:] = [entry for entry in heap if entry[1] == entry[2].order]
            heapq.heapify(heap)
        self.stale = 0
