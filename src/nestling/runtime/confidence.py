"""When an answer is sure enough to stop: one threshold per stage, found on held-out data for a stated loss of accuracy.

In: logits (stages, N, classes) and labels of images the network was not trained on, or what an export keeps of them
(Outcomes), the loss allowed, and what each stage costs. Out: thresholds for `runtime.answer(x, confident=...)` and what they do:
error, share stopped at each stage, cost. An image stops at the first stage whose largest probability reaches that stage's
threshold. Pure numpy.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nestling.errors import NestlingError
from nestling.export.manifest import read_known, read_manifest
from nestling.runtime.answer import softmax

NEVER = math.inf  # no probability reaches it
CANDIDATES = 64  # thresholds tried per stage
ROUNDS = 3


@dataclass(frozen=True)
class Confidence:
    """Thresholds, and what they do on the images they were judged by."""

    thresholds: tuple[float, ...]  # of every stage but the last
    allowed: float  # loss of accuracy they were chosen for, a fraction
    error: float  # with early stops
    last_error: float  # of the last stage on the same images
    stopped: tuple[float, ...]  # share of images that end at each stage
    cost: float  # mean cost as a share of running all stages
    images: int

    def to_dict(self) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


@dataclass(frozen=True)
class Outcomes:
    """Of every stage and held-out image, (stages, N): the largest probability, and whether that class was right."""

    sure: NDArray[np.float32]
    right: NDArray[np.bool_]

    @classmethod
    def of(cls, logits: ArrayLike, labels: ArrayLike) -> "Outcomes":
        scores, labels = np.asarray(logits, np.float32), np.asarray(labels)
        if scores.ndim != 3 or labels.shape != scores.shape[1:2]:
            raise NestlingError(
                f"found logits {scores.shape} and labels {labels.shape}; expected (stages, N, classes) and (N,)"
            )
        return cls(softmax(scores).max(axis=2), scores.argmax(axis=2) == labels)

    def to_bytes(self) -> bytes:
        """Four bytes each of how sure, stage by stage, then one byte each: 1 where it was right."""
        return self.sure.astype("<f4").tobytes() + self.right.astype(np.uint8).tobytes()

    @classmethod
    def from_bytes(cls, data: bytes, stages: int) -> "Outcomes":
        count = len(data) // (5 * stages)
        sure = np.frombuffer(data, "<f4", stages * count).reshape(stages, count)
        right = np.frombuffer(data, np.uint8, stages * count, 4 * stages * count).reshape(stages, count)
        if len(data) != 5 * stages * count or not ((sure >= 0) & (sure <= 1)).all() or (right > 1).any():
            raise NestlingError(
                f"found {len(data)} bytes that are not how sure and how right {stages} stages were of held-out images; "
                "export the run again"
            )
        return cls(sure.astype(np.float32), right.astype(np.bool_))


def read_outcomes(folder: str | Path) -> Outcomes:
    """What an export keeps of held-out images."""
    manifest = read_manifest(folder)
    if manifest.held_out is None:
        raise NestlingError(
            f"{folder} was exported without outputs for held-out images to choose thresholds on; export a run that was "
            "evaluated, or pass confident=... instead"
        )
    return Outcomes.from_bytes(read_known(folder, manifest.held_out), manifest.spec.stages)


def calibrate(
    logits: ArrayLike, labels: ArrayLike, loss: float = 0.005, costs: Sequence[float] = (), share: float = 0.5
) -> Confidence:
    """Thresholds that cost at most `loss` accuracy at the least mean cost.

    They are chosen on the first `share` of the images and judged on the others, which had no say in them. `costs` are
    those of each stage by itself (1 for all if not given).
    """
    return find_thresholds(Outcomes.of(logits, labels), loss, costs, share)


def find_thresholds(seen: Outcomes, loss: float, costs: Sequence[float] = (), share: float = 0.5) -> Confidence:
    """`calibrate` from what is known of the held-out images."""
    sure, right = seen.sure, seen.right
    stages, images = sure.shape
    if not 0 <= loss < 1 or not 0 < share < 1:
        raise NestlingError(f"found loss {loss} and share {share}; expected fractions, such as 0.005 and 0.5")
    count = int(share * images)
    if count < 1 or count == images:
        raise NestlingError(f"{images} images are too few to choose thresholds on some and judge them on others")
    spent = np.cumsum(costs or [1.0] * stages)
    chosen = choose(sure[:, :count], right[:, :count], loss, spent)
    return judge(sure[:, count:], right[:, count:], chosen, loss, spent)


def choose(
    sure: NDArray[np.float32], right: NDArray[np.bool_], loss: float, spent: NDArray[np.float64]
) -> tuple[float, ...]:
    """One threshold for all stages first, then each stage's own while it saves more, within the loss allowed."""
    early = len(sure) - 1
    worst = float((~right[-1]).mean()) + loss
    grid = np.unique(np.quantile(sure[:early], np.linspace(0, 1, CANDIDATES))) if early else np.array([])
    candidates = [*map(float, grid), NEVER]

    def price(thresholds: list[float]) -> float:
        found = judge(sure, right, tuple(thresholds), loss, spent)
        return found.cost if found.error <= worst + 1e-12 else np.inf

    best = min(([value] * early for value in candidates), key=price)
    for _ in range(ROUNDS):
        for stage in range(early):
            tries = ([*best[:stage], value, *best[stage + 1 :]] for value in candidates)
            best = min((best, *tries), key=price)
    return tuple(best)


def judge(
    sure: NDArray[np.float32],
    right: NDArray[np.bool_],
    thresholds: tuple[float, ...],
    loss: float,
    spent: NDArray[np.float64],
) -> Confidence:
    """What thresholds do: `sure` is the largest probability, `right` whether it is right, both (stages, N)."""
    stages, images = sure.shape
    enough = np.vstack([sure[:-1] >= np.array(thresholds)[:, None], np.ones((1, images), bool)])
    stop = enough.argmax(axis=0)  # the first stage that is sure enough
    shares = np.bincount(stop, minlength=stages) / images
    error = float((~right[stop, np.arange(images)]).mean())
    cost = float(shares @ spent / spent[-1])
    last = float((~right[-1]).mean())
    return Confidence(thresholds, loss, error, last, tuple(float(v) for v in shares), cost, images)
