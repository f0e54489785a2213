"""Transposed convolution of images, (N, C, H, W): what enlarges them in decoders.

Our weight is (rows, columns, *kernel), as in every layer; torch's has the columns first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from nestling.nets.ops import lazy
from nestling.nets.ops.frozen import OnnxWriter, Op
from nestling.nets.ops.operation import Extent, Operation
from nestling.nets.ops.weighted_op import WeightedOp

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from nestling.nets.plan import Node


@dataclass(frozen=True)
class ConvTranspose2d(WeightedOp):
    kernel: tuple[int, ...] = (1, 1)
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    more: tuple[int, ...] = (0, 0)  # torch's output_padding: pixels added at one end
    dilation: tuple[int, ...] = (1, 1)

    kind: ClassVar[str] = "convtranspose2d"
    modules: ClassVar[tuple[str, ...]] = ("ConvTranspose2d",)
    functions: ClassVar[tuple[str, ...]] = ("conv_transpose2d",)
    words: ClassVar[tuple[str, ...]] = ("stride", "padding", "output_padding", "groups", "dilation")

    # --- from torch -----------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, layer: Any, read: Node) -> Operation:
        numbers = (layer.kernel_size, layer.stride, layer.padding, layer.output_padding, layer.dilation)
        return cls(*numbers, groups=layer.groups, bias=layer.bias is not None)

    @classmethod
    def torch_layer(cls, weight: Tensor, bias: bool, options: dict[str, Any]) -> nn.Module:
        from torch import nn

        rows, kernel = weight.shape[1] * options.get("groups", 1), (weight.shape[2], weight.shape[3])
        return nn.ConvTranspose2d(len(weight), rows, kernel, bias=bias, device="meta", **options)

    def reading(self, weight: Tensor, inputs: Tensor) -> Tensor:
        return weight[inputs]

    def adopted(self, name: str, value: Tensor, node: Node) -> Tensor:
        return turned(value, self.groups) if name == "weight" else value

    def given_back(self, name: str, value: Tensor) -> Tensor:
        return turned(value, self.groups) if name == "weight" else value

    def reordered(self, name: str, value: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        if name != "weight" or self.groups > 1:
            return super().reordered(name, value, rows, columns)
        return value[columns.to(value.device)][:, rows.to(value.device)]

    # --- planning -------------------------------------------------------------------------------------------------

    def size(self, reads: Sequence[Node]) -> Extent:
        numbers = zip(reads[0].size, self.kernel, self.stride, self.padding, self.more, self.dilation, strict=True)
        return tuple(
            (side - 1) * step - 2 * pad + far * (k - 1) + more + 1 for side, k, step, pad, more, far in numbers
        )

    def uses(self, node: Node, reads: Sequence[Node]) -> int:
        """Every pixel that is read meets every weight once."""
        return prod(reads[0].size)

    # --- with tensors ---------------------------------------------------------------------------------------------

    def draw(
        self, weight: Tensor, bias: Tensor | None, fan_in: Tensor, generator: torch.Generator | None = None
    ) -> None:
        """He's initialisation: with stride, a pixel is the sum of only that part of the kernel that meets it."""
        super().draw(weight, bias, fan_in / prod(self.stride), generator)

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        assert weight is not None
        numbers = (self.stride, self.padding, self.more, self.groups, self.dilation)
        return lazy.torch.conv_transpose2d(reads[0], turned(weight, self.groups), bias, *numbers)

    def write(self, graph: OnnxWriter, op: Op) -> None:
        assert op.weight is not None
        attributes = {
            "kernel_shape": list(self.kernel),
            "strides": list(self.stride),
            "pads": [*self.padding, *self.padding],
            "output_padding": list(self.more),
            "dilations": list(self.dilation),
            "group": self.groups,
        }
        names = [graph.constant(f"{op.out}.weight", turned(op.weight, self.groups))]
        names += [] if op.bias is None else [graph.constant(f"{op.out}.bias", op.bias)]
        graph.add("ConvTranspose", [op.reads[0], *names], op.out, attributes)


def turned(weight: Tensor, groups: int) -> Tensor:
    """A weight with rows and columns exchanged inside each group: torch's layout from ours, and ours from torch's."""
    return weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
