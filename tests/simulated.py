"""A server in simulated time: the scheduler, an engine that takes as long as it is told, clients who look at their deadline."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from nestling.serve.scheduler import Batch, Full, Job, Scheduler


@dataclass
class Costs:
    """Stage s takes one[s - 1] seconds on an image and more[s - 1] on each further one: predicted and true."""

    one: tuple[float, ...]
    more: tuple[float, ...]

    def predict(self, stage: int, images: int = 1) -> float:
        return self.one[stage - 1] + (images - 1) * self.more[stage - 1]


@dataclass
class Simulation:
    """What happened: batches with the time they began at, and for every job when it was said to be over."""

    costs: Costs
    room: int = 10_000
    keep: int = 10_000
    most: int = 64
    slower: float = 1.0  # than predicted
    stops: bool = True
    began: list[tuple[float, Batch]] = field(default_factory=list)
    fresh: list[list[Job]] = field(default_factory=list)  # at the start of each batch: who waited for stage 1
    over: dict[int, list[float]] = field(default_factory=dict)  # by id of the job
    stopped: int = 0
    held: int = 0  # most states at a time
    refused: int = 0

    def run(self, arrivals: Sequence[tuple[float, float]]) -> list[Job]:
        """(when, deadline in seconds from then); the jobs in order of arrival."""
        self.scheduler = Scheduler(self.costs, len(self.costs.one), self.room, self.keep, self.most)
        jobs = [Job(None, at + limit) for at, limit in arrivals]
        self.over = {id(job): [] for job in jobs}
        coming = sorted(((at, index) for index, (at, _) in enumerate(arrivals)), reverse=True)
        leaving: list[tuple[float, int]] = []  # clients look when their time is up
        now, running, ends, since = 0.0, None, inf, 0.0
        while True:
            moment = min(coming[-1][0] if coming else inf, leaving[0][0] if leaving else inf, ends)
            if moment == inf:
                return jobs
            now = max(now, moment)
            if running is not None and ends <= now:
                logits = np.zeros((len(running.jobs), 3), np.float32)
                self.scheduler.finish(running, object(), logits, now)
                self.tell([job for job in running.jobs if job.over], now)
                running, ends = None, inf
            while leaving and leaving[0][0] <= now:
                job = jobs[heapq.heappop(leaving)[1]]
                if not job.over and job.order >= 0:
                    self.scheduler.leave(job)
                    self.over[id(job)].append(now)
            while coming and coming[-1][0] <= now:
                index = coming.pop()[1]
                try:
                    self.scheduler.add([jobs[index]])
                except Full:
                    self.refused += 1
                    continue
                if jobs[index].deadline < inf:
                    heapq.heappush(leaving, (jobs[index].deadline, index))
            if running is not None and self.stops and self.scheduler.yields(running, since, now):
                self.scheduler.return_unfinished(running)
                self.stopped += 1
                running, ends = None, inf
            if running is None:
                waiting = [job for heap in self.scheduler.waiting for _, order, job in heap if order == job.order]
                fresh = [job for job in waiting if not job.best[0]]
                running, over = self.scheduler.turn(now)
                self.tell(over, now)
                self.held = max(self.held, sum(job.state is not None for job in waiting))
                if running is not None:
                    self.began.append((now, running))
                    self.fresh.append(fresh)
                    since, ends = now, now + self.slower * self.costs.predict(running.stage, len(running.jobs))

    def tell(self, jobs: Sequence[Job], now: float) -> None:
        for job in jobs:
            self.over[id(job)].append(now)
