"""How long stages take here and now: profiled latencies times one slow-down, and the quantiles of the last ones seen.

In: the latency of each stage on the quiet device (from a profile, or from the first runs), and every latency observed
since. Out: what the next stage will take, and with what chance it will be done by a time. The slow-down is one number,
filtered in the logarithm, so that twice as slow and twice as fast weigh the same. How much before a deadline to be done,
so that the promise holds, is promise.py's business.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

GAIN = 0.2  # how much a new observation counts; a busy machine is noticed within about five stages
LIMIT = 4.0  # one observation counts as at most so many times slower or faster than expected: stalls are rare, not news
KEPT = 64  # latencies of each stage that quantiles are taken from


class Pace:
    """Predicts stage latencies. Seconds everywhere; stages count from 1."""

    def __init__(self, latencies: Sequence[float] = (), stages: int = 0) -> None:
        """`latencies` are those of each stage by itself; unknown ones (none given) are learnt from what is observed."""
        self.base = list(latencies) or [0.0] * stages
        self.fastest = [math.inf] * len(self.base)
        self.recent = [Recently() for _ in self.base]
        self.more = [math.nan] * len(self.base)  # what each further image of a batch adds; NaN = not seen yet
        self._log = self._log_drag = 0.0

    @property
    def slowdown(self) -> float:
        """1.0 = as profiled, 2.0 = everything takes twice as long."""
        return math.exp(self._log)

    @property
    def drag(self) -> float:
        """How much longer stages take than the fastest ones seen here; 1.0 on a machine that does nothing else."""
        return math.exp(self._log_drag)

    def observe(self, stage: int, latency: float, images: int = 1) -> None:
        """A stage took this long on so many images. Batches only tell what a further image adds."""
        if latency <= 0:
            return
        if images != 1:
            added = max(0.0, latency - self.predict(stage)) / (images - 1)
            known = self.more[stage - 1]
            self.more[stage - 1] = added if math.isnan(known) else known + GAIN * (added - known)
            return
        self.recent[stage - 1].add(latency)
        base, fastest = self.base[stage - 1], self.fastest[stage - 1]
        if latency < fastest:
            fastest = self.fastest[stage - 1] = latency
        drag = math.log(latency / fastest) - self._log_drag
        self._log_drag += GAIN * min(math.log(LIMIT), drag)
        if not base:
            self.base[stage - 1] = latency
            return
        ratio = math.log(latency / base) - self._log
        self._log += GAIN * max(-math.log(LIMIT), min(math.log(LIMIT), ratio))

    def gave_up(self, stage: int, after: float) -> None:
        """A stage on one image was ended after so long. It would have taken longer: where that is news, it counts as this."""
        recent = self.recent[stage - 1]
        if after > recent.quantile(0.5):
            recent.add(after)

    def predict(self, stage: int, images: int = 1) -> float:
        """What this stage will take. For a batch, until one was seen, an upper estimate: as if its images came one by one."""
        one, more = self.base[stage - 1] * self.slowdown, self.more[stage - 1]
        return one + (images - 1) * (one if math.isnan(more) else more)

    def quantile(self, stage: int, share: float) -> float:
        """The time in which this share of the last runs of a stage on one image was done; as predicted where none was seen,
        and NaN where nothing is known."""
        recent = self.recent[stage - 1]
        return recent.quantile(share) if recent.order else self.predict(stage) or math.nan


class Recently:
    """The last latencies of a stage, in order of time and of length. Read without a lock: at worst one run late."""

    __slots__ = ("order", "seen")

    def __init__(self) -> None:
        self.seen: deque[float] = deque()
        self.order: list[float] = []

    def add(self, latency: float) -> None:
        order = self.order.copy()  # whoever reads meanwhile finds a whole list
        if len(self.seen) >= KEPT:
            del order[bisect_left(order, self.seen.popleft())]
        self.seen.append(latency)
        insort(order, latency)
        self.order = order

    def quantile(self, share: float) -> float:
        order = self.order
        return order[min(len(order) - 1, int(share * len(order)))] if order else 0.0
