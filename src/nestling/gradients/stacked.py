"""Parameters that hold something of each task side by side, such as one weight for all heads.

The graph says only that every task uses such a parameter, not that each uses a slice of its own. In come the rows of
a step; where the tasks' gradients never meet along a dimension and fill it together, methods that ask who owns what are
refused: they would train something else. Reads values back, so it is for a first step on a CPU.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nestling.errors import NestlingError

SAMPLE = 1024  # entries that nearly always suffice to see tasks meet


def refuse_stacked(named: Sequence[tuple[str, Tensor]], stored: Sequence[Sequence[Tensor | None]]) -> None:
    """Raise if a parameter is a stack. `stored`: [task][parameter], whole gradients."""
    for index, (name, _) in enumerate(named):
        found = [row[index] for row in stored]
        grads = [grad for grad in found if grad is not None]
        if len(grads) > 1 and _stacked(grads):
            raise NestlingError(
                f"the tasks' gradients of {name} never meet: it seems to hold a slice for each task, which the graph cannot "
                f"tell, and this method needs to know who owns what. Pass owners=, a mapping from each parameter's name to "
                f"int64 bit masks of its shape (bit t: task t uses the entry), or use scope='all'"
            )


def _stacked(grads: Sequence[Tensor]) -> bool:
    if grads[0].dim() < 2:  # of single numbers, zeros tell too little
        return False
    step = max(1, grads[0].numel() // SAMPLE)
    if _meet([grad.reshape(-1)[::step] for grad in grads]):
        return False
    return any(_side_by_side([_support(grad, dim) for grad in grads]) for dim in range(grads[0].dim()))


def _meet(rows: Sequence[Tensor]) -> bool:
    return bool((torch.stack([row != 0 for row in rows]).sum(0) > 1).any())


def _support(grad: Tensor, dim: int) -> Tensor:
    """Along one dimension, where the gradient is not zero."""
    return (grad != 0).movedim(dim, 0).reshape(grad.shape[dim], -1).any(1)


def _side_by_side(supports: Sequence[Tensor]) -> bool:
    """Whether every index belongs to one task, and every task has some."""
    taken = torch.stack(list(supports))
    return bool((taken.sum(0) == 1).all()) and bool(taken.any(1).all())
