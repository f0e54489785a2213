"""Frozen stages run by torch: what torch.export writes, CUDA graphs capture, and the eager engine goes through.

In: a `Frozen` program. Out: a module that takes the tensors of `frozen.takes` and returns the logits and those of
`frozen.gives`. `between` is called before every operation, so that a caller can stop in the middle.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.export.freeze import Frozen, Op
from nestling.nets.net import MAPS, ZIPS


class TorchStage(nn.Module):
    """One frozen stage as an ordinary module without parameters, only buffers."""

    def __init__(self, frozen: Frozen) -> None:
        super().__init__()
        self.frozen = frozen
        self.given = nn.ModuleDict()
        for index, op in enumerate(frozen.ops):
            for name, tensor in (("weight", op.weight), ("bias", op.bias)):
                if tensor is not None:
                    self.register_buffer(f"{name}{index}", tensor)
            if op.module is not None:
                self.given[str(index)] = op.module
        self.last_use = last_uses(frozen)
        self.between: Callable[[], None] | None = None
        self.eval()

    def forward(self, *state: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(self.frozen.takes, state, strict=True))
        for index, op in enumerate(self.frozen.ops):
            if self.between is not None:
                self.between()
            values[op.out] = self.compute(index, op, [values[read] for read in op.reads])
            for done in self.last_use[index]:
                del values[done]
        return (values[self.frozen.head], *(values[name] for name in self.frozen.gives))

    def compute(self, index: int, op: Op, reads: list[Tensor]) -> Tensor:
        if op.kind == "module":
            out: Tensor = self.given[str(index)](reads[0])
            return out
        weight: Tensor | None = getattr(self, f"weight{index}", None)
        bias: Tensor | None = getattr(self, f"bias{index}", None)
        return OPS[op.kind](op, reads, weight, bias)


def conv(op: Op, reads: list[Tensor], weight: Tensor | None, bias: Tensor | None) -> Tensor:
    assert op.node is not None and weight is not None
    return F.conv2d(reads[0], weight, bias, op.node.stride, op.node.padding, op.node.dilation, op.groups)


def linear(op: Op, reads: list[Tensor], weight: Tensor | None, bias: Tensor | None) -> Tensor:
    assert weight is not None
    return F.linear(reads[0], weight, bias)


def affine(op: Op, reads: list[Tensor], weight: Tensor | None, bias: Tensor | None) -> Tensor:
    assert weight is not None and bias is not None
    shape = (-1, *[1] * (reads[0].dim() - 2))
    return torch.addcmul(bias.view(shape), reads[0], weight.view(shape))


def groupnorm(op: Op, reads: list[Tensor], weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return F.group_norm(reads[0], op.groups, weight, bias, op.eps)


def prelu(op: Op, reads: list[Tensor], weight: Tensor | None, bias: Tensor | None) -> Tensor:
    assert weight is not None
    return F.prelu(reads[0], weight)


def mapped(op: Op, reads: list[Tensor], weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return MAPS[op.function](reads[0])


def zipped(op: Op, reads: list[Tensor], weight: Tensor | None, bias: Tensor | None) -> Tensor:
    total = reads[0]
    for read in reads[1:]:
        total = ZIPS[op.function](total, read)
    return total


def cat(op: Op, reads: list[Tensor], weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return torch.cat(reads, 1)


def slice_(op: Op, reads: list[Tensor], weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return reads[0][:, op.start : op.stop]


def pad(op: Op, reads: list[Tensor], weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return F.pad(reads[0], (0, 0) * (reads[0].dim() - 2) + (0, op.stop))


def zero(op: Op, reads: list[Tensor], weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = reads[0]
    return x.new_zeros(x.shape[0], op.stop, *x.shape[2:])


def flatten(op: Op, reads: list[Tensor], weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return reads[0].flatten(1)


def same(op: Op, reads: list[Tensor], weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return reads[0].clone()  # a copy, because torch.export wants outputs of their own


OPS: dict[str, Callable[[Op, list[Tensor], Tensor | None, Tensor | None], Tensor]] = {
    "conv": conv,
    "linear": linear,
    "affine": affine,
    "groupnorm": groupnorm,
    "prelu": prelu,
    "map": mapped,
    "zip": zipped,
    "cat": cat,
    "slice": slice_,
    "pad": pad,
    "zero": zero,
    "flatten": flatten,
    "same": same,
}


def last_uses(frozen: Frozen) -> tuple[tuple[str, ...], ...]:
    """For each operation, the values nobody reads after it: memory goes back early."""
    last: dict[str, int] = {}
    for index, op in enumerate(frozen.ops):
        for name in (*op.reads, op.out):
            last[name] = index
    kept = {frozen.head, *frozen.gives}
    uses: list[list[str]] = [[] for _ in frozen.ops]
    for name, index in last.items():
        if name not in kept:
            uses[index].append(name)
    return tuple(tuple(names) for names in uses)
