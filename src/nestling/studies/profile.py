"""`nestling profile`: how long each stage of a run takes on this device, stored with the run.

In: a run's folder or a trained network's name, a device, engines, batch sizes, threads. Out: profile.json (of a run): the whole
trace of the first condition (that is what deadline studies and forecasts read) and median, p95 and p99 of every condition.
Times are those of the engine that answers, through every stage, on real test images. Threads beyond one are measured in a
process of their own, because ONNX Runtime makes its shared threads once per process.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.table import Table

from nestling.errors import NestlingError
from nestling.nets import NestedNet
from nestling.runs import shelf
from nestling.runs.device import pick_device
from nestling.runs.latency import PROFILE, WARM_UP, Latency, to_dict
from nestling.runs.provenance import device_name
from nestling.runtime.build import build_engine
from nestling.runtime.engine import Engine, Floats, Stop
from nestling.runtime.runtime import load_source

SUMMARY = ("device", "engine", "threads", "batch", "dtype", "repeats", "stages")


def command(
    run: str,
    device: str = "auto",
    engine: str = "auto",
    threads: tuple[int, ...] = (),
    batch: tuple[int, ...] = (),
    repeats: int = 300,
    dry: bool = False,
) -> dict[str, Any]:
    """Measure the latency of every stage of a run on this device and store it with the run.

    Args:
        run: the run's folder, or the name of a trained network that comes with nestling (nothing is stored then).
        device: auto, cpu or cuda.
        engine: auto (the fastest there is), onnx, eager or graph.
        threads: how many CPU threads, 1 if not given; may be repeated. The first is the profile that others read.
        batch: images at a time, 1 if not given; may be repeated. The first is the profile that others read.
        repeats: how often every condition is measured.
        dry: measure, but store nothing; with --json, every repeat is printed.
    """
    device, threads, batch = str(pick_device(device, "--device ")), threads or (1,), batch or (1,)
    if min(threads) < 1 or min(batch) < 1 or repeats < 1:
        raise NestlingError(f"found threads {threads}, batch {batch}, repeats {repeats}; all must be at least 1")
    net, _, folder = load_source(run)
    images = enough(shelf.some_images(folder or run, max(64, *batch)).numpy(), max(batch))
    found: list[dict[str, Any]] = []
    for count in threads:
        if count > 1 and device == "cpu" and (len(threads) > 1 or not dry):
            found += in_another_process(run, engine, count, batch, repeats)
            continue
        built = build_engine(net, device, engine, count)
        for size in batch:
            found.append(to_dict(measure(built, net, images, repeats, size, count, device)))
        built.close()
    result = {**found[0], "conditions": [{key: each[key] for key in SUMMARY} for each in found]}
    if dry:
        return {"run": run, **result, "all": found}
    if folder:
        folder.write_json(PROFILE, result)
    return {"run": run, **{key: value for key, value in result.items() if key != "trace_ms"}}


def enough(images: Floats, count: int) -> Floats:
    """At least `count` images: where they are fewer they come again."""
    return images[np.arange(max(len(images), count)) % len(images)]


def in_another_process(
    run: str, engine: str, threads: int, batch: tuple[int, ...], repeats: int
) -> list[dict[str, Any]]:
    """The same measurement with threads of its own."""
    words = [sys.executable, "-m", "nestling", "profile", run, "--device", "cpu", "--engine", engine]
    words += ["--threads", str(threads), "--repeats", str(repeats), "--dry", "--json"]
    for size in batch:
        words += ["--batch", str(size)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NestlingError(f"measuring with {threads} threads failed: {done.stderr.strip()}")
    found: list[dict[str, Any]] = json.loads(done.stdout)["all"]
    return found


def measure(
    engine: Engine,
    net: NestedNet,
    images: Floats,
    repeats: int,
    batch: int = 1,
    threads: int = 1,
    device: str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> Latency:
    """Run all stages of an engine over and over and time each; a stage's time includes those before it."""
    trace = []
    for repeat in range(WARM_UP + repeats):
        at = repeat * batch % (len(images) - batch + 1)
        x = np.ascontiguousarray(images[at : at + batch])
        began, done = clock(), []
        state = engine.start(x)
        for stage in range(1, engine.stages + 1):
            _, state = engine.step(stage, state, Stop())
            done.append((clock() - began) * 1e3)
        trace.append(tuple(done))
    macs = tuple(net.plan.macs(stage) for stage in net.plan.answering)
    name = device_name(device)
    return Latency(tuple(trace[WARM_UP:]), macs, name, threads, batch, "float32", engine.name)


def show(result: dict[str, Any]) -> Table:
    """A row per condition and stage, for people."""
    title = f"{result['run']}: milliseconds until each stage's answer ({result['device']}, torch {torch.__version__})"
    table = Table("engine", "threads", "batch", "stage", "median", "p95", "p99", "MACs", title=title)
    for condition in result["conditions"]:
        for row in condition["stages"]:
            first = row["stage"] == 1
            cells = [str(condition[key]) if first else "" for key in ("engine", "threads", "batch")]
            cells += [str(row["stage"]), *(f"{row[key]:.3f}" for key in ("median_ms", "p95_ms", "p99_ms"))]
            table.add_row(
                *cells, f"{row['macs']:,}" if "macs" in row else "", end_section=row is condition["stages"][-1]
            )
    return table
