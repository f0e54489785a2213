"""From a recipe to its combiner: stage numbers become tasks, the registry says what is made and with which fields.

In comes the recipe's part on strategy; out comes the combiner it names. Knows no combiner by itself.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from nestling.errors import NestlingError
from nestling.gradients.combiners.diagnosis import Report
from nestling.gradients.contract import Combiner
from nestling.recipes.recipe import StrategyRecipe
from nestling.recipes.strategies import STRATEGIES

T = TypeVar("T")


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


def task_importance(strategy: StrategyRecipe, stages: int) -> list[list[float]]:
    """Weights of the losses: one list, or several to follow each other."""
    given = list(strategy.importance) or [1.0] * stages
    if stages == 1 and len(given) > 1:
        raise NestlingError(
            f"strategy.importance has {len(given)} values; this network has one stage, whose loss has no other beside it: leave "
            "strategy.importance out"
        )
    if len(given) % stages:
        raise NestlingError(
            f"strategy.importance has {len(given)} values; this network has {stages} stages: give one each (or several such "
            "lists one after another)."
        )
    parts = [given[start : start + stages] for start in range(0, len(given), stages)]
    if any(sum(part) <= 0 for part in parts):
        raise NestlingError(
            "strategy.importance is zero for every stage: expected at least one above zero at any time."
        )
    return parts


def turns(parts: list[T], epochs: int) -> T | Callable[[int], T]:
    """One part as it is; several share the epochs equally, one after another."""
    if len(parts) == 1:
        return parts[0]
    return lambda epoch: parts[min(epoch * len(parts) // max(1, epochs), len(parts) - 1)]


def make_combiner(strategy: StrategyRecipe, stages: int, epochs: int = 1, seed: int = 0) -> Combiner[Report]:
    """The combiner a recipe names. Several orders, or weights of losses, share the epochs equally, one after another; `seed` is
    for chance."""
    fields = {
        **vars(strategy),
        "order": turns(task_orders(strategy, stages), epochs),
        "importance": turns(task_importance(strategy, stages), epochs),
        "seed": seed,
    }
    made: Combiner[Report] = kind(strategy.name)(**{field: fields[field] for field in STRATEGIES[strategy.name].takes})
    return made
