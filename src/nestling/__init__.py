"""nestling: anytime neural networks for PyTorch.

The names below are the public surface. Each is imported when first used, so that `import nestling` and
`nestling --help` do not wait for torch.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

EXPORTS: dict[str, str] = {  # public name -> the room it comes from
    "NestlingError": "nestling.errors",
    "DataRecipe": "nestling.recipes.recipe",
    "NetworkRecipe": "nestling.recipes.recipe",
    "Recipe": "nestling.recipes.recipe",
    "RunDir": "nestling.runs.folder",
    "StrategyRecipe": "nestling.recipes.recipe",
    "TrainRecipe": "nestling.recipes.recipe",
    "Accumulator": "nestling.gradients",
    "NormOSGD": "nestling.gradients.combiners",
    "NormSGD": "nestling.gradients.combiners",
    "OSGD": "nestling.gradients.combiners",
    "PCGrad": "nestling.gradients.combiners",
    "SGD": "nestling.gradients.combiners",
    "SumSGD": "nestling.gradients.combiners",
    "backward": "nestling.gradients",
    "Runtime": "nestling.runtime",
    "Spec": "nestling.export.spec",
    "export_net": "nestling.runtime.verified",
    "nest": "nestling.nets.nest",
    "exits": "nestling.nets.exits",
    "Greedy": "nestling.gradients.combiners.greedy",
    "from_deadlines": "nestling.gradients.combiners.priority",
    "COMBINERS": "nestling.gradients.combiners",
    "load": "nestling.runs.open",
    "override": "nestling.recipes.recipe",
}


def __getattr__(name: str) -> Any:
    if name not in EXPORTS:
        raise AttributeError(f"module 'nestling' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(EXPORTS[name]), name)
    except ModuleNotFoundError as error:
        errors = importlib.import_module("nestling.errors")
        raise errors.NestlingError(f"nestling.{name}: {errors.explain_missing(error)}") from error


def __dir__() -> list[str]:
    return sorted(["__version__", *EXPORTS])
