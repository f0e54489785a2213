"""SIGTERM and Ctrl-C: the first asks for the end, the second ends at once; and after a time the end comes whatever holds it up.

Signals are taken by the interpreter, not by an event loop, and the time is kept by a thread: so neither a loop nor a thread that
hangs can keep the process.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from math import inf
from typing import Any, Self

from nestling.runtime.bell import Bell

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def told_to_end(tell: Callable[[], Any]) -> Iterator[None]:
    """While inside, `tell` is called by the first signal."""
    seen: list[int] = []

    def told(number: int, frame: Any) -> None:
        seen.append(number)
        if len(seen) > 1:
            os._exit(128 + number)
        tell()

    before = {number: signal.signal(number, told) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class LastResort:
    """Ends the process, with code 1, if this is not left within so many seconds after `begin`."""

    def __init__(self, seconds: float, say: Callable[[dict[str, Any]], None]) -> None:
        self.seconds, self.say, self.bell, self.over = seconds, say, Bell(), threading.Event()

    def begin(self) -> None:
        """May be called by a signal's handler."""
        self.bell.ring()

    def wait(self) -> None:
        self.bell.wait(inf)
        if not self.over.wait(self.seconds):
            self.say({"event": "forced", "error": f"it had not ended after {self.seconds:g} s"})
            time.sleep(0.1)  # for the line to be written
            os._exit(1)

    def __enter__(self) -> Self:
        threading.Thread(target=self.wait, name="nestling-last-resort", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.bell.ring()
