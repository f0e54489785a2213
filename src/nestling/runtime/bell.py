"""A bell that one thread rings and another waits for, and that is rung without the interpreter's lock.

Python's own locks are released with the interpreter's lock held. On a busy machine the thread that is woken may then take the
processor from the one that woke it, find the interpreter locked, and wait until the kernel lets the other one run again:
milliseconds for a call of a microsecond. A POSIX semaphore called through ctypes lets the interpreter go first. Where the C
library has none with a monotonic clock, Python's locks must do. Knows nothing of what is waited for.
"""

import contextlib
import ctypes
import errno
import math
import sys
import threading
import time
from collections.abc import Callable

MONOTONIC = 1  # CLOCK_MONOTONIC of Linux, which time.monotonic follows
ROOM = 64  # bytes, more than a sem_t takes anywhere
LONGEST = 1e6  # seconds; longer waits are waits for ever


class Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def find_semaphores() -> tuple[ctypes.CDLL | None, Callable[..., int]]:
    """The C library, if it can wait for a semaphore until a time on the monotonic clock, and what makes a semaphore:
    that is over at once, and keeps the interpreter's lock."""
    if not sys.platform.startswith("linux"):
        return None, int
    try:
        library, make = ctypes.CDLL(None, use_errno=True), ctypes.PyDLL(None).sem_init
        library.sem_clockwait.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        library.sem_post.argtypes = library.sem_wait.argtypes = (ctypes.c_void_p,)
        make.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
    except (OSError, AttributeError):
        return None, int
    return library, make


LIBRARY, MAKE = find_semaphores()


class SemaphoreBell:
    """Counts: as many waits come back as there were rings."""

    __slots__ = ("memory", "place")

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(ROOM)
        self.place = ctypes.addressof(self.memory)
        MAKE(self.place, 0, 0)

    def ring(self) -> None:
        assert LIBRARY is not None
        LIBRARY.sem_post(self.place)

    def wait(self, until: float, clock: Callable[[], float] = time.monotonic) -> bool:
        """Whether it rang before a time on the clock; math.inf waits for ever."""
        assert LIBRARY is not None
        left = until - clock()
        if left > LONGEST:
            while LIBRARY.sem_wait(self.place):
                check(ctypes.get_errno())
            return True
        due = time.monotonic() + max(0.0, left)
        seconds = math.floor(due)
        moment = Timespec(seconds, int((due - seconds) * 1e9))
        while LIBRARY.sem_clockwait(self.place, MONOTONIC, ctypes.byref(moment)):
            error = ctypes.get_errno()
            if error == errno.ETIMEDOUT:
                return False
            check(error)
        return True


def check(error: int) -> None:
    if error != errno.EINTR:  # a signal came; Python handles it between two calls
        raise OSError(error, "waiting for a semaphore failed")


class LockBell:
    """The same with Python's own lock, where there is nothing better. Several rings may count as one."""

    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held while nobody has rung
        self.lock.acquire()

    def ring(self) -> None:
        with contextlib.suppress(RuntimeError):  # somebody has rung already
            self.lock.release()

    def wait(self, until: float, clock: Callable[[], float] = time.monotonic) -> bool:
        left = until - clock()
        if left > LONGEST:
            return self.lock.acquire()
        return self.lock.acquire(timeout=left) if left > 0 else self.lock.acquire(blocking=False)


Bell = LockBell if LIBRARY is None else SemaphoreBell
