"""The demo: small nests and their rivals, really trained on the digits, timed, and written up. Minutes on two cores.

In: a folder. Out: run folders in it, live.json and report.html. Runs are trained in worker processes, one thread each; what is
finished already is not done again, so a demo that was stopped goes on. It is nothing but the other rooms, called in turn.
"""

import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from nestling.commands import report
from nestling.errors import NestlingError
from nestling.files import PROFILE, RECIPE, RESULTS, to_text, write_atomically
from nestling.recipes import named
from nestling.recipes.recipe import NetworkRecipe, Recipe, StrategyRecipe
from nestling.runs.folder import RunDir
from nestling.studies.live import live
from nestling.studies.profile import profile
from nestling.train import train

NESTS = ("digits-width", "digits-depth")
BASELINES = ("digits-even", "digits-cascade")
LIVE, LOAD = "width-resnet42-kept-cifar10", "bursts"  # the network that comes with us, while other programs come and go
T = TypeVar("T")


def runs(epochs: int, seeds: int = 1) -> Iterator[tuple[str, Recipe]]:
    """Every run of the demo by folder name: with each seed those of `of_one_seed`."""
    for seed in range(seeds):
        for name, recipe in of_one_seed(epochs):
            yield name + f"-seed{seed}" * (seed > 0), replace(recipe, train=replace(recipe.train, seed=seed))


def of_one_seed(epochs: int) -> Iterator[tuple[str, Recipe]]:
    """The longest first: both nests with OSGD and SGD, the baselines they are compared with, and the independent net of each
    stage's size."""
    for name in (*NESTS, *BASELINES):
        nest = named(name)
        nest = replace(nest, train=replace(nest.train, epochs=epochs))
        yield f"{name}-osgd", nest
        if name in NESTS:
            plain = StrategyRecipe(name="sgd")
            yield f"{name}-sgd", replace(nest, strategy=plain)
            for stage in (3, 2, 1):
                network = NetworkRecipe(name=nest.network.name, alone=stage)
                yield f"{name}-alone{stage}", replace(nest, network=network, strategy=plain)


def train_one(recipe: Recipe, path: str) -> None:
    """One run in a worker process; a run that was begun goes on."""
    torch.set_num_threads(1)
    begun = (Path(path) / RECIPE).exists()
    train(recipe, path, resume=begun, command="nestling demo", quiet=True)


def command(
    out: str = "runs/demo", epochs: int = 30, workers: int = 0, repeats: int = 200, questions: int = 300, seeds: int = 3
) -> dict[str, Any]:
    """Train small anytime networks on the digits, compare them with independent nets, ask a trained one live beside its rivals
    while other programs come and go, and write a report.

    Args:
        out: folder for the runs and the report.
        epochs: of each run.
        workers: processes that train at the same time; 0 means one per core, at most four.
        repeats: how many times each network's stages are timed.
        questions: how many the trained network and each of its rivals are asked, live.
        seeds: trainings of each kind.
    """
    # before anything is trained, because the timing comes last
    if workers < 0 or min(repeats, questions, seeds) < 1:
        raise NestlingError(
            f"found workers {workers}, repeats {repeats}, questions {questions}, seeds {seeds}; "
            "expected at least 0 and at least 1 of the others"
        )
    todo = [(recipe, str(Path(out) / name)) for name, recipe in runs(epochs, seeds)]
    count = workers or min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    compared = Path(out) / "live.json"
    with Bars() as bars:
        with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
            futures = [pool.submit(train_one, recipe, path) for recipe, path in todo]
            for future in bars.through("training on the digits", as_completed(futures), len(todo)):
                future.result()
        for _, path in bars.through("timing every stage", todo, len(todo)):  # alone on the machine now
            time_one(path, repeats)
        for file in bars.through(f"asking {LIVE} and its rivals live", [compared], 1):
            if not file.exists():
                write_atomically(file, to_text(live(LIVE, load=LOAD, questions=questions)).encode())
        for page in bars.through("writing the report", [str(Path(out) / "report.html")], 1):
            found = report.command(tuple(path for _, path in todo), page, (str(compared),))
    return found


class Bars(Progress):
    """A bar for each step of the work; where there is no terminal, a line as it begins and for each piece of it that is done."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        console = Console(stderr=True)
        super().__init__(*columns, console=console, disable=not console.is_terminal)

    def through(self, what: str, pieces: Iterable[T], count: int) -> Iterator[T]:
        bar = self.add_task(what, total=count)
        if self.disable:
            self.console.print(f"{what}: 0 of {count}")
        for number, piece in enumerate(pieces, 1):
            yield piece
            self.advance(bar)
            if self.disable:
                self.console.print(f"{what}: {number} of {count}")


def time_one(path: str, repeats: int) -> None:
    """By the engine that would answer: the fastest there is."""
    run = RunDir.open(path)
    if not run.has(PROFILE) and run.has(RESULTS):
        profile(path, device="cpu", repeats=repeats)


def show(result: dict[str, Any]) -> Any:
    return report.show(result)
