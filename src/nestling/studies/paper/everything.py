"""All runs that the paper's experiments ask for, on CIFAR-10 and Tiny ImageNet, most valuable first, and which are missing.

In: networks, strategies and seeds to choose from, a folder of runs, rows of results. Out: jobs in order, each with what it
needs of a GPU. A run counts as done as a finished folder, or as complete rows of results, where its folder is gone.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from nestling.files import CHECKPOINT, RESULTS
from nestling.nets import plan
from nestling.recipes.recipe import NetworkRecipe, Recipe, StrategyRecipe, override
from nestling.runs.folder import RunDir
from nestling.studies.paper.constant import CONSTANTS, SHORT, calibrated, setting
from nestling.studies.paper.grid import STUDIED, TABLES, all_epochs, cells, run_name, sizes
from nestling.studies.paper.results import ALONE, ALONE_NORM, INDEPENDENT, TINY, Row, changes, strategy_name

SEEDS = 3
COMPARED = ("sgd", "sgd-sum", "osgd")
BOTH = (STUDIED, "depth-sparse98")  # the width and the depth nest
CIFAR10 = (*TABLES["table1"], *TABLES["table2"])
TINY_NETWORKS = tuple(TABLES["tiny"])


@dataclass(frozen=True)
class Part:
    """A part of the grid: what is trained, with how many seeds, and why."""

    why: str
    part: str = ""  # of grid.py; empty: the CIFAR-10 tables
    networks: tuple[str, ...] = CIFAR10
    strategies: tuple[str, ...] = ()
    seeds: int = 1
    settings: tuple[str, ...] = ()
    trials: bool = False  # short ones, that calibrate the constant of normalised gradients


NORMS = ("normsgd", "osgd-norm")
PARTS = (
    Part("the comparison that the paper is about", strategies=COMPARED, seeds=SEEDS),
    Part("the constant of normalised gradients", strategies=NORMS, trials=True),
    Part("normalised gradients", strategies=NORMS),
    Part("greedy training, which takes longest", strategies=("greedy",)),
    Part("independent nets (Oracle)", strategies=(ALONE,), seeds=SEEDS),
    Part("its Oracle of the largest Sparse ResNet-98", networks=("depth-sparse98",), strategies=(ALONE_NORM,)),
    Part("table 3 on Tiny ImageNet", "tiny", TINY_NETWORKS, COMPARED),
    Part("its independent nets", "tiny", TINY_NETWORKS, (ALONE,)),
    Part("priority orders", "priorities", BOTH),
    Part("scopes", "scopes", BOTH),
    Part("weight decay, which the paper does not give", "", BOTH, COMPARED, 1, ("train.weight_decay=0.0001",)),
    Part("more seeds of normalised gradients", strategies=NORMS, seeds=SEEDS),
    Part("more seeds of priority orders", "priorities", BOTH, seeds=SEEDS),
    Part("more seeds of scopes", "scopes", BOTH, seeds=SEEDS),
    Part("more seeds of table 3 on Tiny ImageNet", "tiny", TINY_NETWORKS, COMPARED, SEEDS),
    Part("more seeds of greedy training", strategies=("greedy",), seeds=SEEDS),
)


@dataclass(frozen=True)
class Job:
    """One run to be trained."""

    name: str
    recipe: Recipe
    why: str

    def minutes(self, out: Path) -> float:
        return minutes_left(self.recipe, out / self.name)


def everything(
    networks: Sequence[str] = (),
    strategies: Sequence[str] = (),
    seeds: int = SEEDS,
    settings: Sequence[str] = (),
    parts: Sequence[Part] = PARTS,
    rows: Sequence[Row] = (),
) -> list[Job]:
    """All jobs in order of value, each once; an independent net that two nests share is a job of the first. Normalised
    gradients wait for the trials, among the rows, that tell their constant."""
    found: dict[str, Job] = {}
    sizes_seen: dict[tuple[object, ...], str] = {}
    for each in parts:
        mine = tuple(name for name in each.networks if not networks or name in networks)
        for name, recipe in of_part(replace(each, networks=mine), seeds, settings, rows) if mine else ():
            column = strategy_name(recipe)
            if strategies and column not in strategies and not (each.trials and needs_trial(column, strategies)):
                continue
            if column == ALONE_NORM and recipe.network.alone != len(sizes(NetworkRecipe(recipe.network.name))):
                continue
            if column in INDEPENDENT:
                key = (column, own_size(recipe.network), changes(recipe), recipe.train.seed)
                if sizes_seen.setdefault(key, name) != name:
                    continue
            found.setdefault(name, Job(name, recipe, each.why))
    return list(found.values())


def needs_trial(column: str, strategies: Sequence[str]) -> bool:
    """Independent nets by normalised gradients have the constant of their nest, which its trials tell."""
    return column == "normsgd" and ALONE_NORM in strategies


@cache
def own_size(network: NetworkRecipe) -> tuple[object, ...]:
    """By which independent nets of two nests are known to be the same."""
    planned = plan(network)
    return planned.sizes, planned.macs(1), planned.params(1)


def of_part(part: Part, seeds: int, settings: Sequence[str], rows: Sequence[Row]) -> Iterator[tuple[str, Recipe]]:
    """The cells of one part, seed by seed over all its networks."""
    tables = [part.part] if part.part else [table for table in TABLES if set(part.networks) & set(TABLES[table])]
    for seed in range(min(seeds, part.seeds)):
        for table in tables:
            mine = part.networks if part.part else [name for name in TABLES[table] if name in part.networks]
            for more in trial_settings() if part.trials else [()]:
                every = cells(table, mine, part.strategies, seed + 1, (*part.settings, *more, *settings))
                for name, recipe in every:
                    made = recipe if part.trials else with_constant(recipe, rows)
                    if made is not None and recipe.train.seed == seed:
                        yield name if made is recipe else run_name(made), made


def trial_settings() -> list[tuple[str, ...]]:
    return [(*SHORT, setting(constant)) for constant in CONSTANTS]


def with_constant(recipe: Recipe, rows: Sequence[Row]) -> Recipe | None:
    """A recipe of normalised gradients with its calibrated constant, None before that is known; any other as it is."""
    column = strategy_name(recipe)
    if column not in (*NORMS, ALONE_NORM) or recipe.strategy.constant != StrategyRecipe().constant:
        return recipe
    constant = calibrated(rows, recipe.network.name, column)
    return None if constant is None else override(recipe, [setting(constant)])


def missing_jobs(jobs: Iterable[Job], out: Path, rows: Iterable[Row]) -> list[Job]:
    """What is neither a finished folder nor complete in rows; first what was begun, or its checkpoint would lie about."""
    known = {row_key(row) for row in rows}
    found = [job for job in jobs if not RunDir(out / job.name).has(RESULTS) and not recipe_keys(job.recipe) <= known]
    return sorted(found, key=lambda job: not RunDir(out / job.name).has(CHECKPOINT))


def until_told(jobs: Sequence[Job]) -> list[Job]:
    """The jobs up to the last trial, which says what is to follow; none where no trial is missing."""
    trials = [place for place, job in enumerate(jobs) if set(SHORT) <= set(changes(job.recipe).split())]
    return list(jobs[: trials[-1] + 1]) if trials else []


def row_key(row: Row) -> tuple[object, ...]:
    keys = ("data", "network", "strategy", "changes", "epochs", "seed", "stage")
    return tuple(row.get(key) for key in keys)


def recipe_keys(recipe: Recipe) -> set[tuple[object, ...]]:
    """The keys of the rows that a finished run of this recipe has."""
    stages = [recipe.network.alone] if recipe.network.alone else range(1, len(sizes(recipe.network)) + 1)
    column, changed, train = strategy_name(recipe), changes(recipe), recipe.train
    about = (recipe.data.name, recipe.network.name, column, changed, train.epochs, train.seed)
    return {(*about, stage) for stage in stages}


# --- what a run takes -------------------------------------------------------------------------------------------------

IMAGES = {"cifar10": 50_000, TINY: 100_000, "digits": 1_437, "folder": 1_281_167}  # to train on; of folders: ImageNet
# ms of an H200 for a step of SGD, each of six side by side: results/step-h200.json, the two nests that were measured; the
# others are taken to be like the one with as many layers.
STEP_MS = {"resnet42": 1.15, "sparse98": 1.35}
IMAGENET_MS = {"resnet50": 52.1, "sparse66": 72.8}  # of pictures of 224x224, batch 256: results/imagenet-h200.json
SMALLER = (64 / 224) ** 2  # what is left of it at 64x64, at best
SEVERAL = 1.5  # how much more a step takes that needs a gradient for every task (1.55 and 1.50 there)
ROOM = 1.2  # runs that were planned to take 8.5 minutes took 10


def minutes_left(recipe: Recipe, path: Path) -> float:
    """What is left of a run, as chip_minutes counts."""
    done = max((line["epoch"] for line in RunDir(path).read_log()), default=0)
    return chip_minutes(recipe) * (1 - done / max(1, all_epochs(recipe)))


def seconds_left(recipe: Recipe, path: str) -> float:
    """With room for evaluation, starting up and a chip that is not as quiet as the measured one."""
    return 60 * ROOM * minutes_left(recipe, Path(path))


def chip_minutes(recipe: Recipe) -> float:
    """About how many minutes of an H200 a run takes with five others beside it."""
    stages, kind = sizes(NetworkRecipe(recipe.network.name)), recipe.network.name.partition("-")[2]
    tiny = recipe.data.name == TINY
    step = IMAGENET_MS[kind] * (SMALLER if tiny else 1) if kind in IMAGENET_MS else STEP_MS.get(kind, 1.35)
    images = IMAGES.get(recipe.data.name, IMAGES["cifar10"]) - recipe.data.validation
    steps = (min(images, recipe.data.limit) if recipe.data.limit else images) // recipe.train.batch
    name = strategy_name(recipe)
    if name in INDEPENDENT:
        step *= (
            0.3 + 0.7 * stages[recipe.network.alone - 1][1] / stages[-1][1]
        )  # kernels take their time when small, too
    elif name == "greedy":
        step *= len(stages)  # each has its turn; forward it is a step of SGD, backward at most that
    elif name not in ("sgd", "sgd-sum"):
        step *= SEVERAL
    return step * steps * recipe.train.epochs / 60_000
