"""Threads of the runtime's own: they run what callers do not run themselves.

In: a worker, whose queues say what is next. The first thread serves everything. The others, one for each further place of the
engine, are made once there is a backlog; they take first stages and parts of batches only, so that a processor is left to those
who wait for better answers and must wake up in time. Decides nothing else.
"""

import threading
from math import inf
from typing import TYPE_CHECKING

from nestling.runtime.bell import Bell
from nestling.runtime.engine import Stop
from nestling.runtime.lane import Lane
from nestling.runtime.work import Work

if TYPE_CHECKING:
    from nestling.runtime.worker import Worker


class Threads:
    """All of them, of one worker."""

    def __init__(self, worker: "Worker") -> None:
        self.worker = worker
        self.bell, self.more = Bell(), Bell()  # something to do for the first of us, and for the others
        self.freed, self.wants = Bell(), 0  # a lane; how many of us wait for that
        self.mine: dict[int, Work] = {}  # what each of us runs
        self.all: list[threading.Thread] = []
        self.hire()

    def call(self) -> None:
        """Something has been queued."""
        self.bell.ring()
        if len(self.all) > 1 and self.worker.queues.crowd:
            self.more.ring()

    def left(self) -> None:
        """Somebody has left a lane."""
        if self.wants:
            self.freed.ring()

    def end(self) -> None:
        """The worker is closing: wait until all have gone, unless one of us asks for it."""
        self.wake()
        for thread in self.all:
            if thread is not threading.current_thread():
                thread.join()

    def wake(self) -> None:
        for bell in (self.bell, self.more, self.freed):
            bell.ring()

    def hire(self) -> None:
        """One more, if the engine has a place for it. Under the worker's lock."""
        if len(self.all) < len(self.worker.lanes):
            first = not self.all
            self.all.append(threading.Thread(target=self.live, args=(first,), name="nestling-stages", daemon=True))
            self.all[-1].start()

    # --- in a thread ---------------------------------------------------------------------------------------------

    def live(self, first: bool) -> None:
        """Stage after stage until the end, and then nobody is left waiting."""
        worker = self.worker
        try:
            while self.turn(first):
                pass
        finally:
            with worker.lock:
                worker.closing = True
                left = worker.queues.clear()
                if (own := self.mine.pop(threading.get_ident(), None)) is not None:
                    left.append(own)
                worker.parked.clear()
            self.wake()  # the next one goes, too
            for work in left:
                for image in work.images:
                    image.tell(None)
                work.rest()

    def turn(self, first: bool) -> bool:
        """Wait for work and do the next stages of it; False when it is time to go."""
        worker, queues = self.worker, self.worker.queues
        if not (worker.closing or (queues.anything if first else queues.crowd)):
            (self.bell if first else self.more).wait(inf)
            return True
        if (lane := self.wait_for_lane()) is None:
            return False
        try:
            with worker.lock:
                if worker.closing:
                    return False
                if (work := worker.choose(all_of_them=first)) is not None:
                    self.mine[threading.get_ident()] = lane.running = work
                    work.running, work.stop = True, Stop()
                    if queues.crowd:
                        self.hire()
                        self.more.ring()
            if work is not None:
                self.run(lane, work)
        finally:
            worker.release(lane)
        if not first:
            self.bell.ring()  # what is not for us
            if work is None:
                self.more.wait(inf)
        return not worker.closing

    def run(self, lane: Lane, work: Work) -> None:
        """The next stages of a work, and back into the queues with it if it is not done."""
        worker = self.worker
        while worker.advance(lane, work, self.stage_in_turn(work)) and self.alone(work):
            pass
        with worker.lock:
            work.running = False
            if worker.closing:
                return
            del self.mine[threading.get_ident()]
            if all(image.final for image in work.images):
                work.forget()
            else:
                worker.queues.push(work)

    def wait_for_lane(self) -> Lane | None:
        """None when it is time to go: whoever closes may have the only one itself."""
        worker = self.worker
        while not worker.closing:
            with worker.lock:
                self.wants += 1  # first: whoever leaves one from now on rings
            if (lane := worker.free_lane()) is None:
                self.freed.wait(inf)
            with worker.lock:
                self.wants -= 1
            if lane is not None:
                return lane
        return None

    def alone(self, work: Work) -> bool:
        """Whether a single image may just go on: nobody else is there, it has time, and nobody called it off. Reading
        without the lock is enough: whoever comes is seen after the next stage. What happens between two stages must be
        short: on a busy machine a thread that stops here keeps everybody from the interpreter."""
        worker = self.worker
        if len(work.images) > 1 or worker.queues.anything or worker.closing or work.stop.asked:
            return False
        image = work.images[0]
        return not image.final and image.deadline > worker.clock()

    def stage_in_turn(self, work: Work) -> int:
        """Stage by stage, so that everybody gets something soon, unless nobody here has a deadline."""
        endless = all(image.deadline == inf for image in work.images) and not self.worker.queues.somebody
        return self.worker.next_stage(work, inf) if endless else work.done + 1
