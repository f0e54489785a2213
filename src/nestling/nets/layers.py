"""Nested layers: torch's own layers, told the births of their channels. What they compute is said by the operation.

In: births of the input and output channels. Called on a whole tensor, a layer is one masked dense operation over all
stages (training). A `Cut` says where the parameters of the channels lie that are born at one stage (inference). Masked
entries are zero and stay zero. Layers know nothing of the network around them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from nestling.errors import NestlingError
from nestling.nets.births import Births
from nestling.nets.ops.conv import Conv
from nestling.nets.ops.groupnorm import mixed_groups
from nestling.nets.ops.layernorm import LayerNorm
from nestling.nets.ops.linear import Linear
from nestling.nets.ops.scale import Scale
from nestling.nets.ops.tokens import Tokens
from nestling.nets.ops.weighted_op import WeightedOp
from nestling.nets.synced import batch_norm

Index = slice | Tensor


def as_index(channels: tuple[int, ...]) -> Index:
    """A slice where the channels are consecutive (a view, no copy), an index otherwise."""
    if channels == tuple(range(channels[0], channels[-1] + 1)):
        return slice(channels[0], channels[-1] + 1)
    return torch.tensor(channels)


@dataclass(frozen=True)
class Cut:
    """The part of a layer that one stage computes: output rows and, for weighted layers, the columns each row reads."""

    rows: Index
    columns: Index  # a slice, or of shape (rows, columns) for grouped and unsorted layers

    def weight(self, weight: Tensor) -> Tensor:
        if isinstance(self.rows, slice) and isinstance(self.columns, slice):
            return weight[self.rows, self.columns]
        rows = torch.arange(weight.shape[0])[self.rows] if isinstance(self.rows, slice) else self.rows
        return weight[rows[:, None], self.columns]


def connections(births_in: Births, births_out: Births, groups: int = 1) -> Tensor:
    """The mask of a weight: entry (i, j) exists when channel i is not born before the channel j it reads."""
    reads = torch.tensor(births_in, device="cpu").view(groups, 1, -1)  # planned on the CPU whatever the default device
    rows = torch.tensor(births_out, device="cpu").view(groups, -1, 1)
    return (rows >= reads).flatten(0, 1)  # (out, in / groups)


def describe_births(births: Births) -> str:
    return "+".join(f"{births.count(stage)}@{stage}" for stage in sorted(set(births)))


class Nested(nn.Module):
    """A layer with a weight of (rows, columns, *kernel), whose row i reads only the channels born at or before it."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    mask: Tensor | None

    def __init__(self, op: WeightedOp, births_in: Births, births_out: Births) -> None:
        super().__init__()
        rows, columns = len(births_out), len(births_in) // op.groups
        self.weight = nn.Parameter(torch.empty(rows, columns, *op.kernel))
        self.register_parameter("bias", nn.Parameter(torch.empty(rows)) if op.bias else None)
        self.tell(op, births_in, births_out)

    def tell(self, op: WeightedOp, births_in: Births, births_out: Births) -> None:
        """What it computes, and the births of the channels on both sides."""
        self.op, self.births_in, self.births = op, births_in, births_out
        self.register_buffer("mask", self.made_mask(), persistent=False)
        self.reset_nested()

    def made_mask(self) -> Tensor | None:
        mask = connections(self.births_in, self.births, self.op.groups)
        # As large as the weight: then many masks are applied in one kernel, and a CPU need not broadcast over pixels.
        full = mask.view(*mask.shape, *[1] * len(self.op.kernel)).expand_as(self.weight).to(self.weight).contiguous()
        return None if mask.all() else full

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As torch's, for `.to(...)` and the like. No state dict holds masks, so what `.to_empty` left in one is made anew."""
        before = self.mask
        made = super()._apply(fn, recurse)
        if self.mask is not before:
            self.mask = self.made_mask()
        return made

    def reset_nested(self, generator: torch.Generator | None = None) -> None:
        """Weights drawn anew, every row with the fan-in that it really has."""
        fan_in = connections(self.births_in, self.births, self.op.groups).sum(1)
        with torch.no_grad():
            self.op.draw(self.weight, self.bias, fan_in, generator)
            if self.mask is not None:
                self.weight.mul_(self.mask)

    def live_weight(self) -> Tensor:
        return self.weight if self.mask is None else self.weight * self.mask

    def forward(self, x: Tensor, weight: Tensor | None = None, how: WeightedOp | None = None) -> Tensor:
        """`weight` is the weight already masked, where the network masks all its layers at once."""
        return (how or self.op).compute((x,), self.live_weight() if weight is None else weight, self.bias)

    def extra_repr(self) -> str:
        births = f"births={describe_births(self.births_in)} -> {describe_births(self.births)}"
        return ", ".join(filter(None, (super().extra_repr(), births)))


class NestedConv2d(Nested, nn.Conv2d):  # type: ignore[misc]
    """torch's convolution with births."""

    def __init__(
        self,
        births_in: Births,
        births_out: Births,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = False,
    ) -> None:
        numbers: Any = (kernel_size, stride, padding, dilation, groups, bias)
        nn.Conv2d.__init__(self, len(births_in), len(births_out), *numbers)
        shape: Any = (self.kernel_size, self.stride, self.padding, self.dilation)
        self.tell(Conv(*shape, groups=groups, bias=bias), births_in, births_out)


class NestedLinear(Nested, nn.Linear):  # type: ignore[misc]
    """torch's linear layer with births."""

    def __init__(self, births_in: Births, births_out: Births, bias: bool = True) -> None:
        nn.Linear.__init__(self, len(births_in), len(births_out), bias)
        self.tell(Linear(bias=bias), births_in, births_out)


class NestedBatchNorm2d(nn.BatchNorm2d):
    """Batch norm with births. Statistics are per channel, so one set of them is exact for every stage."""

    def __init__(self, births: Births, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True) -> None:
        super().__init__(len(births), eps, momentum, affine)
        self.births = births
        self.synced = False  # whether ranks normalise by the statistics of all their batches

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() not in (2, 3, 4):
            raise NestlingError(
                f"batch norm takes (N, C), (N, C, L) or (N, C, H, W); found a tensor of shape {tuple(input.shape)}."
            )

    def forward(self, input: Tensor) -> Tensor:
        """As torch's, without counting batches: momentum is fixed, and a count per layer is a kernel per layer."""
        self._check_input_dim(input)
        kept = self.training and not self.track_running_stats  # batch statistics, and nothing is remembered of them
        mean, var = (None, None) if kept else (self.running_mean, self.running_var)
        return batch_norm(input, mean, var, self.weight, self.bias, self.training, self.pace, self.eps, self.synced)

    @property
    def pace(self) -> float:
        """The momentum, which torch's update_bn takes away while it averages, after it has reset what all norms knew."""
        if self.momentum is None:
            raise NestlingError(
                "a batch norm has no momentum, as after torch.optim.swa_utils.update_bn, which also resets the norms of a kept "
                "network. Load the weights into a network that it has not touched, and use nestling.calibrate(net, batches)"
            )
        return self.momentum

    def rows(self, x: Tensor, cut: Cut, training: bool) -> Tensor:
        """Normalise the channels of one stage; when training, update their running statistics and no others."""
        mean, var = self.running_mean, self.running_var
        assert mean is not None and var is not None
        mean, var = mean[cut.rows], var[cut.rows]
        weight, bias = affine_rows(self, cut)
        y = batch_norm(x, mean, var, weight, bias, training, self.pace, self.eps, self.synced)
        if training and not isinstance(cut.rows, slice):  # an index made copies: put them back
            self.running_mean[cut.rows] = mean  # type: ignore[index]
            self.running_var[cut.rows] = var  # type: ignore[index]
        return y

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, births={describe_births(self.births)}"


class NestedGroupNorm(nn.GroupNorm):
    """Group norm whose groups lie inside stripes: a group never mixes channels of different births."""

    def __init__(self, births: Births, groups: int, eps: float = 1e-5, affine: bool = True) -> None:
        if len(births) % groups:
            raise NestlingError(f"group norm: {len(births)} channels cannot be cut into {groups} equal groups.")
        for group, found in mixed_groups(births, groups):
            raise NestlingError(
                f"group norm: group {group} of {groups} holds channels born at stages {found}, so an early stage "
                "would depend on later ones. Use groups that lie inside stripes."
            )
        super().__init__(groups, len(births), eps, affine)
        self.births = births

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, births={describe_births(self.births)}"


class NestedPReLU(nn.PReLU):
    """PReLU with a slope for every channel, so that each slope has a birth."""

    def __init__(self, births: Births) -> None:
        super().__init__(len(births))
        self.births = births

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, births={describe_births(self.births)}"


class NestedLayerNorm(nn.Module):
    """Scale and shift of a norm over channels, one for every channel. What is normalised over what, the operation says."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, births: Births, op: LayerNorm) -> None:
        super().__init__()
        self.births, self.op = births, op
        for name, there in (("weight", op.scale), ("bias", op.shift)):
            self.register_parameter(name, nn.Parameter(torch.empty(len(births))) if there else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for tensor, number in ((self.weight, 1.0), (self.bias, 0.0)):
            if tensor is not None:
                nn.init.constant_(tensor, number)

    def forward(self, x: Tensor) -> Tensor:
        return self.op.compute([x], self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"eps={self.op.eps}, births={describe_births(self.births)}"


class NestedNumbers(nn.Module):
    """A number for every channel, or several, learnt or fixed; the operation says what is done with them."""

    weight: Tensor

    def __init__(self, births: Births, op: Scale | Tokens, more: tuple[int, ...] = (), learnt: bool = True) -> None:
        super().__init__()
        self.births, self.op = births, op
        numbers = torch.empty(len(births), *more)
        if learnt:
            self.weight = nn.Parameter(numbers)
        else:
            self.register_buffer("weight", numbers)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.op.start)

    def forward(self, x: Tensor) -> Tensor:
        return self.op.compute([x], self.weight)

    def extra_repr(self) -> str:
        return f"{self.op.kind}, births={describe_births(self.births)}"


def affine_rows(layer: nn.BatchNorm2d | nn.GroupNorm, cut: Cut) -> tuple[Tensor | None, Tensor | None]:
    """Scale and shift of one stage's channels, None where the norm has none."""
    return (layer.weight[cut.rows], layer.bias[cut.rows]) if layer.affine else (None, None)


class MaskAll(torch.autograd.Function):
    """Many weights times their masks, and many gradients times theirs, each in one call instead of one per layer."""

    @staticmethod
    def forward(ctx: Any, *weights_and_masks: Tensor) -> tuple[Tensor, ...]:
        half = len(weights_and_masks) // 2
        ctx.masks = weights_and_masks[half:]
        ctx.set_materialize_grads(False)  # a stage that does not use a layer leaves it without a gradient
        return tuple(torch._foreach_mul(weights_and_masks[:half], ctx.masks))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found = {i: grad for i, grad in enumerate(grads) if grad is not None}
        masked = torch._foreach_mul(list(found.values()), [ctx.masks[i] for i in found]) if found else ()
        given = dict(zip(found, masked, strict=True))
        return (*(given.get(i) for i in range(len(grads))), *([None] * len(grads)))
