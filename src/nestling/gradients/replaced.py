"""Parameters that were given as a list and have been replaced in the model since: a new head would get no gradient.

A model that is given can be asked for its parameters at every step; a list cannot. In come a step's losses and which of the
parameters they reached; where one is no longer used, and one that was not there before is in its place, the step is refused.
"""

import gc
import weakref
from collections.abc import Sequence

from torch import Tensor, nn

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
        idle = [(name, p) for (name, p), used in zip(named, now, strict=True) if not used]
        lost = [pair for pair in idle if first or id(pair[1]) in before]
        if not first and not lost:
            return
        given = {id(p) for _, p in named}
        leaves = [getattr(node, "variable", None) for node in reached(losses)]
        others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in given]
        new = [leaf for leaf in others if id(leaf) not in self.beside or self.beside[id(leaf)]() is not leaf]
        beside = [leaf for leaf in new if isinstance(leaf, nn.Parameter)]
        for name, p in lost:
            if any(leaf.shape == p.shape for leaf in new) or (beside and _orphaned(p)):
                raise NestlingError(
                    f"{name} is not used by any loss, and one that was not given is, of the same shape or in a module that "
                    f"{name} is no longer in: it seems to have been replaced, and the new one would get no gradient. Give the "
                    f"model itself, which is asked at every step, or its parameters as they are now; or freeze {name}"
                )
        self.beside.update({id(leaf): weakref.ref(leaf) for leaf in new})


def _orphaned(p: Tensor) -> bool:
    """Whether a parameter was a module's, as far as its type says, and is in none that lives."""
    if not isinstance(p, nn.Parameter):
        return False
    holders = [held for held in gc.get_referrers(p) if isinstance(held, dict)]
    modules = [owner for held in holders for owner in gc.get_referrers(held) if isinstance(owner, dict | nn.Module)]
    return not any(_holds(owner, held) for owner in modules for held in holders)


def _holds(owner: "dict[object, object] | nn.Module", held: "dict[object, object]") -> bool:
    found = owner.get("_parameters") if isinstance(owner, dict) else owner._parameters
    return found is held
