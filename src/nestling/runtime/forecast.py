"""What a deadline will give: the share of questions each stage answers, and the error that follows.

In: a trace of stage latencies from the profile, the error of each stage and of the prior, the slow-down of the moment, and
how the last questions went. Out: shares and an expected error per deadline. The spread counts, not only the middle: a stage
that is usually just in time is sometimes late. One slow-down cannot tell how a busy machine spreads, so questions asked when
it was about as slow as now take the profile's place as they come in. Pure numpy.
"""

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Doubles = NDArray[np.float64]
PastTrail = tuple[tuple[float, ...], float, float, int]  # seconds until each stage, and the end; slow-down; first stage
KEPT = 512  # questions remembered
ALIKE = 1.5  # a question counts if the slow-down then was at most so many times more or less than it is now
ENOUGH = 64  # such questions are believed alone; with fewer, the profile has its share


class Recent:
    """How the last questions went: when each stage was done, and when it was given up. Any thread may read."""

    def __init__(self, trails: Iterable[PastTrail] = ()) -> None:
        self.trails: deque[PastTrail] = deque(trails, maxlen=KEPT)

    def add(self, done: Sequence[float], ended: float, slowdown: float, first: int = 1) -> None:
        """A question's stages took until `done`, from when it was asked, beginning with `first`; at `ended` nobody went on with
        the next."""
        self.trails.append((tuple(done), ended, slowdown, first))

    def alike(self, slowdown: float, stages: int, first: int = 1) -> tuple[Doubles, Doubles]:
        """Of the questions that were asked at about this slow-down and began with the same stage: when each stage was done
        (infinite: was not, in time), (n, stages), and when each ended (infinite: it went to the last stage)."""
        low, high = slowdown / ALIKE, slowdown * ALIKE
        trails = list(self.trails)
        chosen = [(done, ended) for done, ended, then, begun in trails if low <= then <= high and begun == first]
        times = np.full((len(chosen), stages), np.inf)
        for index, (done, _) in enumerate(chosen):
            times[index, : len(done)] = done
        ended = np.array([np.inf if len(done) == stages else end for done, end in chosen], np.float64)
        return times, ended


class Forecast:
    """Predicts who answers by a deadline. Seconds everywhere."""

    def __init__(
        self,
        trace: ArrayLike,
        errors: Sequence[float] = (),
        prior_error: float = 1.0,
        recent: Recent | None = None,
        first: int = 1,
    ) -> None:
        """`trace` (repeats, stages): seconds from a question until each stage's answer, for those who begin with `first`."""
        self.trace: Doubles = np.asarray(trace, np.float64)
        self.errors = np.array([prior_error, *errors])
        self.recent, self.first = recent or Recent(), first

    def shares(self, deadline: ArrayLike, slowdown: float = 1.0) -> Doubles:
        """The share of questions answered by the prior and by each stage, (1 + stages,). Several deadlines: their mean."""
        done = self.done(np.atleast_1d(np.asarray(deadline, np.float64)), slowdown).mean(axis=1)
        edges: Doubles = np.concatenate([[1.0], np.minimum.accumulate(done), [0.0]])
        return edges[:-1] - edges[1:]  # not -np.diff, which makes -0.0 of nothing

    def done(self, limits: Doubles, slowdown: float) -> Doubles:
        """The chance that each stage is done by each limit, (stages, limits)."""
        profiled = np.array([at_most(column * slowdown, limits) for column in self.trace.T])
        times, ended = self.recent.alike(slowdown, self.trace.shape[1], self.first)
        if not len(times):
            return profiled
        weight = min(1.0, len(times) / ENOUGH)
        seen = np.array(
            [
                survey(column, ended, limits, before * slowdown)
                for column, before in zip(times.T, self.trace.T, strict=True)
            ]
        )
        return weight * seen + (1 - weight) * profiled

    def error(self, deadline: ArrayLike, slowdown: float = 1.0) -> float:
        """The error to expect; needs every stage's error."""
        return float(self.shares(deadline, slowdown) @ self.errors)


def straight_to(first: int, trace: Doubles, takes: float) -> Doubles:
    """The trace of stages one by one as that of beginning with one of them, which takes so long by itself (the median)."""
    at = trace[:, first - 1]
    began = at * (takes / float(np.median(at)) if first > 1 else 1.0)
    found: Doubles = trace + (began - at)[:, None]
    found[:, : first - 1] = began[:, None]
    return found


def at_most(times: Doubles, limits: Doubles) -> Doubles:
    """The share of times that are not above each limit."""
    found: Doubles = np.searchsorted(np.sort(times), limits, side="right") / len(times)
    return found


def survey(times: Doubles, ended: Doubles, limits: Doubles, profile: Doubles) -> Doubles:
    """The chance that something is done by each limit, from cases some of which were given up before it was.

    Kaplan and Meier's estimate: a case that was given up counts among those it could have been, up to then. After the last
    case that was followed, the rest is as in the profile.
    """
    seen, happened = np.minimum(times, ended), times <= ended
    order = np.lexsort((~happened, seen))  # what was done and what was given up at the same moment: in this order
    seen, happened = seen[order], happened[order]
    left = len(seen) - np.arange(len(seen))
    surviving = np.concatenate([[1.0], np.cumprod(np.where(happened, 1 - 1 / left, 1.0))])
    waiting = 1 - at_most(profile, seen[-1:])[0]
    beyond = (1 - at_most(profile, limits)) / waiting if waiting else np.zeros(len(limits))
    beyond = np.where(limits > seen[-1], beyond, 1.0)
    found: Doubles = 1 - surviving[np.searchsorted(seen, limits, side="right")] * beyond
    return found
