"""A module of somebody else's that treats each channel by itself: an activation, dropout, pooling, a function as traced."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from nestling.nets.ops.frozen import OnnxWriter, Op
from nestling.nets.ops.operation import Channels, Extent, Operation

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nestling.nets.layers import Cut
    from nestling.nets.plan import Node


@dataclass(frozen=True)
class Module(Operation):
    kind: ClassVar[str] = "module"
    layered: ClassVar[bool] = True
    given: ClassVar[bool] = True
    any_axis: ClassVar[bool] = True
    tail: ClassVar[bool] = True

    def check(self, plan: str, node: Node, reads: Sequence[Node]) -> None:
        """Whoever enters it knows where it has the channels: one of some tokens has them at another axis than all tokens."""

    def cut(self, node: Node, reads: Sequence[Node], rows: Channels, columns: Channels) -> Cut | None:
        return None

    def reset(self, layer: Any, generator: torch.Generator) -> None:
        pass

    def staged(self, layer: Any, cut: Cut | None, reads: Sequence[Tensor], training: bool) -> Tensor:
        out: Tensor = layer(*reads)
        return out

    def kept(
        self, name: str, value: Tensor, node: Node, reads: Sequence[Node], rows: Channels, inputs: Channels
    ) -> Tensor:
        return value

    def freeze(self, layer: Any, cut: Cut | None, out: str, reads: tuple[str, ...], shape: Extent) -> list[Op]:
        return [Op(self, out, reads, shape, module=copy.deepcopy(layer).cpu())]

    def write(self, graph: OnnxWriter, op: Op) -> None:
        from nestling.nets.ops.forms import BEFORE, GIVEN, LAST, as_onnx

        assert op.module is not None
        steps, before, value = as_onnx(op.module) or [], op.reads[0], op.reads[0]
        for index, step in enumerate(steps):
            names = {GIVEN: op.reads[0], LAST: value, BEFORE: before, None: ""}
            reads = [
                names[each]
                if each is None or isinstance(each, str)
                else graph.constant(f"{op.out}.{index}.{place}", each)
                for place, each in enumerate(step.reads)
            ]
            while not reads[-1]:  # what is left out at the end is not named
                reads.pop()
            last = index == len(steps) - 1
            made = graph.add(step.kind, reads, op.out if last else f"{op.out}.{index}", step.attributes)
            before, value = value, made
