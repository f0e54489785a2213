"""Attention, a head at a time: heads are born whole, so none of them depends on a later one.

`Scores` compares queries with keys, tokens with their channels last, and gives one channel for every head: how much each token
looks at each other. `Weigh` averages values by such channels. What is between them (softmax, a bias for every pair of tokens,
dropout) treats each head by itself, like any channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, ClassVar

from nestling.errors import NestlingError
from nestling.nets.ops import lazy
from nestling.nets.ops.frozen import OnnxWriter, Op
from nestling.nets.ops.operation import Channels, Extent, Operation

if TYPE_CHECKING:
    from torch import Tensor

    from nestling.nets.plan import Node


@dataclass(frozen=True)
class Scores(Operation):
    """q k^T of each head: (N, *, tokens, channels) twice to (N, heads, *, tokens, tokens)."""

    heads: int
    width: int  # channels of a head
    scale: float = 1.0

    kind: ClassVar[str] = "scores"
    grouped: ClassVar[bool] = True
    joins: ClassVar[bool] = True

    def channels(self, reads: Sequence[Node]) -> int:
        return self.heads

    def size(self, reads: Sequence[Node]) -> Extent:
        return (*reads[0].size, reads[1].size[-1])

    def parents(self, node: Node, reads: Sequence[Node], row: int) -> tuple[Channels, ...]:
        return (tuple(range(row * self.width, (row + 1) * self.width)),) * 2

    def narrow(self, node: Node, rows: Channels, wanted: Sequence[Channels]) -> Operation:
        return replace(self, heads=len(rows))

    def check(self, plan: str, node: Node, reads: Sequence[Node]) -> None:
        check_heads(plan, node, reads, self.width)

    def macs(self, node: Node, reads: Sequence[Node]) -> tuple[int, ...]:
        return (prod(node.size) * self.width,) * node.channels

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        q, k = (apart(x, self.heads) for x in reads)
        return (q if self.scale == 1.0 else q * self.scale) @ k.transpose(-1, -2)

    def write(self, graph: OnnxWriter, op: Op) -> None:
        lead, (queries, keys) = op.shape[1:-2], op.shape[-2:]
        q = write_apart(graph, op.reads[0], f"{op.out}.q", (*lead, queries, self.heads, self.width), last=False)
        if self.scale != 1.0:
            q = graph.add(
                "Mul", [q, graph.constant(f"{op.out}.scale", lazy.torch.tensor(self.scale))], f"{op.out}.scaled"
            )
        k = write_apart(graph, op.reads[1], f"{op.out}.k", (*lead, keys, self.heads, self.width), last=True)
        graph.add("MatMul", [q, k], op.out)


@dataclass(frozen=True)
class Weigh(Operation):
    """Values averaged by what each head looks at: (N, heads, *, tokens, tokens) and (N, *, tokens, channels)."""

    heads: int

    kind: ClassVar[str] = "weigh"
    grouped: ClassVar[bool] = True
    joins: ClassVar[bool] = True

    def channels(self, reads: Sequence[Node]) -> int:
        return reads[1].channels

    def size(self, reads: Sequence[Node]) -> Extent:
        return reads[0].size[:-1]

    def parents(self, node: Node, reads: Sequence[Node], row: int) -> tuple[Channels, ...]:
        return (row // (node.channels // self.heads),), (row,)

    def narrow(self, node: Node, rows: Channels, wanted: Sequence[Channels]) -> Operation:
        width = node.channels // self.heads
        return replace(self, heads=len({row // width for row in rows}))

    def check(self, plan: str, node: Node, reads: Sequence[Node]) -> None:
        check_heads(plan, node, (reads[1],), node.channels // self.heads)
        if self.axis != len(node.size) + 1 or reads[0].op.axis != 1:
            raise NestlingError(
                f"{plan}: {node.name} (attention) gives its channels at axis {self.axis}; expected the last."
            )

    def macs(self, node: Node, reads: Sequence[Node]) -> tuple[int, ...]:
        return (prod(reads[0].size),) * node.channels

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        looks, values = reads
        return (looks @ apart(values, self.heads)).movedim(1, -2).flatten(-2)

    def write(self, graph: OnnxWriter, op: Op) -> None:
        lead, rank = op.shape[:-2], len(op.shape) + 2
        values = (*lead, -1, self.heads, op.shape[-1] // self.heads)
        v = write_apart(graph, op.reads[1], f"{op.out}.v", values, last=False)
        made = graph.add("MatMul", [op.reads[0], v], f"{op.out}.heads")
        order = [0, *range(2, rank - 1), 1, rank - 1]
        made = graph.add("Transpose", [made], f"{op.out}.turned", {"perm": order})
        graph.add("Reshape", [made, graph.ints(f"{op.out}.shape", 0, *op.shape)], op.out)


def apart(x: Tensor, heads: int) -> Tensor:
    """(N, *, tokens, channels) as (N, heads, *, tokens, channels of a head)."""
    return x.unflatten(-1, (heads, -1)).movedim(-2, 1)


def write_apart(graph: OnnxWriter, x: str, name: str, shape: Extent, last: bool) -> str:
    """The same as ONNX; with `last`, a head's channels before its tokens."""
    parted = graph.add("Reshape", [x, graph.ints(f"{name}.shape", 0, *shape)], f"{name}.parted")
    rank = len(shape) + 1
    order = [0, rank - 2, *range(1, rank - 2), rank - 1]
    if last:
        order[-2:] = order[:-3:-1]
    return graph.add("Transpose", [parted], name, {"perm": order})


def check_heads(plan: str, node: Node, reads: Sequence[Node], width: int) -> None:
    for read in reads:
        if read.op.axis != len(read.size) + 1:
            raise NestlingError(
                f"{plan}: {node.name} (attention) reads {read.name}, whose channels stand at axis {read.op.axis} of "
                f"{len(read.size) + 2}; expected the last."
            )
        for head in range(read.channels // width):
            found = sorted(set(read.births[head * width : (head + 1) * width]))
            if len(found) > 1:
                raise NestlingError(
                    f"{plan}: head {head + 1} of {node.name} (attention) reads channels of {read.name} born at stages {found}, "
                    "so an early stage would depend on later ones. Heads are born whole."
                )
