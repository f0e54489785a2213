"""Numbers that a module computes from its own tensors, beside what was computed from the image: relative position biases,
positions made by a small network or brought to another size, gates.

They are made of parameters that belong to no channel, so these are born with the first and every task owns them; each channel
takes its own of the numbers. Frozen, they are constants and cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from nestling.nets.ops import lazy
from nestling.nets.ops.frozen import OnnxWriter, Op, own
from nestling.nets.ops.module import Module
from nestling.nets.ops.operation import Channels, Extent
from nestling.nets.ops.scale import Scale

if TYPE_CHECKING:
    from torch import Tensor

    from nestling.nets.layers import Cut
    from nestling.nets.plan import Node


@dataclass(frozen=True)
class Computed(Module):
    """Its module takes nothing and gives (channels, *pixels), or (channels,) where `pixels` is empty."""

    function: str  # add | sub | mul | div
    pixels: Extent = ()  # as Scale's
    before: bool = False  # whether the numbers stand first, as in 1 - x
    held: int = 0  # parameters
    work: int = 0  # multiply-accumulates of the numbers, which every stage computes for itself
    rows: Channels | None = None  # which of the module's channels these are; None: all

    kind: ClassVar[str] = "computed"

    def size(self, reads: Sequence[Node]) -> Extent:
        sides = self.pixels or (1,) * len(reads[0].size)
        return tuple(max(both) for both in zip(reads[0].size, sides, strict=True))

    def narrow(self, node: Node, rows: Channels, wanted: Sequence[Channels]) -> Computed:
        return replace(self, rows=rows if self.rows is None else tuple(self.rows[row] for row in rows))

    def params(self, node: Node, reads: Sequence[Node]) -> tuple[int, ...]:
        first = node.births.index(min(node.births))
        return tuple(self.held if row == first else 0 for row in range(node.channels))

    def macs(self, node: Node, reads: Sequence[Node]) -> tuple[int, ...]:
        firsts = {node.births.index(birth) for birth in set(node.births)}
        return tuple(self.work if row in firsts else 0 for row in range(node.channels))

    def numbers(self, layer: Any) -> Tensor:
        made: Tensor = layer.forward()  # which may be a view of a parameter, that torch's hooks do not take
        return made if self.rows is None else made[lazy.torch.tensor(self.rows, device=made.device)]

    def whole(self, layer: Any, reads: Sequence[Tensor]) -> Tensor:
        return self.compute(reads, self.numbers(layer))

    def staged(self, layer: Any, cut: Cut | None, reads: Sequence[Tensor], training: bool) -> Tensor:
        return self.whole(layer, reads)

    @property
    def plain(self) -> Scale:
        return Scale(self.function, False, self.pixels, axis=self.axis)

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        assert weight is not None
        both = (reads[0], self.plain.beside(weight, reads[0].dim()))
        out: Tensor = getattr(lazy.torch, self.function)(*(both[::-1] if self.before else both))
        return out

    def freeze(self, layer: Any, cut: Cut | None, out: str, reads: tuple[str, ...], shape: Extent) -> list[Op]:
        number = self.numbers(layer).detach().cpu()
        return (
            [Op(self, out, reads, shape, own(number))] if self.before else self.plain.frozen(number, out, reads, shape)
        )

    def write(self, graph: OnnxWriter, op: Op) -> None:
        assert op.weight is not None
        numbers = graph.constant(f"{op.out}.numbers", self.plain.beside(op.weight, len(op.shape) + 1).contiguous())
        graph.add(self.function.capitalize(), [numbers, op.reads[0]], op.out)
