"""How long each stage of a run takes on this device, measured and stored with the run.

In: a run's folder or name, a device, engines, batch sizes, threads. Out: profile.json (unless it comes with us): the whole
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

from nestling.errors import NestlingError
from nestling.files import PROFILE
from nestling.nets import NestedNet
from nestling.runs.device import pick_device
from nestling.runs.latency import WARM_UP, Latency, to_dict
from nestling.runs.open import resolve
from nestling.runs.provenance import device_name
from nestling.runtime.build import build_engine
from nestling.runtime.engine import Engine, Floats, Stop

SUMMARY = ("device", "engine", "threads", "batch", "dtype", "repeats", "stages")


def profile(
    run: str,
    device: str = "auto",
    engine: str = "auto",
    threads: tuple[int, ...] = (1,),
    batch: tuple[int, ...] = (1,),
    repeats: int = 300,
    dry: bool = False,
    build: str = "",
) -> dict[str, Any]:
    """Measure every condition; the first is the profile that others read. `dry`: store nothing, return every repeat."""
    device = str(pick_device(device, "--device "))
    if min(threads) < 1 or min(batch) < 1 or repeats < 1:
        raise NestlingError(f"found threads {threads}, batch {batch}, repeats {repeats}; all must be at least 1")
    opened = resolve(run, build)
    net, images = opened.net(), enough(opened.images(max(64, *batch)).numpy(), max(batch))
    found: list[dict[str, Any]] = []
    for count in threads:
        if count > 1 and device == "cpu" and (len(threads) > 1 or not dry):
            found += in_another_process(run, engine, count, batch, repeats, build)
            continue
        built = build_engine(net, device, engine, count)
        for size in batch:
            found.append(to_dict(measure(built, net, images, repeats, size, count, device)))
        built.close()
    result = {**found[0], "conditions": [{key: each[key] for key in SUMMARY} for each in found]}
    if dry:
        return {"run": run, "stored": False, **result, "all": found}
    stored = not opened.comes_with_us
    if stored:
        opened.write_json(PROFILE, result)
    return {"run": run, "stored": stored, **{key: value for key, value in result.items() if key != "trace_ms"}}


def enough(images: Floats, count: int) -> Floats:
    """At least `count` images: where they are fewer they come again."""
    return images[np.arange(max(len(images), count)) % len(images)]


def in_another_process(
    run: str, engine: str, threads: int, batch: tuple[int, ...], repeats: int, build: str = ""
) -> list[dict[str, Any]]:
    """The same measurement with threads of its own."""
    words = [sys.executable, "-m", "nestling", "profile", run, "--device", "cpu", "--engine", engine]
    words += ["--threads", str(threads), "--repeats", str(repeats), "--dry", "--json"]
    words += ["--build", build] if build else []
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
