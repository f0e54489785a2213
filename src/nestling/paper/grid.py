"""The paper's grid of runs: which recipe stands behind each cell of its tables, and how to train a part of it.

In: a table, networks, strategies, a number of seeds. Out: recipes with the folders they go to, and trained runs. What is
finished is skipped, what was begun goes on. It draws nothing and compares nothing.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nestling.errors import NestlingError, nearest
from nestling.nets import plan
from nestling.recipe import NetworkRecipe, Recipe, override
from nestling.recipes import named
from nestling.rundir import RECIPE, RESULTS, RunDir
from nestling.train import train, train_side_by_side

TABLES: dict[str, dict[str, str]] = {  # table -> network -> recipe
    "table1": {
        "depth-sparse98": "cifar10-depth",
        "width-resnet42": "cifar10-width",
        "alternate-sparse98": "cifar10-alternate",
        "together-sparse98": "cifar10-together",
    },
    "table2": {"cascade-sparse98": "cifar10-cascade", "even-resnet42": "cifar10-even"},
    "table3": {"width-resnet50": "imagenet-width", "depth-sparse66": "imagenet-depth"},
    "digits": {f"{kind}-digits": f"digits-{kind}" for kind in ("width", "depth", "even", "cascade")},
}
# alone: the independent net of every size. Greedy last: it takes an epoch per stage for every epoch of the others.
STRATEGIES = ("sgd", "osgd", "sgd-sum", "normsgd", "osgd-norm", "alone", "greedy")


def cells(
    table: str, networks: tuple[str, ...], strategies: tuple[str, ...], seeds: int, changes: tuple[str, ...] = ()
) -> Iterator[tuple[str, Recipe]]:
    """Run name and recipe of every chosen cell, seed by seed, so that a first answer for all comes before a second."""
    if table not in TABLES:
        raise NestlingError(
            f"unknown table {table!r}; did you mean {nearest(table, TABLES)}? Known: {', '.join(TABLES)}."
        )
    for name in networks:
        if name not in TABLES[table]:
            raise NestlingError(f"{table} has no network {name!r}; it has {', '.join(TABLES[table])}.")
    for name in strategies:
        if name not in STRATEGIES:
            raise NestlingError(f"unknown strategy {name!r}; did you mean {nearest(name, STRATEGIES)}?")
    for seed in range(seeds):
        for network in networks or tuple(TABLES[table]):
            base = override(named(TABLES[table][network]), [f"train.seed={seed}", *changes])
            for strategy in strategies or STRATEGIES:
                yield from variants(network, strategy, seed, base)


def variants(network: str, strategy: str, seed: int, base: Recipe) -> Iterator[tuple[str, Recipe]]:
    """One run, or for "alone" one run for every stage's size."""
    if strategy != "alone":
        kind: Any = strategy
        yield f"{network}-{strategy}-seed{seed}", replace(base, strategy=replace(base.strategy, name=kind))
        return
    for stage in range(1, len(plan(NetworkRecipe(name=network)).heads) + 1):
        recipe = replace(base, network=NetworkRecipe(name=network, alone=stage))
        yield f"{network}-alone{stage}-seed{seed}", replace(recipe, strategy=replace(base.strategy, name="sgd"))


def train_cells(chosen: list[tuple[str, Recipe]], out: str, beside: int, seconds: float, command: str) -> None:
    """Train what is not finished, `beside` runs at a time where there is a GPU, one after another elsewhere."""
    todo = [(recipe, str(Path(out) / name)) for name, recipe in chosen if not RunDir(Path(out) / name).has(RESULTS)]
    if not torch.cuda.is_available():
        for recipe, path in todo:
            train(recipe, path, resume=(Path(path) / RECIPE).exists(), command=command, seconds=seconds)
        return
    for start in range(0, len(todo), beside):
        train_side_by_side(todo[start : start + beside], command, seconds)
