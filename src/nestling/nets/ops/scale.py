"""A number for every channel that is added to it or multiplied with it: LayerScale, the normalisation of images, gains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from nestling.nets.ops import lazy
from nestling.nets.ops.batchnorm import Affine
from nestling.nets.ops.frozen import Op
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

    kind: ClassVar[str] = "scale"
    layered: ClassVar[bool] = True
    tail: ClassVar[bool] = True

    def params(self, node: Node, reads: Sequence[Node]) -> tuple[int, ...]:
        return (int(self.learnt),) * node.channels

    def layer(self, node: Node, reads: Sequence[Node]) -> nn.Module:
        from nestling.nets.layers import NestedScale

        return NestedScale(node.births, self)

    def reset(self, layer: Any, generator: torch.Generator) -> None:
        if self.learnt:
            layer.reset_parameters()

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        assert weight is not None
        out: Tensor = getattr(lazy.torch, self.function)(reads[0], weight.view(-1, *[1] * (reads[0].dim() - 2)))
        return out

    def staged(self, layer: Any, cut: Cut | None, reads: Sequence[Tensor], training: bool) -> Tensor:
        assert cut is not None
        return self.compute(reads, layer.weight[cut.rows])

    def adopted(self, name: str, value: Tensor, node: Node) -> Tensor:
        """One number for all becomes one for each."""
        return value.reshape(-1).expand(node.channels)

    def freeze(self, layer: Any, cut: Cut | None, out: str, reads: tuple[str, ...], shape: Extent) -> list[Op]:
        """A scale and a shift, in float64 until they are folded into a neighbour."""
        assert cut is not None
        number = layer.weight.detach().cpu()[cut.rows].double()
        one, zero = lazy.torch.ones_like(number), lazy.torch.zeros_like(number)
        forms = {"add": (one, number), "sub": (one, -number), "mul": (number, zero), "div": (1 / number, zero)}
        return [Op(Affine(), out, reads, shape, *forms[self.function])]
