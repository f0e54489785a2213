"""Which stage to begin with, and whether to go on: what has the least error to expect in the time there is.

In: how long stages and beginnings took lately, how often those who worked were interrupted, and the error of each stage. D_s at
once skips answers that nobody would look at; if it is not done in time, there is none. Who goes on from an answer can be
stopped in time, unless another program has the processor just then: that answer is late, and worth nothing. So on a quiet
machine one begins with the largest that fits, on a busy one with what fits even if it is interrupted.
"""

from collections.abc import Sequence

from nestling.runtime.pace import Pace
from nestling.runtime.promise import USUAL

BEST_GUESS = 0.1  # error of the first stage where errors are not known; each further stage takes away a fifth
NEXT = 0.8
EQUAL = 4e-3  # errors that differ by less are the same: one run of a few hundred that took longer makes as much
MOSTLY = 0.5  # who is late as often as that is not only a little late
A_LITTLE = 0.3e-3  # seconds after the deadline by which an answer
SLIGHTLY = 0.03  # loses so much of its worth; how often that may happen is the promise's business


REMEMBERED = 32  # questions for which it is remembered between which times a stage was the best,
ALIKE = 1.1  # as long as the machine does not become so many times slower or faster


class Beginnings:
    """Looks ahead, by the last runs. Any thread may ask."""

    def __init__(self, pace: Pace, errors: Sequence[float] = (), nothing: float = 1.0) -> None:
        """`nothing` is the error where no stage has answered."""
        self.pace, self.stages = pace, len(pace.steps)
        guess = [BEST_GUESS * nothing * NEXT**place for place in range(self.stages)]
        self.errors = [nothing, *(errors or guess)]
        self.last_is_best = self.errors[-1] == min(self.errors)
        self.known: dict[
            int, tuple[float, float]
        ] = {}  # the least and the most time for which a stage was the best lately
        self.of: tuple[bool, float] = (False, 1.0)  # on a machine that is crowded or not, and at which price
        self.asked, self.slowdown = 0, 1.0

    def first(self, left: float, price: float = 1.0) -> int:
        """The stage to begin with when there are so many seconds left; what is passed over is tried again some day."""
        now, slowdown, self.asked = (self.pace.crowded, price), self.pace.slowdown, self.asked + 1
        alike = self.slowdown < slowdown * ALIKE and slowdown < self.slowdown * ALIKE
        if self.of != now or not alike or self.asked % REMEMBERED == 0:
            self.of, self.slowdown, self.known = now, slowdown, {}
        for stage, (least, most) in self.known.items():
            if least <= left <= most:
                best = stage
                break
        else:  # looking ahead takes longer than all else that asking takes
            best = self.best(left, price)
            least, most = self.known.get(best, (left, left))
            self.known = {**self.known, best: (min(least, left), max(most, left))}
        if best < self.stages and self.pace.predict(best + 1, straight=True) <= left:
            self.pace.skip(best + 1, straight=True)
        return best

    def best(self, left: float, price: float = 1.0) -> int:
        """The same, without being heard of; 1 if none can be in time. `price`: how many times worse late is than nothing."""
        late, last = price * self.errors[0], self.pace.overruns(self.stages, left, straight=True)
        if self.last_is_best and last == (0.0, 0.0):
            return self.stages  # the usual case where there is time
        best, least = 1, late - EQUAL
        for stage in range(1, self.stages + 1):
            slow, lost = last if stage == self.stages else self.pace.overruns(stage, left, straight=True)
            if slow + lost < MOSTLY:
                if slow:
                    much = self.pace.overruns(stage, left + A_LITTLE, straight=True)[0]
                    lost += much + SLIGHTLY * max(0.0, slow - much)
                after = left - self.pace.quantile(stage, 0.5, straight=True)
                worth = min(self.errors[stage], self.going(stage, after, late))
                expected = (1 - lost) * worth + lost * late
                if expected <= least + EQUAL:  # of equals the largest: it is done sooner than one by one
                    best, least = stage, min(least, expected)
        return best

    def goes_on(self, stage: int, left: float, price: float = 1.0) -> bool:
        """Whether to begin the next stage now that this one is done."""
        return self.going(stage, left, price * self.errors[0]) < self.errors[stage]

    def going(self, stage: int, left: float, late: float) -> float:
        """The error to expect of who goes on from a stage: stopped in time, it is that stage's."""
        if stage == self.stages or left <= 0:
            return self.errors[stage]
        if self.pace.quantile(stage + 1, USUAL) > left:  # then it is not begun (here.py)
            return self.errors[stage]
        stopped, interrupted = self.pace.overruns(stage + 1, left)
        done = 1 - stopped - interrupted
        return done * self.errors[stage + 1] + stopped * self.errors[stage] + interrupted * late
