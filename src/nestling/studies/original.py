"""The network that a run learnt from, beside its stages: how good it is on the same test inputs, and how long it takes.

In: a run's recipe, whose teacher was handed over in this process or lies in another run's folder. Out: facts for results.json
and profile.json, of which a report makes its first table. A teacher that can be read is timed by the engine that answers for
the stages; one that cannot, by torch itself, and that is said.
"""

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from nestling.data import load
from nestling.errors import NestlingError
from nestling.nets import NestedNet
from nestling.nets.nest import nest
from nestling.recipes.code import HANDED, handed
from nestling.recipes.recipe import Recipe
from nestling.runs.device import pick_device
from nestling.runs.folder import shipped
from nestling.runs.goal import examined_otherwise, goal_of
from nestling.runs.latency import WARM_UP, Latency
from nestling.runs.provenance import device_name
from nestling.runtime.build import build_engine
from nestling.runtime.engine import Floats
from nestling.studies.measure import measure
from nestling.train.teacher import asked, last_stage


def at_hand(recipe: Recipe) -> bool:
    """Whether a run has a teacher that this process may ask."""
    name = recipe.train.teacher
    return bool(name) and (name in HANDED if ":" in name else name in shipped() or Path(name).is_dir())


def teacher_of(recipe: Recipe) -> nn.Module:
    """A copy of a run's teacher, in evaluation."""
    name = recipe.train.teacher
    with torch.enable_grad():  # a function of somebody's may train it first
        made: nn.Module = (
            copy.deepcopy(handed(name, "its teacher", "--teacher {0}")()) if ":" in name else last_stage(name)
        )
    return made.eval()


def called(recipe: Recipe) -> str:
    """What people call it: a function's name, a folder, or just what it is."""
    name = recipe.train.teacher
    return name.rpartition(":")[2] if ":" in name else name


@torch.no_grad()
def judged(recipe: Recipe) -> dict[str, Any]:
    """How good a run's teacher is, on the test inputs of the run."""
    device = pick_device(recipe.train.device)
    teacher = teacher_of(recipe).to(device)
    test = load(recipe.data, device).test
    found = examined_otherwise(
        (((asked(teacher, x, isinstance(teacher, NestedNet)),), y) for x, y in test.batches(64)),
        goal_of(test, recipe.train),
        recipe.train,
    )
    said = {"name": called(recipe), "loss": float(found.losses[0]), "error": float(found.errors[0])}
    return said if found.iou is None else {**said, "iou": float(found.iou[0])}


def timed(recipe: Recipe, images: Floats, repeats: int, device: str, engine: str) -> dict[str, Any]:
    """How long a run's teacher takes for one input, on one CPU thread or on the GPU."""
    module = teacher_of(recipe)
    try:
        alone = (
            module if isinstance(module, NestedNet) else nest(module, "", images.shape[1:], name="teacher", proof=False)
        )
        built = build_engine(alone.eval(), device, engine, 1)
    except NestlingError:
        latency = by_torch(module.to(device), images, repeats, device)
    else:
        latency = measure(built, alone, images, repeats, 1, 1, device)
        built.close()
    found = {"name": called(recipe), "engine": latency.engine, "repeats": repeats, "median_ms": latency.median()[-1]}
    return {**found, "p95_ms": latency.percentile(95)[-1], **({"macs": latency.macs[-1]} if latency.macs else {})}


@torch.no_grad()
def by_torch(
    module: nn.Module, images: Floats, repeats: int, device: str, clock: Callable[[], float] = time.perf_counter
) -> Latency:
    """A module that cannot be read, called as it is."""
    trace, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for repeat in range(WARM_UP + repeats):
            x = torch.from_numpy(np.ascontiguousarray(images[[repeat % len(images)]]))
            began = clock()
            asked(module, x.to(device), isinstance(module, NestedNet)).cpu()
            trace.append(((clock() - began) * 1e3,))
    finally:
        torch.set_num_threads(threads)
    return Latency(tuple(trace[WARM_UP:]), (), device_name(device), 1, 1, "float32", "torch eager")
