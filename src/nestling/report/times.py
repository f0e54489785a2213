"""Measured times of a family: one network takes as long however it was trained, so its runs' traces are pooled.

Comes in: families. Goes out: Times, under one set of conditions; what was measured under others is left out, never
mixed in. Knows nothing of errors.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nestling.report.families import ALONE, Family, kind_of
from nestling.report.records import Run

LineKey = tuple[str, int]  # the kind of a line, and the stage an independent net stands beside (0 for the others)


@dataclass(frozen=True, eq=False)
class Times:
    conditions: str  # device, threads, batch, number type, engine
    traces: dict[LineKey, NDArray[np.float64]]  # (repeats, stages) cumulative milliseconds
    runs: int  # measured
    others: int  # measured under other conditions, and left out

    def trace(self, kind: str, stage: int) -> NDArray[np.float64] | None:
        return self.traces.get((kind, stage if kind == ALONE else 0))

    def median(self, kind: str, stage: int) -> float | None:
        """Until the answer of this stage is out."""
        found = self.trace(kind, stage)
        index = 0 if kind == ALONE else stage - 1
        return None if found is None or index >= found.shape[1] else float(np.median(found[:, index]))


def conditions(run: Run) -> str:
    """Under what a run's latency was measured, as text; empty = not measured."""
    found = run.latency
    if found is None:
        return ""
    threads = f"{found.threads} thread{'s' * (found.threads != 1)}"
    return ", ".join(filter(None, [found.device, threads, f"batch {found.batch}", found.dtype, found.engine]))


def times(family: Family, wanted: str = "") -> Times | None:
    """What was measured under the wanted conditions; without a wish, under the most common ones of the family."""
    measured = [run for run in family.runs if conditions(run)]
    if not wanted:
        counts = Counter(conditions(run) for run in measured)
        wanted = counts.most_common(1)[0][0] if counts else ""
    chosen = [run for run in measured if conditions(run) == wanted]
    if not chosen:
        return None
    grouped: dict[LineKey, list[Run]] = {}
    for run in chosen:
        grouped.setdefault((kind_of(run), run.alone), []).append(run)
    traces = {key: pooled([run.latency.array for run in runs if run.latency]) for key, runs in grouped.items()}
    return Times(wanted, traces, len(chosen), len(measured) - len(chosen))


def pooled(traces: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Traces of one network as one: repeat by repeat in turn, so that any part of it holds something of each."""
    stages = max(each.shape[1] for each in traces)
    same = [each for each in traces if each.shape[1] == stages]
    longest = max(len(each) for each in same)
    return np.array([each[row] for row in range(longest) for each in same if row < len(each)])
