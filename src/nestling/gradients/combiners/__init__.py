"""Rows to update: one small file per method, behind one contract (`combine(rows) -> Report`).

COMBINERS maps the names used in recipes to classes.
"""

from nestling.gradients.combiners.norm import NormSGD
from nestling.gradients.combiners.osgd import OSGD, NormOSGD
from nestling.gradients.combiners.pcgrad import PCGrad
from nestling.gradients.combiners.report import Report
from nestling.gradients.combiners.sgd import SGD, SumSGD
from nestling.gradients.combiners.weighted import Weighted

COMBINERS: dict[str, type[Weighted]] = {
    "sgd": SGD,
    "sgd-sum": SumSGD,
    "normsgd": NormSGD,
    "osgd": OSGD,
    "osgd-norm": NormOSGD,
    "pcgrad": PCGrad,
}

__all__ = ["COMBINERS", "OSGD", "SGD", "NormOSGD", "NormSGD", "PCGrad", "Report", "SumSGD", "Weighted"]
