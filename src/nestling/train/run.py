"""Runs from beginning to end: one, or several side by side on one GPU, new or resumed.

In: recipes and folders. Out: finished run folders and their results. How an epoch is trained is loop.py's business.
"""

import os
import time
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from nestling.files import RECIPE, RESULTS
from nestling.recipes.recipe import Recipe
from nestling.runs.folder import RunDir
from nestling.train import progress
from nestling.train.begin import prepare
from nestling.train.beside import side_by_side
from nestling.train.capabilities import more_queues
from nestling.train.loop import main_rank
from nestling.train.stop import on_signal


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
    resume = resume or (restarted() and RunDir(path).has(RECIPE))
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
    """Several runs in one process on one GPU, all at the same time; see beside.py. Returns the results of the runs that are
    finished; the first that fails ends them all.
    """
    for outcome in side_by_side(recipes, len(recipes), command, seconds):
        if outcome.error is not None:
            raise outcome.error
    done = [run for run in (RunDir.open(path) for _, path in recipes) if run.has(RESULTS)]
    return [dict(run.read_json(RESULTS)) for run in done]


def restarted() -> bool:
    """Whether torchrun (`--max-restarts`) has started these processes again, after one of them was lost: they go on."""
    return dist.is_torchelastic_launched() and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def join_ranks() -> None:
    """Join the other processes when started by torchrun."""
    if dist.is_available() and dist.is_torchelastic_launched() and not dist.is_initialized():
        gpus = torch.cuda.device_count()
        if gpus:  # every process its own; what follows asks for "cuda" and means the current one
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % gpus)
        # What lost processes left in torchrun's store must not be found by those that were started in their place: they would
        # wait for the dead for ever. So every attempt has keys of its own.
        store, rank, world = next(dist.rendezvous("env://"))
        attempt = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(store=attempt, rank=rank, world_size=world)  # nccl for tensors on GPUs, else gloo
