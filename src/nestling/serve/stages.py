"""The thread that runs the stages of one network for everybody who asks.

In: tickets, from any thread. It asks the scheduler for the next batch, puts the states of its images together, runs the stage and
tells the tickets. A stage that nobody waits for any more, or that keeps somebody from a first answer, is stopped. Whoever waits
looks at `ticket.best` when told or when time is up, and never waits for a stage.
"""

import threading
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import numpy as np

from nestling.runtime.bell import Bell
from nestling.runtime.engine import Abandoned, JoiningEngine, Stop
from nestling.runtime.pace import Pace
from nestling.serve.scheduler import Full, Scheduler, StageBatch, Ticket


class Closed(Full):
    """The network is not answered any more: its server ends, or has opened it anew."""


class Stages:
    """Owns the thread, the engine and the scheduler. Everything here is thread-safe."""

    def __init__(self, engine: JoiningEngine, scheduler: Scheduler, pace: Pace, clock: Callable[[], float]) -> None:
        self.engine, self.scheduler, self.pace, self.clock = engine, scheduler, pace, clock
        self.lock = threading.Lock()
        self.bell = Bell()  # there is something to do; rung without the lock
        self.running: tuple[StageBatch, Stop, float] | None = None
        self.closing = False
        self.busy = 0.0  # seconds that stages have run
        self.thread = threading.Thread(target=self.live, name="nestling-stages", daemon=True)
        self.thread.start()

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Raises Full where there is no room for all of them."""
        with self.lock:
            if self.closing:
                raise Closed
            self.scheduler.add(tickets)
            self.make_way()
        self.bell.ring()

    def leave(self, tickets: Sequence[Ticket]) -> None:
        """Nobody waits for these tickets any more."""
        with self.lock:
            for ticket in tickets:
                self.scheduler.leave(ticket)
            self.make_way()

    def look(self) -> None:
        """See whether the stage that runs must be stopped."""
        with self.lock:
            self.make_way()

    def close(self) -> None:
        """End the stage that runs, and the thread; tickets that wait are over."""
        with self.lock:
            self.closing = True
            if self.running is not None:
                self.running[1].set()
        self.bell.ring()
        if self.thread is not threading.current_thread():
            self.thread.join()

    def make_way(self) -> None:
        if self.running is not None and self.engine.stops:
            batch, stop, began = self.running
            if self.scheduler.yields(batch, began, self.clock()):
                stop.set()

    # --- the thread ----------------------------------------------------------------------------------------------

    def live(self) -> None:
        try:
            while self.turn():
                pass
        finally:
            with self.lock:
                self.closing = True
                left = self.scheduler.clear()
            for ticket in left:
                ticket.tell()

    def turn(self) -> bool:
        """Run the next batch, or wait for one; False when it is time to go."""
        with self.lock:
            if self.closing:
                return False
            began = self.clock()
            batch, over = self.scheduler.turn(began)
            stop = Stop()
            self.running = None if batch is None else (batch, stop, began)
        for ticket in over:
            ticket.tell()
        if batch is None:
            self.bell.wait(inf)
            return True
        news = self.run(batch, stop, began)
        for ticket in news:
            ticket.tell()
        return True

    def run(self, batch: StageBatch, stop: Stop, began: float) -> Sequence[Ticket]:
        """One stage of one batch; the tickets of which there is news."""
        for ticket in batch.tickets:
            ticket.began = began if ticket.began is None else ticket.began
        try:
            logits, state = self.engine.step(batch.stage, self.state_of(batch), stop)
        except Abandoned:
            with self.lock:
                self.running = None
                self.busy += (after := self.clock() - began)
                if batch.straight and after > self.pace.predict(batch.stage, straight=True):
                    self.pace.observe(batch.stage, after, straight=True)  # at least: nobody learns of it otherwise
                self.scheduler.return_unfinished(batch)
            return ()
        except Exception as error:  # engines have no one kind of error
            with self.lock:
                self.running = None
                self.scheduler.fail(batch, error)
            return batch.tickets
        with self.lock:
            now = self.clock()
            self.running = None
            self.busy += now - began
            for ticket in batch.tickets:
                ticket.ran.append((batch.stage, began, now))
            self.pace.observe(batch.stage, now - began, len(batch.tickets), batch.straight)
            return self.scheduler.finish(batch, state, logits, now)

    def state_of(self, batch: StageBatch) -> Any:
        """The state that the batch's images have now, as one."""
        tickets = batch.tickets
        if batch.stage == 1 or batch.straight:
            return self.engine.start(
                tickets[0].x if len(tickets) == 1 else np.concatenate([ticket.x for ticket in tickets])
            )
        first, places = tickets[0].state, [ticket.place for ticket in tickets]
        if any(ticket.state is not first for ticket in tickets):
            return self.engine.join([(ticket.state, ticket.place) for ticket in tickets])
        if places == list(range(tickets[0].beside)):
            return first
        return self.engine.take(first, places)
