"""The ways of training as data: one line each, in the order in which tables and reports show them.

What a recipe may name, its columns, and which of its fields a method is made with follow from here. Knows no torch:
a line names the class, which gradients/combiners imports when one is made.
"""

from dataclasses import dataclass

COMBINERS = "nestling.gradients.combiners"


@dataclass(frozen=True)
class Strategy:
    """`made_by`: module and class of a combiner, which is made with the recipe's fields `takes` (and train.seed as seed);
    empty for greedy, which is no combiner but a schedule. `paper`: part of the paper's grid."""

    made_by: str = ""
    takes: tuple[str, ...] = ()
    paper: bool = False


STRATEGIES: dict[str, Strategy] = {
    "greedy": Strategy(paper=True),
    "sgd": Strategy(f"{COMBINERS}.sgd:SGD", ("importance",), paper=True),
    "sgd-sum": Strategy(f"{COMBINERS}.sgd:SumSGD", ("importance",), paper=True),
    "osgd": Strategy(f"{COMBINERS}.osgd:OSGD", ("order", "scope", "importance"), paper=True),
    "normsgd": Strategy(f"{COMBINERS}.norm:NormSGD", ("importance", "constant", "literal"), paper=True),
    "osgd-norm": Strategy(
        f"{COMBINERS}.osgd:NormOSGD", ("order", "scope", "importance", "constant", "literal"), paper=True
    ),
    "pcgrad": Strategy(f"{COMBINERS}.pcgrad:PCGrad", ("scope", "importance", "seed")),
}


def that_take(field: str) -> tuple[str, ...]:
    """The strategies that a field of the recipe means something to."""
    return tuple(name for name, strategy in STRATEGIES.items() if field in strategy.takes)
