"""Batch norm: per channel, so one set of statistics is exact for every stage. Frozen, it is a scale and a shift."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from nestling.errors import NestlingError
from nestling.nets.ops import lazy
from nestling.nets.ops.frozen import OnnxWriter, Op
from nestling.nets.ops.operation import Extent, Operation

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nestling.nets.layers import Cut
    from nestling.nets.plan import Node


@dataclass(frozen=True)
class BatchNorm(Operation):
    eps: float = 1e-5
    momentum: float = 0.1
    affine: bool = True

    kind: ClassVar[str] = "batchnorm"
    modules: ClassVar[tuple[str, ...]] = ("BatchNorm1d", "BatchNorm2d", "SyncBatchNorm")
    layered: ClassVar[bool] = True
    tail: ClassVar[bool] = True

    @classmethod
    def of(cls, layer: Any, read: Node) -> Operation:
        ranks = {"BatchNorm1d": (0, 1), "BatchNorm2d": (2,)}
        if len(read.size) not in ranks.get(type(layer).__name__, (0, 1, 2)):
            raise NestlingError(f"it does not normalise tensors of shape (N, {read.channels}, *{read.size})")
        if layer.num_features != read.channels:
            raise NestlingError(f"it normalises {layer.num_features} channels but reads {read.channels}")
        if layer.momentum is None or not layer.track_running_stats:
            raise NestlingError("batch norm needs running statistics with a momentum")
        return cls(layer.eps, layer.momentum, layer.affine)

    def params(self, node: Node, reads: Sequence[Node]) -> tuple[int, ...]:
        return (2 if self.affine else 0,) * node.channels

    def layer(self, node: Node, reads: Sequence[Node]) -> nn.Module:
        from nestling.nets.layers import NestedBatchNorm2d

        return NestedBatchNorm2d(node.births, self.eps, self.momentum, self.affine)

    def staged(self, layer: Any, cut: Cut | None, reads: Sequence[Tensor], training: bool) -> Tensor:
        out: Tensor = layer.rows(reads[0], cut, training and layer.training)
        return out

    def freeze(self, layer: Any, cut: Cut | None, out: str, reads: tuple[str, ...], shape: Extent) -> list[Op]:
        """In float64 until it is folded: what comes out then differs from batch norm by one rounding."""
        assert cut is not None
        mean, var = layer.running_mean.cpu()[cut.rows].double(), layer.running_var.cpu()[cut.rows].double()
        weight, bias = (t.cpu()[cut.rows].double() for t in parameters(layer))
        scale = weight / (var + layer.eps).sqrt()
        return [Op(Affine(), out, reads, shape, scale, bias - mean * scale)]


def parameters(layer: Any) -> tuple[Tensor, Tensor]:
    """Scale and shift of a norm, ones and zeros where it has none."""
    if layer.affine:
        return layer.weight, layer.bias
    return lazy.torch.ones(len(layer.births)), lazy.torch.zeros(len(layer.births))


@dataclass(frozen=True)
class Affine(Operation):
    """A scale and a shift for every channel: frozen batch norm."""

    kind: ClassVar[str] = "affine"

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        assert weight is not None and bias is not None
        shape = (-1, *[1] * (reads[0].dim() - self.axis - 1))
        return lazy.torch.addcmul(bias.view(shape), reads[0], weight.view(shape))

    def write(self, graph: OnnxWriter, op: Op) -> None:
        """As batch norm with mean 0 and variance 1: ONNX Runtime fuses that with the ReLU behind it, and Mul + Add not."""
        assert op.weight is not None and op.bias is not None
        if self.axis > 1:
            shape = (-1, *[1] * (len(op.shape) - self.axis))
            scale, shift = (graph.constant(f"{op.out}.{i}", t.view(shape)) for i, t in enumerate((op.weight, op.bias)))
            graph.add("Add", [graph.add("Mul", [op.reads[0], scale], f"{op.out}.scaled"), shift], op.out)
            return
        zero = graph.constant(f"{op.out}.mean", lazy.torch.zeros(len(op.bias)))
        one = graph.constant(f"{op.out}.variance", lazy.torch.ones(len(op.bias)))
        graph.add("BatchNormalization", [op.reads[0], *graph.weights(op), zero, one], op.out, {"epsilon": 0.0})
