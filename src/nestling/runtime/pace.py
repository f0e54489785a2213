"""How long stages take here and now: profiled latencies, times one slow-down factor that is estimated as we go.

In: the latency of each stage on the quiet device (from a profile, or from the first runs), and every latency observed
since. Out: what the next stage will take. The factor is one number, filtered in the logarithm, so that twice as slow and
twice as fast weigh the same. Beside it, the margin: how late this machine wakes a thread up.
"""

import math
from collections import deque
from collections.abc import Sequence

GAIN = 0.2  # how much a new observation counts; a busy machine is noticed within about five stages
LIMIT = (
    4.0  # one observation counts as at most this many times slower or faster than expected: stalls are rare, not news
)


class Pace:
    """Predicts stage latencies. Seconds everywhere; stages count from 1."""

    def __init__(self, latencies: Sequence[float] = (), stages: int = 0) -> None:
        """`latencies` are those of each stage by itself; unknown ones (none given) are learnt from what is observed."""
        self.base = list(latencies) or [0.0] * stages
        self.fastest = [math.inf] * len(self.base)
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
        """A stage took this long on so many images. Only single images count: batches cost less per image."""
        if latency <= 0 or images != 1:
            return
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

    def predict(self, stage: int, images: int = 1) -> float:
        """What this stage will take. For a batch an upper estimate: as if its images came one by one."""
        return self.base[stage - 1] * self.slowdown * images


class Margin:
    """How much before a deadline to wake up so as to be back in time: the 98th percentile of recent lateness, from the time
    a timer was due until its caller had the answer in hand."""

    LEAST, MOST = 20e-6, 50e-3
    LEAVING = 20e-6  # seconds from noting how late an answer is until its caller goes on
    RATE = 0.2

    def __init__(self) -> None:
        self.value = 100e-6
        self.recent: deque[float] = deque([0.0], maxlen=64)  # how late wake-ups were

    def looked(self, late: float) -> None:
        """A wake-up came this long after it was due."""
        self.recent.append(late)

    def observe(self, late: float) -> None:
        """An answer was handed over this long after the timer was due. Moves up 49 times as far as down, so it settles at
        98 %."""
        moved = self.value * math.exp(self.RATE * (0.98 if late > self.value else -0.02))
        self.value = min(self.MOST, max(self.LEAST, moved))

    def before(self, deadline: float) -> float:
        """When to wake up, in seconds from the start. Never more than a fifth of the time is given away."""
        return deadline - min(self.value + self.LEAVING, deadline / 5)

    def looks(self, deadline: float) -> list[float]:
        """When an answer to this deadline will really be looked at, as far as recent wake-ups tell."""
        due = self.before(deadline)
        return [due + late for late in list(self.recent)] if deadline > 0 else [0.0]
