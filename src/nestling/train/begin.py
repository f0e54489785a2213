"""A run begins: its folder is made or found, the recipe is held against it, and what it runs on is written down.

In: a recipe and a folder. Out: a Training ready to go, or None where the run is finished already.
"""

from nestling.data import DataSet
from nestling.errors import NestlingError
from nestling.files import PROVENANCE, RESULTS
from nestling.recipes.recipe import Recipe, flat
from nestling.runs.folder import RunDir
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
    stop: StopRequest | None,
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
