"""How long each stage of a run takes on this device, measured and stored with the run.

In: a run's folder or name, a device, engines, batch sizes, threads. Out: profile.json (unless it comes with us): the whole
trace of the first condition (that is what deadline studies and forecasts read) and median, p95 and p99 of every condition.
Times are those of the engine that answers, through every stage, on real test images. Threads beyond one are measured in a
process of their own, because ONNX Runtime makes its shared threads once per process.
"""

import json
import subprocess
import sys
from typing import Any

import numpy as np

from nestling.errors import NestlingError
from nestling.files import PROFILE
from nestling.recipes.code import hand_over
from nestling.runs.device import pick_device
from nestling.runs.latency import to_dict
from nestling.runs.open import resolve
from nestling.runtime.build import build_engine
from nestling.runtime.engine import Floats
from nestling.studies.measure import measure
from nestling.studies.original import at_hand, timed

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
    teacher: str = "",
) -> dict[str, Any]:
    """Measure every condition; the first is the profile that others read. `dry`: store nothing, return every repeat."""
    device = str(pick_device(device, "--device "))
    if min(threads) < 1 or min(batch) < 1 or repeats < 1:
        raise NestlingError(f"found threads {threads}, batch {batch}, repeats {repeats}; all must be at least 1")
    opened = resolve(run, build)
    if teacher:
        hand_over(teacher, opened.recipe.train.teacher)
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
    if at_hand(opened.recipe) and threads[0] == 1:
        result["teacher"] = timed(opened.recipe, images, repeats, device, engine)
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
