"""Which runs a sweep has: every combination of the values given for some fields of a recipe.

In: a recipe and axes as text, "strategy.name=sgd,osgd". Out: a name for its folder and a recipe for each run, the last axis
changing fastest. It knows no folder and trains nothing.
"""

import re
from collections.abc import Sequence
from itertools import product
from typing import get_origin

from nestling.errors import NestlingError, nearest
from nestling.recipes.recipe import Recipe, keys, override
from nestling.recipes.rules import split


def grid_runs(recipe: Recipe, axes: Sequence[str]) -> list[tuple[str, Recipe]]:
    """Name and recipe of every run. Two that would be the same are refused, and so are two of one name."""
    if recipe.network.own or recipe.data.name == "own":
        raise NestlingError(
            f"{recipe.name} is of your own making; a sweep runs in other processes, which know only recipes: call nestling.fit "
            "for each run"
        )
    several = [read_axis(axis) for axis in axes]
    seen: list[str] = []
    for key, _ in several:
        if key in seen:
            raise NestlingError(f"--grid names {key} twice; give all its values at once: {key}=A,B")
        seen.append(key)
    found: dict[str, Recipe] = {}
    for values in product(*(texts for _, texts in several)):
        settings = [f"{key}={value}" for key, value in zip(seen, values, strict=True)]
        name, made = "-".join(map(slug, settings)) or recipe.name, override(recipe, settings)
        if name in found or made in found.values():
            raise NestlingError(f"{' '.join(settings)} is in the grid twice; give every value once")
        found[name] = made
    return list(found.items())


def read_axis(text: str) -> tuple[str, list[str]]:
    """ "train.seed=0,1" as ("train.seed", ["0", "1"]); lists, which have commas of their own, stand between semicolons."""
    key, equals, values = text.partition("=")
    key, valid = key.strip().replace("-", "_"), keys()
    if not equals:
        raise NestlingError(f"--grid {text} has no '='; write key=value,value, such as train.seed=0,1,2")
    if key not in valid:
        raise NestlingError(f"--grid: unknown key {key!r}; did you mean {nearest(key, valid)}?")
    several = get_origin(split(valid[key])[0]) is tuple
    return key, [value.strip() for value in values.split(";" if several else ",")]


def slug(setting: str) -> str:
    """A setting as a part of a folder's name: "strategy.name=sgd" as "strategy-sgd", "train.lr=0.1" as "lr-0.1"."""
    key, _, value = setting.partition("=")
    section, _, field = key.rpartition(".")
    return f"{section if field == 'name' else field}-{re.sub('[^A-Za-z0-9.]+', '_', value) or 'none'}"
