"""What each stage costs: latency measured on a device, beside the plan's MACs.

Comes in: a net, images, how often to run it, a device. Goes out: a Latency, whose trace keeps every repeat (the
deadline study needs the spread, not only the middle), and profile.json in a run folder. A stage's time is the
time until its answer is out, the earlier stages' included. Runs eager torch only; knows no data set.
"""

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestling.errors import NestlingError
from nestling.nets import NestedNet
from nestling.provenance import device_name
from nestling.rundir import RunDir

PROFILE = "profile.json"
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


def measure(
    net: NestedNet,
    x: Tensor,
    repeats: int = 200,
    device: torch.device | str = "cpu",
    batch: int = 1,
    threads: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> Latency:
    """Run net stage by stage on `batch` images of x at a time, over and over, and time every stage.

    x (k,C,H,W) is gone through in turn, so that the trace is over real inputs. threads=0 keeps torch's own number.
    The net itself is left as it is: a copy is moved to the device and put into evaluation mode.
    """
    if repeats < 1 or batch < 1 or len(x) < batch:
        raise NestlingError(
            f"cannot measure {repeats} repeats of {batch} images out of {len(x)}; ask for at least one of each "
            "and give at least as many images as one batch holds"
        )
    device = torch.device(device)
    copied = copy.deepcopy(net).to(device).eval()
    x = x.to(device)
    batches = [x[start : start + batch] for start in range(0, len(x) - batch + 1, batch)]
    with using_threads(threads), torch.inference_mode():
        for repeat in range(WARM_UP):
            one_run(copied, batches[repeat % len(batches)], clock)
        trace = tuple(one_run(copied, batches[repeat % len(batches)], clock) for repeat in range(repeats))
        found_threads = torch.get_num_threads()
    return Latency(
        trace=trace,
        macs=tuple(net.plan.macs(stage) for stage in net.plan.answering),
        device=device_name(str(device)),
        threads=found_threads,
        batch=batch,
        dtype=str(x.dtype).removeprefix("torch."),
    )


def one_run(net: NestedNet, x: Tensor, clock: Callable[[], float]) -> tuple[float, ...]:
    """Milliseconds from the start until each stage's logits are there."""
    wait = torch.cuda.synchronize if x.device.type == "cuda" else nothing
    wait()
    start = clock()
    done = []
    for _ in net.answers(x):
        wait()
        done.append((clock() - start) * 1e3)
    return tuple(done)


def nothing() -> None:
    """On a CPU there is nothing to wait for."""


@contextmanager
def using_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if threads:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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


def save_profile(run: RunDir, latency: Latency) -> None:
    run.write_json(PROFILE, to_dict(latency))


def load_profile(run: RunDir) -> Latency:
    found = run.read_json(PROFILE)
    try:
        return from_dict(found)
    except NestlingError as error:
        raise NestlingError(f"{run.path / PROFILE}: {error}") from error
