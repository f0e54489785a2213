"""An alarm that one thread sets and another sleeps by. Setting it wakes nobody, so it costs a microsecond.

On Linux a timer of the kernel's (timerfd), which whoever sleeps reads; elsewhere a bell, which must be rung whenever the
alarm is set for an earlier time than the sleeper knows of. Times are those of a clock that goes like time.monotonic. Knows
nothing of what it is set for.
"""

import ctypes
import math
import os
import sys
import time
from collections.abc import Callable

from nestling.runtime.bell import Bell
from nestling.runtime.descriptor import Descriptor

MONOTONIC = 1  # CLOCK_MONOTONIC of Linux, which time.monotonic follows
ABSOLUTE = 1  # TFD_TIMER_ABSTIME
CLOSE_ON_EXEC = 0o2000000  # TFD_CLOEXEC
LONGEST = 1e6  # seconds; an alarm further ahead is never set


class Interval(ctypes.Structure):
    """struct itimerspec: how often again (never), and when."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("again", "again_ns", "seconds", "nanoseconds"))


def find_timers() -> tuple[Callable[..., int], Callable[..., int]] | None:
    """The C library's calls, where they are known to exist. They keep the interpreter's lock: both are over at once."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        library = ctypes.PyDLL(None, use_errno=True)
        make, put = library.timerfd_create, library.timerfd_settime
    except (OSError, AttributeError):
        return None
    put.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    return make, put


TIMERS = find_timers()


class KernelAlarm(Descriptor):
    """One timer of the kernel's. Closed, nobody sleeps by it any more, and setting it does nothing."""

    def __init__(self, clock: Callable[[], float]) -> None:
        assert TIMERS is not None
        make, self.put = TIMERS
        self.clock, self.moment = clock, Interval()
        self.place, self.file = ctypes.addressof(self.moment), make(MONOTONIC, CLOSE_ON_EXEC)
        if self.file < 0:
            raise OSError(ctypes.get_errno(), "there is no timer left")

    def set(self, at: float) -> None:
        """Wake the sleeper at a time on the clock, in place of any that was set before; math.inf: not at all."""
        left = at - self.clock()
        if left < LONGEST:
            due = max(time.monotonic() + left, 1e-9)
            self.moment.seconds = seconds = math.floor(due)
            self.moment.nanoseconds = max(1, int((due - seconds) * 1e9))
        else:
            self.moment.seconds = self.moment.nanoseconds = 0
        self.put(self.file, ABSOLUTE, self.place, None)

    def sleep(self) -> None:
        """Until the time comes; other threads may set it meanwhile."""
        os.read(self.file, 8)


class BellAlarm:
    """The same where there are no such timers."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.bell = clock, Bell()
        self.due = self.asleep = math.inf

    def set(self, at: float) -> None:
        self.due = at
        if at < self.asleep:
            self.bell.ring()

    def sleep(self) -> None:
        while self.clock() < self.due:
            self.asleep = self.due
            if (
                self.asleep == self.due
            ):  # it may have been set meanwhile, by somebody who did not see for how long we sleep
                self.bell.wait(self.asleep, self.clock)
        self.due = self.asleep = math.inf

    def close(self) -> None: ...


Alarm = BellAlarm if TIMERS is None else KernelAlarm
