"""The worker: decides which stage is run next, and runs it in the caller's thread or in one of its own.

In: works, groups of images that have the same stages behind them. A caller who finds nobody else runs the stages of its image
itself, as long as they are in time (`run_here`). Otherwise the thread does, in the order of turns.py, and a second one runs
first stages beside it where the engine allows that. A stage that runs although its time is up ends at the next layer once
others come. Callers of the threads never wait for a stage: they look at `image.best` when their time is up.
"""

import os
import threading
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from nestling.errors import NestlingError
from nestling.runtime.beginning import Beginnings
from nestling.runtime.bell import Bell
from nestling.runtime.engine import Abandoned, Engine, Floats, Stop
from nestling.runtime.forecast import Recent
from nestling.runtime.guard import Guard
from nestling.runtime.news import publish, remember
from nestling.runtime.pace import CALM, Pace, Wait
from nestling.runtime.processor import Processor
from nestling.runtime.promise import HOPE, MOST_EARLY, USUAL, Promise
from nestling.runtime.second import SecondThread
from nestling.runtime.turns import Turns
from nestling.runtime.work import ImageWork, Work

BUSY = 1.5  # stages take so many times longer than the fastest ones seen: other processes want the processor, too


class Worker:
    """Owns the thread, the queues and the engine. Everything here is thread-safe."""

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
        self.engine, self.pace, self.clock = engine, pace, clock
        self.prepare = prepare or (lambda x, first: x)
        self.beginnings = beginnings or Beginnings(pace)
        self.engine_lock = (
            threading.Lock()
        )  # whoever runs a stage holds it; taken before `lock`, never while holding that
        self.here = 0  # the thread that runs stages itself, if any
        self.guard, self.processor = Guard(clock), Processor()
        self.wait = CALM  # for a processor, of the stage that was run last
        self.process = os.getpid()  # threads do not live on in a forked process
        self.recent = Recent()
        self.lock = threading.Lock()
        self.turns = Turns(pace, keep, clock, self.recent)  # under the lock
        self.bell = Bell()  # there is something to do; rung without the lock
        self.running: Work | None = None
        self.aside: Work | None = None  # what runs beside it
        self.room: Work | None = None  # what had to stop although it has time, so that others get a first stage
        self.busy_until = -inf  # when what runs should be done, unless it is somebody's first stage
        self.closing = False
        self.thread = threading.Thread(target=self.live, name="nestling-stages", daemon=True)
        self.thread.start()
        self.second = SecondThread(self.first_beside) if engine.beside else None

    # --- called by anybody ---------------------------------------------------------------------------------------

    def check_process(self) -> None:
        """Refuse to work in a forked process: the thread that runs the stages has stayed behind."""
        if os.getpid() != self.process:
            raise NestlingError(
                f"this runtime was made by process {self.process}, of which this one is a fork; stages are run by threads, "
                "which a fork leaves behind: make the runtime in the process that asks it, or start processes by 'spawn'"
            )

    def submit(self, work: Work) -> None:
        """Queue a work, and end a running stage that nobody waits for. Without time it is only kept for later."""
        with self.lock:
            if work.deadline() <= (now := self.clock()):
                for image in work.images:
                    remember(image, now, self.recent)
                work.rest()
                return
            self.turns.push(work)
            running = self.running
            crowd = running is not None or len(self.turns.fresh) > 1
            if running is not None and self.keeps_out(work):
                self.room = running
            if running is not None and (running is self.room or running.deadline() <= self.clock()):
                running.stop.set()
        self.bell.ring()
        if crowd and self.second is not None:
            self.second.ring()

    def keeps_out(self, work: Work) -> bool:
        """Whether a later stage, or D_s at once, takes so long that those who came meanwhile could not all have a first one."""
        by = min(work.deadline(), *(image.due for image in work.images))
        return not work.done and self.busy_until + len(self.turns.fresh) * self.pace.quantile(1, USUAL) > by

    def make_room(self) -> None:
        """Raise Abandoned where a stage that is about to begin would keep out somebody who came just now."""
        if self.turns.fresh:
            with self.lock:
                if self.turns.fresh and self.keeps_out(self.turns.fresh[0][-1]):
                    self.room = self.running
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
        running = self.running
        costs = bool(self.turns.fresh or self.turns.begun) or self.pace.drag > BUSY
        if running is not None and costs and running.deadline() <= self.clock():
            running.stop.set()

    def cancel(self, images: Sequence[ImageWork]) -> None:
        """Nobody wants more of these images."""
        now = self.clock()
        for image in images:
            image.deadline = min(image.deadline, now)
        running = self.running
        if running is not None and running.deadline() <= now:
            running.stop.set()

    def close(self) -> None:
        """End the running stage, the thread and the engine. Waiting callers are told, and answer with what they have."""
        if os.getpid() != self.process:
            return  # the thread, the engine and perhaps the lock are those of the process that this one was forked from
        with self.lock:
            if self.closing:
                return
            self.closing = True
            for work in (self.running, self.aside):
                if work is not None:
                    work.stop.set()
        self.bell.ring()
        if self.second is not None:
            self.second.close()
        if self.thread is not threading.current_thread():
            self.thread.join()
        self.guard.close()
        self.processor.close()
        if self.here != threading.get_ident():  # a signal's handler may close what its own thread is running
            with self.engine_lock:
                self.engine.close()

    # --- in the caller's thread ----------------------------------------------------------------------------------

    def run_here(self, image: ImageWork, work: Work, promise: Promise, due: float) -> bool:
        """Run the stages of one image in this thread while they are in time. False: others want the engine, or a stage may
        overrun that cannot be stopped, so the image was left to the worker's own thread, for which to wait until it is due."""
        if not self.engine_lock.acquire(blocking=False):
            work.running = False
            self.leave(image, work, promise, due)
            return False
        turn = True
        try:
            if not (self.turns or self.closing):
                self.here, self.running, work.running, work.stop = threading.get_ident(), work, True, Stop()
                self.room = None
                turn = self.stages_here(image, work, promise)
            else:
                turn = self.closing
        finally:
            self.here, self.running, work.running = 0, None, False
            if self.closing:
                self.engine.close()
            self.engine_lock.release()
            if turn:
                with self.lock:
                    if image.final:
                        work.forget()
                    else:
                        self.turns.park(work)
        if not turn:
            self.leave(image, work, promise, due)
        return turn

    def leave(self, image: ImageWork, work: Work, promise: Promise, due: float) -> None:
        """Let the thread go on with what a caller did not run itself."""
        image.due = due
        image.deadline = min(image.deadline, due if image.best[0] else promise.patient(due, image.deadline))
        self.submit(work)

    def stages_here(self, image: ImageWork, work: Work, promise: Promise) -> bool:
        """A stage that will be in time by all experience is just run; one that may be is told to stop at the deadline; one
        that can hardly be is not begun, but the first is always tried. False: let the worker's thread go on."""
        pace, soon = self.pace, promise.late is None
        pace.crowded = self.processor.crowded() if image.deadline < inf else None
        while not image.final and not work.stop.asked and (left := image.deadline - self.clock()) > 0:
            if self.turns.fresh or self.turns.begun:
                return False
            early, price = (0.0, 1.0) if soon else (promise.early.value, promise.price.value)
            stage, first = self.next_stage(work, left - early, price), not image.best[0]
            straight = stage > work.done + 1
            if image.trail is not None and not work.done:
                image.trail.first = stage
            likely = pace.quantile(stage, HOPE, straight)
            sure = left == inf or pace.quantile(stage, USUAL, straight) * promise.caution.value <= left
            hopeless = not sure and (soon or likely > left - promise.guard.value)
            if not first and left < inf and (hopeless or not self.beginnings.goes_on(stage - 1, left, price)):
                pace.skip(stage)
                break
            image.tried = ("jump" if straight else "first") if first else "sure" if sure else "guarded"
            if not (sure or soon or self.engine.stops):
                return False
            alone = image.tried == "first" and likely <= left  # whoever is interrupted then has nothing less to give
            if not soon and left < inf and self.engine.stops and not (pace.crowded and alone):
                margin = 0.0 if sure else min(promise.guard.value, MOST_EARLY)
                if first:
                    margin = -promise.grace.value if likely <= left else min(margin, left / 10)
                self.guard.until(image.deadline - margin, work.stop)
            began = self.clock()
            done = self.advance(work, stage)
            self.guard.off()
            image.waited += self.wait[0]
            if not done and self.room is not work:
                pace.gave_up(stage, self.clock() - began, straight, self.wait)
            if not done:
                break
        return image.final or self.room is not work or image.deadline <= self.clock()

    def next_stage(self, work: Work, left: float, price: float = 1.0) -> int:
        """The next one; where nobody looks in between and nothing was run yet, the one that is best to begin with."""
        if work.done or not (work.straight and self.engine.jumps):
            return work.done + 1
        return self.engine.stages if left == inf else self.beginnings.first(left, price)

    # --- the threads ---------------------------------------------------------------------------------------------

    def live(self) -> None:
        """The thread: stage after stage until the end, and then nobody is left waiting."""
        try:
            while self.turn():
                pass
        finally:
            with self.lock:
                self.closing = True
                left = self.turns.clear()
                left += [self.running] if self.running is not None else []
            for work in left:
                dismiss(work)

    def turn(self) -> bool:
        """Wait for work and do the next stages of it; False when it is time to go."""
        if not (self.turns or self.closing):
            self.bell.wait(inf)
            return True
        with self.engine_lock:
            with self.lock:
                if self.closing:
                    return False
                work = self.turns.choose()
                if work is None:
                    return True
                self.running, work.running, work.stop = work, True, Stop()
            while self.advance(work, self.stage_in_turn(work)) and self.alone(work):
                pass
            with self.lock:
                work.running = False
                if self.closing:
                    return False
                self.running = None
                self.put_back(work)
        return True

    def first_beside(self) -> bool:
        """Run a first stage while others have the engine; False if nobody waits for one. Paces are learnt from those alone."""
        with self.lock:
            work = None if self.closing else self.turns.choose(first=True)
            if work is None:
                return False
            self.aside, work.running, work.stop = work, True, Stop()
        try:
            self.ready(work)
            logits, work.state = self.engine.step(1, work.state, work.stop)
            work.done = 1
            publish(work.images, 1, self.engine.stages == 1, logits, self.clock(), self.recent)
        except Abandoned:
            pass
        except Exception as error:
            for image in work.images:
                image.fail(error)
        with self.lock:
            self.aside, work.running, closing = None, False, self.closing
            if not closing:
                self.put_back(work)
        if closing:
            dismiss(work)
        self.bell.ring()
        return True

    def put_back(self, work: Work) -> None:
        """A work had its turn; under the lock."""
        if all(image.final for image in work.images):
            work.forget()
        else:
            self.turns.push(work)

    def alone(self, work: Work) -> bool:
        """Whether a single image may just go on: nobody else is there, it has time, and nobody called it off. Reading
        without the lock is enough: whoever comes is seen after the next stage. What happens between two stages must be
        short: on a busy machine a thread that stops here keeps everybody from the interpreter."""
        if len(work.images) > 1 or self.turns or self.closing or work.stop.asked:
            return False
        image = work.images[0]
        return not image.final and image.deadline > self.clock()

    def stage_in_turn(self, work: Work) -> int:
        """Stage by stage, so that everybody gets something soon, unless nobody here has a deadline."""
        endless = all(image.deadline == inf for image in work.images) and not (self.turns.fresh or self.turns.begun)
        return self.next_stage(work, inf) if endless else work.done + 1

    def advance(self, work: Work, stage: int) -> bool:
        """One stage of one work, and the news of it; False if it came to nothing."""
        straight = stage > work.done + 1
        try:
            self.ready(work)
            began, before = self.clock(), self.processor.waited()
            if stage > 1:
                self.busy_until = began + self.pace.predict(stage, len(work.images), straight)
                self.make_room()
            logits, work.state = self.engine.step(stage, work.state, work.stop)
        except Abandoned:
            self.wait = self.waited(before)
            if straight:
                work.forget()  # what was begun at once is begun anew, perhaps by stage 1
            return False
        except Exception as error:
            for image in work.images:
                image.fail(error)
            return False
        finally:
            self.busy_until = -inf
        now, self.wait = self.clock(), self.waited(before)
        self.pace.observe(stage, now - began, len(work.images), straight, self.wait)
        work.done = stage
        publish(work.images, stage, stage == self.engine.stages, logits, now, self.recent)
        return True

    def ready(self, work: Work) -> None:
        """The state that a work goes on from."""
        if work.state is None:
            given: Any = work.x if work.first is None else self.prepare(work.x, work.first)
            work.state = self.engine.start(given)
        elif work.pick is not None:
            work.state = self.engine.take(work.state, work.pick)
        work.pick = None

    def waited(self, before: Wait) -> Wait:
        """For a processor, since then. An engine that cannot be stopped works elsewhere: this thread only waits for it."""
        return self.processor.since(before) if self.engine.stops else CALM


def dismiss(work: Work) -> None:
    """Tell whoever waits that nothing more will come."""
    for image in work.images:
        image.tell(None)
    work.rest()
