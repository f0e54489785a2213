"""Run by torchrun from test_train.py: one training shared by two processes, and what each of them ends with.

As a module it gives `frozen_run`, the same training of a network whose batch statistics are frozen.
"""

import os
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from nestling.recipes import named
from nestling.recipes.recipe import override
from nestling.runs.folder import RunDir
from nestling.train import Training
from nestling.train.run import join_ranks

SETTINGS = ("train.epochs=2", "train.batch=128", "data.limit=512", "train.diagnostics=false", "data.augment=false")


def frozen_run(path: Path) -> dict[str, torch.Tensor]:
    """An epoch with batch norm in evaluation mode (evaluating ends that mode): however a batch is shared, steps are equal."""
    recipe = override(named("digits-width"), [*SETTINGS, "train.lr=0.01", "train.epochs=1"])
    training = Training(recipe, RunDir(path))
    if training.main:
        RunDir.create(path).write_recipe(recipe)
    for module in training.net.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval()
    for small in training.step.tasks.nets if training.step.tasks else ():
        small.eval()
    for _ in training.epochs():
        pass
    if training.main:
        training.run.save_weights(training.net)
    return training.net.state_dict()


def timed(path: Path, seconds: float) -> None:
    """Time is up for one rank and not for the other: both stop, with a checkpoint, instead of waiting for each other."""
    recipe = override(named("digits-width"), SETTINGS)
    training = Training(recipe, RunDir(path), until=time.monotonic() + seconds)
    if training.main:
        RunDir.create(path).write_recipe(recipe)
    for _ in training.epochs():
        pass
    assert training.done == 1, training.done


def main() -> None:
    folder = Path(sys.argv[1])
    join_ranks()
    rank = torch.distributed.get_rank()
    recipe = override(named("digits-width"), SETTINGS)
    training = Training(recipe, RunDir(folder / "run"))
    if training.main:
        RunDir.create(folder / "run").write_recipe(recipe)
    torch.distributed.barrier()
    for _ in training.epochs():
        pass
    ended = {key: value.contiguous() for key, value in training.net.state_dict().items()}
    save_file(ended, folder / f"rank{rank}.safetensors")
    frozen_run(folder / "frozen")
    timed(folder / "timed", 0.0 if rank == 0 else 1000.0)
    torch.distributed.barrier()
    os._exit(0)  # as nestling's own command line does under torchrun, and for the same reason: see __main__.entry


if __name__ == "__main__":
    main()
