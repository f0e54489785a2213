"""Each channel's pixels in another order or shape, and the channels at another axis: images to tokens, windows, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from nestling.errors import NestlingError
from nestling.nets.ops.frozen import OnnxWriter, Op
from nestling.nets.ops.operation import Extent, Operation

if TYPE_CHECKING:
    from torch import Tensor

    from nestling.nets.plan import Node


@dataclass(frozen=True)
class Rearrange(Operation):
    """What is read is shaped as `before`, its dimensions put in `order`, and shaped as `after`.

    Both shapes are without the batch, which stays first; 0 stands for however many channels there are."""

    before: Extent
    order: tuple[int, ...]
    after: Extent

    kind: ClassVar[str] = "rearrange"
    any_axis: ClassVar[bool] = True
    tail: ClassVar[bool] = True

    @classmethod
    def to_axis(cls, read: Node, axis: int) -> Rearrange:
        """The channels of a node moved to another axis; its pixels keep their order."""
        shape = read.shape(0)
        order = [d for d in range(len(shape) + 1) if d != read.op.axis]
        order.insert(axis, read.op.axis)
        return cls(shape, tuple(order), tuple(shape[d - 1] for d in order[1:]), axis=axis)

    def size(self, reads: Sequence[Node]) -> Extent:
        return tuple(side for side in self.after if side)

    def check(self, plan: str, node: Node, reads: Sequence[Node]) -> None:
        first = self.order[0] == 0 and self.after.count(0) == self.before.count(0) == 1
        if not first or self.after.index(0) + 1 != self.axis:
            raise NestlingError(
                f"{plan}: {node.name} does not keep the batch first and the channels in one place: {self}."
            )

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        [x] = reads
        batch, channels = x.shape[0], x.numel() // max(1, x.shape[0]) // product(self.before)
        parted = x.reshape(batch, *(side or channels for side in self.before))
        return parted.permute(self.order).reshape(batch, *(side or channels for side in self.after))

    def write(self, graph: OnnxWriter, op: Op) -> None:
        channels = op.shape[self.axis - 1]
        before, after = (tuple(side or channels for side in shape) for shape in (self.before, self.after))
        value = graph.add("Reshape", [op.reads[0], graph.ints(f"{op.out}.before", 0, *before)], f"{op.out}.parted")
        value = graph.add("Transpose", [value], f"{op.out}.turned", {"perm": list(self.order)})
        graph.add("Reshape", [value, graph.ints(f"{op.out}.after", 0, *after)], op.out)


def product(sides: Extent) -> int:
    total = 1
    for side in sides:
        total *= side or 1
    return total
