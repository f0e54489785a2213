"""What each stage costs: latency measured on a device, beside the plan's MACs, as profile.json in a run folder keeps it.

A Latency's trace holds every repeat (the deadline study needs the spread, not only the middle). A stage's time is the time
until its answer is out, the earlier stages' included. Who measures is studies/profile.py; nothing here runs a network.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestling.errors import NestlingError
from nestling.files import PROFILE
from nestling.runs.folder import RunDir

WARM_UP = 10  # runs thrown away: the first ones allocate, pick kernels and fill caches


@dataclass(frozen=True)
class Latency:
    """Cumulative latency per repeat and stage, and the conditions it was measured under."""

    trace: tuple[tuple[float, ...], ...]  # (repeats, stages) milliseconds until the stage's answer, rising in a row
    macs: tuple[int, ...]  # multiply-accumulates until each stage's answer, for one image; empty = not known
    device: str
    threads: int
    batch: int
    dtype: str
    engine: str = "torch eager"

    @property
    def array(self) -> NDArray[np.float64]:
        return np.array(self.trace, dtype=np.float64)

    @property
    def stages(self) -> int:
        return len(self.trace[0])

    def percentile(self, q: float) -> tuple[float, ...]:
        """The q-th percentile (linear interpolation) of each stage, in milliseconds."""
        return tuple(float(v) for v in np.percentile(self.array, q, axis=0))

    def median(self) -> tuple[float, ...]:
        return tuple(statistics.median(column) for column in zip(*self.trace, strict=True))


def to_dict(latency: Latency) -> dict[str, Any]:
    """What profile.json holds."""
    columns: Sequence[tuple[str, tuple[float, ...]]] = (
        ("median_ms", latency.median()),
        ("mean_ms", tuple(float(v) for v in latency.array.mean(axis=0))),
        ("p95_ms", latency.percentile(95)),
        ("p99_ms", latency.percentile(99)),
    )
    stages = []
    for index in range(latency.stages):
        row: dict[str, Any] = {"stage": index + 1} | {key: values[index] for key, values in columns}
        if latency.macs:
            row["macs"] = latency.macs[index]
        stages.append(row)
    return {
        "device": latency.device,
        "threads": latency.threads,
        "batch": latency.batch,
        "dtype": latency.dtype,
        "engine": latency.engine,
        "repeats": len(latency.trace),
        "stages": stages,
        "trace_ms": [list(row) for row in latency.trace],
    }


def from_dict(found: Mapping[str, Any]) -> Latency:
    """The Latency that to_dict wrote; anything else raises NestlingError."""
    try:
        trace = tuple(tuple(float(value) for value in row) for row in found["trace_ms"])
        macs = tuple(int(row["macs"]) for row in found["stages"] if "macs" in row)
        known = {key: found[key] for key in ("device", "threads", "batch", "dtype")}
    except (KeyError, TypeError, ValueError) as error:
        raise NestlingError(
            f"this is no latency profile ({type(error).__name__}: {error}); expected the fields device, threads, "
            "batch, dtype, stages and trace_ms; measure it again"
        ) from error
    if not trace or len({len(row) for row in trace}) != 1 or not trace[0]:
        raise NestlingError("trace_ms should hold one row per repeat, all of one length; measure the profile again")
    return Latency(trace, macs, **known, engine=str(found.get("engine", "")))


def load_profile(run: RunDir) -> Latency:
    found = run.read_json(PROFILE)
    try:
        return from_dict(found)
    except NestlingError as error:
        raise NestlingError(f"{run.path / PROFILE}: {error}") from error
