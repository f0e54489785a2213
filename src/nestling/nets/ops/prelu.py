"""PReLU with a slope for every channel, so that each slope has a birth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from nestling.nets.ops import lazy
from nestling.nets.ops.frozen import OnnxWriter, Op, own
from nestling.nets.ops.operation import Extent, Operation

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nestling.nets.layers import Cut
    from nestling.nets.plan import Node


@dataclass(frozen=True)
class PReLU(Operation):
    kind: ClassVar[str] = "prelu"
    modules: ClassVar[tuple[str, ...]] = ("PReLU",)
    layered: ClassVar[bool] = True
    tail: ClassVar[bool] = True

    @classmethod
    def of(cls, layer: Any, read: Node) -> Operation:
        return cls()

    def params(self, node: Node, reads: Sequence[Node]) -> tuple[int, ...]:
        return (1,) * node.channels

    def layer(self, node: Node, reads: Sequence[Node]) -> nn.Module:
        from nestling.nets.layers import NestedPReLU

        return NestedPReLU(node.births)

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        assert weight is not None
        return lazy.F.prelu(reads[0], weight)

    def staged(self, layer: Any, cut: Cut | None, reads: Sequence[Tensor], training: bool) -> Tensor:
        assert cut is not None
        return self.compute(reads, layer.weight[cut.rows])

    def adopted(self, name: str, value: Tensor, node: Node) -> Tensor:
        """One slope for all becomes a slope for each."""
        return value.expand(node.channels)

    def freeze(self, layer: Any, cut: Cut | None, out: str, reads: tuple[str, ...], shape: Extent) -> list[Op]:
        assert cut is not None
        return [Op(self, out, reads, shape, own(layer.weight.cpu()[cut.rows]))]

    def write(self, graph: OnnxWriter, op: Op) -> None:
        assert op.weight is not None
        slope = graph.constant(f"{op.out}.slope", op.weight.view(-1, *[1] * (len(op.shape) - 1)))
        graph.add("PRelu", [op.reads[0], slope], op.out)
