"""The worker: decides which stage is run next, and runs it in the caller's thread or in one of its own.

In: works, groups of images that have the same stages behind them. A caller who finds a place in the engine (lane.py), and nobody
who waits, runs the stages of its image itself, as long as they are in time (`run_here`). Otherwise a thread of ours does, one for
each place once so many have something to do: everybody gets stage 1 before anybody gets stage 2 (queues.py). A stage that cannot
be in time is not started while others wait; one whose time is up ends at the next layer once others come. States of unfinished
images are kept, the newest `keep`. Callers never wait for a stage of a thread: they look at `image.best` when time is up.
"""

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from nestling.errors import NestlingError
from nestling.runtime.beginning import Beginnings
from nestling.runtime.engine import Abandoned, Engine, Floats, Stop
from nestling.runtime.forecast import Recent
from nestling.runtime.here import stages_here
from nestling.runtime.lane import Lane
from nestling.runtime.news import publish, remember
from nestling.runtime.pace import Pace
from nestling.runtime.processor import Processor
from nestling.runtime.promise import USUAL, Promise
from nestling.runtime.queues import Queues
from nestling.runtime.threads import Threads
from nestling.runtime.work import ImageWork, Work

BUSY = 1.5  # stages take so many times longer than the fastest ones seen: other processes want the processor, too
COMPACT = 0.75  # a batch is cut down when at most this share of it still has time: cutting copies the state


class Worker:
    """Owns the threads, the queues and the engine. Everything here is thread-safe."""

    def __init__(
        self,
        engine: Engine,
        pace: Pace,
        keep: int,
        clock: Callable[[], float],
        prepare: Callable[[Any, int], Floats] | None = None,
        beginnings: Beginnings | None = None,
    ) -> None:
        """`prepare`: images as they were given, and the number of the first, to what the engine takes."""
        self.engine, self.pace, self.keep, self.clock = engine, pace, max(1, keep), clock
        self.prepare = prepare or (lambda x, first: x)
        self.beginnings = beginnings or Beginnings(pace)
        self.lanes = [Lane(clock) for _ in range(engine.places)]
        self.processor = Processor()
        self.process = os.getpid()  # threads do not live on in a forked process
        self.recent = Recent()
        self.lock = threading.Lock()
        self.queues = Queues(self.keep)
        self.parked: deque[tuple[weakref.ref[Work], int]] = deque()  # oldest first, with how many images each holds
        self.parked_images = 0
        self.closing = False
        self.threads = Threads(self)  # of our own

    # --- called by anybody ---------------------------------------------------------------------------------------

    def check_process(self) -> None:
        """Refuse to work in a forked process: the thread that runs the stages has stayed behind."""
        if os.getpid() != self.process:
            raise NestlingError(
                f"this runtime was made by process {self.process}, of which this one is a fork; stages are run by threads, "
                "which a fork leaves behind: make the runtime in the process that asks it, or start processes by 'spawn'"
            )

    def submit(self, *works: Work) -> None:
        """Queue works, all before the first is begun, for whoever begins one takes this thread's processor; and end a running
        stage that nobody waits for. Those without time are only kept for later."""
        with self.lock:
            now, queued = self.clock(), 0
            for work in works:
                if work.deadline() <= now:
                    for image in work.images:
                        remember(image, now, self.recent)
                    work.rest()
                    continue
                self.queues.push(work)
                queued += 1
                if (lane := self.in_the_way(work)) is not None:
                    lane.busy_until = -inf
                    lane.end()
            if queued:
                self.end_expired()
        if queued:
            self.threads.call()

    def in_the_way(self, work: Work) -> Lane | None:
        """The lane whose later stage, or D_s at once, takes so long that not all who came meanwhile could have a first one."""
        longest = max(self.lanes, key=lambda lane: lane.busy_until)
        if work.done or longest.busy_until == -inf:
            return None
        by = min(work.deadline(), *(image.due for image in work.images))
        open_now = [lane for lane in self.lanes if lane.busy_until == -inf]
        free = self.clock() if open_now else min(lane.busy_until for lane in self.lanes)
        firsts = len(self.queues.fresh) * self.pace.quantile(1, USUAL) / max(1, len(open_now))
        return longest if free + firsts > by else None

    def make_room(self, lane: Lane) -> None:
        """Raise Abandoned where a stage that is about to begin would keep out somebody who came just now."""
        if self.queues.fresh:
            with self.lock:
                if self.queues.fresh and self.in_the_way(self.queues.fresh[0][-1]) is lane:
                    raise Abandoned

    def resume(self, image: ImageWork, deadline: float) -> Work | None:
        """Somebody wants more of this image: the work to go on with, or None if it is on its way already, or done."""
        with self.lock:
            image.deadline, image.due = max(image.deadline, deadline), inf
            work = image.work
            if image.final or work is None or work.running or work.queued:
                return None
            resumed = work.resume(image)
            resumed.running = True  # until it is run: nobody may take its state
            return resumed

    def expire(self) -> None:
        """Somebody's time is up: the stage ends at the next layer if it was for them and costs others, here or on a busy
        machine; otherwise it finishes for a later refine. Takes no lock, so as not to be late itself; at worst a stage
        ends that was just asked for again, and is begun anew."""
        if self.queues.somebody or self.pace.drag > BUSY:
            self.end_expired()

    def cancel(self, images: Sequence[ImageWork]) -> None:
        """Nobody wants more of these images."""
        now = self.clock()
        for image in images:
            image.deadline = min(image.deadline, now)
        self.end_expired()

    def end_expired(self) -> None:
        """What runs although nobody has time for it any more."""
        now = self.clock()
        for lane in self.lanes:
            running = lane.running
            if running is not None and running.deadline() <= now:
                running.stop.set()

    def close(self) -> None:
        """End the running stages, the threads and the engine. Waiting callers are told, and answer with what they have."""
        if os.getpid() != self.process:
            return  # the thread, the engine and perhaps the lock are those of the process that this one was forked from
        with self.lock:
            if self.closing:
                return
            self.closing = True
            for lane in self.lanes:
                lane.end()
        self.threads.end()
        own = next((lane for lane in self.lanes if lane.here == threading.get_ident()), None)
        for lane in self.lanes:
            lane.guard.close()
            if lane is not own:
                lane.lock.acquire()  # for good: whoever was there has gone
        self.processor.close()
        if own is None:
            self.engine.close()
        else:
            own.closes = True  # a signal's handler may close what its own thread is running

    # --- in the caller's thread ----------------------------------------------------------------------------------

    def run_here(self, image: ImageWork, work: Work, promise: Promise, due: float, one: bool = False) -> bool:
        """Run the stages of one image in this thread while they are in time. False: others want the engine, or a stage may
        overrun that cannot be stopped, so the image was left to a thread of our own, and is looked at when it is due."""
        lane = self.free_lane()
        if lane is None:
            work.running = False
            return self.leave(image, work, promise, due)
        turn = True
        try:
            if not (self.queues.anything or self.closing):  # where many wait, one at a time is sooner
                lane.running, work.running, work.stop = work, True, Stop()
                turn = stages_here(self, lane, image, work, promise, one)
            else:
                turn = self.closing
        finally:
            work.running = False
            self.release(lane)
            if turn:
                with self.lock:
                    if image.final:
                        work.forget()
                    else:
                        self.park(work)
        return turn or self.leave(image, work, promise, due)

    def leave(self, image: ImageWork, work: Work, promise: Promise, due: float) -> bool:
        """Let our threads go on with what a caller did not run itself."""
        image.due = due
        image.deadline = min(image.deadline, due if image.best[0] else promise.patient(due, image.deadline))
        self.submit(work)
        return False

    def free_lane(self) -> Lane | None:
        for lane in self.lanes:
            if lane.lock.acquire(blocking=False):
                lane.here = threading.get_ident()
                return lane
        return None

    def release(self, lane: Lane) -> None:
        lane.here, lane.running = 0, None
        if lane.closes:
            self.engine.close()
        lane.lock.release()
        self.threads.left()

    def next_stage(self, work: Work, left: float, price: float = 1.0) -> int:
        """The next one; where nobody looks in between and nothing was run yet, the one that is best to begin with."""
        if work.done or not (work.straight and self.engine.jumps):
            return work.done + 1
        return self.engine.stages if left == inf else self.beginnings.first(left, price)

    # --- under the lock ------------------------------------------------------------------------------------------

    def choose(self, all_of_them: bool = True) -> Work | None:
        """The work to run now, or what is worth one more thread; those that have no time left are put aside."""
        while (expired := self.queues.pop_expired(self.clock())) is not None:
            if expired.deadline() > self.clock():  # somebody asked for more meanwhile
                self.queues.push(expired)
            else:
                self.park(expired)
        while (work := self.queues.pop(all_of_them)) is not None:
            now, others = self.clock(), self.queues.somebody
            alive = [place for place, image in enumerate(work.images) if image.deadline > now and not image.final]
            if not alive:
                self.park(work)
            elif others and now + self.pace.predict(work.done + 1, len(alive)) > work.deadline():
                self.queues.push_late(work)
            elif len(alive) <= COMPACT * len(work.images):
                idle, work = work, work.part(alive)
                self.park(idle)
                return work
            else:
                return work
        return None

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

    # --- by whoever has a lane -----------------------------------------------------------------------------------

    def advance(self, lane: Lane, work: Work, stage: int) -> bool:
        """One stage of one work, and the news of it; False if it came to nothing."""
        straight = stage > work.done + 1
        try:
            if work.state is None:
                given: Any = work.x if work.first is None else self.prepare(work.x, work.first)
                work.state = self.engine.start(given)
            elif work.pick is not None:
                work.state = self.engine.take(work.state, work.pick)
            work.pick = None
            began, before = self.clock(), self.processor.waited()
            if stage > 1:
                lane.busy_until = began + self.pace.predict(stage, len(work.images), straight)
                self.make_room(lane)
            logits, work.state = self.engine.step(stage, work.state, work.stop)
        except Abandoned:
            lane.wait = self.waited(before)
            if straight:
                work.forget()  # what was begun at once is begun anew, perhaps by stage 1
            return False
        except Exception as error:
            for image in work.images:
                image.fail(error)
            return False
        finally:
            lane.busy_until = -inf
        work.done, now, lane.wait = stage, self.clock(), self.waited(before)
        self.pace.observe(stage, now - began, len(work.images), straight, lane.wait)
        publish(work.images, stage, stage == self.engine.stages, logits, now, self.recent)
        return True

    def waited(self, before: float) -> float:
        """For a processor, since then. An engine that cannot be stopped works elsewhere: this thread only waits for it."""
        return self.processor.waited() - before if self.engine.stops else 0.0
