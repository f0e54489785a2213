"""The deadline study: what error remains when every input must be answered by a deadline.

Comes in, per network: which stages are right on which test input, and the measured time at which each stage
answered it. Goes out: rows (scheme, deadline, error, who answered) for anytime networks (the paper's Base and
Nest) and for its two oracles over independent networks. An input without an answer in time gets a random guess,
counted by its expected error, 1 - 1/classes. Pure numpy; knows neither nets nor files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isinf
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nestling.errors import NestlingError

NEST, BASE, ORACLE_ALL, ORACLE_EACH = "Nest", "Base", "Oracle_All", "Oracle_Each"
FRACTIONS = tuple(float(f) for f in np.linspace(0.5, 1.0, 7))  # of the largest network's mean latency


@dataclass(frozen=True, eq=False)
class Timed:
    """One network on the test inputs: right or wrong, and when. An independent network has one stage."""

    name: str
    correct: NDArray[np.bool_]  # (stages, N)
    latency: NDArray[np.float64]  # (N, stages) milliseconds until the stage's answer

    def __post_init__(self) -> None:
        stages, inputs = self.correct.shape
        if self.latency.shape != (inputs, stages):
            raise NestlingError(
                f"{self.name}: {stages} stages on {inputs} inputs need latencies of shape ({inputs}, {stages}), "
                f"found {self.latency.shape}; spread() makes them from a measured trace"
            )
        if not (np.diff(self.latency, axis=1) >= 0).all() or not (self.latency >= 0).all():
            raise NestlingError(
                f"{self.name}: a stage's latency counts from the start of the input, so it must not fall from one "
                "stage to the next; pass cumulative times"
            )


@dataclass(frozen=True)
class SchemeResult:
    """One scheme under one deadline."""

    scheme: str
    deadline: float  # milliseconds; inf = none
    error: float  # mean over inputs, a fraction
    answered: tuple[float, ...]  # share of inputs answered by each stage, or by each independent network
    guessed: float  # share of inputs for which nothing was ready

    def to_dict(self) -> dict[str, Any]:
        deadline = None if isinf(self.deadline) else self.deadline
        return {
            "scheme": self.scheme, "deadline_ms": deadline, "error": self.error,
            "answered": list(self.answered), "guessed": self.guessed,
        }  # fmt: skip


def timed(name: str, logits: ArrayLike, labels: ArrayLike, trace: ArrayLike) -> Timed:
    """From what a run folder holds: logits (stages, N, classes), labels (N), trace (repeats, stages)."""
    correct = np.asarray(logits).argmax(axis=2) == np.asarray(labels)[None, :]
    return Timed(name, correct, spread(trace, correct.shape[1]))


def spread(trace: ArrayLike, n: int) -> NDArray[np.float64]:
    """One measured row per input: the trace begins anew at its end, or is gone through evenly if it is the longer."""
    rows = np.asarray(trace, dtype=np.float64)
    if rows.ndim != 2 or not len(rows):
        raise NestlingError(f"a latency trace has the shape (repeats, stages), found {rows.shape}; measure it again")
    return rows[np.arange(n) * max(1, len(rows) // n) % len(rows)]


def deadlines(largest: Timed, fractions: Sequence[float] = FRACTIONS) -> tuple[float, ...]:
    """The paper's: 0.5x to 1x of the largest network's mean latency, then none."""
    mean = float(largest.latency[:, -1].mean())
    return (*(fraction * mean for fraction in fractions), inf)


def anytime(scheme: str, network: Timed, limits: Sequence[float], classes: int) -> list[SchemeResult]:
    """An anytime network gives the latest answer that is ready."""
    rows = []
    for limit in limits:
        ready = (network.latency <= limit).sum(axis=1)  # how many stages are done; 0 = none
        rows.append(row(scheme, limit, network.correct, ready - 1, classes))
    return rows


def oracle_all(networks: Sequence[Timed], limits: Sequence[float], classes: int) -> list[SchemeResult]:
    """The one independent network that, used for all inputs, leaves the least error at this deadline."""
    correct, latency = side_by_side(networks)
    rows = []
    for limit in limits:
        every = []
        for index in range(len(networks)):
            chosen = np.where(latency[:, index] <= limit, index, -1)
            every.append(row(ORACLE_ALL, limit, correct, chosen, classes))
        rows.append(min(every, key=lambda each: each.error))
    return rows


def oracle_each(networks: Sequence[Timed], limits: Sequence[float], classes: int) -> list[SchemeResult]:
    """For each input the most accurate network (over all inputs) that is done with this input in time.

    It foresees latencies, not answers: the paper calls it impossible for "latency prediction" and free swapping.
    """
    correct, latency = side_by_side(networks)
    ranked = np.argsort(correct.mean(axis=1), kind="stable")  # least accurate first, so that later ones overwrite
    rows = []
    for limit in limits:
        chosen = np.full(correct.shape[1], -1)
        for index in ranked:
            chosen[latency[:, index] <= limit] = index
        rows.append(row(ORACLE_EACH, limit, correct, chosen, classes))
    return rows


def study(
    nest: Timed, alone: Sequence[Timed], classes: int, base: Timed | None = None, limits: Sequence[float] = ()
) -> list[SchemeResult]:
    """The paper's comparison, scheme by scheme, under its own deadlines unless others are given."""
    limits = limits or deadlines(max(alone, key=lambda each: each.latency[:, -1].mean()) if alone else nest)
    rows = anytime(BASE, base, limits, classes) if base else []
    rows += anytime(NEST, nest, limits, classes)
    if alone:
        rows += oracle_all(alone, limits, classes) + oracle_each(alone, limits, classes)
    return rows


def mean_rows(several: Sequence[Sequence[SchemeResult]]) -> list[SchemeResult]:
    """Row by row the mean over several runs (seeds) of one scheme under the same deadlines."""
    averaged = []
    for rows in zip(*several, strict=True):
        shares = tuple(float(v) for v in np.mean([each.answered for each in rows], axis=0))
        error = float(np.mean([each.error for each in rows]))
        guessed = float(np.mean([each.guessed for each in rows]))
        averaged.append(SchemeResult(rows[0].scheme, rows[0].deadline, error, shares, guessed))
    return averaged


def row(scheme: str, limit: float, correct: NDArray[np.bool_], chosen: NDArray[np.int_], classes: int) -> SchemeResult:
    """The row of a choice: chosen (N) names the answer given to each input, -1 for a guess."""
    guessed = chosen < 0
    wrong = ~correct[np.maximum(chosen, 0), np.arange(correct.shape[1])]
    errors = np.where(guessed, 1 - 1 / classes, wrong)
    shares = tuple(float((chosen == index).mean()) for index in range(len(correct)))
    return SchemeResult(scheme, limit, float(errors.mean()), shares, float(guessed.mean()))


def side_by_side(networks: Sequence[Timed]) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Independent networks as one table: correct (networks, N), latency (N, networks)."""
    inputs = {each.correct.shape[1] for each in networks}
    if len(inputs) != 1:
        raise NestlingError(f"the oracles need networks that answered the same inputs; found {sorted(inputs)} inputs")
    correct = np.stack([each.correct[-1] for each in networks])
    return correct, np.stack([each.latency[:, -1] for each in networks], axis=1)


def by_scheme(rows: Sequence[SchemeResult]) -> Mapping[str, list[SchemeResult]]:
    found: dict[str, list[SchemeResult]] = {}
    for each in rows:
        found.setdefault(each.scheme, []).append(each)
    return found
