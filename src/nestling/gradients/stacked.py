"""What tasks have side by side: outputs of several heads in one tensor, or one weight for all heads.

The graph says only that every task uses them, not that each uses a slice of its own. In come the rows of a step. A parameter
of another head has zeros for a task, which does not own it then. Where the tasks' gradients of one parameter never meet along
a dimension, methods that ask who owns what are refused. Reads values back, so it is for a first step.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from nestling.errors import NestlingError
from nestling.gradients.sharded import Sharded

SAMPLE = 1024  # entries that nearly always suffice to see tasks meet


Grads = Sequence[Sequence[Tensor | None]]  # [task][parameter], whole gradients, or each rank's share of them


def unused(
    grads: Grads, doubts: Mapping[int, Collection[int]], sharded: Sharded | None = None
) -> tuple[set[tuple[int, int]], bool]:
    """The (task, parameter) among the doubts whose gradient is zero while another task's is not: the task's loss was made from
    one of several outputs that were stacked, and the parameter is of another one. And whether all is clear: not where every
    task's is zero."""
    places = sorted({i for found in doubts.values() for i in found})
    if not places:
        return set(), True
    some = torch.tensor([[_some(row[i]) for i in places] for row in grads])
    if sharded is not None:
        some = _anywhere(some, sharded).cpu()
    used = some.any(0).tolist()
    pairs = [(task, at, i) for task, found in doubts.items() for at, i in enumerate(places) if i in found]
    known = {(task, i) for task, at, i in pairs if used[at] and grads[task][i] is not None and not some[task, at]}
    return known, all(used)


def stacked(grads: Grads, sharded: Sharded | None = None, shapes: Sequence[torch.Size] = ()) -> int | None:
    """The first parameter that is a stack. `shapes`: of the whole parameters."""
    each = [[grad for grad in (row[i] for row in grads) if grad is not None] for i in range(len(grads[0]))]
    seen = [len(g) < 2 or g[0].dim() < 1 or _meet([_sample(grad) for grad in g]) for g in each]
    if sharded is not None:  # they may meet on another rank
        seen = _anywhere(torch.tensor(seen), sharded).tolist()
    for index in (i for i, meet in enumerate(seen) if not meet):
        supports = [torch.stack([_support(grad, dim) for grad in each[index]]) for dim in range(each[index][0].dim())]
        if sharded is not None:
            window, shape = sharded.windows[index], shapes[index]
            supports = [
                _anywhere(_placed(found, window[dim], shape[dim]), sharded) for dim, found in enumerate(supports)
            ]
        if any(_side_by_side(found, len(supports)) for found in supports):
            return index
    return None


def of_a_stack(name: str) -> NestlingError:
    return NestlingError(
        f"the tasks' gradients of {name} never meet: it seems to hold a slice for each task, which the graph cannot tell, and "
        f"this method needs to know who owns what. Pass owners=, a mapping from each parameter's name to int64 bit masks of "
        f"its shape (bit t: task t uses the entry), or use scope='all'"
    )


def _some(grad: Tensor | None) -> bool:
    """Whether a gradient is anywhere other than zero."""
    return grad is not None and (bool(_sample(grad).any()) or bool(grad.any()))


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
    return (grad != 0).movedim(dim, 0).reshape(grad.shape[dim], -1).any(1)


def _side_by_side(taken: Tensor, dims: int) -> bool:
    """Whether tasks use runs of indices one after the other, (tasks, indices): at least two of them, and no index twice. Of a
    vector every index has to be used: a few numbers may be apart by chance."""
    if bool((taken.sum(0) > 1).any()) or (dims == 1 and not bool(taken.any(0).all())):
        return False
    runs = sorted((int(found[0]), int(found[-1])) for found in (row.nonzero().flatten() for row in taken) if len(found))
    return len(runs) > 1 and all(a[1] < b[0] for a, b in pairwise(runs))
