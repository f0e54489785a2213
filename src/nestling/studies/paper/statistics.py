"""What seeds say: means with their spread, differences seed by seed, and whether a claim about them holds.

In: rows of results, one per run and stage. Out: numbers with n. ± over seeds and the error that a finite number of test
images leaves are different things, and have different names here. Reads no files.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nestling.studies.paper.results import Row

# Student's t for a 95 % interval of a mean of n: the seeds are few, and two standard errors would be far too sure of them.
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
HOLDS, NOT, OPEN = "holds", "does not hold", "open"
SURE = 3  # seeds: with fewer nothing is settled


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds; `error` is its standard error, None for a single seed."""

    mean: float
    error: float | None
    n: int

    @property
    def interval(self) -> tuple[float, float] | None:
        """Where the mean of many seeds lies, with 95 % confidence; None where there are too few to tell."""
        if self.error is None:
            return None
        half = self.error * T95.get(self.n, 2.23)  # of more than ten at most that
        return self.mean - half, self.mean + half

    def __str__(self) -> str:
        spread = "" if self.error is None else f" ± {self.error:.2f}"
        return f"{self.mean:+.2f}{spread}".replace("-", "−")


def estimate(values: Sequence[float]) -> Estimate:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return Estimate(statistics.fmean(values), error, len(values))


def label(row: Row) -> str:
    """A way of training: "osgd", "osgd strategy.scope=block"."""
    return " ".join(filter(None, (row["strategy"], row.get("changes", ""))))


def errors(rows: Iterable[Row], network: str, way: str, stage: int) -> dict[int, float]:
    """Error in % by seed of one way of training one stage; of a seed trained twice, the later row."""
    wanted = (network, stage, way)
    return {row["seed"]: row["error"] for row in rows if (row["network"], row["stage"], label(row)) == wanted}


def gain(rows: Sequence[Row], network: str, one: str, other: str, stage: int) -> Estimate | None:
    """By how many points `one` is better than `other`, seed by seed over the seeds that both have; None where none is."""
    return difference(errors(rows, network, other, stage), errors(rows, network, one, stage))


def difference(first: dict[int, float], second: dict[int, float]) -> Estimate | None:
    """The first less the second, seed by seed."""
    both = sorted(first.keys() & second.keys())
    return estimate([first[seed] - second[seed] for seed in both]) if both else None


def verdict(found: Estimate | None, least: float = 0.0) -> str:
    """Whether a gain of more than `least` points is there: only an interval that leaves out the contrary settles it."""
    if found is None or found.n < SURE or found.interval is None:
        return OPEN
    low, high = found.interval
    return HOLDS if low > least else NOT if high < least else OPEN


def image_error(error: float, images: int) -> float:
    """The standard error, in points, that so many test images leave in one error in %: it says nothing of seeds."""
    share = error / 100
    return 100 * float((share * (1 - share) / images) ** 0.5)
