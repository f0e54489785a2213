"""nestling: anytime neural networks for PyTorch.

The names below are the public surface. Each is imported when first used, so that `import nestling` and
`nestling --help` do not wait for torch.

Stages count from 1: stage s is the subnetwork D_s, and an answer of stage 0 is none. Tasks count from 0: a task is a
place in the list of losses, and need not be a stage. Names say which (`stage`, `task`), and the other is refused.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers; tests/test_typed.py holds these lines, _ROOMS and __all__ against each other
    from nestling.errors import NestlingError
    from nestling.export.spec import Spec
    from nestling.gradients.accumulate import Accumulator
    from nestling.gradients.call import backward
    from nestling.gradients.combiners import COMBINERS, OSGD, SGD, Damped, NormOSGD, NormSGD, PCGrad, SumSGD
    from nestling.gradients.combiners.greedy import Greedy
    from nestling.gradients.combiners.priority import from_deadlines
    from nestling.nets.calibrate import calibrate
    from nestling.nets.exits import exits
    from nestling.nets.keep import keep
    from nestling.nets.nest import nest
    from nestling.nets.net import NestedNet
    from nestling.recipes.recipe import DataRecipe, NetworkRecipe, Recipe, StrategyRecipe, TrainRecipe, override
    from nestling.runs.folder import RunDir
    from nestling.runs.open import load, resolve
    from nestling.runtime.answer import Answer
    from nestling.runtime.chooser import Chooser
    from nestling.runtime.runtime import Runtime
    from nestling.runtime.verified import export_net
    from nestling.serve.server import Server
    from nestling.studies.fit import fit
    from nestling.studies.sweep.tune import trainable

__version__ = "0.1.0"

__all__ = [
    "COMBINERS",
    "Accumulator",
    "Answer",
    "Chooser",
    "Damped",
    "DataRecipe",
    "Greedy",
    "NestedNet",
    "NestlingError",
    "NetworkRecipe",
    "NormOSGD",
    "NormSGD",
    "OSGD",
    "PCGrad",
    "Recipe",
    "RunDir",
    "Runtime",
    "SGD",
    "Server",
    "Spec",
    "StrategyRecipe",
    "SumSGD",
    "TrainRecipe",
    "backward",
    "calibrate",
    "exits",
    "export_net",
    "fit",
    "from_deadlines",
    "keep",
    "load",
    "nest",
    "override",
    "resolve",
    "trainable",
]

_ROOMS = {  # where each public name comes from
    "nestling.errors": ("NestlingError",),
    "nestling.export.spec": ("Spec",),
    "nestling.gradients.accumulate": ("Accumulator",),
    "nestling.gradients.call": ("backward",),
    "nestling.gradients.combiners": ("COMBINERS", "OSGD", "SGD", "Damped", "NormOSGD", "NormSGD", "PCGrad", "SumSGD"),
    "nestling.gradients.combiners.greedy": ("Greedy",),
    "nestling.gradients.combiners.priority": ("from_deadlines",),
    "nestling.nets.calibrate": ("calibrate",),
    "nestling.nets.exits": ("exits",),
    "nestling.nets.keep": ("keep",),
    "nestling.nets.nest": ("nest",),
    "nestling.nets.net": ("NestedNet",),
    "nestling.recipes.recipe": ("DataRecipe", "NetworkRecipe", "Recipe", "StrategyRecipe", "TrainRecipe", "override"),
    "nestling.runs.folder": ("RunDir",),
    "nestling.runs.open": ("load", "resolve"),
    "nestling.runtime.answer": ("Answer",),
    "nestling.runtime.chooser": ("Chooser",),
    "nestling.runtime.runtime": ("Runtime",),
    "nestling.runtime.verified": ("export_net",),
    "nestling.serve.server": ("Server",),
    "nestling.studies.fit": ("fit",),
    "nestling.studies.sweep.tune": ("trainable",),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}


if not TYPE_CHECKING:  # a checker would take it that every name is there

    def __getattr__(name: str) -> Any:
        if name not in _ROOM_OF:
            raise AttributeError(f"module 'nestling' has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(_ROOM_OF[name]), name)
        except ModuleNotFoundError as error:
            errors = importlib.import_module("nestling.errors")
            raise errors.NestlingError(f"nestling.{name}: {errors.explain_missing(error)}") from error


def __dir__() -> list[str]:
    return sorted(["__version__", *__all__])
