"""A linear layer over the last dimension of each channel, the same for all channels: how Mixer models mix their tokens.

Its weights belong to no channel, so they are born with the first and every task owns them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from nestling.nets.ops import lazy
from nestling.nets.ops.frozen import OnnxWriter, Op, own
from nestling.nets.ops.module import Module
from nestling.nets.ops.operation import Extent

if TYPE_CHECKING:
    from torch import Tensor

    from nestling.nets.layers import Cut
    from nestling.nets.plan import Node


@dataclass(frozen=True)
class PixelLinear(Module):
    inputs: int
    outputs: int
    bias: bool = True

    kind: ClassVar[str] = "pixellinear"

    def size(self, reads: Sequence[Node]) -> Extent:
        return (*reads[0].size[:-1], self.outputs)

    def params(self, node: Node, reads: Sequence[Node]) -> tuple[int, ...]:
        first = node.births.index(min(node.births))
        held = (self.inputs + self.bias) * self.outputs
        return tuple(held if row == first else 0 for row in range(node.channels))

    def macs(self, node: Node, reads: Sequence[Node]) -> tuple[int, ...]:
        times = self.inputs
        for side in node.size:
            times *= side
        return (times,) * node.channels

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        assert weight is not None
        return lazy.F.linear(reads[0], weight, bias)

    def freeze(self, layer: Any, cut: Cut | None, out: str, reads: tuple[str, ...], shape: Extent) -> list[Op]:
        weight, bias = own(layer.weight), None if layer.bias is None else own(layer.bias)
        return [Op(self, out, reads, shape, weight, bias)]

    def write(self, graph: OnnxWriter, op: Op) -> None:
        assert op.weight is not None
        weight = graph.constant(f"{op.out}.weight", op.weight.t())
        made = graph.add("MatMul", [op.reads[0], weight], op.out if op.bias is None else f"{op.out}.product")
        if op.bias is not None:
            graph.add("Add", [made, graph.constant(f"{op.out}.bias", op.bias)], op.out)
