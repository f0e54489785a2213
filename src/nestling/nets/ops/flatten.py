"""All pixels of all channels as one vector: each becomes a channel of its own, born with the channel it was of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, ClassVar

from nestling.nets.ops.frozen import OnnxWriter, Op
from nestling.nets.ops.operation import Channels, Extent, Operation

if TYPE_CHECKING:
    from torch import Tensor

    from nestling.nets.plan import Node


@dataclass(frozen=True)
class Flatten(Operation):
    kind: ClassVar[str] = "flatten"
    tail: ClassVar[bool] = True

    def channels(self, reads: Sequence[Node]) -> int:
        return reads[0].channels * prod(reads[0].size)

    def size(self, reads: Sequence[Node]) -> Extent:
        return ()

    def parents(self, node: Node, reads: Sequence[Node], row: int) -> tuple[Channels, ...]:
        return ((row // prod(reads[0].size),),)

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return reads[0].flatten(1)

    def write(self, graph: OnnxWriter, op: Op) -> None:
        graph.add("Flatten", op.reads, op.out)
