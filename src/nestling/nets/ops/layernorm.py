"""Layer norm, RMS norm and group norm of one group, under the rule: a channel is normalised over the channels born by its birth.

So no statistic knows a later channel, and each channel has one value for all its readers: with Q_s the sum of squares of what
is born by s, channels born at s are divided by sqrt(Q_s/d_s + eps). With one stage this is torch's own norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from nestling.errors import NestlingError
from nestling.nets.ops import lazy
from nestling.nets.ops.frozen import OnnxWriter, Op, own
from nestling.nets.ops.operation import Channels, Extent, Operation

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nestling.nets.layers import Cut, Index
    from nestling.nets.plan import Node


@dataclass(frozen=True)
class Alike:
    """The channels that are normalised alike: where they stand, over which channels, and as which rows they come out."""

    rows: Channels
    own: Channels
    over: Channels


@dataclass(frozen=True)
class LayerNorm(Operation):
    eps: float | None = 1e-5  # None: the smallest step of the number type
    center: bool = True  # False: RMS norm
    pixels: bool = False  # over all pixels, too: group norm of one group
    scale: bool = True
    shift: bool = True
    variance: bool = False  # without a center: by the variance (of n - 1) and not by the mean square
    parts: tuple[Alike, ...] = ()  # told once births are settled; none: all channels alike

    kind: ClassVar[str] = "layernorm"
    modules: ClassVar[tuple[str, ...]] = ("LayerNorm", "RMSNorm")
    layered: ClassVar[bool] = True
    any_axis: ClassVar[bool] = True
    picks: ClassVar[bool] = True

    @classmethod
    def of(cls, layer: Any, read: Node) -> Operation:
        """Of layer norm, RMS norm, or group norm of one group."""
        pixels = hasattr(layer, "num_groups")
        if not pixels and (read.op.axis != len(read.size) + 1 or tuple(layer.normalized_shape) != (read.channels,)):
            raise NestlingError(
                f"it normalises the last dimensions {tuple(layer.normalized_shape)}; nested are norms over channels alone, here "
                f"{read.channels} at dimension {read.op.axis}"
            )
        scale, shift = (getattr(layer, word, None) is not None for word in ("weight", "bias"))
        center = type(layer).__name__ != "RMSNorm"
        return cls(layer.eps, center, pixels, scale, shift, axis=read.op.axis)

    # --- planning -------------------------------------------------------------------------------------------------

    def parents(self, node: Node, reads: Sequence[Node], row: int) -> tuple[Channels, ...]:
        for part in self.parts:
            if row in part.rows:
                return (part.over,)
        births = reads[0].births
        limit = node.births[row] or births[row]  # 0: not given yet
        return (tuple(c for c, birth in enumerate(births) if birth <= limit or c == row),)

    def spread(self, node: Node, reads: Sequence[Node], mine: Sequence[int], theirs: Sequence[list[int]]) -> None:
        """Rows that are born together read the same: gather their owners before spreading."""
        for part in self.parts_for(node, reads):
            owned = 0
            for row in part.rows:
                owned |= mine[row]
            for channel in part.over:
                theirs[0][channel] |= owned

    def tied(self, node: Node, reads: Sequence[Node], row: int) -> tuple[Channels, ...]:
        return ((row,),)

    def wants(self, node: Node, reads: Sequence[Node], rows: Channels, stage: int) -> tuple[Channels, ...]:
        births = reads[0].births
        wanted = {c for part in self.parts_for(node, reads) if set(part.rows) & set(rows) for c in part.over}
        return (tuple(sorted(wanted, key=lambda c: (births[c], c))),)

    def told(self, node: Node, reads: Sequence[Node]) -> Operation:
        return replace(self, parts=self.parts_for(node, reads))

    def untold(self, plan: str, node: Node, reads: Sequence[Node]) -> Operation:
        if any(part.rows != part.own for part in self.parts) or (self.parts and node.channels != reads[0].channels):
            raise NestlingError(
                f"{plan}: cannot nest {node.name} once more: it normalises over channels of which it gives only some; nest the "
                "module that it was made of"
            )
        return replace(self, parts=())

    def parts_for(self, node: Node, reads: Sequence[Node]) -> tuple[Alike, ...]:
        if self.parts:
            return self.parts
        births, found = reads[0].births, []
        for stage in sorted(set(node.births)):
            rows = tuple(row for row, birth in enumerate(node.births) if birth == stage)
            found.append(Alike(rows, rows, tuple(c for c, birth in enumerate(births) if birth <= stage)))
        return tuple(found)

    def narrow(self, node: Node, rows: Channels, wanted: Sequence[Channels]) -> Operation:
        """Only some rows, where only some channels are there: all that these rows are normalised over."""
        place, there = {channel: i for i, channel in enumerate(wanted[0])}, {row: i for i, row in enumerate(rows)}
        found = []
        for part in self.parts:
            mine = [(there[row], place[c]) for row, c in zip(part.rows, part.own, strict=True) if row in there]
            if mine:
                over = tuple(sorted(place[c] for c in part.over))
                found.append(Alike(tuple(row for row, _ in mine), tuple(c for _, c in mine), over))
        return replace(self, parts=tuple(found))

    def params(self, node: Node, reads: Sequence[Node]) -> tuple[int, ...]:
        return (self.scale + self.shift,) * node.channels

    def check(self, plan: str, node: Node, reads: Sequence[Node]) -> None:
        super().check(plan, node, reads)
        if self.variance and any(len(part.over) < 2 for part in self.parts_for(node, reads)):
            raise NestlingError(f"{plan}: {node.name} divides by the variance of a single channel. Use wider stripes.")

    # --- with tensors ---------------------------------------------------------------------------------------------

    def layer(self, node: Node, reads: Sequence[Node]) -> nn.Module:
        from nestling.nets.layers import NestedLayerNorm

        return NestedLayerNorm(node.births, self)

    def whole(self, layer: Any, reads: Sequence[Tensor]) -> Tensor:
        return self.compute(reads, layer.weight, layer.bias)

    def staged(self, layer: Any, cut: Cut | None, reads: Sequence[Tensor], training: bool) -> Tensor:
        assert cut is not None
        return self.compute(reads, *(None if t is None else t[cut.rows] for t in (layer.weight, layer.bias)))

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        [x] = reads
        if self.simple(x.shape[self.axis]):
            out = self.torch_norm(x, weight, bias)
            if out is not None:
                return out
        parts = self.parts or (Alike(*[tuple(range(x.shape[self.axis]))] * 3),)
        made = [self.normalised(x, part) for part in parts]
        rows = [row for part in parts for row in part.rows]
        out = made[0] if len(made) == 1 else lazy.torch.cat(made, self.axis)
        if rows != sorted(rows):
            out = out.index_select(self.axis, lazy.torch.tensor(rows, device=x.device).argsort())
        shape = (-1, *[1] * (x.dim() - self.axis - 1))
        out = out if weight is None else out * weight.view(shape)
        return out if bias is None else out + bias.view(shape)

    def simple(self, channels: int) -> bool:
        """Whether all channels that are there are normalised alike, each in its place."""
        everything = tuple(range(channels))
        return not self.parts or self.parts == (Alike(everything, everything, everything),)

    def torch_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor | None:
        if self.pixels:
            return lazy.F.group_norm(x, 1, weight, bias, self.eps or 0.0) if self.axis == 1 else None
        if self.axis != x.dim() - 1 or self.variance:
            return None
        shape = (x.shape[-1],)
        if self.center:
            return lazy.F.layer_norm(x, shape, weight, bias, self.eps or 0.0)
        return lazy.F.rms_norm(x, shape, weight, self.eps)

    def normalised(self, x: Tensor, part: Alike) -> Tensor:
        """The channels of a part, by the mean and the variance (or the mean square) of those that they are normalised over."""
        over, own = taken(x, part.over, self.axis), taken(x, part.own, self.axis)
        axes = (self.axis, *(d for d in range(1, x.dim()) if d != self.axis and self.pixels))
        if self.center:
            var, mean = lazy.torch.var_mean(over, axes, correction=0, keepdim=True)
            own = own - mean
        elif self.variance:
            var = over.var(axes, correction=1, keepdim=True)
        else:
            var = over.square().mean(axes, keepdim=True)
        return own * (var + self.step(x)).rsqrt()

    def step(self, x: Tensor) -> float:
        return float(lazy.torch.finfo(x.dtype).eps) if self.eps is None else self.eps

    # --- frozen, and as ONNX --------------------------------------------------------------------------------------

    def freeze(self, layer: Any, cut: Cut | None, out: str, reads: tuple[str, ...], shape: Extent) -> list[Op]:
        assert cut is not None
        weight, bias = (None if t is None else own(t.cpu()[cut.rows]) for t in (layer.weight, layer.bias))
        return [Op(self, out, reads, shape, weight, bias)]

    def write(self, graph: OnnxWriter, op: Op) -> None:
        """Alike by part. A layer norm over the last axis is one operator, of which early channels are then left out."""
        channels = op.shape[self.axis - 1]
        parts = self.parts or (Alike(*[tuple(range(channels))] * 3),)
        made = [self.write_part(graph, op, i, part) for i, part in enumerate(parts)]
        value = made[0] if len(made) == 1 else graph.add("Concat", made, f"{op.out}.parts", {"axis": self.axis})
        rows = [row for part in parts for row in part.rows]
        if rows != sorted(rows):
            order = graph.ints(f"{op.out}.order", *sorted(range(len(rows)), key=rows.__getitem__))
            value = graph.add("Gather", [value, order], f"{op.out}.ordered", {"axis": self.axis})
        shape = (-1, *[1] * (len(op.shape) - self.axis))
        for word, kind, tensor in (("scale", "Mul", op.weight), ("shift", "Add", op.bias)):
            if tensor is not None:
                constant = graph.constant(f"{op.out}.{word}", tensor.view(shape))
                value = graph.add(kind, [value, constant], f"{op.out}.{word}d")
        graph.add("Identity", [value], op.out)

    def write_part(self, graph: OnnxWriter, op: Op, index: int, part: Alike) -> str:
        at, [x], torch = f"{op.out}.{index}", op.reads, lazy.torch
        over = written(graph, x, part.over, self.axis, f"{at}.over")
        axes = [self.axis] if not self.pixels else list(range(1, len(op.shape) + 1))
        if self.center and not self.pixels and self.axis == len(op.shape):
            ones = graph.constant(f"{at}.ones", torch.ones(len(part.over)))
            normed = graph.add("LayerNormalization", [over, ones], f"{at}.normed", {"axis": -1, "epsilon": self.eps})
            if part.own == part.over:
                return normed
            place = {channel: i for i, channel in enumerate(part.over)}
            return written(graph, normed, tuple(place[c] for c in part.own), self.axis, f"{at}.own")
        own = written(graph, x, part.own, self.axis, f"{at}.own")
        along = graph.ints(f"{at}.axes", *axes)
        if self.center:
            mean = graph.add("ReduceMean", [over, along], f"{at}.mean")
            over, own = (graph.add("Sub", [v, mean], f"{at}.{w}0") for v, w in ((over, "over"), (own, "own")))
        if self.variance:
            over = graph.add("Sub", [over, graph.add("ReduceMean", [over, along], f"{at}.mean")], f"{at}.over0")
        square = graph.add("Mul", [over, over], f"{at}.square")
        var = graph.add("ReduceMean", [square, along], f"{at}.var")
        if self.variance:
            more = graph.constant(f"{at}.more", torch.tensor(len(part.over) / (len(part.over) - 1)))
            var = graph.add("Mul", [var, more], f"{at}.unbiased")
        step = graph.constant(f"{at}.eps", torch.tensor(self.step(torch.zeros(0))))
        root = graph.add("Sqrt", [graph.add("Add", [var, step], f"{at}.above")], f"{at}.root")
        return graph.add("Div", [own, root], f"{at}.divided")


def taken(x: Tensor, channels: Channels, axis: int) -> Tensor:
    """Some channels: a view where they stand together."""
    from nestling.nets.layers import as_index

    where: Index = as_index(channels)
    if isinstance(where, slice):
        return x.narrow(axis, where.start, where.stop - where.start)
    return x.index_select(axis, where.to(x.device))


def written(graph: OnnxWriter, x: str, channels: Channels, axis: int, out: str) -> str:
    """The same as ONNX."""
    if channels == tuple(range(channels[0], channels[-1] + 1)):
        bounds = (graph.ints(f"{out}.{w}", v) for w, v in (("a", channels[0]), ("b", channels[-1] + 1), ("axis", axis)))
        return graph.add("Slice", [x, *bounds], out)
    return graph.add("Gather", [x, graph.ints(f"{out}.which", *channels)], out, {"axis": axis})
