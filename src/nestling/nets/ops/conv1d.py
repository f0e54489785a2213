"""Convolution of sequences: (N, C, L)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from nestling.nets.ops import lazy
from nestling.nets.ops.conv import Conv
from nestling.nets.ops.weighted_op import WeightedOp

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nestling.nets.plan import Node


@dataclass(frozen=True)
class Conv1d(Conv):
    kernel: tuple[int, ...] = (1,)
    stride: tuple[int, ...] = (1,)
    padding: tuple[int, ...] = (0,)
    dilation: tuple[int, ...] = (1,)

    kind: ClassVar[str] = "conv1d"
    modules: ClassVar[tuple[str, ...]] = ("Conv1d",)
    functions: ClassVar[tuple[str, ...]] = ("conv1d",)

    def layer(self, node: Node, reads: Sequence[Node]) -> nn.Module:
        return WeightedOp.layer(self, node, reads)

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        assert weight is not None
        return lazy.torch.conv1d(reads[0], weight, bias, self.stride, self.padding, self.dilation, self.groups)
