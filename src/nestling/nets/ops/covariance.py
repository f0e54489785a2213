"""Attention over channels, a head at a time: how much each channel of a head looks at each other, and values averaged by that.

`Covariance` multiplies queries by keys along the tokens, `Mingle` averages channels of values. Heads are born whole, so none of
them depends on a later one. What is between them (softmax, a temperature of each head) treats each row by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, ClassVar

from nestling.nets.ops import lazy
from nestling.nets.ops.attention import apart, check_heads, write_apart
from nestling.nets.ops.frozen import OnnxWriter, Op
from nestling.nets.ops.operation import Channels, Extent, Operation

if TYPE_CHECKING:
    from torch import Tensor

    from nestling.nets.plan import Node


@dataclass(frozen=True)
class Covariance(Operation):
    """q^T k of each head: (N, *, tokens, channels) twice to (N, channels, *, channels of a head)."""

    heads: int
    scale: float = 1.0

    kind: ClassVar[str] = "covariance"
    grouped: ClassVar[bool] = True
    joins: ClassVar[bool] = True

    def size(self, reads: Sequence[Node]) -> Extent:
        return (*reads[0].size[:-1], reads[1].channels // self.heads)

    def parents(self, node: Node, reads: Sequence[Node], row: int) -> tuple[Channels, ...]:
        return tuple(head_of(row, node.channels, read.channels, self.heads) for read in reads)

    def narrow(self, node: Node, rows: Channels, wanted: Sequence[Channels]) -> Operation:
        return replace(self, heads=heads_among(rows, node.channels, self.heads))

    def check(self, plan: str, node: Node, reads: Sequence[Node]) -> None:
        for read in reads:
            check_heads(plan, node, (read,), read.channels // self.heads)

    def macs(self, node: Node, reads: Sequence[Node]) -> tuple[int, ...]:
        return (prod(reads[0].size) * (reads[1].channels // self.heads),) * node.channels

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        q, k = (apart(x, self.heads) for x in reads)
        made = (q if self.scale == 1.0 else q * self.scale).transpose(-1, -2) @ k
        return made.movedim(-2, 2).flatten(1, 2)

    def write(self, graph: OnnxWriter, op: Op) -> None:
        lead, each, keys = op.shape[1:-1], op.shape[0] // self.heads, op.shape[-1]
        q = write_apart(graph, op.reads[0], f"{op.out}.q", (*lead, -1, self.heads, each), last=True)
        if self.scale != 1.0:
            number = graph.constant(f"{op.out}.scale", lazy.torch.tensor(self.scale))
            q = graph.add("Mul", [q, number], f"{op.out}.scaled")
        k = write_apart(graph, op.reads[1], f"{op.out}.k", (*lead, -1, self.heads, keys), last=False)
        made, rank = graph.add("MatMul", [q, k], f"{op.out}.heads"), len(lead) + 4
        order = [0, 1, rank - 2, *range(2, rank - 2), rank - 1]
        made = graph.add("Transpose", [made], f"{op.out}.turned", {"perm": order})
        graph.add("Reshape", [made, graph.ints(f"{op.out}.shape", 0, *op.shape)], op.out)


@dataclass(frozen=True)
class Mingle(Operation):
    """(N, channels, *, channels of a head) and (N, *, tokens, channels) to (N, *, tokens, channels)."""

    heads: int

    kind: ClassVar[str] = "mingle"
    grouped: ClassVar[bool] = True
    joins: ClassVar[bool] = True

    def size(self, reads: Sequence[Node]) -> Extent:
        return reads[1].size

    def parents(self, node: Node, reads: Sequence[Node], row: int) -> tuple[Channels, ...]:
        return tuple(head_of(row, node.channels, read.channels, self.heads) for read in reads)

    def narrow(self, node: Node, rows: Channels, wanted: Sequence[Channels]) -> Operation:
        return replace(self, heads=heads_among(rows, node.channels, self.heads))

    def check(self, plan: str, node: Node, reads: Sequence[Node]) -> None:
        check_heads(plan, node, (reads[1],), reads[1].channels // self.heads)
        assert self.axis == len(node.size) + 1 and reads[0].op.axis == 1

    def macs(self, node: Node, reads: Sequence[Node]) -> tuple[int, ...]:
        return (prod(node.size) * reads[0].size[-1],) * node.channels

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        looks = reads[0].unflatten(1, (self.heads, -1)).movedim(2, -1)  # (N, heads, *, read, made)
        return (apart(reads[1], self.heads) @ looks).movedim(1, -2).flatten(-2)

    def write(self, graph: OnnxWriter, op: Op) -> None:
        lead, each, rank = op.shape[:-2], op.shape[-1] // self.heads, len(op.shape) + 2
        parted = graph.ints(f"{op.out}.parts", 0, self.heads, each, *lead, -1)
        looks = graph.add("Reshape", [op.reads[0], parted], f"{op.out}.parted")
        looks = graph.add("Transpose", [looks], f"{op.out}.looks", {"perm": [0, 1, *range(3, rank), 2]})
        apart_heads = (*lead, op.shape[-2], self.heads, -1)
        v = write_apart(graph, op.reads[1], f"{op.out}.v", apart_heads, last=False)
        made = graph.add("MatMul", [v, looks], f"{op.out}.heads")
        made = graph.add("Transpose", [made], f"{op.out}.turned", {"perm": [0, *range(2, rank - 1), 1, rank - 1]})
        graph.add("Reshape", [made, graph.ints(f"{op.out}.shape", 0, *op.shape)], op.out)


def head_of(row: int, mine: int, theirs: int, heads: int) -> Channels:
    """All channels that a read has in the head of one of our channels."""
    head, each = row // (mine // heads), theirs // heads
    return tuple(range(head * each, (head + 1) * each))


def heads_among(rows: Channels, channels: int, heads: int) -> int:
    return len({row // (channels // heads) for row in rows})
