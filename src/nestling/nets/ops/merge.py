"""Some pixels of each channel as channels of their own, born with the channel they were of: patches merged into channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from nestling.nets.ops import lazy
from nestling.nets.ops.frozen import OnnxWriter, Op
from nestling.nets.ops.operation import Channels, Extent, Operation

if TYPE_CHECKING:
    from torch import Tensor

    from nestling.nets.plan import Node


@dataclass(frozen=True)
class Merge(Operation):
    """The side of pixels that stands before the channels (`outer`) or behind them becomes one dimension with them."""

    count: int  # pixels of that side
    outer: bool
    taken: Channels | None = None  # which of the new channels there are; None: all
    there: int = 0  # of how many channels these are taken

    kind: ClassVar[str] = "merge"
    grouped: ClassVar[bool] = True
    picks: ClassVar[bool] = True

    def channels(self, reads: Sequence[Node]) -> int:
        return self.count * reads[0].channels

    def size(self, reads: Sequence[Node]) -> Extent:
        at = self.axis - 1
        return (*reads[0].size[:at], *reads[0].size[at + 1 :])

    def parents(self, node: Node, reads: Sequence[Node], row: int) -> tuple[Channels, ...]:
        row = row if self.taken is None else self.taken[row]
        return ((row % reads[0].channels if self.outer else row // self.count,),)

    def narrow(self, node: Node, rows: Channels, wanted: Sequence[Channels]) -> Operation:
        total = node.channels // self.count if self.taken is None else self.there
        place, known = {channel: i for i, channel in enumerate(wanted[0])}, len(wanted[0])
        taken = []
        for row in rows:
            row = row if self.taken is None else self.taken[row]
            pixel, channel = (row // total, row % total) if self.outer else (row % self.count, row // self.count)
            taken.append(pixel * known + place[channel] if self.outer else place[channel] * self.count + pixel)
        whole = taken == list(range(known * self.count))
        return replace(self, taken=None if whole else tuple(taken), there=0 if whole else known)

    def check(self, plan: str, node: Node, reads: Sequence[Node]) -> None:
        """Whoever enters it has put the side beside the channels."""
        assert reads[0].op.axis == self.axis + self.outer and reads[0].size[self.axis - 1] == self.count

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        out = reads[0].flatten(self.axis, self.axis + 1)
        return (
            out if self.taken is None else out.index_select(self.axis, lazy.torch.tensor(self.taken, device=out.device))
        )

    def write(self, graph: OnnxWriter, op: Op) -> None:
        shape = [*op.shape]
        shape[self.axis - 1] = -1
        name = op.out if self.taken is None else f"{op.out}.all"
        made = graph.add("Reshape", [op.reads[0], graph.ints(f"{op.out}.shape", 0, *shape)], name)
        if self.taken is not None:
            graph.add("Gather", [made, graph.ints(f"{op.out}.taken", *self.taken)], op.out, {"axis": self.axis})
