"""Which stage to begin with: D_s at once for the s from which the least error is to be expected in the time there is.

In: how long stages and beginnings took lately, and the error of each stage. Beginning with a large D_s skips answers that nobody
would look at; but if it is not done in time there is none at all, where a smaller one would have answered and gone on. So the
spread of times decides: on a quiet machine the largest that fits, on a busy one something to fall back on first. What a
machine does is known by the last runs only, which are looked at anew every few questions, and after every failure.
"""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from nestling.runtime.forecast import Doubles
from nestling.runtime.pace import Pace, Timing

POINTS = 16  # of the distribution of a time
FRESH = 16  # runs after which distributions are worked out again
BEST_GUESS = 0.1  # error of the first stage where errors are not known; each further stage takes away a fifth
NEXT = 0.8
ROUNDING = 1e-9


class Beginnings:
    """Looks ahead. Used by one thread at a time."""

    def __init__(self, pace: Pace, errors: Sequence[float] = (), nothing: float = 1.0) -> None:
        """`nothing` is the error where no stage has answered."""
        self.pace, self.stages = pace, len(pace.steps)
        guess = [BEST_GUESS * nothing * NEXT**place for place in range(self.stages)]
        self.errors = [nothing, *(errors or guess)]
        self.limits: list[float] = []  # seconds, at slow-down 1, from which on
        self.bests = [1]  # another stage is best; the first is that for less than all of them
        self.seen, self.failed = -FRESH, 0

    def first(self, left: float) -> int:
        """The stage to begin with when there are so many seconds left; what is passed over is tried again some day."""
        best = self.best(left)
        if best < self.stages and self.pace.predict(best + 1, straight=True) <= left:
            self.pace.skip(best + 1, straight=True)
        return best

    def best(self, left: float) -> int:
        """The same, without being heard of; 1 if none can be in time."""
        if self.pace.observed - self.seen >= FRESH or self.pace.given_up > self.failed:
            self.look()
        return self.bests[bisect_right(self.limits, left / self.pace.slowdown)]

    def look(self) -> None:
        """Work out from the last runs when each stage will be done, and so the best to begin with for any time left."""
        self.seen, self.failed = self.pace.observed, self.pace.given_up
        steps, jumps = ([points(each) for each in timings] for timings in (self.pace.steps, self.pace.jumps))
        done: list[list[Doubles]] = []  # [s - 1][k]: when stage s + k is done, having begun with s
        for stage in range(1, self.stages + 1):
            done.append([jumps[stage - 1]])
            for step in steps[stage:]:
                done[-1].append(np.sort(np.add.outer(done[-1][-1], step), axis=None)[POINTS // 2 :: POINTS])
        moments = np.unique(np.concatenate([times for each in done for times in each]))
        expected = np.array([self.expect(stage, times, moments) for stage, times in enumerate(done, start=1)])
        equal = expected <= expected.min(axis=0) + ROUNDING
        best = self.stages - equal[::-1].argmax(axis=0)  # of equals the largest: it is done sooner than one by one
        changes = np.flatnonzero(np.diff(best, prepend=1))
        self.limits, self.bests = moments[changes].tolist(), [1, *best[changes].tolist()]

    def expect(self, stage: int, times: list[Doubles], moments: Doubles) -> Doubles:
        """The error to expect at each moment of who began with this stage; later ones are done at so many times."""
        expected: Doubles = np.full(len(moments), self.errors[0])
        before = self.errors[0]
        for error, done in zip(self.errors[stage:], times, strict=True):
            expected -= np.searchsorted(done, moments, side="right") / len(done) * (before - error)
            before = error
        return expected


def points(timing: Timing) -> Doubles:
    """A distribution as so many quantiles of equal weight."""
    order = np.array(timing.recent.order or [1.0])
    return timing.base * order[((np.arange(POINTS) + 0.5) / POINTS * len(order)).astype(int)]
