"""The margin before a deadline: what the way to and from a client takes, as far as a server can measure it.

Two parts, which share what may be late, 1 in 100: from when an answer is due until it is on its way, kept by feedback
(runtime.promise.Margin); and what the server does not see, a request on its way here and a reply on its way back. How late the
event loop's own timers are tells how long that takes: what two of them, there and back, are late together but for 1 in 200 is
taken off, too; but for 1 in 10 where there is no answer at all yet, since a little late is worth more than nothing.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from operator import add

from nestling.runtime.promise import Margin

PERIOD = 0.005  # seconds between two beats
KEPT = 800  # beats: four seconds
LATE = 0.01  # of answers, for two reasons
USUAL = 1 - LATE / 2  # of the ways there and back took at most so long
HOPED = 0.9  # the same for those who have no answer yet
MOST = 0.5  # of a deadline that is given away


class Way(Margin):
    """The margin of one event loop's clients."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(LATE / 2)
        self.clock, self.lags, self.count = clock, deque[float](maxlen=KEPT), 0
        self.both = self.hoped = 0.0

    def beaten(self, late: float) -> None:
        """A timer of the event loop was so late."""
        self.lags.append(late)
        self.count += 1
        if self.count % 8 == 1:
            there = list(self.lags)
            back = there[len(there) // 2 :] + there[: len(there) // 2]  # another moment's
            order = sorted(map(add, there, back))
            self.both, self.hoped = (order[int(share * (len(there) - 1))] for share in (USUAL, HOPED))

    def unseen(self, hoped: bool = False) -> float:
        """Seconds of the way that the server does not see."""
        return self.hoped if hoped else self.both

    def before(self, deadline: float) -> float:
        """When an answer is due, in seconds from the start."""
        return deadline - min(self.value + self.LEAVING + self.unseen(), MOST * deadline)

    def latest(self, deadline: float) -> float:
        """When to give up where there is no answer at all yet, in seconds from the start."""
        return max(self.before(deadline), deadline - self.LEAVING - self.unseen(hoped=True))

    async def beat(self) -> None:
        """For ever: see how late the event loop is."""
        while True:
            due = self.clock() + PERIOD
            await asyncio.sleep(PERIOD)
            self.beaten(max(0.0, self.clock() - due))


class ProxyWay(Way):
    """The same behind a proxy in another process, from which bodies are fetched: as long as the way there and back once more. As
    long again is taken off for what the proxy does not tell, requests that wait there to be read and replies to be sent."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self.trips, self.trip, self.fetches = deque[float](maxlen=KEPT), 0.0, 0

    def fetched(self, took: float) -> None:
        """A body was fetched from the proxy, which took so long."""
        self.trips.append(took)
        self.fetches += 1
        if self.fetches % 8 == 1:
            self.trip = sorted(self.trips)[int(USUAL * (len(self.trips) - 1))]

    def unseen(self, hoped: bool = False) -> float:
        return super().unseen(hoped) + 2 * self.trip
