"""What a deadline will give: the share of questions each stage answers, and the error that follows.

In: a trace of measured stage latencies, the error of each stage and of the prior, the slow-down of the moment. Out: shares
and an expected error per deadline. The spread of the trace counts, not only its middle: a stage that is usually just in
time is sometimes late. Pure numpy.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Forecast:
    """Predicts who answers by a deadline. Seconds everywhere."""

    def __init__(self, trace: ArrayLike, errors: Sequence[float] = (), prior_error: float = 1.0) -> None:
        """`trace` (repeats, stages): seconds from a question until each stage's answer."""
        self.trace: NDArray[np.float64] = np.asarray(trace, np.float64)
        self.errors = np.array([prior_error, *errors])

    def shares(self, deadline: float, slowdown: float = 1.0) -> NDArray[np.float64]:
        """The share of questions answered by the prior and by each stage, (1 + stages,)."""
        done = (self.trace * slowdown <= deadline).sum(axis=1)
        found: NDArray[np.float64] = np.bincount(done, minlength=self.trace.shape[1] + 1) / len(self.trace)
        return found

    def error(self, deadline: float, slowdown: float = 1.0) -> float:
        """The error to expect; needs every stage's error."""
        return float(self.shares(deadline, slowdown) @ self.errors)
