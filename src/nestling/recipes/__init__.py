"""The named runs. A run is a function that returns a complete Recipe; a variant changes a few fields of another.

In: a name, or a path to a recipe.json. Out: a Recipe. `nestling train NAME --set key=value` changes any field.
"""

from collections.abc import Callable
from pathlib import Path

from nestling.errors import NestlingError, nearest
from nestling.files import RECIPE
from nestling.recipes import cifar10, digits, imagenet, tiny
from nestling.recipes.recipe import Recipe, from_json

RECIPES: dict[str, Callable[[], Recipe]] = {
    "digits-width": digits.width,
    "digits-even": digits.even,
    "digits-depth": digits.depth,
    "digits-alternate": digits.alternate,
    "digits-together": digits.together,
    "digits-cascade": digits.cascade,
    "cifar10-width": cifar10.width,
    "cifar10-even": cifar10.even,
    "cifar10-depth": cifar10.depth,
    "cifar10-alternate": cifar10.alternate,
    "cifar10-together": cifar10.together,
    "cifar10-cascade": cifar10.cascade,
    "cifar10-msdnet": cifar10.msdnet,
    "imagenet-width": imagenet.width,
    "imagenet-depth": imagenet.depth,
    "tiny-width": tiny.width,
    "tiny-depth": tiny.depth,
    "tiny-small": tiny.small,
}


def named(name: str) -> Recipe:
    """The recipe of that name, or the one in that file."""
    if name in RECIPES:
        return RECIPES[name]()
    path = Path(name)
    if path.suffix == ".json":
        if not path.is_file():
            raise NestlingError(
                f"there is no recipe file {path}; give a file that exists, or one of {', '.join(RECIPES)}."
            )
        return from_json(path.read_text(encoding="utf-8"))
    if (path / RECIPE).is_file():
        raise NestlingError(f"{name} is a run's folder, not a recipe; its recipe is {path / RECIPE}")
    raise NestlingError(
        f"unknown recipe {name!r}; did you mean {nearest(name, RECIPES)}? (nestling train --help lists all)"
    )
