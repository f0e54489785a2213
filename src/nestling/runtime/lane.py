"""A place in an engine: whoever has it runs stages there. An engine that serves several threads at a time has several.

Knows who is there, what runs and until when that will probably take, and has the guard that tells it to end. Decides nothing.
"""

import threading
from collections.abc import Callable
from math import inf

from nestling.runtime.guard import Guard
from nestling.runtime.work import Work


class Lane:
    """One of them. Its lock is taken before the worker's, never while holding that."""

    __slots__ = ("busy_until", "closes", "guard", "here", "lock", "running", "wait")

    def __init__(self, clock: Callable[[], float]) -> None:
        self.lock = threading.Lock()
        self.here = 0  # the thread that has it, if any
        self.running: Work | None = None
        self.busy_until = -inf  # when what runs should be done, unless it is somebody's first stage
        self.wait = 0.0  # seconds for a processor, of the stage that was run last
        self.guard = Guard(clock)
        self.closes = False  # whether the engine is closed by whoever leaves

    def end(self) -> None:
        """Tell what runs to end."""
        running = self.running
        if running is not None:
            running.stop.set()
