"""`backward`: one step in one call, in place of `sum(losses).backward()`.

In come losses, parameters and a combiner; `.grad` is filled, by an Accumulator made for the occasion, or with `features` at a
representation (features.py).
"""

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor

from nestling.errors import NestlingError
from nestling.gradients.accumulate import Accumulator, Owners
from nestling.gradients.checks import Losses, Params, arranged
from nestling.gradients.contract import Combiner, R, Scaler
from nestling.gradients.features import backward_at


def backward(
    losses: Losses,
    params: Params,
    combine: Combiner[R],
    *,
    owners: Owners | None = None,
    diagnose: bool = False,
    reduce: "bool | dist.ProcessGroup" = True,
    scaler: Scaler | None = None,
    check: bool | None = None,
    mode: str = "auto",
    retain_graph: bool = False,
    features: Tensor | Iterable[Tensor] | None = None,
) -> R:
    """Combine the gradients of several losses into `.grad`: takes the place of `sum(losses).backward()`.

    `losses`: one per task, or by name; None where a task is absent. `params`: a module or its parameters. The options are
    those of Accumulator, which does the same with less planning per step, and `retain_graph` as torch's. Adds to `.grad` as
    torch does, so call `optimizer.zero_grad()` as always. `features`: combine tasks by their gradients at these tensors, which
    the losses were made from, with one pass through what is before them.
    """
    if features is not None:
        options = {"owners": owners, "diagnose": diagnose, "reduce": not reduce, "retain_graph": retain_graph}
        given = [name for name, value in options.items() if value]
        if given or mode != "auto":
            raise NestlingError(f"features= is given with {(given or ['mode'])[0]}=: expected one of the two")
        return backward_at(features, losses, params, combine, scaler, check)
    known, names = arranged(losses, None)  # first: where the arguments are swapped, this says so
    once = Accumulator(
        params, combine, owners=owners, diagnose=diagnose, reduce=reduce, scaler=scaler, check=check, mode=mode
    )
    if names is not None:
        combine.set_tasks(names)
    once._add(known, final=True, retain_graph=retain_graph)
    return once.fill()
