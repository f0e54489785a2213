"""Waking up on time on a busy machine: while a thread waits for its deadline, it asks Linux for short time slices.

A thread that asks for little at a time is let in sooner when it wakes up (EEVDF scheduler, Linux 6.12 and later); its share
of the processor stays the same. What the thread had before is restored when the wait is over. On other systems, and for
threads under real-time policies, nothing is done.
"""

import ctypes
import platform
import struct
import sys
import threading
from collections.abc import Callable

SLICE = 400_000  # nanoseconds: less than anybody has by default, and enough to form an answer after waking up
NUMBERS = {"x86_64": (314, 315), "aarch64": (274, 275)}  # of the calls sched_setattr and sched_getattr
LAYOUT = "IIQiIQQQII"  # struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period, two clamps
SIZE = struct.calcsize(LAYOUT)


def find_syscall() -> Callable[..., int] | None:
    """The C library's syscall function, where the two calls are known to exist; None elsewhere."""
    if not sys.platform.startswith("linux") or platform.machine() not in NUMBERS:
        return None
    try:
        release = tuple(int(part) for part in platform.release().split(".")[:2])
        # PyDLL, not CDLL: letting the interpreter's lock go and asking for it back would take longer than the calls.
        return ctypes.PyDLL(None).syscall if release >= (6, 12) else None
    except (ValueError, OSError, AttributeError):
        return None


SYSCALL = find_syscall()
INSIDE = threading.local()
SET, GET = NUMBERS.get(platform.machine(), (0, 0))


class Promptly:
    """While inside, the calling thread is woken up as soon as the kernel can. Inside another one it does nothing."""

    __slots__ = ("before", "changed")

    def __enter__(self) -> None:
        self.changed = False
        if SYSCALL is None or getattr(INSIDE, "prompt", False):
            return
        self.before = ctypes.create_string_buffer(SIZE)
        if SYSCALL(GET, 0, self.before, SIZE, 0) == 0:
            size, policy, flags, nice, priority, *_ = struct.unpack(LAYOUT, self.before.raw)
            if policy == 0 and size == SIZE:
                short = struct.pack(LAYOUT, SIZE, policy, flags, nice, priority, SLICE, 0, 0, 0, 0)
                self.changed = INSIDE.prompt = SYSCALL(SET, 0, short, 0) == 0

    def __exit__(self, *error: object) -> None:
        if self.changed and SYSCALL is not None:
            INSIDE.prompt = False
            SYSCALL(SET, 0, self.before, 0)
