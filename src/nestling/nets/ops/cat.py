"""Several tensors as one, their channels behind each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from nestling.nets.ops import lazy
from nestling.nets.ops.frozen import OnnxWriter, Op
from nestling.nets.ops.operation import Channels, Extent, Operation
from nestling.nets.ops.select import Same

if TYPE_CHECKING:
    from torch import Tensor

    from nestling.nets.layers import Cut
    from nestling.nets.plan import Node


@dataclass(frozen=True)
class Cat(Operation):
    kind: ClassVar[str] = "cat"
    any_axis: ClassVar[bool] = True
    joins: ClassVar[bool] = True

    def channels(self, reads: Sequence[Node]) -> int:
        return sum(read.channels for read in reads)

    def parents(self, node: Node, reads: Sequence[Node], row: int) -> tuple[Channels, ...]:
        found: list[Channels] = []
        for read in reads:
            found.append((row,) if 0 <= row < read.channels else ())
            row -= read.channels
        return tuple(found)

    def spread(self, node: Node, reads: Sequence[Node], mine: Sequence[int], theirs: Sequence[list[int]]) -> None:
        """As ever, without asking for each row which of many tensors it is of."""
        rows = iter(mine)
        for read, bits in zip(reads, theirs, strict=True):
            for channel, owned in zip(range(read.channels), rows, strict=False):
                bits[channel] |= owned

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return lazy.torch.cat(list(reads), self.axis) if len(reads) > 1 else reads[0]

    def freeze(self, layer: Any, cut: Cut | None, out: str, reads: tuple[str, ...], shape: Extent) -> list[Op]:
        return [Op(self if len(reads) > 1 else Same(axis=self.axis), out, reads, shape)]

    def write(self, graph: OnnxWriter, op: Op) -> None:
        graph.add("Concat", op.reads, op.out, {"axis": self.axis})
