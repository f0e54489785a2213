"""`nestling train`: a recipe becomes a run folder, or a run that was stopped goes on."""

import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.table import Table
from rich.text import Text

from nestling.commands import evaluate
from nestling.errors import NestlingError
from nestling.recipes import RECIPES, named
from nestling.recipes.recipe import override
from nestling.runs.folder import RunDir
from nestling.train import train


def command(
    recipe: str = "",
    /,
    out: str = "",
    set: tuple[str, ...] = (),
    resume: str = "",
    minutes: float = 0.0,
    quiet: bool = False,
) -> dict[str, Any]:
    """Train a recipe into a run folder, or go on with one that was stopped.

    Recipes: digits-width, digits-even, digits-depth, digits-alternate, digits-together, digits-cascade; the paper's
    cifar10-width, cifar10-even, cifar10-depth, cifar10-alternate, cifar10-together, cifar10-cascade, imagenet-width,
    imagenet-depth; and those on Tiny ImageNet: tiny-width, tiny-depth.

    Args:
        recipe: a recipe's name, or a recipe.json; not needed with --resume.
        out: the run's folder; by default runs/RECIPE.
        set: change a field, key=value, for example train.epochs=3; may be repeated. nestling describe RECIPE lists every field.
        resume: the folder of a run to go on with.
        minutes: stop at the end of an epoch after so many minutes, on a GPU up to two epochs later, to be resumed; 0 means never.
            Ctrl-C and SIGTERM stop at once, with a checkpoint of the last whole epoch.
        quiet: no progress bar.
    """
    if not recipe and not resume:
        raise NestlingError(f"no recipe was named; give one of {', '.join(RECIPES)}, a recipe.json, or --resume RUN")
    chosen = override(named(recipe) if recipe else RunDir.open(resume).read_recipe(), set)
    path = resume or out or f"runs/{chosen.name}"
    words = " ".join(["nestling train", recipe or f"--resume {resume}", *(f"--set {each}" for each in set)])
    seconds = 60 * minutes if minutes else float("inf")
    found = train(chosen, path, bool(resume), words, quiet, seconds, since_process_began())
    spectator = dist.is_torchelastic_launched() and os.environ.get("RANK") != "0"
    return {} if spectator else {"run": path, **found}


def since_process_began() -> float:
    """Seconds this process has run, when it is our own command (then they went into imports) and Linux tells; else 0."""
    if Path(sys.argv[0]).name not in ("nestling", "__main__.py"):
        return 0.0
    try:
        ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        now = float(Path("/proc/uptime").read_text().split()[0])
        return max(0.0, now - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0


def show(result: dict[str, Any]) -> Table | Text:
    if "stages" in result:
        return evaluate.show(result)
    return Text(f"stopped when time was up; go on with {RunDir(result['run']).going_on()}", overflow="fold")
