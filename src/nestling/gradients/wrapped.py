"""Models wrapped for several processes: DistributedDataParallel, and what averages gradients in ways we do not know.

In come parameters, however they were handed over; out comes the wrapper that holds them, or a refusal. A wrapper's hooks
wait for gradients to be accumulated, once per step; ours are taken beside them, task by task (`Beside`), so that nothing is
averaged twice.
"""

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nestling.errors import NestlingError


class Route(Protocol):
    """A way to gradients other than accumulating them into `.grad`."""

    def gradients(
        self, losses: Sequence[Tensor], seeds: Sequence[Tensor] | None, retain: bool, params: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """The gradients of the losses' sum, weighted by the seeds; tensors that are nobody else's."""
        ...


class Beside(Route):
    """Gradients taken before they reach the parameters, where a wrapper's hooks wait."""

    def __init__(self, wrapper: DistributedDataParallel | None) -> None:
        self.wrapper = wrapper

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
        return [None if grad is None else grad.clone() for grad in found]  # autograd may hand out one tensor twice

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


def unwrapped(net: nn.Module) -> nn.Module:
    """The module inside, which knows its owners and its parameters' names."""
    return unwrapped(net.module) if isinstance(net, DistributedDataParallel) else net


_looked: "weakref.WeakValueDictionary[int, Tensor]" = weakref.WeakValueDictionary()
_wrappers: "weakref.WeakValueDictionary[int, nn.Module]" = weakref.WeakValueDictionary()


def wrapper_of(params: Sequence[Tensor]) -> DistributedDataParallel | None:
    """The live wrapper that holds these parameters, if there is one that we know; others are refused. Looks once per first
    parameter."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
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
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # half a second, so only where it is used

    ours = {id(p) for p in params}
    for known in gc.get_objects():
        if issubclass(type(known), (DistributedDataParallel, FSDPModule, FullyShardedDataParallel)):
            wrapper: Any = known
            if any(id(p) in ours for p in wrapper.parameters()):
                if not isinstance(wrapper, DistributedDataParallel):
                    raise _sharded()
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


def _sharded() -> NestlingError:
    return NestlingError(
        "these parameters belong to a model sharded by FSDP, which adds up what every backward pass gives before tasks "
        "can be combined: found a sharded model, expected the bare module with whole parameters on every rank. Drop "
        "fully_shard (or FullyShardedDataParallel): nestling.backward averages each task's gradient over the ranks itself"
    )
