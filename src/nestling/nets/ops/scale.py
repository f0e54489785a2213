"""A number for every channel that is added to it or multiplied with it: LayerScale, the normalisation of images, gains.

Or one for every pixel of every channel: position embeddings, and biases for pairs of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from nestling.nets.ops import lazy
from nestling.nets.ops.batchnorm import Affine
from nestling.nets.ops.frozen import OnnxWriter, Op, own
from nestling.nets.ops.operation import Extent, Operation

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from nestling.nets.layers import Cut
    from nestling.nets.plan import Node


@dataclass(frozen=True)
class Scale(Operation):
    function: str  # add | sub | mul | div
    learnt: bool = True  # a parameter; else a buffer
    pixels: Extent = ()  # how many numbers a channel has along each of its sides, 1 where they are alike; (): one

    kind: ClassVar[str] = "scale"
    layered: ClassVar[bool] = True
    any_axis: ClassVar[bool] = True
    tail: ClassVar[bool] = True

    @property
    def start(self) -> float:
        return float(self.function in ("mul", "div"))

    def params(self, node: Node, reads: Sequence[Node]) -> tuple[int, ...]:
        return (prod(self.pixels) * self.learnt,) * node.channels

    def layer(self, node: Node, reads: Sequence[Node]) -> nn.Module:
        from nestling.nets.layers import NestedNumbers

        return NestedNumbers(node.births, self, self.pixels, self.learnt)

    def reset(self, layer: Any, generator: torch.Generator) -> None:
        if self.learnt:
            layer.reset_parameters()

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        assert weight is not None
        out: Tensor = getattr(lazy.torch, self.function)(reads[0], self.beside(weight, reads[0].dim()))
        return out

    def beside(self, weight: Tensor, rank: int) -> Tensor:
        """The numbers where the channels stand in a tensor of so many dimensions."""
        if self.pixels:
            return weight.movedim(0, self.axis - 1)
        return weight.view(-1, *[1] * (rank - self.axis - 1))

    def staged(self, layer: Any, cut: Cut | None, reads: Sequence[Tensor], training: bool) -> Tensor:
        assert cut is not None
        return self.compute(reads, layer.weight[cut.rows])

    def whole(self, layer: Any, reads: Sequence[Tensor]) -> Tensor:
        return self.compute(reads, layer.weight)

    def adopted(self, name: str, value: Tensor, node: Node) -> Tensor:
        """Torch's numbers are shaped like what they are combined with. One for all becomes one for each."""
        if not self.pixels:
            return value.reshape(-1).expand(node.channels)
        rank = len(self.pixels) + 1
        shape = tuple(value.shape)[-rank:]
        wide = value.reshape((1,) * (rank - len(shape)) + shape).movedim(self.axis - 1, 0)
        return wide.expand(node.channels, *self.pixels)

    def given_back(self, name: str, value: Tensor) -> Tensor:
        return value.movedim(0, self.axis - 1) if self.pixels else value

    def reordered(self, name: str, value: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        if not self.pixels:
            return super().reordered(name, value, rows, columns)
        at = self.axis - (len(self.pixels) + 2)  # counted from the end
        moves = value.dim() >= -at and value.shape[at] > 1
        return value.index_select(at, rows.to(value.device)) if moves else value

    def freeze(self, layer: Any, cut: Cut | None, out: str, reads: tuple[str, ...], shape: Extent) -> list[Op]:
        assert cut is not None
        return self.frozen(layer.weight.detach().cpu()[cut.rows], out, reads, shape)

    def frozen(self, number: Tensor, out: str, reads: tuple[str, ...], shape: Extent) -> list[Op]:
        """A scale and a shift, in float64 until they are folded into a neighbour; a number for every pixel stays as it is."""
        if self.pixels:
            return [Op(self, out, reads, shape, own(number))]
        number = number.double()
        one, zero = lazy.torch.ones_like(number), lazy.torch.zeros_like(number)
        forms = {"add": (one, number), "sub": (one, -number), "mul": (number, zero), "div": (1 / number, zero)}
        return [Op(Affine(axis=self.axis), out, reads, shape, *forms[self.function])]

    def write(self, graph: OnnxWriter, op: Op) -> None:
        assert op.weight is not None
        numbers = graph.constant(f"{op.out}.numbers", self.beside(op.weight, len(op.shape) + 1).contiguous())
        graph.add(self.function.capitalize(), [op.reads[0], numbers], op.out)
