"""Rows to update: one small file per method, behind one contract (`combine(rows) -> Report`).

COMBINERS maps the names used in recipes to classes; the list itself is recipes/strategies.py. RIVALS are methods of others, which
wait for the device or follow from the losses' values: for your own loops, not for recipes.
"""

from nestling.gradients.combiners.aligned import AlignedMTL
from nestling.gradients.combiners.cagrad import CAGrad
from nestling.gradients.combiners.damped import Damped
from nestling.gradients.combiners.diagnosis import Report
from nestling.gradients.combiners.dwa import DWA
from nestling.gradients.combiners.famo import FAMO
from nestling.gradients.combiners.gradnorm import GradNorm
from nestling.gradients.combiners.imtl import IMTLG
from nestling.gradients.combiners.made import kind, make_combiner
from nestling.gradients.combiners.mgda import MGDA
from nestling.gradients.combiners.nash import NashMTL
from nestling.gradients.combiners.norm import NormSGD
from nestling.gradients.combiners.osgd import OSGD, NormOSGD
from nestling.gradients.combiners.pcgrad import PCGrad
from nestling.gradients.combiners.sgd import SGD, SumSGD
from nestling.gradients.combiners.solved import Solved
from nestling.gradients.combiners.uncertainty import Uncertainty
from nestling.gradients.combiners.upgrad import UPGrad
from nestling.gradients.combiners.watched import Watched
from nestling.gradients.combiners.weighted import Weighted
from nestling.recipes.strategies import STRATEGIES

COMBINERS: dict[str, type[Weighted]] = {name: kind(name) for name, strategy in STRATEGIES.items() if strategy.made_by}
RIVALS: dict[str, type[Solved] | type[Watched]] = {
    "upgrad": UPGrad,
    "mgda": MGDA,
    "cagrad": CAGrad,
    "nash-mtl": NashMTL,
    "imtl-g": IMTLG,
    "aligned-mtl": AlignedMTL,
    "dwa": DWA,
    "uncertainty": Uncertainty,
    "famo": FAMO,
    "gradnorm": GradNorm,
}

__all__ = [
    "COMBINERS",
    "DWA",
    "FAMO",
    "IMTLG",
    "MGDA",
    "OSGD",
    "RIVALS",
    "SGD",
    "AlignedMTL",
    "CAGrad",
    "Damped",
    "GradNorm",
    "NashMTL",
    "NormOSGD",
    "NormSGD",
    "PCGrad",
    "Report",
    "SumSGD",
    "UPGrad",
    "Uncertainty",
    "Weighted",
    "make_combiner",
]
