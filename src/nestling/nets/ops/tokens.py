"""Learnt tokens put before those that are read, a number of each for every channel: class tokens, registers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from nestling.errors import NestlingError
from nestling.nets.ops import lazy
from nestling.nets.ops.frozen import OnnxWriter, Op, own
from nestling.nets.ops.operation import Extent, Operation

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nestling.nets.layers import Cut
    from nestling.nets.plan import Node


@dataclass(frozen=True)
class Tokens(Operation):
    count: int
    learnt: bool = True

    kind: ClassVar[str] = "tokens"
    layered: ClassVar[bool] = True
    any_axis: ClassVar[bool] = True

    def size(self, reads: Sequence[Node]) -> Extent:
        return (reads[0].size[0] + self.count,)

    def check(self, plan: str, node: Node, reads: Sequence[Node]) -> None:
        super().check(plan, node, reads)
        if len(node.size) != 1 or self.axis != 2:
            raise NestlingError(
                f"{plan}: {node.name} (tokens) reads channels of {reads[0].size}; expected (N, tokens, channels)."
            )

    def params(self, node: Node, reads: Sequence[Node]) -> tuple[int, ...]:
        return (self.count * self.learnt,) * node.channels

    def layer(self, node: Node, reads: Sequence[Node]) -> nn.Module:
        from nestling.nets.layers import NestedNumbers

        return NestedNumbers(node.births, self, (self.count,), self.learnt)

    @property
    def start(self) -> float:
        return 0.0

    def whole(self, layer: Any, reads: Sequence[Tensor]) -> Tensor:
        return self.compute(reads, layer.weight)

    def staged(self, layer: Any, cut: Cut | None, reads: Sequence[Tensor], training: bool) -> Tensor:
        assert cut is not None
        return self.compute(reads, layer.weight[cut.rows])

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        assert weight is not None
        [x] = reads
        return lazy.torch.cat([weight.t().type_as(x).expand(x.shape[0], -1, -1), x], 1)

    def adopted(self, name: str, value: Tensor, node: Node) -> Tensor:
        """Torch's shape is (1, tokens, channels)."""
        return value.reshape(self.count, node.channels).t()

    def given_back(self, name: str, value: Tensor) -> Tensor:
        return value.t()[None]

    def reordered(self, name: str, value: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return value[..., rows.to(value.device)]

    def freeze(self, layer: Any, cut: Cut | None, out: str, reads: tuple[str, ...], shape: Extent) -> list[Op]:
        assert cut is not None
        return [Op(self, out, reads, shape, own(layer.weight.cpu()[cut.rows]))]

    def write(self, graph: OnnxWriter, op: Op) -> None:
        assert op.weight is not None
        first, last = (graph.ints(f"{op.out}.{i}", i) for i in (0, 1))
        shape = graph.add("Shape", op.reads, f"{op.out}.shape")
        batch = graph.add("Slice", [shape, first, last], f"{op.out}.batch")
        wanted = graph.add("Concat", [batch, graph.ints(f"{op.out}.ones", 1, 1)], f"{op.out}.wanted", {"axis": 0})
        tokens = graph.constant(f"{op.out}.tokens", op.weight.t()[None].contiguous())
        spread = graph.add("Expand", [tokens, wanted], f"{op.out}.spread")
        graph.add("Concat", [spread, op.reads[0]], op.out, {"axis": 1})
