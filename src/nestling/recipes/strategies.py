"""The ways of training as data: one line each, in the order in which reports show them.

What a recipe may name, its columns, and which of its fields a method is made with follow from here. Knows no torch:
a line names the class, which gradients/combiners imports when one is made.
"""

from dataclasses import dataclass

COMBINERS = "nestling.gradients.combiners"


@dataclass(frozen=True)
class Strategy:
    """`made_by`: module and class of a combiner, which is made with the recipe's fields `takes` (and train.seed as seed);
    empty for greedy, which is no combiner but a schedule. `paper`: its place in the paper's tables, 0 for none."""

    made_by: str = ""
    takes: tuple[str, ...] = ()
    paper: int = 0


STRATEGIES: dict[str, Strategy] = {
    "osgd": Strategy(f"{COMBINERS}.osgd:OSGD", ("order", "scope", "importance"), paper=4),
    "osgd-norm": Strategy(
        f"{COMBINERS}.osgd:NormOSGD", ("order", "scope", "importance", "constant", "literal"), paper=6
    ),
    "sgd": Strategy(f"{COMBINERS}.sgd:SGD", ("importance",), paper=2),
    "sgd-sum": Strategy(f"{COMBINERS}.sgd:SumSGD", ("importance",), paper=3),  # ours, beside the paper's
    "normsgd": Strategy(f"{COMBINERS}.norm:NormSGD", ("importance", "constant", "literal"), paper=5),
    "pcgrad": Strategy(f"{COMBINERS}.pcgrad:PCGrad", ("scope", "importance", "seed")),
    "damped": Strategy(f"{COMBINERS}.damped:Damped", ("damping", "importance")),
    "greedy": Strategy(paper=1),
}


def of_the_paper() -> tuple[str, ...]:
    """Those of the paper's tables, in its order."""
    return tuple(
        sorted((name for name in STRATEGIES if STRATEGIES[name].paper), key=lambda name: STRATEGIES[name].paper)
    )


def that_take(field: str) -> tuple[str, ...]:
    """The strategies that a field of the recipe means something to."""
    return tuple(name for name, strategy in STRATEGIES.items() if field in strategy.takes)


NORMALISED = that_take("constant")  # those that rescale gradients, which shows in an independent net, too
