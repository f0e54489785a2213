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
from nestling.recipes.recipe import override, refuse_idle
from nestling.runs.folder import RunDir, own_words
from nestling.studies.fit import fit
from nestling.train import train


def command(
    recipe: str = "",
    /,
    out: str = "",
    set: tuple[str, ...] = (),
    resume: str = "",
    minutes: float = 0.0,
    quiet: bool = False,
    data: str = "",
    way: str = "",
    teacher: str = "",
    loss: str = "",
    error: str = "",
) -> dict[str, Any]:
    """Train a recipe into a run folder, or go on with one that was stopped.

    Recipes: digits-width, digits-even, digits-depth, digits-alternate, digits-together, digits-cascade; the paper's
    cifar10-width, cifar10-even, cifar10-depth, cifar10-alternate, cifar10-together, cifar10-cascade, imagenet-width,
    imagenet-depth; cifar10-msdnet, to compare with; and those on Tiny ImageNet: tiny-width, tiny-depth, tiny-small. A
    network of your own: the function that builds it, my_file.py:build or package.module:function.

    Args:
        recipe: a recipe's name, a recipe.json, or the function that builds a network of your own; not needed with --resume.
        out: the run's folder; by default runs/RECIPE.
        set: change a field, key=value, for example train.epochs=3; may be repeated. nestling describe RECIPE lists every field.
        resume: the folder of a run to go on with.
        minutes: stop at the end of an epoch after so many minutes, on a GPU up to two epochs later, to be resumed; 0 means never.
            Ctrl-C and SIGTERM stop at once, with a checkpoint of the last whole epoch.
        quiet: no progress bar.
        data: for a network of your own: a function that gives (training, test) data, such as my_file.py:loaders, a folder of
            pictures (train/CLASS, val/CLASS), or the name of a data set.
        way: for one that is built as a plain module: how it becomes anytime, such as 'exits(at=(0.25, 0.5))' or 'nest("w,w")'.
        teacher: a trained module that it learns from (a function that gives it), or a run's folder.
        loss: a function of your own, of outputs and targets.
        error: a function of your own: of all outputs and targets, the error of each sample from 0 to 1.
    """
    if not minutes >= 0:
        raise NestlingError(f"--minutes is {minutes:g}; expected how many, or 0 for no end but the run's")
    if out and resume and Path(out) != Path(resume):
        raise NestlingError(
            f"--resume {resume} goes on in that folder, so --out {out} means nothing; leave out one of them"
        )
    seconds = 60 * minutes if minutes else float("inf")
    if is_function(recipe):
        return own(recipe, data, out or resume, way, teacher, loss, error, set, bool(resume), seconds, quiet)
    for option, given in {"--data": data, "--way": way, "--teacher": teacher, "--loss": loss, "--error": error}.items():
        if given:
            raise NestlingError(
                f"{option} is for a network of your own, and {recipe or resume!r} is none; use --set data.name=..., or name the "
                "function that builds it: nestling train my_file.py:build"
            )
    if not recipe and not resume:
        raise NestlingError(f"no recipe was named; give one of {', '.join(RECIPES)}, a recipe.json, or --resume RUN")
    if resume and not recipe and own_words(RunDir.open(resume).read_recipe()):
        raise NestlingError(
            f"{resume} is of your own making, and what a folder names is not run unasked; name it again: "
            f"{RunDir(resume).going_on()}"
        )
    chosen = override(named(recipe) if recipe else RunDir.open(resume).read_recipe(), set)
    refuse_idle(set, [chosen])
    path = resume or out or f"runs/{chosen.name}"
    words = " ".join(["nestling train", recipe or f"--resume {resume}", *(f"--set {each}" for each in set)])
    found = train(chosen, path, bool(resume), words, quiet, seconds, since_process_began())
    return {} if spectator() else {"run": path, **found}


def is_function(recipe: str) -> bool:
    """Whether this names a function, and no recipe."""
    return ":" in recipe and recipe not in RECIPES and not recipe.endswith(".json")


def own(
    build: str,
    data: str,
    out: str,
    way: str,
    teacher: str,
    loss: str,
    error: str,
    set: tuple[str, ...],
    resume: bool,
    seconds: float,
    quiet: bool,
) -> dict[str, Any]:
    """A network of the user's own, whose files are run because they were named."""
    if not data:
        raise NestlingError(f"nothing was said to train {build} on; add --data my_file.py:loaders, a folder, or a name")
    said = {
        "--data": data,
        "--way": way,
        "--teacher": teacher,
        "--loss": loss,
        "--error": error,
        **{f"--set {each}": "" for each in set},
    }
    words = " ".join(
        ["nestling train", build, *(f"{key} {value}".strip() for key, value in said.items() if value or "=" in key)]
    )
    path = out or f"runs/{build.rpartition(':')[2]}"
    run = fit(
        build, data, teacher=teacher or None, loss=loss or None, error=error or None, out=path, way=way, set=set, resume=resume,
        seconds=seconds, quiet=quiet, command=words,
    )  # fmt: skip
    return {} if spectator() else {"run": path, **run.results}


def spectator() -> bool:
    """One of several processes, and not the one that speaks."""
    return dist.is_torchelastic_launched() and os.environ.get("RANK") != "0"


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
