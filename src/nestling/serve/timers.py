"""An event loop whose timers come when they are due: asyncio's own round their waits up to whole milliseconds.

Out: a loop for `asyncio.Runner(loop_factory=...)`. Epoll waits for milliseconds, select for microseconds; so this waits by select
for the one file that epoll is, and then asks epoll what there is. Where there is no epoll, the loop is asyncio's own.
"""

import asyncio
import select
import selectors
from collections.abc import Coroutine
from typing import Any

FEW = 1024  # select takes files below this number only


def loop() -> asyncio.AbstractEventLoop:
    return asyncio.SelectorEventLoop(selector()) if hasattr(select, "epoll") else asyncio.new_event_loop()


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """`asyncio.run` with such a loop."""
    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(main)


def selector() -> selectors.BaseSelector:
    """Epoll that waits as long as it is told."""

    class PreciseSelector(selectors.EpollSelector):
        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if timeout is not None and timeout > 0 and self.fileno() < FEW:
                try:
                    select.select([self.fileno()], [], [], timeout)
                except InterruptedError:
                    return []
                timeout = 0.0
            return super().select(timeout)

    return PreciseSelector()
