"""nestling: anytime neural networks for PyTorch.

The names below are the public surface. Each is imported when first used, so that `import nestling` and
`nestling --help` do not wait for torch.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

EXPORTS: dict[str, str] = {  # public name -> the room it comes from
    "NestlingError": "nestling.errors",
    "DataRecipe": "nestling.recipe",
    "NetworkRecipe": "nestling.recipe",
    "Recipe": "nestling.recipe",
    "RunDir": "nestling.rundir",
    "StrategyRecipe": "nestling.recipe",
    "TrainRecipe": "nestling.recipe",
    "Accumulator": "nestling.gradients",
    "NormOSGD": "nestling.combine",
    "NormSGD": "nestling.combine",
    "OSGD": "nestling.combine",
    "PCGrad": "nestling.combine",
    "SGD": "nestling.combine",
    "SumSGD": "nestling.combine",
    "backward": "nestling.gradients",
    "Runtime": "nestling.runtime",
    "Spec": "nestling.anytime.spec",
    "export_net": "nestling.export",
    "nest": "nestling.nets.nest",
    "Greedy": "nestling.combine.greedy",
    "from_deadlines": "nestling.combine.priority",
    "COMBINERS": "nestling.combine",
    "load": "nestling.shelf",
    "override": "nestling.recipe",
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
