"""Several tensors as one, the pixels of each channel behind each other along one side: tokens of several origins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from nestling.errors import NestlingError
from nestling.nets.ops import lazy
from nestling.nets.ops.frozen import OnnxWriter, Op
from nestling.nets.ops.operation import Extent, Operation

if TYPE_CHECKING:
    from torch import Tensor

    from nestling.nets.plan import Node


@dataclass(frozen=True)
class Join(Operation):
    side: int  # which of a channel's sides grows

    kind: ClassVar[str] = "join"
    any_axis: ClassVar[bool] = True
    joins: ClassVar[bool] = True

    @property
    def dim(self) -> int:
        """The same in a tensor."""
        return self.side + 1 if self.side + 1 < self.axis else self.side + 2

    def size(self, reads: Sequence[Node]) -> Extent:
        first = reads[0].size
        return (*first[: self.side], sum(read.size[self.side] for read in reads), *first[self.side + 1 :])

    def check(self, plan: str, node: Node, reads: Sequence[Node]) -> None:
        super().check(plan, node, reads)
        others = {(read.channels, *read.size[: self.side], 0, *read.size[self.side + 1 :]) for read in reads}
        if len(others) > 1:
            raise NestlingError(
                f"{plan}: {node.name} (join) puts together tensors whose channels or other sides differ: {sorted(others)}."
            )

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return lazy.torch.cat(list(reads), self.dim)

    def write(self, graph: OnnxWriter, op: Op) -> None:
        graph.add("Concat", list(op.reads), op.out, {"axis": self.dim})
