"""A mailbox between two threads: one puts, one waits with a timeout.

queue.SimpleQueue would do, but in CPython its `get` can sleep for ever when the timeout is so short that it is over before
the wait begins (the time left turns negative, and negative means "no timeout"), and it wakes with the interpreter locked
(bell.py). Knows nothing of what is in the post.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from nestling.runtime.bell import Bell

T = TypeVar("T")


class Mailbox(Generic[T]):
    """First in, first out. Any thread may put; one thread gets."""

    __slots__ = ("bell", "post")

    def __init__(self) -> None:
        self.post: deque[T] = deque()
        self.bell = Bell()

    def put(self, item: T) -> None:
        self.post.append(item)
        self.bell.ring()

    def get(self, timeout: float) -> T:
        """The oldest item; raises TimeoutError if none comes in so many seconds."""
        return self.wait(time.monotonic() + timeout, time.monotonic)

    def wait(self, until: float, clock: Callable[[], float]) -> T:
        """The same with a time on a clock: a thread that is stopped before it begins to wait does not wait the longer."""
        while not self.post:
            if not self.bell.wait(until, clock) and not self.post:
                raise TimeoutError
        return self.post.popleft()
