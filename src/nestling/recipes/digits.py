"""Runs on the 8x8 digits that ship inside scikit-learn: real data, half a minute on one CPU core.

In: nothing. Out: complete recipes; every variant changes only the network.
"""

from dataclasses import replace

from nestling.recipes.recipe import DataRecipe, NetworkRecipe, Recipe, StrategyRecipe, TrainRecipe


def width() -> Recipe:
    """A three-stage width nest. `nestling train digits-width`"""
    return Recipe(
        name="digits-width",
        data=DataRecipe(name="digits"),
        network=NetworkRecipe(name="width-digits"),
        strategy=StrategyRecipe(name="osgd"),
        train=TrainRecipe(epochs=30, batch=64, lr=0.1, weight_decay=5e-4, schedule="cosine", diagnostics=True),
    )


def _other(name: str) -> Recipe:
    return replace(width(), name=f"digits-{name}", network=NetworkRecipe(name=f"{name}-digits"))


def even() -> Recipe:
    """Four stripes of equal width (baseline). `nestling train digits-even`"""
    return _other("even")


def depth() -> Recipe:
    """A three-stage depth nest. `nestling train digits-depth`"""
    return _other("depth")


def alternate() -> Recipe:
    """Width and depth in turn, five stages. `nestling train digits-alternate`"""
    return _other("alternate")


def together() -> Recipe:
    """Width and depth at once, three stages. `nestling train digits-together`"""
    return _other("together")


def cascade() -> Recipe:
    """Early exits on one deep network (baseline). `nestling train digits-cascade`"""
    return _other("cascade")
