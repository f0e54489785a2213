"""Parameters that hold something of each task side by side, such as one weight for all heads.

The graph says only that every task uses such a parameter, not that each uses a slice of its own. In come the rows of
a step; where the tasks' gradients never meet along a dimension and fill it together, methods that ask who owns what are
refused: they would train something else. Reads values back, so it is for a first step on a CPU.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from nestling.errors import NestlingError
from nestling.gradients.sharded import Sharded

SAMPLE = 1024  # entries that nearly always suffice to see tasks meet


def refuse_stacked(
    named: Sequence[tuple[str, Tensor]], stored: Sequence[Sequence[Tensor | None]], sharded: Sharded | None = None
) -> None:
    """Raise if a parameter is a stack. `stored`: [task][parameter], whole gradients, or each rank's share of them."""
    grads = [[grad for grad in (row[i] for row in stored) if grad is not None] for i in range(len(named))]
    seen = [len(g) < 2 or g[0].dim() < 2 or _meet([_sample(grad) for grad in g]) for g in grads]
    if sharded is not None:  # they may meet on another rank
        seen = _anywhere(torch.tensor(seen), sharded).tolist()
    for index in (i for i, meet in enumerate(seen) if not meet):
        supports = [torch.stack([_support(grad, dim) for grad in grads[index]]) for dim in range(grads[index][0].dim())]
        if sharded is not None:
            window, shape = sharded.windows[index], named[index][1].shape
            supports = [
                _anywhere(_placed(found, window[dim], shape[dim]), sharded) for dim, found in enumerate(supports)
            ]
        if any(_side_by_side(found) for found in supports):
            raise NestlingError(
                f"the tasks' gradients of {named[index][0]} never meet: it seems to hold a slice for each task, which the "
                f"graph cannot tell, and this method needs to know who owns what. Pass owners=, a mapping from each "
                f"parameter's name to int64 bit masks of its shape (bit t: task t uses the entry), or use scope='all'"
            )


def _anywhere(seen: Tensor, sharded: Sharded) -> Tensor:
    """What any rank has seen."""
    joined = seen.to(sharded.shares[0].device, torch.int32)
    dist.all_reduce(joined, dist.ReduceOp.MAX, group=sharded.group)
    return joined.bool()


def _placed(support: Tensor, window: tuple[int, int], size: int) -> Tensor:
    """A share's support, (tasks, share), inside that of the whole."""
    whole = support.new_zeros(len(support), size)
    whole[:, slice(*window)] = support
    return whole


def _sample(grad: Tensor) -> Tensor:
    return grad.reshape(-1)[:: max(1, grad.numel() // SAMPLE)]


def _meet(rows: Sequence[Tensor]) -> bool:
    return bool((torch.stack([row != 0 for row in rows]).sum(0) > 1).any())


def _support(grad: Tensor, dim: int) -> Tensor:
    """Along one dimension, where the gradient is not zero."""
    return (grad != 0).movedim(dim, 0).flatten(1).any(1)


def _side_by_side(taken: Tensor) -> bool:
    """Whether every index belongs to one task, and every task has some; (tasks, indices)."""
    return bool((taken.sum(0) == 1).all()) and bool(taken.any(1).all())
