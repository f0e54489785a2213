"""The paper's grid of runs: which recipe stands behind each cell of its tables and figures, and how to train a part of it.

In: a part of the grid, networks, strategies, scopes, priority orders, a number of seeds. Out: recipes with the folders they
go to, and trained runs. What is finished is skipped, what was begun goes on. It draws nothing and compares nothing.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import torch

from nestling.errors import NestlingError, nearest
from nestling.files import RESULTS
from nestling.nets import plan
from nestling.recipes import named
from nestling.recipes.recipe import NetworkRecipe, Recipe, override
from nestling.recipes.recipe import StrategyRecipe as Strategy
from nestling.recipes.rules import hints, parsed
from nestling.recipes.strategies import of_the_paper, that_take
from nestling.runs.folder import RunDir
from nestling.studies.paper.results import ALONE, ALONE_NORM, INDEPENDENT, TINY, Row, changes, strategy_name
from nestling.train import side_by_side

TABLES: dict[str, dict[str, str]] = {  # table -> network -> recipe
    "table1": {
        "depth-sparse98": "cifar10-depth",
        "width-resnet42": "cifar10-width",
        "alternate-sparse98": "cifar10-alternate",
        "together-sparse98": "cifar10-together",
    },
    "table2": {"cascade-sparse98": "cifar10-cascade", "even-resnet42": "cifar10-even"},
    "tiny": {"width-resnet50": "tiny-width", "depth-sparse66": "tiny-depth"},  # table 3 at a size we can run
    "table3": {"width-resnet50": "imagenet-width", "depth-sparse66": "imagenet-depth"},
    "digits": {
        f"{kind}-digits": f"digits-{kind}" for kind in ("width", "depth", "even", "cascade", "alternate", "together")
    },
}
# alone: the independent net of every size. Greedy last: it takes an epoch per stage for every epoch of the others.
GRID = (*(name for name in of_the_paper() if name != "greedy"), ALONE, "greedy")
CHOICES = (*GRID, ALONE_NORM)  # by name only: the paper has it for one network
PRIORITISED = that_take("order")  # they have a scope, too
SCOPES: tuple[str, ...] = get_args(hints(Strategy)["scope"])
# Studies of one network: its strategies. The paper does not say which network its priority figure shows.
STUDIES = {"scopes": ("osgd",), "priorities": ("osgd", "sgd")}
STUDIED = "width-resnet42"
PARTS = (*TABLES, *STUDIES)
START = 60.0  # seconds: with fewer left a run on a GPU would hardly get past its start


def cells(
    part: str,
    networks: Sequence[str],
    strategies: Sequence[str],
    seeds: int,
    settings: Sequence[str] = (),
    scopes: Sequence[str] = (),
    orders: Sequence[str] = (),
) -> Iterator[tuple[str, Recipe]]:
    """Run name and recipe of every chosen cell, seed by seed, so that a first answer for all comes before a second."""
    if part not in PARTS:
        near = nearest(part, (*PARTS, "all", "figures", "findings", "profile", "pack", "unpack"))
        raise NestlingError(f"unknown table {part!r}; did you mean {near}? (nestling paper --help lists all)")
    drawn = TABLES.get(part) or {name: recipe for table in TABLES.values() for name, recipe in table.items()}
    default = (STUDIED,) if part in STUDIES else tuple(drawn)
    known(strategies, CHOICES, "strategy")
    known(scopes, SCOPES, "scope")
    for name in networks:
        if name not in drawn:
            raise NestlingError(f"{part} has no network {name!r}; it has {', '.join(drawn)}.")
    for seed in range(seeds):
        for network in networks or default:
            base = override(named(drawn[network]), [f"train.seed={seed}", *settings])
            stages = len(sizes(replace(base.network, alone=0)))
            chosen = [read_order(order, stages) for order in orders]
            if part == "priorities" and not orders:
                chosen = four_orders(stages)
            wide = SCOPES if part == "scopes" and not scopes else scopes
            for strategy in strategies or STUDIES.get(part, GRID):
                for recipe in variants(base, strategy, stages, wide, chosen):
                    yield run_name(recipe), recipe


def known(names: Sequence[str], valid: Sequence[str], what: str) -> None:
    for name in names:
        if name not in valid:
            raise NestlingError(f"unknown {what} {name!r}; did you mean {nearest(name, valid)}?")


def four_orders(stages: int) -> list[tuple[int, ...]]:
    """Four priority orders, most important first: the paper's own, the stages between the first and the last ahead of
    both, the last stage ahead of all, and the reverse."""
    first, between, last = 1, range(2, stages), stages
    rising = (*range(1, stages + 1),)
    orders = [rising, (*between, first, last), (last, first, *between), rising[::-1]]
    return list(dict.fromkeys(order for order in orders if len(set(order)) == stages))  # fewer for two stages


def read_order(text: str, stages: int) -> tuple[int, ...]:
    order: tuple[int, ...] = parsed(text, hints(Strategy)["order"], "--order")
    if sorted(order) != list(range(1, stages + 1)):
        raise NestlingError(f"--order {text} is no order of the stages; name each of 1 to {stages} once, such as 2,1,3")
    return order


def variants(
    base: Recipe, strategy: str, stages: int, scopes: Sequence[str], orders: Sequence[tuple[int, ...]]
) -> Iterator[Recipe]:
    """One run; for independent nets one for every stage's size, for osgd one for every scope and order that was asked for."""
    if strategy in INDEPENDENT:
        norm = Strategy("normsgd", constant=base.strategy.constant, literal=base.strategy.literal)
        for stage in range(1, stages + 1):
            network = replace(base.network, alone=stage)
            yield replace(base, network=network, strategy=norm if strategy == ALONE_NORM else Strategy("sgd"))
        return
    kind: Any = strategy
    if strategy not in PRIORITISED:
        yield replace(base, strategy=replace(base.strategy, name=kind))
        return
    for scope in scopes or (base.strategy.scope,):
        for order in orders or (base.strategy.order,):
            usual = order == (*range(1, stages + 1),)  # then it is the run of table 1, and is not trained twice
            seen: Any = scope
            yield replace(base, strategy=replace(base.strategy, name=kind, scope=seen, order=() if usual else order))


def run_name(recipe: Recipe) -> str:
    """A folder's name that tells a run from every other of the grid, whatever was changed about its recipe."""
    settings = [each.partition("=") for each in changes(recipe).split()]
    changed = [f"{key.rpartition('.')[2]}-{re.sub('[^A-Za-z0-9.]+', '_', value)}" for key, _, value in settings]
    kind = f"{strategy_name(recipe)}{recipe.network.alone or ''}"
    tiny = ["tiny"] if recipe.data.name == TINY else []  # whose networks are ImageNet's, too
    return "-".join([*tiny, recipe.network.name, kind, *changed, f"seed{recipe.train.seed}"])


@cache
def sizes(network: NetworkRecipe) -> tuple[tuple[str, int], ...]:
    """Every stage's size and multiply-accumulates."""
    found = plan(network)
    return tuple((size, found.macs(stage)) for stage, size in zip(found.answering, found.sizes, strict=True))


def all_epochs(recipe: Recipe) -> int:
    """Epochs of a whole run: greedy training has the recipe's for every stage."""
    return recipe.train.epochs * (len(sizes(recipe.network)) if recipe.strategy.name == "greedy" else 1)


def sizes_of(network: str) -> tuple[tuple[str, int], ...]:
    return sizes(NetworkRecipe(name=network))


def recipe_of(row: Row) -> Recipe:
    """The recipe behind a row of results."""
    alone = row["strategy"] in INDEPENDENT
    name = {ALONE: "sgd", ALONE_NORM: "normsgd"}.get(row["strategy"], row["strategy"])
    recipes = {network: recipe for table in TABLES.values() for network, recipe in table.items()}
    if row.get("data") == TINY:
        recipes = {**TABLES["tiny"], "width-resnet18": "tiny-small"}  # which is ours, not the paper's
    settings = [f"network.alone={row['stage'] if alone else 0}", f"strategy.name={name}", *row["changes"].split()]
    return override(named(recipes[row["network"]]), [*settings, f"train.seed={row['seed']}"])


def trains(row: Row) -> bool:
    """Whether a row's stage has a loss of any weight, when training ends."""
    field = "strategy.importance="
    given = [each.removeprefix(field) for each in row["changes"].split() if each.startswith(field)]
    if not given or row["strategy"] in INDEPENDENT:
        return True
    stages = len(sizes_of(row["network"]))
    return float(given[0].split(",")[-stages:][row["stage"] - 1]) > 0


def train_cells(
    chosen: Sequence[tuple[str, Recipe]],
    out: str,
    beside: int,
    seconds: float,
    command: str,
    finished: Callable[[Path], object] = lambda path: None,
    takes: Callable[[Recipe, str], float] | None = None,
) -> dict[str, str]:
    """Train what is not finished, `beside` runs at a time where there is a GPU, one after another elsewhere.

    `finished` is called with a run's folder as soon as it is. A run that fails (its loss is no number any more, its folder
    holds something else) does not keep the others from theirs: it comes back with what was wrong. `takes`: see side_by_side.
    """
    if beside < 1:
        raise NestlingError(f"--beside is {beside}: expected how many runs to train at the same time, 1 or more")
    todo = [(recipe, str(Path(out) / name)) for name, recipe in chosen if not RunDir(Path(out) / name).has(RESULTS)]
    gpu = torch.cuda.is_available()
    failed: dict[str, str] = {}
    for outcome in side_by_side(todo, beside if gpu else 1, command, seconds, START if gpu else 0.0, takes=takes):
        if outcome.error is not None:
            failed[outcome.path] = str(outcome.error)
        else:
            finished(Path(outcome.path))
    return failed
