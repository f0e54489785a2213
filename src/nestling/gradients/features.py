"""Gradients at a representation alone: every task goes back to the features, and one pass goes on through the trunk.

In come losses and the features they were made from; tasks are combined by their gradients there (MGDA-UB of Sener and Koltun
2018, TorchJD's mtl_backward), and what follows the features gets its gradients as ever. Does not know how tasks are combined.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nestling.errors import NestlingError
from nestling.gradients.accumulate import Accumulator
from nestling.gradients.checks import Losses, Named, Params, arranged, named, trainable
from nestling.gradients.contract import Combiner, R, Scaler
from nestling.gradients.walks import reached
from nestling.gradients.wrapped import Route


class _Stopped(Route):
    """Gradients of the features, in the places of their stand-ins, and of what follows them."""

    group = None

    def __init__(self, features: Sequence[Tensor], stands: Sequence[Tensor]) -> None:
        self.there = {id(stand): feature for stand, feature in zip(stands, features, strict=True)}

    def gradients(
        self, losses: Sequence[Tensor], seeds: Sequence[Tensor] | None, retain: bool, params: Sequence[Tensor]
    ) -> list[Tensor | None]:
        asked = [self.there.get(id(p), p) for p in params]
        given = None if seeds is None else list(seeds)
        found = torch.autograd.grad(list(losses), asked, given, retain_graph=retain, allow_unused=True)
        return [None if grad is None else grad.clone() for grad in found]


def backward_at(
    features: Tensor | Iterable[Tensor],
    losses: Losses,
    params: Params,
    combine: Combiner[R],
    scaler: Scaler | None = None,
    check: bool | None = None,
) -> R:
    """`backward`, with tasks combined by their gradients at the features: one pass through the trunk, whatever their number.

    Scope "shared" is about the features alone; "all" is about the parameters that follow them, too.
    """
    known, names = arranged(losses, None)
    at = _checked(features)
    trunk, heads = _split([loss for loss in known if loss is not None], at, trainable(named(params)))
    stands = [torch.zeros_like(feature).requires_grad_() for feature in at]
    places: Named = [*((f"features {i}", stand) for i, stand in enumerate(stands)), *heads]
    rows = Accumulator(places, combine, reduce=False, scaler=scaler, check=check, mode="rows")
    rows.now.route = _Stopped(at, stands)
    if names is not None:
        combine.set_tasks(names)
    rows._add(known, final=True, retain_graph=False)
    report = rows.fill()
    pairs = [(feature, stand.grad) for feature, stand in zip(at, stands, strict=True) if stand.grad is not None]
    if trunk and pairs:
        torch.autograd.backward([f for f, _ in pairs], [g for _, g in pairs], inputs=[p for _, p in trunk])
    return report


def _checked(features: Tensor | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(features, nn.Module):
        raise NestlingError("features is a module: expected the tensors it gave, from which the losses were made")
    found = [features] if isinstance(features, Tensor) else list(features) if isinstance(features, Iterable) else []
    if not found or any(not isinstance(f, Tensor) or f.grad_fn is None for f in found):
        raise NestlingError(
            "features has no graph: expected one or more tensors that the trunk gave and the losses were made from"
        )
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise NestlingError(
            "features= is given, and there are several processes, each with features of its own: expected one; leave "
            "features= out"
        )
    return found


def _split(losses: Sequence[Tensor], features: Sequence[Tensor], params: Named) -> tuple[Named, Named]:
    """The parameters before the features, and those after them."""
    found = reached(losses)
    for index, feature in enumerate(features):
        if feature.grad_fn not in found:
            raise NestlingError(f"no loss depends on features {index}: expected tensors that the losses were made from")
    before = {id(getattr(node, "variable", None)) for node in reached(features)}
    stops = {feature.grad_fn for feature in features}
    after = {id(getattr(node, "variable", None)) for node in reached(losses, stops)}
    both = [name for name, p in params if id(p) in before & after]
    if both:
        raise NestlingError(
            f"{both[0]} is used before the features and after them: expected features that all paths from it to the losses "
            f"go through; give more tensors, or leave features= out"
        )
    return [pair for pair in params if id(pair[1]) in before], [pair for pair in params if id(pair[1]) in after]
