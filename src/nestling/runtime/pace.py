"""How long stages take here and now: profiled latencies times one slow-down, and how far that was off lately.

In: the latency of each stage on the quiet device (from a profile, or from the first runs), and every latency observed
since. Out: what the next stage will take, and quantiles of it. The slow-down is one number, filtered in the logarithm, so that
twice as slow and twice as fast weigh the same. Quantiles are those of the last runs over what had been predicted for them:
what the stages that are run tell about the machine goes for the others, too. How sure one must be is promise.py's business.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

GAIN = 0.2  # how much a new observation counts; a busy machine is noticed within about five stages
LIMIT = 4.0  # one observation counts as at most so many times slower or faster than expected: stalls are rare, not news
KEPT = 64  # runs of each stage that quantiles are taken from
BEFORE = 8  # runs that went as predicted, as it were, before the first
FORGET = 8  # times that a stage was not begun after which one more run counts as having gone as predicted


class Pace:
    """Predicts stage latencies. Seconds everywhere; stages count from 1."""

    def __init__(self, latencies: Sequence[float] = (), stages: int = 0) -> None:
        """`latencies` are those of each stage by itself; unknown ones (none given) are learnt from what is observed."""
        self.base = list(latencies) or [0.0] * stages
        self.fastest = [math.inf] * len(self.base)
        self.recent = [Recently(BEFORE if base else 0) for base in self.base]
        self.skipped = [0] * len(self.base)
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
        self.recent[stage - 1].add(latency / (self.predict(stage) or latency))
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
        recent, predicted = self.recent[stage - 1], self.predict(stage)
        if predicted and after > predicted * recent.quantile(0.5):
            recent.add(after / predicted)

    def skip(self, stage: int) -> None:
        """A stage was not begun, because it would hardly have been in time. Nobody learns then that it has become faster: so
        what made it look slow is forgotten little by little, and it is tried again."""
        self.skipped[stage - 1] += 1
        if self.skipped[stage - 1] % FORGET == 0:
            self.recent[stage - 1].add(1.0)

    def predict(self, stage: int, images: int = 1) -> float:
        """What this stage will take. For a batch, until one was seen, an upper estimate: as if its images came one by one."""
        one, more = self.base[stage - 1] * self.slowdown, self.more[stage - 1]
        return one + (images - 1) * (one if math.isnan(more) else more)

    def quantile(self, stage: int, share: float) -> float:
        """The time in which this share of runs of a stage on one image is done, by the last of them; NaN if nothing is known."""
        return self.predict(stage) * self.recent[stage - 1].quantile(share)


class Recently:
    """The last runs of a stage as multiples of what was predicted, in order of time and of length. Read without a lock."""

    __slots__ = ("order", "seen")

    def __init__(self, before: int) -> None:
        self.seen: deque[float] = deque([1.0] * before)
        self.order = [1.0] * before

    def add(self, multiple: float) -> None:
        order = self.order.copy()  # whoever reads meanwhile finds a whole list
        if len(self.seen) >= KEPT:
            del order[bisect_left(order, self.seen.popleft())]
        self.seen.append(multiple)
        insort(order, multiple)
        self.order = order

    def quantile(self, share: float) -> float:
        order = self.order
        return order[min(len(order) - 1, int(share * len(order)))] if order else math.nan
