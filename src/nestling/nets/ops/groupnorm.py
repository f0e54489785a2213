"""Group norm whose groups lie inside stripes: a group is computed as one, so its channels are born as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from nestling.errors import NestlingError
from nestling.nets.births import Births
from nestling.nets.ops import lazy
from nestling.nets.ops.batchnorm import parameters
from nestling.nets.ops.frozen import OnnxWriter, Op, own
from nestling.nets.ops.operation import Channels, Extent, Operation

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nestling.nets.layers import Cut
    from nestling.nets.plan import Node


ACROSS = (
    "it normalises across channels, so that early channels would depend on later ones; use BatchNorm2d, or GroupNorm "
    "with groups that lie inside stripes"
)


@dataclass(frozen=True)
class GroupNorm(Operation):
    groups: int
    eps: float = 1e-5
    affine: bool = True

    kind: ClassVar[str] = "groupnorm"
    modules: ClassVar[tuple[str, ...]] = ("GroupNorm", "InstanceNorm2d")
    layered: ClassVar[bool] = True
    tail: ClassVar[bool] = True

    @classmethod
    def of(cls, layer: Any, read: Node) -> Operation:
        """Instance norm is group norm with a group for every channel."""
        if getattr(layer, "track_running_stats", False):
            raise NestlingError("instance norm with running statistics is not nested")
        groups = getattr(layer, "num_groups", read.channels)
        return cls(groups, layer.eps, layer.affine)

    def check(self, plan: str, node: Node, reads: Sequence[Node]) -> None:
        super().check(plan, node, reads)
        for group, found in mixed_groups(node.births, self.groups):
            raise NestlingError(
                f"{plan}: group {group + 1} of {self.groups} of {node.name} (group norm) holds channels born at stages "
                f"{found}, so an early stage would depend on later ones. Use groups that lie inside stripes."
            )

    def narrow(self, node: Node, rows: Channels, wanted: Sequence[Channels]) -> Operation:
        size = node.channels // self.groups
        return replace(self, groups=len({row // size for row in rows}))

    def params(self, node: Node, reads: Sequence[Node]) -> tuple[int, ...]:
        return (2 if self.affine else 0,) * node.channels

    @property
    def grouped(self) -> bool:
        return self.groups > 1

    def layer(self, node: Node, reads: Sequence[Node]) -> nn.Module:
        from nestling.nets.layers import NestedGroupNorm

        return NestedGroupNorm(node.births, self.groups, self.eps, self.affine)

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return lazy.F.group_norm(reads[0], self.groups, weight, bias, self.eps)

    def staged(self, layer: Any, cut: Cut | None, reads: Sequence[Tensor], training: bool) -> Tensor:
        assert cut is not None
        return self.compute(reads, *((layer.weight[cut.rows], layer.bias[cut.rows]) if layer.affine else ()))

    def freeze(self, layer: Any, cut: Cut | None, out: str, reads: tuple[str, ...], shape: Extent) -> list[Op]:
        assert cut is not None
        weight, bias = (own(t.cpu()[cut.rows]) for t in parameters(layer))
        return [Op(self, out, reads, shape, weight, bias)]

    def write(self, graph: OnnxWriter, op: Op) -> None:
        """As instance norm of the groups, then scale and shift: GroupNormalization is too new for many runtimes."""
        assert op.weight is not None and op.bias is not None
        apart = graph.ints(f"{op.out}.apart", 0, self.groups, -1)
        groups = graph.add("Reshape", [op.reads[0], apart], f"{op.out}.groups")
        one = graph.constant(f"{op.out}.one", lazy.torch.ones(self.groups))
        zero = graph.constant(f"{op.out}.zero", lazy.torch.zeros(self.groups))
        normed = graph.add("InstanceNormalization", [groups, one, zero], f"{op.out}.normed", {"epsilon": self.eps})
        together = graph.ints(f"{op.out}.together", 0, *op.shape)
        flat = graph.add("Reshape", [normed, together], f"{op.out}.flat")
        shape = (-1, *[1] * (len(op.shape) - 1))
        scale = graph.constant(f"{op.out}.scale", op.weight.view(shape))
        shift = graph.constant(f"{op.out}.shift", op.bias.view(shape))
        graph.add("Add", [graph.add("Mul", [flat, scale], f"{op.out}.scaled"), shift], op.out)


def mixed_groups(births: Births, groups: int) -> list[tuple[int, list[int]]]:
    """The groups whose channels are not born together, and when they are born."""
    size = len(births) // groups
    found = [sorted(set(births[group * size : (group + 1) * size])) for group in range(groups)]
    return [(group, stages) for group, stages in enumerate(found) if len(stages) > 1]
