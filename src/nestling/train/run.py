"""Runs from beginning to end: one, or several side by side on one GPU, new or resumed.

In: recipes and folders. Out: finished run folders and their results. How an epoch is trained is loop.py's business.
"""

import os
import time
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from nestling.data import DataSet, load
from nestling.errors import NestlingError
from nestling.recipes.recipe import Recipe, flat
from nestling.runs.device import pick_device
from nestling.runs.folder import PROVENANCE, RESULTS, RunDir
from nestling.train import progress
from nestling.train.capabilities import memory_explained, more_queues
from nestling.train.loop import Training, kept, main_rank
from nestling.train.progress import Startup
from nestling.train.stop import Stop, on_signal


def prepare(
    recipe: Recipe,
    path: str,
    resume: bool,
    command: str,
    data: DataSet | None = None,
    until: float = float("inf"),
    startup: Startup | None = None,
    beside: int = 1,
    stop: Stop | None = None,
) -> Training | None:
    """A Training over its run folder, new or resumed, which it holds until it is released; None when the run is finished
    already."""
    run, main = RunDir.open(path) if resume else RunDir(path), main_rank()
    if main:
        run.hold()
    try:
        training = begin(recipe, run, resume, command, data, until, startup, beside, stop)
    except BaseException:
        run.release()
        raise
    if training is None:
        run.release()
    return training


def begin(
    recipe: Recipe,
    run: RunDir,
    resume: bool,
    command: str,
    data: DataSet | None,
    until: float,
    startup: Startup | None,
    beside: int,
    stop: Stop | None,
) -> Training | None:
    """The same in a folder that nobody else writes."""
    main = main_rank()
    if resume:
        found = run.read_recipe()
        if found != recipe:
            raise NestlingError(
                f"{run.path} was trained with another recipe ({first_difference(found, recipe)}); "
                f"{run.going_on()} goes on with its own, or train into a new folder."
            )
        if run.has(RESULTS):
            return None
    elif main:
        RunDir.create(run.path)
        run.write_recipe(recipe)
    with memory_explained(recipe, lambda: kept(run), beside):
        try:
            training = Training(recipe, run, data, until, startup, stop)
        except BaseException:
            if main and not resume:  # a folder with a recipe alone would look like a run
                run.discard()
            raise
        if main:
            run.write_provenance(command, str(training.device), resumed=resume)
            if training.given_up:  # a reader of the numbers must know
                origin = run.read_json(PROVENANCE)
                part = origin.get("resumed", [origin])[-1]
                part["given_up"] = training.given_up
                run.write_json(PROVENANCE, origin)
        if resume:
            training.restore()
    return training


def first_difference(found: Recipe, given: Recipe) -> str:
    old, new = flat(found), flat(given)
    key = next(key for key in old if old[key] != new[key])
    return f"{key} was {old[key]!r}, now {new[key]!r}"


def train(
    recipe: Recipe,
    path: str,
    resume: bool = False,
    command: str = "nestling.train",
    quiet: bool = False,
    seconds: float = float("inf"),
    imports: float = 0.0,
) -> dict[str, Any]:
    """Train one recipe into a run folder (or go on with it) and return its results; {} if time was up before.

    Ctrl-C and SIGTERM stop it after the step, with a checkpoint of the last whole epoch: that raises Stopped.
    `imports`: seconds already gone before this call, to be shown as part of the start."""
    until = time.monotonic() + seconds
    more_queues()
    join_ranks()
    with on_signal() as stop, ExitStack() as held:
        with progress.bar(recipe.name, quiet or not main_rank()) as shown:
            shown.startup.seconds["import"] = imports
            training = prepare(recipe, path, resume, command, until=until, startup=shown.startup, stop=stop)
            if training is None:
                return dict(RunDir.open(path).read_json(RESULTS))
            held.callback(training.run.release)
            for epoch, index in training.epochs():
                shown(training, epoch, index)
        stop.waits = False
        if stop.asked and not training.finished:
            how = f"after epoch {training.done} of" if training.done else "in the first epoch of"
            raise stop.stopped(f" {how} {training.total}; go on with {training.run.going_on()}")
        found = training.finish() if training.main and training.finished else {}
    if dist.is_initialized():
        dist.barrier()  # the others wait for the one that evaluates
    return found


def train_side_by_side(
    recipes: list[tuple[Recipe, str]], command: str = "nestling.train", seconds: float = float("inf")
) -> list[dict[str, Any]]:
    """Several runs in one process on one GPU, taking turns step by step: small networks do not fill a chip alone.

    Each run is what it would be alone: runs share the data in memory and nothing else. Runs that were begun go on. After
    `seconds` all of them stop at the end of the epoch with a checkpoint, to be gone on with in another call; on Ctrl-C and
    SIGTERM after the step, with checkpoints of their last whole epochs (raises Stopped). Returns the results of the runs
    that are finished.
    """
    until = time.monotonic() + seconds
    more_queues()
    data: dict[Any, DataSet] = {}
    with on_signal() as stop, ExitStack() as held, progress.bar(f"{len(recipes)} runs", quiet=False) as shown:
        trainings = []
        for recipe, path in recipes:
            begun = RunDir(path).has("recipe.json")
            key = (recipe.data, recipe.train.device)
            if key not in data:
                with shown.startup.step("data"):
                    data[key] = load(recipe.data, pick_device(recipe.train.device))
            made = prepare(recipe, path, begun, command, data[key], until, shown.startup, len(recipes), stop)
            trainings.append(made)
            if made is not None:
                held.callback(made.run.release)
        turns = [(training, training.epochs(len(recipes))) for training in trainings if training is not None]
        while turns:
            places = [(training, turn, next(turn, None)) for training, turn in turns]
            for training, _, place in places:
                if place is None and training.finished:
                    training.finish()
            going = [(training, turn, place) for training, turn, place in places if place is not None]
            turns = [(training, turn) for training, turn, _ in going]
            for training, _, place in going[:1]:
                shown(training, *place)
    done = [run for run in (RunDir.open(path) for _, path in recipes) if run.has(RESULTS)]
    if stop.asked and len(done) < len(recipes):
        raise stop.stopped(f" with {len(done)} of {len(recipes)} runs finished; the others go on when called again")
    return [dict(run.read_json(RESULTS)) for run in done]


def join_ranks() -> None:
    """Join the other processes when started by torchrun."""
    if dist.is_available() and dist.is_torchelastic_launched() and not dist.is_initialized():
        gpus = torch.cuda.device_count()
        if gpus:  # every process its own; what follows asks for "cuda" and means the current one
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % gpus)
        dist.init_process_group()  # nccl for tensors on GPUs, gloo for those that are not
