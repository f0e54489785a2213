"""A mailbox between two threads: one puts, one waits with a timeout.

queue.SimpleQueue would do, but in CPython its `get` can sleep for ever when the timeout is so short that it is over before
the wait begins (the time left turns negative, and negative means "no timeout"). A deque and a lock cannot. Knows nothing
of what is in the post.
"""

import contextlib
import threading
import time
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """First in, first out. Any thread may put; one thread gets."""

    __slots__ = ("lock", "post")

    def __init__(self) -> None:
        self.post: deque[T] = deque()
        self.lock = threading.Lock()  # held while the box is known to be empty
        self.lock.acquire()

    def put(self, item: T) -> None:
        self.post.append(item)
        with contextlib.suppress(RuntimeError):  # somebody has rung already
            self.lock.release()

    def get(self, timeout: float) -> T:
        """The oldest item; raises TimeoutError if none comes in so many seconds."""
        until = time.monotonic() + timeout
        while True:
            try:
                return self.post.popleft()
            except IndexError:
                left = until - time.monotonic()
                if left <= 0 or not self.lock.acquire(timeout=left):
                    break
        if self.post:  # it came at the last moment
            return self.post.popleft()
        raise TimeoutError
