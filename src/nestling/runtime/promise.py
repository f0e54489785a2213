"""What a caller is promised about deadlines, and the feedback by which it is kept, whatever the load.

`late` is the share of answers that may come after their deadline. Three things are moved by what happened: how much longer
than usual a stage is reckoned to take before it is taken for sure, how much before the deadline D_s must usually be done, and
how much worse late is than nothing. Each moves back with every answer in time, and on with a late one once more were late
than was promised, whatever the reason (Budget). `late=None` promises no share: nobody is careful then.
"""

import math
from collections import deque
from collections.abc import Callable

from nestling.errors import NestlingError
from nestling.runtime.bell import Bell
from nestling.runtime.prompt import Promptly

TRIED = ("sure", "guarded", "first", "jump")
LATE = 0.01  # of answers, unless the caller says otherwise
USUAL = 0.9  # a stage usually takes at most this quantile of its last runs
HOPE = 0.5  # what usually takes too long is tried if at least every second run was short enough
RATE = 0.2  # of a step, in the logarithm, once the first steps were taken
FIRST = 1.0  # of the first step; the tenth late answer moves by RATE


class Promise:
    """The feedback of one promise. Times are seconds."""

    def __init__(self, late: float | None = LATE) -> None:
        self.late = late
        share = late or LATE
        self.timer = Margin(share)  # for callers that sleep until their deadline
        # An answer of the caller's own thread is late for one of three reasons, which share what is promised.
        self.budget = Budget(share)
        self.early = Margin(share)  # how much before the deadline D_s must usually be done to be begun with
        self.price, self.caution = Price(share), Caution(share)

    def patient(self, due: float, end: float) -> float:
        """Until when to wait for a first stage where the timer has rung and there is nothing yet: until as much before the
        deadline as threads usually wake up late. A little late is worth more than nothing."""
        late = sorted(self.timer.recent)
        return max(due, end - late[int(USUAL * len(late))])

    @property
    def calm(self) -> bool:
        """Whether all is as it is where nothing is ever late: one more answer in time changes nothing."""
        return (
            self.budget.left == Budget.MOST
            and self.price.value == Price.LEAST
            and self.caution.value == Caution.LEAST
            and self.early.value == Margin.LEAST
        )

    def observe(self, late: float, tried: str, interrupted: bool = False) -> None:
        """An answer of the caller's own thread came so many seconds after its deadline (less than none: before). What was tried
        last: a stage that was sure to be in time, one with a guard, the first one, or D_s at once (see TRIED). Whoever was
        interrupted learns nothing about margins: less must be begun with where that may happen."""
        if late <= 0 and self.calm:
            return
        over = self.budget.spent(late > 0)
        self.price.observe(over and interrupted != (tried == "first"))  # the first one might have been told to end
        was_late = over and not interrupted
        self.caution.observe(was_late and tried == "sure")
        self.early.observe(self.early.value + late if was_late and tried == "jump" else 0.0)


class Budget:
    """Late answers that were promised and have not come: as long as there are any, there is no need to be careful, and one
    that is late is no reason to become so. Who is careful begins with less, goes on more often, and is interrupted more
    often, which takes time, too. No more than two are saved up, so that a load that comes is noticed soon."""

    MOST = 2.0

    def __init__(self, late: float) -> None:
        self.late, self.left = late, self.MOST

    @property
    def affords(self) -> bool:
        """Whether there is no need to be careful."""
        return self.left > 0

    def spent(self, late: bool) -> bool:
        """An answer came: whether it was late and one too many."""
        self.left = min(self.MOST, self.left + self.late)
        if not late:
            return False
        self.left = max(-1.0, self.left - 1.0)
        return self.left < 0


class Caution:
    """How many times longer than its usual quantile a stage is reckoned to take."""

    LEAST, MOST = 0.7, 8.0

    def __init__(self, late: float) -> None:
        self.step, self.value = StepSizes(late), 1.1

    def observe(self, late: bool) -> None:
        """An answer whose stages were begun without a guard came, late or not."""
        self.value = min(self.MOST, max(self.LEAST, self.value * math.exp(self.step(late) / 2)))


class Price:
    """How many times worse than no answer a late one is."""

    LEAST, MOST = 1.0, 2.0

    def __init__(self, late: float) -> None:
        self.step, self.value = StepSizes(late), 1.0

    def observe(self, late: bool) -> None:
        """An answer came; late, where somebody might have begun with less or ended sooner, or not."""
        self.value = min(self.MOST, max(self.LEAST, self.value * math.exp(self.step(late) / 2)))


class StepSizes:
    """How far to move, in the logarithm: up where it was too little, down where it was not, so that it settles where this
    share is too little. The first steps are longer, to learn quickly what machine this is."""

    __slots__ = ("back", "late", "seen")

    def __init__(self, late: float) -> None:
        self.late, self.seen, self.back = late, 0, -late * FIRST

    def __call__(self, too_little: bool) -> float:
        if not too_little:
            return self.back
        rate = max(RATE, FIRST / (1 + 0.4 * self.seen))
        self.seen += 1
        self.back = -self.late * max(RATE, FIRST / (1 + 0.4 * self.seen))
        return rate * (1 - self.late)


class Margin:
    """How much before a deadline something must happen so that the answer is back in time."""

    LEAST, MOST = 20e-6, 50e-3
    LEAVING = 20e-6  # seconds from noting how late an answer is until its caller goes on

    def __init__(self, late: float = 0.02) -> None:
        self.step, self.value = StepSizes(late), 100e-6
        self.recent: deque[float] = deque([0.0], maxlen=64)  # how late wake-ups were

    def looked(self, late: float) -> None:
        """A wake-up came this long after it was due."""
        self.recent.append(late)

    def observe(self, late: float) -> None:
        """An answer was handed over this long after the timer was due."""
        self.value = min(self.MOST, max(self.LEAST, self.value * math.exp(self.step(late > self.value))))

    def before(self, deadline: float) -> float:
        """When to wake up, in seconds from the start. Never more than a fifth of the time is given away."""
        return deadline - min(self.value + self.LEAVING, deadline / 5)

    def latest(self, deadline: float) -> float:
        """When to give up where there is no answer at all yet, in seconds from the start."""
        return self.before(deadline)

    def looks(self, deadline: float) -> list[float]:
        """When an answer to this deadline will really be looked at, as far as recent wake-ups tell."""
        due = self.before(deadline)
        return [due + late for late in list(self.recent)] if deadline > 0 else [0.0]


def wakeups(clock: Callable[[], float], count: int = 8, seconds: float = 5e-4) -> float:
    """The most that a few timers are late, one after another."""
    bell, most = Bell(), 0.0
    with Promptly():
        for _ in range(count):
            due = clock() + seconds
            bell.wait(due, clock)
            most = max(most, clock() - due)
    return most


def check_late(late: float | None) -> float | None:
    if late is None or (isinstance(late, int | float) and not isinstance(late, bool) and 0 < late < 1):
        return late
    raise NestlingError(
        f"found late={late!r}; expected the share of answers that may come after their deadline, such as 0.01, or None: then an "
        "answer comes as soon as it can, and nothing is promised"
    )
