"""Rows to update: one small file per method, behind one contract (`combine(rows) -> Report`).

COMBINERS maps the names used in recipes to classes; the list itself is recipes/strategies.py.
"""

from nestling.gradients.combiners.damped import Damped
from nestling.gradients.combiners.diagnosis import Report
from nestling.gradients.combiners.made import kind, make_combiner
from nestling.gradients.combiners.norm import NormSGD
from nestling.gradients.combiners.osgd import OSGD, NormOSGD
from nestling.gradients.combiners.pcgrad import PCGrad
from nestling.gradients.combiners.sgd import SGD, SumSGD
from nestling.gradients.combiners.weighted import Weighted
from nestling.recipes.strategies import STRATEGIES

COMBINERS: dict[str, type[Weighted]] = {name: kind(name) for name, strategy in STRATEGIES.items() if strategy.made_by}

__all__ = [
    "COMBINERS",
    "OSGD",
    "SGD",
    "Damped",
    "NormOSGD",
    "NormSGD",
    "PCGrad",
    "Report",
    "SumSGD",
    "Weighted",
    "make_combiner",
]
