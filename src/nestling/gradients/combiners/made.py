"""From a recipe to its combiner: stage numbers become tasks, the registry says what is made and with which fields.

In comes the recipe's part on strategy; out comes the combiner it names. Knows no combiner by itself.
"""

from importlib import import_module
from typing import Any

from nestling.errors import NestlingError
from nestling.gradients.combiners.diagnosis import Report
from nestling.gradients.combiners.weighted import Order
from nestling.gradients.contract import Combiner
from nestling.recipes.recipe import StrategyRecipe
from nestling.recipes.strategies import STRATEGIES


def kind(name: str) -> type[Any]:
    """The class of a strategy."""
    module, _, found = STRATEGIES[name].made_by.partition(":")
    made: type[Any] = getattr(import_module(module), found)
    return made


def task_orders(strategy: StrategyRecipe, stages: int) -> list[list[int]]:
    """Priorities as task indices, from the recipe's stage numbers: one order, or several to follow each other."""
    order = strategy.order or tuple(range(1, stages + 1))
    parts = [order[start : start + stages] for start in range(0, len(order), stages)]
    if any(sorted(part) != list(range(1, stages + 1)) for part in parts):
        raise NestlingError(
            f"strategy.order={','.join(map(str, strategy.order))} is not an order of this network's stages; "
            f"expected each of 1 to {stages} once, most important first (or several such orders one after another)."
        )
    return [[stage - 1 for stage in part] for part in parts]


def task_importance(strategy: StrategyRecipe, stages: int) -> list[float]:
    if strategy.importance and len(strategy.importance) != stages:
        raise NestlingError(
            f"strategy.importance has {len(strategy.importance)} values; this network has {stages} stages: give one each."
        )
    return list(strategy.importance) or [1.0] * stages


def make_combiner(strategy: StrategyRecipe, stages: int, epochs: int = 1, seed: int = 0) -> Combiner[Report]:
    """The combiner a recipe names. Several orders share the epochs equally, one after another; `seed` is for chance."""
    orders = task_orders(strategy, stages)
    several: Order = lambda epoch: orders[min(epoch * len(orders) // max(1, epochs), len(orders) - 1)]  # noqa: E731
    fields = {
        **vars(strategy),
        "order": several if len(orders) > 1 else orders[0],
        "importance": task_importance(strategy, stages),
        "seed": seed,
    }
    made: Combiner[Report] = kind(strategy.name)(**{field: fields[field] for field in STRATEGIES[strategy.name].takes})
    return made
