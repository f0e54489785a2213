"""The mean of each channel over all its pixels: an image becomes a vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from nestling.nets.ops.frozen import OnnxWriter, Op
from nestling.nets.ops.operation import Extent, Operation

if TYPE_CHECKING:
    from torch import Tensor

    from nestling.nets.plan import Node


@dataclass(frozen=True)
class Mean(Operation):
    kind: ClassVar[str] = "mean"
    tail: ClassVar[bool] = True

    def size(self, reads: Sequence[Node]) -> Extent:
        return ()

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return reads[0].mean(tuple(range(2, reads[0].dim())))

    def write(self, graph: OnnxWriter, op: Op) -> None:
        graph.add("Flatten", [graph.add("GlobalAveragePool", op.reads, f"{op.out}.pool")], op.out)
