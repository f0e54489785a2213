"""A run begins: its folder is made or found, the recipe is held against it, and what it runs on is written down.

In: a recipe and a folder. Out: a Training ready to go, or None where the run is finished already.
"""

from contextlib import ExitStack
from typing import Any

from nestling.data import DataSet
from nestling.errors import NestlingError
from nestling.files import PROVENANCE, RESULTS
from nestling.recipes.recipe import Recipe, flat
from nestling.runs.folder import RunDir
from nestling.runs.open import resolve
from nestling.train.capabilities import memory_explained
from nestling.train.loop import Training, kept, main_rank
from nestling.train.progress import Startup
from nestling.train.stop import StopRequest


def prepare(
    recipe: Recipe,
    path: str,
    resume: bool,
    command: str,
    data: DataSet | None = None,
    until: float = float("inf"),
    startup: Startup | None = None,
    beside: int = 1,
    stop: StopRequest | None = None,
) -> Training | None:
    """A Training over its run folder, new or resumed, which it holds until it is released; None when the run is finished
    already."""
    run, main = RunDir.open(path) if resume else RunDir(path), main_rank()
    with ExitStack() as unless_it_begins:
        if main:
            run.hold()
        unless_it_begins.callback(run.release)
        if resume:
            check_recipe(run, recipe)
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
                write_origin(training, command, resume)
            if resume:
                training.restore()
        unless_it_begins.pop_all()
    return training


def check_recipe(run: RunDir, recipe: Recipe) -> None:
    """Refuse to go on with a run by another recipe than its own."""
    old, new = flat(run.read_recipe()), flat(recipe)
    if old != new:
        key = next(key for key in old if old[key] != new[key])
        raise NestlingError(
            f"{run.path} was trained with another recipe ({key} was {old[key]!r}, now {new[key]!r}); "
            f"{run.going_on()} goes on with its own, or train into a new folder."
        )


def write_origin(training: Training, command: str, resumed: bool) -> None:
    """Where the run comes from, and what its device could not do: a reader of the numbers must know."""
    run = training.run
    run.write_provenance(command, str(training.device), resumed=resumed)
    origins = {} if resumed else adopted(training.recipe)
    if training.given_up or origins:
        origin = run.read_json(PROVENANCE)
        part = origin.get("resumed", [origin])[-1]
        if training.given_up:
            part["given_up"] = training.given_up
        if origins:
            part["adopted"] = origins
        run.write_json(PROVENANCE, origin)


def adopted(recipe: Recipe) -> dict[str, Any]:
    """Where the runs come from whose weights this one begins with."""
    named = {f"network.{name}": getattr(recipe.network, name) for name in ("keep", "early_from")}
    runs = {field: resolve(path) for field, path in named.items() if path}
    return {field: run.read_json(PROVENANCE) for field, run in runs.items() if run.has(PROVENANCE)}
