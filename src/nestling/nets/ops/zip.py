"""Functions of several tensors, channel by channel: sums, products and the like. A single channel is broadcast over all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from nestling.nets.ops import lazy
from nestling.nets.ops.frozen import OnnxWriter, Op
from nestling.nets.ops.operation import Channels, Extent, Operation

if TYPE_CHECKING:
    from torch import Tensor

    from nestling.nets.plan import Node

# As a function of torch, and as an ONNX operator.
FUNCTIONS = {
    "add": ("add", "Add"),
    "sub": ("sub", "Sub"),
    "mul": ("mul", "Mul"),
    "div": ("div", "Div"),
    "max": ("maximum", "Max"),
    "min": ("minimum", "Min"),
    "where": ("where", "Where"),  # a mask of ones and zeros, this, and that
}
BOOL = 9  # ONNX's number for it


@dataclass(frozen=True)
class Zip(Operation):
    function: str

    kind: ClassVar[str] = "zip"
    any_axis: ClassVar[bool] = True
    joins: ClassVar[bool] = True

    def channels(self, reads: Sequence[Node]) -> int:
        return max(read.channels for read in reads)

    def size(self, reads: Sequence[Node]) -> Extent:
        return tuple(max(sides) for sides in zip(*(read.size for read in reads), strict=True))

    def parents(self, node: Node, reads: Sequence[Node], row: int) -> tuple[Channels, ...]:
        return tuple((row if read.channels > 1 else 0,) for read in reads)

    def tied(self, node: Node, reads: Sequence[Node], row: int) -> tuple[Channels, ...]:
        """Born together, because a sum is born with the latest of its terms; a broadcast channel is not."""
        return tuple((row,) if read.channels == node.channels else () for read in reads)

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        function, total = getattr(lazy.torch, FUNCTIONS[self.function][0]), reads[0]
        if self.function == "where":
            chosen: Tensor = function(total > 0.5, *reads[1:])
            return chosen
        for read in reads[1:]:
            total = function(total, read)
        return total

    def write(self, graph: OnnxWriter, op: Op) -> None:
        total = op.reads[0]
        if self.function == "where":
            true = graph.add("Cast", [total], f"{op.out}.true", {"to": BOOL})
            graph.add("Where", [true, *op.reads[1:]], op.out)
            return
        for index, read in enumerate(op.reads[1:], start=1):
            last = index == len(op.reads) - 1
            out = op.out if last else f"{op.out}.{index}"
            total = graph.add(FUNCTIONS[self.function][1], [total, read], out)
