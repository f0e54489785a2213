"""A server in simulated time: the scheduler, an engine that takes as long as it is told, clients who look at their deadline."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from nestling.serve.scheduler import Full, Scheduler, StageBatch, Ticket


@dataclass
class Costs:
    """Stage s takes one[s - 1] seconds on an image and more[s - 1] on each further one: predicted and true."""

    one: tuple[float, ...]
    more: tuple[float, ...]
    last: float = inf  # what the last one takes at once

    def predict(self, stage: int, images: int = 1, straight: bool = False) -> float:
        if straight:
            return self.last if stage == len(self.one) else inf
        return self.one[stage - 1] + (images - 1) * self.more[stage - 1]


@dataclass
class Simulation:
    """What happened: batches with the time they began at, and for every ticket when it was said to be over."""

    costs: Costs
    room: int = 10_000
    keep: int = 10_000
    most: int = 64
    slower: float = 1.0  # than predicted
    stops: bool = True
    began: list[tuple[float, StageBatch]] = field(default_factory=list)
    fresh: list[list[Ticket]] = field(default_factory=list)  # at the start of each batch: who waited for stage 1
    over: dict[int, list[float]] = field(default_factory=dict)  # by id of the ticket
    stopped: int = 0
    held: int = 0  # most states at a time
    refused: int = 0

    def run(self, arrivals: Sequence[tuple[float, float]]) -> list[Ticket]:
        """(when, deadline in seconds from then); the tickets in order of arrival."""
        self.scheduler = Scheduler(
            self.costs, len(self.costs.one), self.room, self.keep, self.most, self.costs.last < inf
        )
        tickets = [Ticket(None, at + limit) for at, limit in arrivals]
        self.over = {id(ticket): [] for ticket in tickets}
        coming = sorted(((at, index) for index, (at, _) in enumerate(arrivals)), reverse=True)
        leaving: list[tuple[float, int]] = []  # clients look when their time is up
        looking: list[float] = []  # and before, whether there will be an answer by then
        now, running, ends, since = 0.0, None, inf, 0.0
        while True:
            next_look = looking[0] if looking else inf
            moment = min(coming[-1][0] if coming else inf, leaving[0][0] if leaving else inf, next_look, ends)
            if moment == inf:
                return tickets
            now = max(now, moment)
            if running is not None and ends <= now:
                logits = np.zeros((len(running.tickets), 3), np.float32)
                self.scheduler.finish(running, object(), logits, now)
                self.tell([ticket for ticket in running.tickets if ticket.over], now)
                running, ends = None, inf
            while looking and looking[0] <= now:
                heapq.heappop(looking)
            while leaving and leaving[0][0] <= now:
                ticket = tickets[heapq.heappop(leaving)[1]]
                if not ticket.over and ticket.order >= 0:
                    self.scheduler.leave(ticket)
                    self.over[id(ticket)].append(now)
            while coming and coming[-1][0] <= now:
                index = coming.pop()[1]
                try:
                    self.scheduler.add([tickets[index]])
                except Full:
                    self.refused += 1
                    continue
                if tickets[index].deadline < inf:
                    heapq.heappush(leaving, (tickets[index].deadline, index))
                    heapq.heappush(looking, self.scheduler.last_call(tickets[index].deadline))
            if running is not None and self.stops and self.scheduler.yields(running, since, now):
                self.scheduler.return_unfinished(running)
                self.stopped += 1
                running, ends = None, inf
            if running is None:
                waiting = [
                    ticket for heap in self.scheduler.waiting for _, order, ticket in heap if order == ticket.order
                ]
                fresh = [ticket for ticket in waiting if not ticket.best[0]]
                running, over = self.scheduler.turn(now)
                self.tell(over, now)
                self.held = max(self.held, sum(ticket.state is not None for ticket in waiting))
                if running is not None:
                    self.began.append((now, running))
                    self.fresh.append(fresh)
                    takes = self.costs.predict(running.stage, len(running.tickets), running.straight)
                    since, ends = now, now + self.slower * takes

    def tell(self, tickets: Sequence[Ticket], now: float) -> None:
        for ticket in tickets:
            self.over[id(ticket)].append(now)
