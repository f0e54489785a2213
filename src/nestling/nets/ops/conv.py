"""Convolution of images: (N, C, H, W)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from nestling.errors import NestlingError
from nestling.nets.ops import lazy
from nestling.nets.ops.frozen import OnnxWriter, Op
from nestling.nets.ops.operation import Extent, Operation
from nestling.nets.ops.weighted_op import WeightedOp

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nestling.nets.plan import Node


@dataclass(frozen=True)
class Conv(WeightedOp):
    kernel: tuple[int, ...] = (1, 1)
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    dilation: tuple[int, ...] = (1, 1)

    kind: ClassVar[str] = "conv"
    modules: ClassVar[tuple[str, ...]] = ("Conv2d",)
    functions: ClassVar[tuple[str, ...]] = ("conv2d",)
    words: ClassVar[tuple[str, ...]] = ("stride", "padding", "dilation", "groups")

    @classmethod
    def of(cls, layer: Any, read: Node) -> Operation:
        padding = layer.padding
        if isinstance(padding, str):
            total = [far * (kernel - 1) for far, kernel in zip(layer.dilation, layer.kernel_size, strict=True)]
            if padding == "same" and any(t % 2 for t in total):
                raise NestlingError('padding "same" with an even kernel pads one side more than the other')
            padding = tuple(t // 2 if padding == "same" else 0 for t in total)
        numbers = (layer.kernel_size, layer.stride, padding, layer.dilation)
        return cls(*numbers, groups=layer.groups, bias=layer.bias is not None)

    def apart(self, layer: Any) -> tuple[nn.Module | None, Operation]:
        """Padding with anything but zeros is done before."""
        if layer.padding_mode == "zeros" or not any(self.padding):
            return None, self
        from nestling.nets.ops.calls import Call

        sides = tuple(pad for pad in reversed(self.padding) for _ in range(2))
        pads = Call(lazy.F.pad, 0, (None, sides), {"mode": layer.padding_mode})
        return pads, replace(self, padding=(0,) * len(self.padding))

    @classmethod
    def torch_layer(cls, weight: Tensor, bias: bool, options: dict[str, Any]) -> nn.Module:
        from torch import nn

        width, kernel = weight.shape[1] * options.get("groups", 1), tuple(weight.shape[2:])
        made: nn.Module = getattr(nn, cls.modules[0])(width, len(weight), kernel, bias=bias, device="meta", **options)
        return made

    def size(self, reads: Sequence[Node]) -> Extent:
        numbers = zip(reads[0].size, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return tuple((side + 2 * pad - far * (kernel - 1) - 1) // step + 1 for side, kernel, step, pad, far in numbers)

    def layer(self, node: Node, reads: Sequence[Node]) -> nn.Module:
        from nestling.nets.layers import NestedConv2d

        numbers = (self.kernel, self.stride, self.padding, self.dilation, self.groups, self.bias)
        return NestedConv2d(reads[0].births, node.births, *numbers)

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        assert weight is not None
        return lazy.torch.conv2d(reads[0], weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def write(self, graph: OnnxWriter, op: Op) -> None:
        attributes = {
            "kernel_shape": list(self.kernel),
            "strides": list(self.stride),
            "pads": [*self.padding, *self.padding],
            "dilations": list(self.dilation),
            "group": self.groups,
        }
        graph.add("Conv", [op.reads[0], *graph.weights(op)], op.out, attributes)
