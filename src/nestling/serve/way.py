"""The margin before a deadline: what the way to and from a client takes, as far as a server can measure it.

Two parts: from when an answer is due until it is on its way, kept by feedback (runtime.promise.Margin); and what the server does
not see, a request that waits to be read and a reply that waits to be sent. How late the event loop's own timers are tells how
long that takes: twice that, there and back, is taken off, too.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

from nestling.runtime.promise import Margin

PERIOD = 0.005  # seconds between two beats
KEPT = 400  # beats: two seconds
USUAL = 0.95  # of the beats were at most so late
MOST = 0.5  # of a deadline that is given away


class Way(Margin):
    """The margin of one event loop's clients."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(0.01)
        self.clock, self.lags, self.lag, self.count = clock, deque[float](maxlen=KEPT), 0.0, 0

    def beaten(self, late: float) -> None:
        """A timer of the event loop was so late."""
        self.lags.append(late)
        self.count += 1
        if self.count % 8 == 1:
            self.lag = sorted(self.lags)[int(USUAL * (len(self.lags) - 1))]

    def before(self, deadline: float) -> float:
        """When an answer is due, in seconds from the start."""
        return deadline - min(self.value + self.LEAVING + 2 * self.lag, MOST * deadline)

    async def beat(self) -> None:
        """For ever: see how late the event loop is."""
        while True:
            due = self.clock() + PERIOD
            await asyncio.sleep(PERIOD)
            self.beaten(max(0.0, self.clock() - due))
