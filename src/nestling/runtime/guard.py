"""A guard beside a thread that runs a stage itself: at the deadline it tells the stage to stop.

In: a Stop and a time. One stage is guarded at a time. Waking the thread that guards costs more than a short stage, so it is woken
only for stages that may overrun; for the others it looks by itself every few milliseconds, so that even a stage that took
an unheard-of time ends soon after its deadline. It is made when first needed. Knows nothing of stages.
"""

import threading
from collections.abc import Callable
from math import inf

from nestling.runtime.bell import Bell
from nestling.runtime.engine import Stop
from nestling.runtime.prompt import Promptly

PERIOD = 0.01  # seconds between two looks
IDLE = 100  # looks at nothing after which it sleeps until it is woken


class Guard:
    """`until` a time, then `stop.set()`; unless it was called `off`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.bell = Bell()
        self.target: tuple[float, Stop] | None = None  # replaced whole, so reading needs no lock
        self.asleep = inf  # until then
        self.closing = False
        self.thread: threading.Thread | None = None

    def until(self, at: float, stop: Stop, exactly: bool = True) -> None:
        """`exactly`: it may well come to that; otherwise a look too late is soon enough."""
        self.target = at, stop
        if self.thread is None:
            self.thread = threading.Thread(target=self.live, name="nestling-guard", daemon=True)
            self.thread.start()
        elif at < self.asleep and (exactly or self.asleep == inf):
            self.bell.ring()

    def off(self) -> None:
        self.target = None

    def close(self) -> None:
        self.closing, self.target = True, None
        if self.thread is not None:
            self.bell.ring()
            if self.thread is not threading.current_thread():
                self.thread.join()

    def live(self) -> None:
        nothing = 0
        with Promptly():
            while not self.closing:
                target = self.target
                nothing = nothing + 1 if target is None else 0
                self.asleep = inf if nothing > IDLE else self.clock() + PERIOD
                if target is not None:
                    self.asleep = min(self.asleep, target[0])
                if self.target is not target:  # came while we looked, and may not have seen how long we sleep
                    continue
                self.bell.wait(self.asleep, self.clock)
                target = self.target
                if target is not None and self.clock() >= target[0]:
                    self.target = None
                    target[1].set()
