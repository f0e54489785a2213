"""Rows to update: one small file per method, behind one contract (`combine(rows) -> Report`).

COMBINERS maps the names used in recipes to classes.
"""

from nestling.combine.norm import NormSGD
from nestling.combine.osgd import OSGD, NormOSGD
from nestling.combine.pcgrad import PCGrad
from nestling.combine.report import Report
from nestling.combine.sgd import SGD, SumSGD
from nestling.combine.weighted import Weighted

COMBINERS: dict[str, type[Weighted]] = {
    "sgd": SGD,
    "sgd-sum": SumSGD,
    "normsgd": NormSGD,
    "osgd": OSGD,
    "osgd-norm": NormOSGD,
    "pcgrad": PCGrad,
}

__all__ = ["COMBINERS", "OSGD", "SGD", "NormOSGD", "NormSGD", "PCGrad", "Report", "SumSGD", "Weighted"]
