"""A guard beside a thread that runs a stage itself: at the deadline it tells the stage to stop.

In: a Stop and a time. One stage is guarded at a time. The guard sleeps by an alarm, which is set without waking it, so that
guarding a stage costs nothing unless it overruns. One that was called off is left to ring for nobody: the next stage sets
it anew, mostly before that. Its thread is made when first needed. Knows nothing of stages.
"""

import threading
from collections.abc import Callable
from math import inf

from nestling.runtime.alarm import Alarm
from nestling.runtime.engine import Stop
from nestling.runtime.prompt import Promptly


class Guard:
    """`until` a time, then `stop.set()`; unless it was called `off`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.target: tuple[float, Stop] | None = None  # replaced whole, so reading needs no lock
        self.closing = False
        self.alarm = Alarm(clock)
        self.thread: threading.Thread | None = None

    def until(self, at: float, stop: Stop) -> None:
        self.target = at, stop
        if self.thread is None:
            self.thread = threading.Thread(target=self.live, name="nestling-guard", daemon=True)
            self.thread.start()
        self.set(at)

    def off(self) -> bool:
        """Whether it was too late for that."""
        gone, self.target = self.target is None, None
        return gone

    def close(self) -> None:
        self.closing, self.target = True, None
        self.set(inf)
        if self.thread is not None:
            self.thread.join()
        self.alarm.close()

    def set(self, at: float) -> None:
        self.alarm.set(at)
        if self.closing:  # perhaps meanwhile, by another thread, which waits for the guard to go
            self.alarm.set(self.clock())

    def live(self) -> None:
        with Promptly():
            while not self.closing:
                self.alarm.sleep()
                target = self.target
                if target is not None and self.clock() >= target[0]:
                    self.target = None
                    target[1].set()
