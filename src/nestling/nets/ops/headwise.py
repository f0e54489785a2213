"""Something over all channels of each head, the last dimension, alike for every head: norms of queries and keys, cosines.

Heads are born whole, so none of them depends on a later one. What parameters there are belong to no head: they are born with
the first, and every task owns them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from nestling.nets.ops.attention import check_heads
from nestling.nets.ops.frozen import OnnxWriter, Op
from nestling.nets.ops.module import Module
from nestling.nets.ops.operation import Channels, Extent, Operation

if TYPE_CHECKING:
    from torch import Tensor

    from nestling.nets.layers import Cut
    from nestling.nets.plan import Node


@dataclass(frozen=True)
class Headwise(Module):
    """A module of (.., channels of a head) that keeps the shape."""

    heads: int
    width: int
    held: int = 0  # parameters

    kind: ClassVar[str] = "headwise"
    grouped: ClassVar[bool] = True
    tail: ClassVar[bool] = False

    def parents(self, node: Node, reads: Sequence[Node], row: int) -> tuple[Channels, ...]:
        head = row // self.width
        return (tuple(range(head * self.width, (head + 1) * self.width)),)

    def narrow(self, node: Node, rows: Channels, wanted: Sequence[Channels]) -> Operation:
        return replace(self, heads=len({row // self.width for row in rows}))

    def check(self, plan: str, node: Node, reads: Sequence[Node]) -> None:
        check_heads(plan, node, reads, self.width)

    def params(self, node: Node, reads: Sequence[Node]) -> tuple[int, ...]:
        first = node.births.index(min(node.births))
        return tuple(self.held if row == first else 0 for row in range(node.channels))

    def whole(self, layer: Any, reads: Sequence[Tensor]) -> Tensor:
        made: Tensor = layer(reads[0].unflatten(-1, (self.heads, self.width)))
        return made.flatten(-2)

    def staged(self, layer: Any, cut: Cut | None, reads: Sequence[Tensor], training: bool) -> Tensor:
        return self.whole(layer, reads)

    def freeze(self, layer: Any, cut: Cut | None, out: str, reads: tuple[str, ...], shape: Extent) -> list[Op]:
        apart, whole = (*shape[:-1], self.heads, self.width), Reshaped(shape, axis=self.axis)
        [made] = super().freeze(layer, cut, f"{out}.done", (f"{out}.apart",), apart)
        plain = replace(made, does=Module(axis=self.axis))
        return [
            Op(Reshaped(apart, axis=self.axis), f"{out}.apart", reads, apart),
            plain,
            Op(whole, out, (plain.out,), shape),
        ]


@dataclass(frozen=True)
class Reshaped(Operation):
    """All of each image in another shape."""

    shape: Extent

    kind: ClassVar[str] = "reshaped"

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return reads[0].reshape(-1, *self.shape)

    def write(self, graph: OnnxWriter, op: Op) -> None:
        graph.add("Reshape", [op.reads[0], graph.ints(f"{op.out}.shape", 0, *self.shape)], op.out)
