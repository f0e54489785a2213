"""Models sharded by FSDP2 (`fully_shard`): every rank holds its share of every row, and Gram matrices alone are added up.

In come the parameters, whole or sharded as FSDP happens to hold them; out come this rank's shares as plain tensors, whose
gradients FSDP averages and scatters in one backward pass per task. What was combined goes back as the sharded `.grad` that
optimizers expect. It does not know what rows are for.
"""

import gc
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nestling.errors import NestlingError
from nestling.gradients.owners import Box
from nestling.gradients.walks import reached

FSDP = "torch.distributed.fsdp"


_known: "weakref.WeakValueDictionary[int, Tensor]" = weakref.WeakValueDictionary()  # first parameters once looked for
_found: dict[int, list[weakref.ref[Any]]] = {}


def alive(*kinds: type) -> list[Any]:
    """Every object of these kinds in this process; a type is asked once, since there are few and objects are many."""
    every = gc.get_objects()
    wanted = {kind for kind in set(map(type, every)) if issubclass(kind, kinds)}
    return [thing for thing in every if type(thing) in wanted]


def managers(params: Sequence[Tensor], net: nn.Module | None) -> list[Any]:
    """The modules that FSDP2 manages: those in the net, or anywhere, where the net does not say. The latter are looked for
    once per first parameter."""
    fsdp: Any = sys.modules.get(FSDP)
    if fsdp is None or not dist.is_initialized() or not params:  # never imported: nothing is sharded
        return []
    inside = [module for module in net.modules() if isinstance(module, fsdp.FSDPModule)] if net is not None else []
    if inside:
        return inside
    key = id(params[0])
    if _known.get(key) is not params[0]:
        _found[key] = [weakref.ref(module) for module in alive(fsdp.FSDPModule)]
        _known[key] = params[0]
    return [module for module in (known() for known in _found[key]) if module is not None]


def _groups(module: Any) -> list[Any]:
    """FSDP's groups of parameters of one module."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [g for g in [state._fsdp_param_group] if g is not None]


def sharded_ones(params: Sequence[Tensor], net: nn.Module | None) -> dict[int, Tensor]:
    """From parameters that FSDP has gathered for now to the sharded ones, which an optimizer holds."""
    if not (dist.is_available() and dist.is_initialized()) or all(hasattr(p, "placements") for p in params):
        return {}
    every = [p for module in managers(params, net) for group in _groups(module) for p in group.fsdp_params]
    return {id(p._unsharded_param): p.sharded_param for p in every if hasattr(p, "_unsharded_param")}


class Sharded:
    """The way to gradients through FSDP2. `shares`: per parameter, this rank's part."""

    def __init__(self, named: Sequence[tuple[str, Tensor]], modules: Sequence[Any]) -> None:
        self.groups = list({id(g): g for module in modules for g in _groups(module)}.values())
        self.states = [module._get_fsdp_state() for module in modules]
        self.sharded: list[Any] = [p for _, p in named]
        self._check(named)
        self.dim = next(d for d, place in enumerate(self.sharded[0].placements) if place.is_shard())
        mesh = self.sharded[0].device_mesh
        self.shards: dist.ProcessGroup = mesh.get_group(self.dim)
        self.group = self.shards if mesh.ndim == 1 else dist.group.WORLD
        self.shares = [p.detach().to_local().requires_grad_() for p in self.sharded]
        self.windows = [self._window(p) for p in self.sharded]

    def _check(self, named: Sequence[tuple[str, Tensor]]) -> None:
        managed = {id(p.sharded_param) for group in self.groups for p in group.fsdp_params}
        for name, p in named:
            if not hasattr(p, "placements"):
                raise NestlingError(
                    f"{name} is whole on every rank, while other parameters are sharded by FSDP: expected all or none; call "
                    f"fully_shard on the root module, too, and leave ignored_params= out"
                )
            if id(p) not in managed:
                raise NestlingError(
                    f"{name} is a DTensor that FSDP2 does not manage: expected parameters that fully_shard has sharded, or "
                    f"whole ones on every rank"
                )
        first = self.sharded[0]
        if any(p.device_mesh != first.device_mesh or p.placements != first.placements for p in self.sharded):
            raise NestlingError(
                "the parameters are sharded in different ways: expected one mesh and one placement for all"
            )
        kinds = [place for place in first.placements if not place.is_replicate()]
        if [type(place).__name__ for place in kinds] != ["Shard"]:
            raise NestlingError(
                f"the parameters have placements {tuple(first.placements)}: expected one sharded dimension, as fully_shard "
                f"makes it; per-task gradients of tensor-parallel layers are not known here"
            )
        if first.device_mesh.ndim > 1 and first.device_mesh.size() != dist.get_world_size():
            raise NestlingError(
                f"the mesh has {first.device_mesh.size()} of {dist.get_world_size()} processes in "
                f"{first.device_mesh.ndim} dimensions: expected all of them, or a mesh of one dimension"
            )
        if any(type(group.offload_policy).__name__ == "CPUOffloadPolicy" for group in self.groups):
            raise NestlingError("FSDP keeps the parameters on the CPU (CPUOffloadPolicy): expected them on the device")

    def leaves(self) -> list[int]:
        """The ids of the whole parameters, which a graph ends at."""
        every = {id(p.sharded_param): p for group in self.groups for p in group.fsdp_params}
        return [id(getattr(every[id(p)], "_unsharded_param", None)) for p in self.sharded]

    def _window(self, p: Any) -> Box:
        """Which entries of a parameter this rank holds."""
        axis, ranks, rank = p.placements[self.dim].dim, dist.get_world_size(self.shards), dist.get_rank(self.shards)
        chunk = -(-p.shape[axis] // ranks)
        start, stop = (min(edge * chunk, p.shape[axis]) for edge in (rank, rank + 1))
        window = tuple((start, stop) if d == axis else (0, size) for d, size in enumerate(p.shape))
        assert tuple(p.to_local().shape) == tuple(b - a for a, b in window)
        return window

    @property
    def fills_up(self) -> bool:
        """Whether FSDP gives zeros to parameters that a backward pass did not reach, so that owners are not known."""
        return any(getattr(group, "reduce_scatter_unused_params", False) for group in self.groups)

    def gradients(
        self, losses: Sequence[Tensor], seeds: Sequence[Tensor] | None, retain: bool, params: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """One whole backward pass, as FSDP wants it; whatever else it reaches is as it was before."""
        self._refuse_unreduced()
        leaves = [getattr(node, "variable", None) for node in reached(losses)]
        known = [p.sharded_param for group in self.groups for p in group.fsdp_params]
        touched: list[Any] = list({id(p): p for p in [*known, *leaves] if p is not None}.values())
        before = [p.grad for p in touched]
        for p in touched:
            p.grad = None
        try:
            torch.autograd.backward(list(losses), None if seeds is None else list(seeds), retain_graph=retain)
            found = {id(share): p.grad for share, p in zip(self.shares, self.sharded, strict=True)}
        finally:
            for p, grad in zip(touched, before, strict=True):
                p.grad = grad
        asked = [found[id(share)] for share in params]
        with torch.no_grad():
            return [None if grad is None else grad.to_local() for grad in asked]

    def _refuse_unreduced(self) -> None:
        held = any(not (group.reduce_grads and group.all_reduce_grads) for group in self.groups)
        if held or not all(state._state_ctx.is_last_backward for state in self.states):
            raise NestlingError(
                "FSDP was told to wait with averaging (set_requires_gradient_sync, set_requires_all_reduce or "
                "set_is_last_backward with False), which would mix the tasks' gradients: leave it as it is; micro-batches are "
                "added by Accumulator.add"
            )

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Inside, the shares have the parameters' gradients; what they have at the end becomes the parameters'."""
        from torch.distributed.tensor import DTensor

        with torch.no_grad():
            for share, p in zip(self.shares, self.sharded, strict=True):
                share.grad = None if p.grad is None else p.grad.to_local()
            try:
                yield
                for share, p in zip(self.shares, self.sharded, strict=True):
                    if share.grad is not None and p.grad is None:
                        p.grad = DTensor.from_local(
                            share.grad, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
                        )
            finally:
                for share in self.shares:
                    share.grad = None
