"""Which images go through which stage next: stage 1 for everybody, then slack to those who can use it.

In: jobs (one image each, with a deadline) and the time. Out: batches of jobs that go through a stage together, and the jobs for
which nothing better can come in time. Those with the fewest stages go first (see `level`), of them the earliest deadline. Whoever
cannot be in time waits until nobody else does, and whoever has no time left is never run. Nothing here knows a clock, a
thread or an engine: the same calls at the same times give the same batches.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

import numpy as np

from nestling.runtime.answer import softmax
from nestling.runtime.engine import Floats

CAUTION = 1.1  # a stage is reckoned to take so many times what is predicted
WORTH_JOINING = 0.8  # images go together where one more costs at most this part of one alone
SHARE = 0.25  # and where the batch takes at most this part of the time that the most urgent of them has
STALE = 64  # entries of jobs that have left, after which the heaps are made anew


class Paces(Protocol):
    """What is asked of a runtime.pace.Pace."""

    def predict(self, stage: int, images: int = 1) -> float:
        """Seconds that a stage will take on so many images."""


class Full(Exception):
    """There is no room for more jobs now."""


@dataclass(eq=False, slots=True)
class Job:
    """One image on its way through the stages."""

    x: Any  # the image, normalised, (1,C,H,W)
    deadline: float  # on the clock; inf = none
    confident: tuple[float, ...] = ()  # per stage: a probability that is sure enough to stop
    tell: Callable[[], None] = lambda: None  # for whoever runs the stages: there is news of this job
    best: tuple[int, Floats | None] = (0, None)  # stage and logits; replaced whole, so reading needs no lock
    trail: list[tuple[int, Floats, float]] | None = (
        None  # the same of every stage, and when; None = nobody wants to know
    )
    final: bool = False  # nothing better will ever come: the last stage answered, or one that was sure enough
    over: bool = False  # nothing better will come in time
    error: Exception | None = None
    began: float | None = None  # when its first stage was begun
    done: int = 0  # stages that its state has behind it
    state: Any = None  # the engine's; shared by jobs that went through a stage together
    place: int = 0  # of this image in that state,
    beside: int = 1  # which is that of so many
    running: bool = False
    order: int = -1  # of arrival; -1 = not with the scheduler


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """Jobs that go through a stage together: they have the same stages behind them."""

    jobs: tuple[Job, ...]
    stage: int
    late: bool = False  # hardly in time; run because nobody else waits


Heap = list[tuple[float, int, Job]]  # by deadline, then arrival


class Scheduler:
    """The jobs of one engine. Not thread-safe."""

    def __init__(self, pace: Paces, stages: int, room: int = 256, keep: int = 64, most: int = 64) -> None:
        """`room`: jobs at a time; `keep`: of these may hold the state of a begun image; `most` go together."""
        self.pace, self.stages, self.room, self.keep, self.most = pace, stages, room, max(1, keep), most
        self.waiting: list[Heap] = [[] for _ in range(stages)]  # by stages done
        self.again: Heap = []  # whose state had to go; they begin anew when there is time
        self.late: Heap = []  # without any stage, and hardly in time
        self.order = itertools.count()
        self.open = self.holding = self.stale = 0

    # --- jobs come and go ----------------------------------------------------------------------------------------

    def add(self, jobs: Sequence[Job]) -> None:
        """All of them, or none: raises Full."""
        if self.open + len(jobs) > self.room:
            raise Full
        for job in jobs:
            job.order, job.over = next(self.order), False
            self.open += 1
            self.holding += job.state is not None
            if not job.running:  # else it comes back with its batch
                self.push(job)

    def leave(self, job: Job) -> None:
        """Nobody waits for this job any more. It keeps what it has, and may be added again."""
        if job.order < 0:
            return
        self.stale += not job.running
        self.remove(job)
        if self.stale > self.open + STALE:
            self.sweep()

    def clear(self) -> list[Job]:
        """Everybody goes; those who did."""
        everybody = [
            job for heap in (*self.waiting, self.again, self.late) for _, order, job in heap if order == job.order
        ]
        for job in everybody:
            job.over = True
            self.leave(job)
        return everybody

    def waits(self) -> int:
        """How many jobs have no stage yet."""
        return sum(job.order == order for heap in (self.waiting[0], self.late) for _, order, job in heap)

    # --- batches come and go -------------------------------------------------------------------------------------

    def turn(self, now: float) -> tuple[Batch | None, list[Job]]:
        """The next batch, if any, and the jobs that are over: out of time, or without enough for another stage."""
        over: list[Job] = []
        for heap in (*self.waiting, self.again, self.late):
            self.skim(heap, now, over)
        if any(self.waiting):
            return self.gather(*self.level(now)), over
        for heap in (self.again, self.late):
            if heap:
                return self.gather(heap, 1), over
        return None, over

    def finish(self, batch: Batch, state: Any, logits: Floats, now: float) -> list[Job]:
        """A batch went through its stage; the jobs of which there is news."""
        news = []
        for place, job in enumerate(batch.jobs):
            job.running = False
            if self.learn(job, batch.stage, logits[place], now):
                news.append(job)
            held = job.state is not None
            job.state, job.place, job.beside, job.done = state, place, len(batch.jobs), batch.stage
            if job.final:
                job.state = None
            if job.order < 0:
                continue
            self.holding += (job.state is not None) - held
            if job.final or job.deadline < now + self.rest(job):
                job.over = True
                self.remove(job)
            else:
                if self.holding > self.keep:
                    self.forget(job)
                self.push(job)
        return news

    def return_unfinished(self, batch: Batch) -> None:
        """A batch was stopped half-way: its jobs are where they were."""
        for job in batch.jobs:
            job.running = False
            if job.order >= 0:
                self.push(job)

    def fail(self, batch: Batch, error: Exception) -> None:
        for job in batch.jobs:
            self.remove(job)
            job.running, job.error, job.final, job.over, job.state = False, error, True, True, None

    def yields(self, batch: Batch, began: float, now: float) -> bool:
        """Whether a running batch must be stopped: for one that waits for stage 1 and would be late otherwise; or because
        nobody in it waits any more."""
        if all(job.order < 0 for job in batch.jobs):
            return True
        heap = self.waiting[0]
        while heap and heap[0][1] != heap[0][2].order:
            self.stale -= 1
            heapq.heappop(heap)
        if not heap or (batch.stage == 1 and not batch.late):
            return False
        deadline, first = heap[0][0], self.takes(1)
        ends = max(now, began + self.takes(batch.stage, len(batch.jobs)))
        return now + first <= deadline and (batch.late or deadline < ends + first)

    # --- what these share ----------------------------------------------------------------------------------------

    def takes(self, stage: int, images: int = 1) -> float:
        return CAUTION * self.pace.predict(stage, images)

    def rest(self, job: Job) -> float:
        """What a job's next answer takes: one stage, or all up to it where its state had to go."""
        return sum(self.takes(stage) for stage in range(job.done + 1, job.best[0] + 2))

    def push(self, job: Job) -> None:
        heap = self.again if job.done < job.best[0] else self.waiting[job.done]
        heapq.heappush(heap, (job.deadline, job.order, job))

    def remove(self, job: Job) -> None:
        if job.order >= 0:
            self.open -= 1
            self.holding -= job.state is not None
            job.order = -1

    def forget(self, job: Job) -> None:
        """There is no memory for another state."""
        self.holding -= job.state is not None
        job.state, job.done = None, 0

    def learn(self, job: Job, stage: int, logits: Floats, now: float) -> bool:
        """Write down what a stage said; False if that is no news."""
        if stage <= job.best[0]:
            return False
        if not np.isfinite(logits).all():
            job.error = ArithmeticError("its logits are not numbers (NaN or infinite); check the weights and the image")
            job.final = True
            return True
        job.best = (stage, logits)
        if job.trail is not None:
            job.trail.append((stage, logits, now))
        job.final = stage == self.stages or bool(job.confident and softmax(logits).max() >= job.confident[stage - 1])
        return True

    def skim(self, heap: Heap, now: float, over: list[Job]) -> None:
        """Take out those at the top that have left or have too little time; those without any stage are put aside."""
        while heap:
            deadline, order, job = heap[0]
            if order != job.order:
                self.stale -= 1
            elif deadline > now and (heap is self.late or deadline >= now + self.rest(job)):
                return
            elif deadline > now and not job.best[0]:
                heapq.heappush(self.late, heap[0])
            else:
                job.over = True
                self.remove(job)
                over.append(job)
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

    def gather(self, heap: Heap, count: int) -> Batch:
        """The most urgent jobs of a heap, as many as there are of so many."""
        jobs: list[Job] = []
        while heap and len(jobs) < count:
            _, order, job = heapq.heappop(heap)
            if order == job.order:
                job.running = True
                jobs.append(job)
            else:
                self.stale -= 1
        return Batch(tuple(jobs), jobs[0].done + 1, late=heap is self.late)

    def sweep(self) -> None:
        """Make the heaps anew, without those that have left."""
        for heap in (*self.waiting, self.again, self.late):
            heap[:] = [entry for entry in heap if entry[1] == entry[2].order]
            heapq.heapify(heap)
        self.stale = 0
