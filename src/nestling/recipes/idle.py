"""Fields of a recipe that mean nothing beside its others: who sets one would change nothing, and not be told.

In: a recipe and a field's key, "strategy.constant". Out: why it is idle, "" where it acts. Recipes may hold such fields, as a
variant of another does; who sets one is refused (recipe.refuse_idle).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from nestling.recipes.strategies import STRATEGIES, that_take

if TYPE_CHECKING:
    from nestling.recipes.recipe import Recipe

FOLDERS = "data.size", "data.workers", "data.skip_unreadable"
BY_NAME = (
    "alone", "ensemble", "growth", "stripes", "widths", "blocks", "heads", "early", "keep", "early_from", "early_widths",
)  # fmt: skip
COMBINERS = "order", "scope", "importance", "constant", "damping", "literal"
Idle = Callable[["Recipe"], bool]
# Of some fields: when they are idle, and why
RULES: tuple[tuple[tuple[str, ...], Idle, str], ...] = (
    (("data.root",), lambda r: r.data.name in ("digits", "synthetic"), "these data need no files"),
    (FOLDERS, lambda r: r.data.name != "folder", "it is for data.name=folder"),
    (("data.augment", "data.cutmix"), lambda r: r.data.name == "own", "data of your own come as you hand them over"),
    (("network.way",), lambda r: not r.network.own, "it is for a network of your own"),
    (
        tuple(f"network.{name}" for name in BY_NAME),
        lambda r: r.network.own,
        "a network of your own comes as your function builds it",
    ),
    (
        ("strategy.refresh",),
        lambda r: r.strategy.name in ("sgd", "sgd-sum", "greedy"),
        "this strategy's weights do not follow from gradients",
    ),
    (("train.milestones", "train.gamma"), lambda r: r.train.schedule != "step", "it is for train.schedule=step"),
    (("train.teaches",), lambda r: not r.train.teacher, "there is no train.teacher"),
    (("train.distill_temperature",), lambda r: not r.train.distill, "train.distill is 0"),
    (("train.smoothing",), lambda r: bool(r.train.loss), "the loss is your own"),
)


def why_idle(recipe: "Recipe", key: str) -> str:
    """Why a field means nothing in this recipe; "" where it does."""
    section, _, name = key.rpartition(".")
    if section == "strategy" and name in COMBINERS and name not in STRATEGIES[recipe.strategy.name].takes:
        return f"it is for strategy.name={' or '.join(that_take(name))}, not {recipe.strategy.name}"
    return next((why for fields, idle, why in RULES if key in fields and idle(recipe)), "")
