"""Channels copied by number, or zeros: what splits, slices, reorders and widens. Frozen: slices, with zeros put behind them.

The forms it freezes into (`Slice`, `Pad`, `Zero`, `Same`) are operations of frozen stages only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from nestling.nets.ops import lazy
from nestling.nets.ops.frozen import OnnxWriter, Op
from nestling.nets.ops.operation import Channels, Extent, Operation

if TYPE_CHECKING:
    from torch import Tensor

    from nestling.nets.layers import Cut
    from nestling.nets.plan import Node


@dataclass(frozen=True)
class Select(Operation):
    source: tuple[int, ...]  # the input channel copied to each output channel, -1 for zeros

    kind: ClassVar[str] = "select"
    any_axis: ClassVar[bool] = True
    picks: ClassVar[bool] = True

    def channels(self, reads: Sequence[Node]) -> int:
        return len(self.source)

    def parents(self, node: Node, reads: Sequence[Node], row: int) -> tuple[Channels, ...]:
        channel = self.source[row]
        return ((channel,) if channel >= 0 else (),)

    def wants(self, node: Node, reads: Sequence[Node], rows: Channels, stage: int) -> tuple[Channels, ...]:
        """Nothing but zeros still take their shape from somewhere: from one channel that exists."""
        [wanted] = super().wants(node, reads, rows, stage)
        return (wanted or tuple(c for c, birth in enumerate(reads[0].births) if birth <= stage)[:1],)

    def narrow(self, node: Node, rows: Channels, wanted: Sequence[Channels]) -> Operation:
        place = {channel: i for i, channel in enumerate(wanted[0])}
        return replace(self, source=tuple(place.get(self.source[row], -1) for row in rows))

    def runs(self) -> list[tuple[int, int]]:
        """Neighbouring channels as (first, how many); zeros are runs that begin at -1."""
        runs: list[tuple[int, int]] = []
        for channel in self.source:
            first, count = runs[-1] if runs else (-2, 0)
            if runs and (first == channel == -1 or (channel >= 0 and first >= 0 and first + count == channel)):
                runs[-1] = (first, count + 1)
            else:
                runs.append((channel, 1))
        return runs

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Slices and one concatenation, or a mere slice where that is all."""
        x = reads[0]
        parts = [
            zeros(x, count, self.axis) if first < 0 else x.narrow(self.axis, first, count)
            for first, count in self.runs()
        ]
        return parts[0] if len(parts) == 1 else lazy.torch.cat(parts, self.axis)

    def freeze(self, layer: Any, cut: Cut | None, out: str, reads: tuple[str, ...], shape: Extent) -> list[Op]:
        """Slices, each with the zeros that follow it, put together."""
        from nestling.nets.ops.cat import Cat

        [read], ops, parts = reads, list[Op](), list[str]()
        runs, known, axis = self.runs(), max(self.source) + 1, self.axis
        sized = lambda count: (*shape[: axis - 1], count, *shape[axis:])  # noqa: E731
        for index, (first, count) in enumerate(runs):
            name = f"{out}/{index}"
            if first == 0 and count == known:
                parts.append(read)
                continue
            if first >= 0:
                ops.append(Op(Slice(first, first + count, axis=axis), name, (read,), sized(count)))
            elif parts:
                before = runs[index - 1][1]
                ops.append(Op(Pad(before, count, axis=axis), name, (parts.pop(),), sized(before + count)))
            else:
                ops.append(Op(Zero(count, axis=axis), name, (read,), sized(count)))
            parts.append(name)
        if len(parts) > 1:
            return [*ops, Op(Cat(axis=axis), out, tuple(parts), shape)]
        return [*ops[:-1], replace(ops[-1], out=out)] if ops else [Op(Same(axis=axis), out, (read,), shape)]


def zeros(x: Tensor, count: int, axis: int) -> Tensor:
    """So many channels of zeros, as large as those of x."""
    return x.new_zeros(*x.shape[:axis], count, *x.shape[axis + 1 :])


@dataclass(frozen=True)
class Slice(Operation):
    """Channels start to stop."""

    start: int
    stop: int

    kind: ClassVar[str] = "slice"

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return reads[0].narrow(self.axis, self.start, self.stop - self.start)

    def write(self, graph: OnnxWriter, op: Op) -> None:
        bounds = (("start", self.start), ("stop", self.stop), ("axis", self.axis))
        graph.add("Slice", [op.reads[0], *(graph.ints(f"{op.out}.{word}", value) for word, value in bounds)], op.out)


@dataclass(frozen=True)
class Pad(Operation):
    """Zero channels behind those that are there."""

    there: int
    more: int

    kind: ClassVar[str] = "pad"

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return lazy.F.pad(reads[0], (0, 0) * (reads[0].dim() - self.axis - 1) + (0, self.more))

    def write(self, graph: OnnxWriter, op: Op) -> None:
        """Of an image as a 1x1 convolution by ones and zeros, which is exact: a Pad would leave ONNX Runtime's blocked
        layout, and with it every sum and batch norm up to the next group of blocks."""
        if len(op.shape) == 3 and self.axis == 1:
            identity = lazy.torch.eye(self.there + self.more, self.there)[:, :, None, None]
            kernel = graph.constant(f"{op.out}.identity", identity)
            graph.add("Conv", [op.reads[0], kernel], op.out, {"kernel_shape": [1, 1]})
        else:
            ends = [0] * (len(op.shape) + 1)
            ends[self.axis] = self.more
            graph.add("Pad", [op.reads[0], graph.ints(f"{op.out}.amounts", *[0] * len(ends), *ends)], op.out)


@dataclass(frozen=True)
class Zero(Operation):
    """Nothing but zero channels, as large as those of what is read."""

    count: int

    kind: ClassVar[str] = "zero"

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return zeros(reads[0], self.count, self.axis)

    def write(self, graph: OnnxWriter, op: Op) -> None:
        first, last = (graph.ints(f"{op.out}.{i}", i) for i in (0, 1))
        shape = graph.add("Shape", op.reads, f"{op.out}.shape")
        batch = graph.add("Slice", [shape, first, last], f"{op.out}.batch")
        rest = graph.ints(f"{op.out}.rest", *op.shape)
        whole = graph.add("Concat", [batch, rest], f"{op.out}.whole", {"axis": 0})
        graph.add("ConstantOfShape", [whole], op.out, {"value": lazy.torch.zeros(1)})


@dataclass(frozen=True)
class Same(Operation):
    kind: ClassVar[str] = "same"

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return reads[0].clone()  # a copy, because torch.export wants outputs of their own

    def write(self, graph: OnnxWriter, op: Op) -> None:
        graph.add("Identity", op.reads, op.out)
