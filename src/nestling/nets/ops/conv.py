"""Convolution of images: (N, C, H, W)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from nestling.nets.ops.frozen import Graph, Op
from nestling.nets.ops.operation import Size
from nestling.nets.ops.weighted import Weighted

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nestling.nets.plan import Node


@dataclass(frozen=True)
class Conv(Weighted):
    kernel: tuple[int, ...] = (1, 1)
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    dilation: tuple[int, ...] = (1, 1)

    kind: ClassVar[str] = "conv"

    def size(self, reads: Sequence[Node]) -> Size:
        numbers = zip(reads[0].size, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return tuple((side + 2 * pad - far * (kernel - 1) - 1) // step + 1 for side, kernel, step, pad, far in numbers)

    def layer(self, node: Node, reads: Sequence[Node]) -> nn.Module:
        from nestling.nets.layers import NestedConv2d

        numbers = (self.kernel, self.stride, self.padding, self.dilation, self.groups, self.bias)
        return NestedConv2d(reads[0].births, node.births, *numbers)

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        import torch.nn.functional as F

        assert weight is not None
        return F.conv2d(reads[0], weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def write(self, graph: Graph, op: Op) -> None:
        attributes = {
            "kernel_shape": list(self.kernel),
            "strides": list(self.stride),
            "pads": [*self.padding, *self.padding],
            "dilations": list(self.dilation),
            "group": self.groups,
        }
        graph.add("Conv", [op.reads[0], *graph.weights(op)], op.out, attributes)
