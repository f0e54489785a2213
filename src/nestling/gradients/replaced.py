"""Parameters that were given as a list and have been replaced in the model since: a new head would get no gradient.

A model that is given can be asked for its parameters at every step; a list cannot. In come a step's losses and which of the
parameters they reached; where one is no longer used, and one that was not there before is in its place, the step is refused.
"""

import weakref
from collections.abc import Sequence

from torch import Tensor

from nestling.errors import NestlingError
from nestling.gradients.checks import Named
from nestling.gradients.walks import reached


class Followed:
    """What the losses have used so far, of the parameters that were given and beside them."""

    def __init__(self) -> None:
        self.used: set[int] = set()
        self.beside: dict[int, weakref.ref[Tensor]] = {}

    def look(self, losses: Sequence[Tensor], named: Named, now: Sequence[bool]) -> None:
        """`now`: per parameter whether a loss reached it in this step. The graph is walked only where one is missing."""
        first = not self.used
        before, self.used = self.used, self.used | {id(p) for (_, p), used in zip(named, now, strict=True) if used}
        lost = [(name, p) for (name, p), used in zip(named, now, strict=True) if not used and id(p) in before]
        if not first and not lost:
            return
        given = {id(p) for _, p in named}
        leaves = [getattr(node, "variable", None) for node in reached(losses)]
        others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in given]
        new = [leaf for leaf in others if id(leaf) not in self.beside or self.beside[id(leaf)]() is not leaf]
        for name, p in [] if first else lost:
            if any(leaf.shape == p.shape for leaf in new):
                raise NestlingError(
                    f"{name} is no longer used by any loss, and one of the same shape that was not given is: it seems to have "
                    f"been replaced, and the new one would get no gradient. Give the model itself, which is asked at every "
                    f"step, or make a new Accumulator"
                )
        self.beside.update({id(leaf): weakref.ref(leaf) for leaf in new})
