"""An event loop whose timers come when they are due, and that knows since when what it reads may have waited.

Asyncio's own timers round their waits up to whole milliseconds. Out: a loop for `asyncio.Runner(loop_factory=...)`. Epoll waits
for milliseconds, select for microseconds; so this waits by select for the one file that epoll is, and then asks epoll what there
is. Where there is no epoll, the loop is asyncio's own.
"""

import asyncio
import select
import selectors
import time
from collections.abc import Coroutine
from typing import Any

FEW = 1024  # select takes files below this number only


def loop() -> asyncio.AbstractEventLoop:
    return asyncio.SelectorEventLoop(selector()) if hasattr(select, "epoll") else asyncio.new_event_loop()


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """`asyncio.run` with such a loop."""
    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(main)


def since() -> float:
    """When what the running loop reads now can have come at the earliest, by time.monotonic(): at its look before this one, when
    it was not there yet; now, where the loop had nothing to do and waited for it, or is not ours."""
    found = getattr(asyncio.get_running_loop(), "_selector", None)
    return found.since if isinstance(found, Looks) else time.monotonic()


class Looks:
    """When a selector looked last, and since when what it found then may have been there."""

    def __init__(self) -> None:
        super().__init__()
        self.looked = self.since = time.monotonic()

    def note(self, waited: bool) -> None:
        before, self.looked = self.looked, time.monotonic()
        self.since = self.looked if waited else before


def selector() -> selectors.BaseSelector:
    """Epoll that waits as long as it is told."""

    class PreciseSelector(Looks, selectors.EpollSelector):
        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            found = super().select(0.0)
            if waits := not found and (timeout is None or timeout > 0):
                if timeout is not None and self.fileno() < FEW:
                    try:
                        select.select([self.fileno()], [], [], timeout)
                    except InterruptedError:
                        return []
                    timeout = 0.0
                found = super().select(timeout)
            self.note(waits)
            return found

    return PreciseSelector()
