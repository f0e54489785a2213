"""A request: some images that are answered together, by one deadline; and waiting for it, by a thread or a coroutine.

In: tickets for the stages' thread. Out: Answers, when nothing better will come or time is up. Time is up a margin before the
deadline: what it took lately from then until an answer was on its way (runtime.promise.Margin). Whoever has nothing by then waits
until `latest`. Runs nothing itself.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from math import inf
from typing import Any

from nestling.errors import NestlingError
from nestling.export.spec import Spec
from nestling.runtime.answer import Answer, told
from nestling.runtime.bell import Bell
from nestling.runtime.engine import Floats
from nestling.runtime.promise import Margin
from nestling.serve.scheduler import CAUTION, Ticket, tell_nobody
from nestling.serve.stages import Stages

LONGEST_SLEEP = 1e6  # seconds; a timer cannot hold every number


class ServedRequest:
    """Jobs that one client waits for."""

    def __init__(
        self,
        stages: Stages,
        spec: Spec,
        prior: Floats,
        tickets: Sequence[Ticket],
        began: float,
        limit: float,
        margin: Margin,
    ) -> None:
        self.stages, self.spec, self.prior, self.tickets = stages, spec, prior, tickets
        self.clock, self.began, self.margin = stages.clock, began, margin
        self.due = began + (margin.before(limit) if limit < inf else inf)
        self.latest = began + (margin.latest(limit) if limit < inf else inf)
        self.last_call = stages.scheduler.last_call(self.due)
        self.deadline = began + limit
        self.told = [0] * len(tickets)  # the stages of the answers that were sent
        self.left = False  # the client has
        self.looked = False  # whether what is computed at once may still be in time
        self.traceparent = ""  # which trace of the client's this belongs to
        self.before = self.stage  # what there was when it began
        self.wake: Callable[[], Any] = lambda: None

    def submit(self, every: bool = False) -> "ServedRequest":
        """Begin. `every`: the client wants every stage's answer. Raises Full where there is no room."""
        todo = [ticket for ticket in self.tickets if not ticket.final]
        if any(ticket.order >= 0 for ticket in todo):
            raise NestlingError("this answer is being refined already; wait for that")
        for ticket in todo:
            ticket.deadline, ticket.latest = self.due, self.latest
            ticket.tell, ticket.trail = self.tell, [] if every else None
        self.stages.submit(todo)
        return self

    def tell(self) -> None:
        """Called by the stages' thread."""
        if self.over or self.tickets[0].trail is not None:
            self.wake()

    @property
    def over(self) -> bool:
        return all(ticket.over for ticket in self.tickets)

    @property
    def stage(self) -> int:
        """The stage that every image has reached; 0 = some have none."""
        return min(ticket.best[0] for ticket in self.tickets)

    @property
    def allowed(self) -> int:
        """The stage for which there would have been time if nobody else had asked."""
        ends = itertools.accumulate(self.stages.pace.base[self.before :])
        return self.before + sum(CAUTION * end <= self.due - self.began for end in ends)

    def leave(self) -> None:
        """Stop working on it. What there is stays, and can be gone on with. Tickets do not know this request any more: else the
        two would keep each other, and the states of their images, until garbage is collected."""
        if not self.over:
            self.stages.leave(self.tickets)
        for ticket in self.tickets:
            if ticket.tell == self.tell:
                ticket.tell = tell_nobody

    def cancel(self) -> None:
        """The client has left: nobody waits any longer."""
        self.left = True
        self.leave()
        self.wake()

    def again(self, tickets: Sequence[Ticket], limit: float, began: float) -> "ServedRequest":
        """More of some of the images, from where their work stands."""
        return ServedRequest(self.stages, self.spec, self.prior, tickets, began, limit, self.margin)

    # --- answers -------------------------------------------------------------------------------------------------

    def answers(self, stage: int | None = None) -> list[Answer]:
        """The best answers now, or those there were when every image had reached a stage."""
        return [self.form(ticket, stage) for ticket in self.tickets]

    def form(self, ticket: Ticket, stage: int | None) -> Answer:
        if ticket.error is not None:
            failed = f"stage {ticket.failed} of {self.spec.name} failed: {ticket.error}"
            raise NestlingError(failed) from ticket.error
        final = ticket.final  # read before the logits: they may only be newer
        found, logits, at = *ticket.best, self.clock()
        if stage is not None and ticket.trail:
            found, logits, at = next((each for each in reversed(ticket.trail) if each[0] <= stage), ticket.trail[0])
            final = final and found == ticket.best[0]
        label, name, size, probabilities = told(self.spec, self.prior, found, logits)
        refine = partial(self.refine, ticket)
        return Answer(label, name, found, size, at - self.began, final, probabilities, refine, logits)

    def refine(self, ticket: Ticket, limit: float | None) -> Answer:
        """Go on with one image where it stopped, and wait for it."""
        return self.again([ticket], inf if limit is None else limit, self.clock()).submit().wait()[0]

    def handed(self) -> None:
        """The answer is on its way: how long that took after it was due is what the margin must cover."""
        if self.due < inf:
            first = max(ticket.ran[0][2] if ticket.ran else inf for ticket in self.tickets)
            self.margin.observe(max(0.0, self.clock() - (self.latest if first > self.due else self.due)))

    def until(self) -> float:
        """Until when to wait, as things are. What is computed at once and not done at `last_call` is given up for stage 1."""
        now = self.clock()
        if self.stage:
            return self.due
        if now < self.last_call:
            return self.last_call
        if not self.looked:
            self.looked = True
            self.stages.look()
        return self.due if now < self.due else self.latest

    # --- waiting -------------------------------------------------------------------------------------------------

    def news(self, seen: int) -> range:
        """Stages that all images have reached since."""
        return range(seen + 1, self.stage + 1)

    def wait(self) -> list[Answer]:
        """In a thread: until nothing better will come, or time is up."""
        for _ in self.each_stage():
            pass
        found = self.answers()
        self.handed()
        return found

    def each_stage(self) -> Iterator[int]:
        """In a thread: every stage that all images have reached, as they do."""
        bell, seen = Bell(), self.before
        self.wake = bell.ring
        try:
            while not self.over and (bell.wait(self.until(), self.clock) or self.clock() < self.until()):
                yield from (new := self.news(seen))
                seen += len(new)
            yield from self.news(seen)
        finally:
            self.leave()

    async def each_stage_async(self) -> AsyncIterator[int]:
        """In a coroutine: the same."""
        loop, rang, seen = asyncio.get_running_loop(), asyncio.Event(), self.before

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(rang.set)

        self.wake = wake
        moments = {self.last_call, self.due, self.latest}
        timers = [
            loop.call_later(max(0.0, at - self.clock()), rang.set)
            for at in moments
            if at - self.clock() < LONGEST_SLEEP
        ]
        try:
            while not self.over and not self.left and self.clock() < self.until():
                await rang.wait()
                rang.clear()
                for stage in (new := self.news(seen)):
                    yield stage
                seen += len(new)
            for stage in self.news(seen):
                yield stage
        finally:
            for timer in timers:
                timer.cancel()
            self.leave()
