"""Models wrapped for several processes: DistributedDataParallel and FSDP2, and what we do not know and refuse.

In come parameters, however they were handed over; out comes the wrapper that holds them, or a refusal. A wrapper's hooks
wait for gradients to be accumulated, once per step; ours are taken beside them, task by task (`Beside`), so that nothing is
averaged twice.
"""

import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nestling.errors import NestlingError
from nestling.gradients.compiled import is_compiled
from nestling.gradients.sharded import FSDP, Sharded, alive, managers
from nestling.gradients.walks import SINK, reached


class Route(Protocol):
    """A way to gradients other than accumulating them into `.grad`; `group`: whose mean they are to be."""

    group: dist.ProcessGroup | None

    def gradients(
        self, losses: Sequence[Tensor], seeds: Sequence[Tensor] | None, retain: bool, params: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """The gradients of the losses' sum, weighted by the seeds; tensors that are nobody else's."""
        ...


class Beside(Route):
    """Gradients taken before they reach the parameters, where a wrapper's hooks wait."""

    def __init__(self, wrapper: DistributedDataParallel | None) -> None:
        self.wrapper = wrapper
        self.group = dist.group.WORLD if wrapper is None else wrapper.process_group

    def gradients(
        self, losses: Sequence[Tensor], seeds: Sequence[Tensor] | None, retain: bool, params: Sequence[Tensor]
    ) -> list[Tensor | None]:
        with self._unnoticed():
            found = torch.autograd.grad(
                list(losses),
                list(params),
                None if seeds is None else list(seeds),
                retain_graph=retain,
                allow_unused=True,
            )
        strange = _strangers(losses, params) if self.wrapper is not None else set()
        known = (None if id(p) in strange else grad for p, grad in zip(params, found, strict=True))
        return [None if grad is None else grad.clone() for grad in known]  # autograd may hand out one tensor twice

    @contextmanager
    def _unnoticed(self) -> Iterator[None]:
        """A static graph's first backward pass would average whatever `.grad` holds when it ends."""
        wrapper: Any = self.wrapper
        before = getattr(wrapper, "_static_graph_delay_allreduce_enqueued", None)
        if before is None:
            yield
            return
        wrapper._static_graph_delay_allreduce_enqueued = True
        try:
            yield
        finally:
            wrapper._static_graph_delay_allreduce_enqueued = before


def _strangers(losses: Sequence[Tensor], params: Sequence[Tensor]) -> set[int]:
    """Parameters, by id, that no loss depends on and that may get zeros all the same: a wrapper's sink asks for the gradients
    of all outputs, and functions such as SyncBatchNorm's make zeros of what is missing."""
    nodes = reached(losses)
    if not any(node.name() == SINK for node in nodes):
        return set()
    leaves = {id(getattr(node, "variable", None)) for node in nodes}
    return {id(p) for p in params if id(p) not in leaves}


def route_of(named: Sequence[tuple[str, Tensor]], net: nn.Module | None) -> Route | None:
    """How to come to the gradients of these parameters; None: by accumulating them, as a lone process does."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    if any(hasattr(p, "placements") for _, p in named):  # DTensors
        return Sharded(named, managers([p for _, p in named], net))
    return Beside(wrapper_of([p for _, p in named]))


def unwrapped(net: nn.Module) -> nn.Module:
    """The module inside, which knows its owners and its parameters' names."""
    if is_compiled(net):
        return unwrapped(net.get_submodule("_orig_mod"))
    if not isinstance(net, DistributedDataParallel):
        return net
    _check(net)
    first = next((p for p in net.parameters() if p.requires_grad), None)
    if first is not None:  # no need to look for it, where a search might pass it by (gc.freeze)
        _looked[id(first)], _wrappers[id(first)] = first, net
    return unwrapped(net.module)


_looked: "weakref.WeakValueDictionary[int, Tensor]" = weakref.WeakValueDictionary()
_wrappers: "weakref.WeakValueDictionary[int, nn.Module]" = weakref.WeakValueDictionary()


def wrapper_of(params: Sequence[Tensor]) -> DistributedDataParallel | None:
    """The live wrapper that holds these parameters, if there is one that we know; others are refused. Looks once per first
    parameter."""
    key = id(params[0])
    if _looked.get(key) is not params[0]:
        _wrappers.pop(key, None)
        found = _search(params)
        if found is not None:
            _wrappers[key] = found
        _looked[key] = params[0]
    wrapper = _wrappers.get(key)
    assert wrapper is None or isinstance(wrapper, DistributedDataParallel)
    return wrapper


def _search(params: Sequence[Tensor]) -> DistributedDataParallel | None:
    fsdp: Any = sys.modules.get(FSDP)
    older = () if fsdp is None else (fsdp.FullyShardedDataParallel,)
    ours = {id(p) for p in params}
    for wrapper in alive(DistributedDataParallel, *older):
        if any(id(p) in ours for p in wrapper.parameters()):
            if not isinstance(wrapper, DistributedDataParallel):
                raise _older()
            _check(wrapper)
            return wrapper
    return None


def _check(wrapper: DistributedDataParallel) -> None:
    """Raise if it does more than to average gradients: what it does is not done to per-task ones."""
    inside: Any = wrapper
    more = {
        "mixed_precision=": inside.mixed_precision is not None,
        "a communication hook": bool(inside._comm_hooks),
        "delay_all_reduce_named_params=": bool(inside._delay_all_reduce_params),
    }
    for what, there in more.items():
        if there:
            raise NestlingError(
                f"the model is wrapped in DistributedDataParallel with {what}, which per-task gradients do not pass through: "
                f"expected a wrapper that averages and nothing else; leave it out (for mixed precision: torch.autocast)"
            )


def _older() -> NestlingError:
    return NestlingError(
        "these parameters belong to a model wrapped in FullyShardedDataParallel, the older FSDP, which adds up what every "
        "backward pass gives before tasks can be combined: use torch.distributed.fsdp.fully_shard(model), which "
        "nestling.backward works with, or DistributedDataParallel"
    )
