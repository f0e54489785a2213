"""Linear layer: over the channels of vectors (N, C), or of whatever has its channels last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from nestling.errors import NestlingError
from nestling.nets.ops import lazy
from nestling.nets.ops.frozen import OnnxWriter, Op
from nestling.nets.ops.operation import Operation
from nestling.nets.ops.weighted_op import WeightedOp

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from nestling.nets.plan import Node


@dataclass(frozen=True)
class Linear(WeightedOp):
    kind: ClassVar[str] = "linear"
    any_axis: ClassVar[bool] = True
    modules: ClassVar[tuple[str, ...]] = ("Linear",)
    functions: ClassVar[tuple[str, ...]] = ("linear",)

    @classmethod
    def of(cls, layer: Any, read: Node) -> Operation:
        if read.op.axis != len(read.size) + 1:
            raise NestlingError("it reads the last dimension of an image, not its channels; flatten or pool before it")
        return cls(bias=layer.bias is not None, axis=read.op.axis)

    @classmethod
    def torch_layer(cls, weight: Tensor, bias: bool, options: dict[str, Any]) -> nn.Module:
        from torch import nn

        return nn.Linear(weight.shape[1], weight.shape[0], bias=bias, device="meta")

    def check(self, plan: str, node: Node, reads: Sequence[Node]) -> None:
        super().check(plan, node, reads)
        if self.axis != len(node.size) + 1:
            raise NestlingError(
                f"{plan}: {node.name} (linear) has its channels at axis {self.axis} of {len(node.size) + 2}; a linear layer "
                "reads and gives the last axis."
            )

    def layer(self, node: Node, reads: Sequence[Node]) -> nn.Module:
        from nestling.nets.layers import NestedLinear

        return NestedLinear(reads[0].births, node.births, self.bias)

    def draw(
        self, weight: Tensor, bias: Tensor | None, fan_in: Tensor, generator: torch.Generator | None = None
    ) -> None:
        """torch's own range for linear layers, 1/sqrt(fan-in), with each row's real fan-in."""
        bound = fan_in.to(weight).rsqrt()
        weight.uniform_(-1, 1, generator=generator).mul_(bound[:, None])
        if bias is not None:
            bias.uniform_(-1, 1, generator=generator).mul_(bound)

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        assert weight is not None
        return lazy.F.linear(reads[0], weight, bias)

    def write(self, graph: OnnxWriter, op: Op) -> None:
        if self.axis == 1:
            graph.add("Gemm", [op.reads[0], *graph.weights(op)], op.out, {"transB": 1})
            return
        assert op.weight is not None
        weight = graph.constant(f"{op.out}.weight", op.weight.t())
        out = op.out if op.bias is None else f"{op.out}.product"
        graph.add("MatMul", [op.reads[0], weight], out)
        if op.bias is not None:
            graph.add("Add", [out, graph.constant(f"{op.out}.bias", op.bias)], op.out)
