"""From when answers are wanted to what to train for: importance and priority order of the stages. Pure.

In come deadlines (observed, or with their probabilities) and the time at which each stage answers; out comes the
share of deadlines that each stage's answer is the last one ready for, as weights k and as an order of tasks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nestling.errors import NestlingError


@dataclass(frozen=True)
class Priority:
    """What to pass on: OSGD(order=p.order, importance=p.importance)."""

    importance: tuple[float, ...]  # per stage, their mean 1
    order: tuple[int, ...]  # tasks from 0, the most often used stage first
    missed: float  # share of deadlines before the first answer


def from_deadlines(deadlines: Sequence[float] | Mapping[float, float], latencies: Sequence[float]) -> Priority:
    """`deadlines`: seconds, as observed, or seconds to probability. `latencies`: seconds until each stage's answer.

    A stage no deadline ever ends at still trains, with importance 0 of its own; equal shares keep the stages' order.
    """
    if not latencies or any(b <= a for a, b in pairwise(latencies)) or latencies[0] <= 0:
        raise NestlingError(
            f"latencies are {list(latencies)}: expected positive times that rise from stage to stage, each counted "
            f"from the start of the first (cumulative)"
        )
    weighted = dict(deadlines) if isinstance(deadlines, Mapping) else None
    pairs = list(weighted.items()) if weighted is not None else [(float(d), 1.0) for d in deadlines]
    total = sum(weight for _, weight in pairs)
    if not pairs or total <= 0 or any(weight < 0 for _, weight in pairs):
        raise NestlingError(
            "deadlines hold no probability: expected observed deadlines, or a mapping from deadline to its share"
        )
    shares = [0.0] * len(latencies)
    missed = 0.0
    for deadline, weight in pairs:
        ready = sum(latency <= deadline for latency in latencies)
        if ready:
            shares[ready - 1] += weight / total
        else:
            missed += weight / total
    if missed > 1 - 1e-12:
        raise NestlingError(
            f"no stage answers before any deadline: the first answer takes {latencies[0]} s; allow longer deadlines "
            f"or a smaller first stage"
        )
    mean = (1 - missed) / len(shares)
    order = sorted(range(len(shares)), key=lambda task: -shares[task])
    return Priority(tuple(share / mean for share in shares), tuple(order), missed)
