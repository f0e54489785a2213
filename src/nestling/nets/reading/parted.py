"""Parts of the channels that are combined with each other: stacks, and sums or softmax over the parts of a stack or a split.

In: a traced operation along a dimension of channels beside which there are others (the branches of split attention, the paths of
selective kernels). Out: nodes that add, compare or divide the parts channel by channel, which are then born together.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from nestling.nets.ops import Cat, Zip
from nestling.nets.ops.calls import Call
from nestling.nets.reading.attend import Attend
from nestling.nets.reading.layout import Arrangement, Factor, channel_factors, sides_of

OVER_PARTS: dict[Callable[..., Any], str] = {torch.sum: "add", torch.mean: "add", torch.amax: "max", torch.amin: "min"}


class Parted(Attend):
    """Enters what combines parts."""

    def stack(self, node: fx.Node) -> None:
        """Tensors of one layout, side by side along a new dimension of channels."""
        given = self.given(node, "tensors", "dim")
        tensors, dim = given["tensors"], given.get("dim", 0) % self.values[node].dim()
        if self.whole or not all(isinstance(t, fx.Node) and self.is_known(t) for t in tensors):
            self.refuse(node, "it stacks something else than tensors that were computed from the image")
        parts = [self.made(node, self.layout_of(node, tensor))[1] for tensor in tensors]
        self.layouts_or_name(node, self.gathered(node, parts, dim))

    def gathered(self, node: fx.Node, parts: Sequence[Arrangement], dim: int) -> Arrangement:
        """Parts of one layout as one node, and the layout that has them along `dim`."""
        first, names = parts[0], list[str]()
        for part in parts:
            alike = [sides_of(d) for d in part.dims] == [sides_of(d) for d in first.dims] and part.axis == first.axis
            if not alike or self.sketch.nodes[part.name].size != self.sketch.nodes[first.name].size:
                self.refuse(
                    node, f"it puts tensors side by side whose channels stand differently: {first.shape}, {part.shape}"
                )
            names.append(self.another(node, part.name, part.name if part.name in names else ""))
        name, each = (
            self.enter_as(self.inside(node, "parts"), Cat(axis=first.axis), tuple(names)),
            self.channels(names[0]),
        )
        dims, new = [*first.dims], Factor("channel", len(parts))
        dims.insert(dim, (new,))
        base = tuple(
            (Factor("channel", len(parts) * each),) if d == first.axis else b for d, b in enumerate(first.base)
        )
        index = torch.stack(
            [first.index + number * each for number in range(len(parts))], channel_factors(tuple(dims)).index(new)
        )
        return Arrangement(name, first.axis, base, tuple(dims), index)

    def apart_along(self, node: fx.Node, layout: Arrangement, dim: int) -> list[Arrangement] | None:
        """The parts along a dimension of channels; None if it is something else, or all channels there are."""
        mine = layout.dims[dim]
        if self.whole or not mine or not layout.holds(dim, "channel") or len(channel_factors(layout.dims)) == len(mine):
            return None
        return [self.made(node, layout.picked(dim, place))[1] for place in range(layout.shape[dim])]

    def reduced_parts(
        self, node: fx.Node, function: Callable[..., Any], dim: int, keepdim: bool, source: fx.Node
    ) -> bool:
        """A sum, a mean, the largest or the smallest of parts; False if that is not what it is."""
        parts = self.apart_along(node, self.layout_of(node, source), dim) if function in OVER_PARTS else None
        if parts is None:
            return False
        made = self.combined(node, OVER_PARTS[function], parts)
        if function is torch.mean:
            made = self.pixelwise(node, made, Call(torch.mul, 0, (None, 1 / len(parts)), {}), "mean")
        dims = [*made.dims]
        dims[dim:dim] = [()] if keepdim else []
        self.layouts_or_name(node, replace(made, dims=tuple(dims)))
        return True

    def softmax_parts(self, node: fx.Node, dim: int) -> bool:
        """Softmax over parts, as torch does it: the largest is subtracted first."""
        source = node.all_input_nodes[0]
        layout = self.layout_of(node, source)
        dim %= len(layout.dims)
        parts = self.apart_along(node, layout, dim)
        if parts is None:
            return False
        most = self.combined(node, "max", parts)
        powers = [
            self.pixelwise(node, self.combined(node, "sub", [part, most]), Call(torch.exp, 0, (None,), {}), "power")
            for part in parts
        ]
        total = self.combined(node, "add", powers)
        shares = [self.combined(node, "div", [power, total]) for power in powers]
        self.layouts_or_name(node, self.gathered(node, shares, dim))
        return True

    def combined(self, node: fx.Node, function: str, parts: Sequence[Arrangement]) -> Arrangement:
        """Tensors of one layout, channel by channel."""
        if len(parts) == 1:
            return parts[0]
        name = self.enter_as(
            self.inside(node, function), Zip(function, axis=parts[0].axis), tuple(part.name for part in parts)
        )
        return replace(parts[0], name=name)

    def zip_everywhere(self, node: fx.Node, function: str, tensors: list[fx.Node]) -> None:
        """Two tensors of the same layout, of which one may have a single pixel where the other has many."""
        layouts = [self.layout_of(node, tensor) for tensor in tensors]
        which = int(layouts[0].shape != self.shape(node))
        larger = layouts[which]
        for dim in (d for d, factors in enumerate(larger.dims) if factors and larger.holds(d, "pixel")):
            layouts = [layout.with_side(dim) if len(layout.dims) == len(larger.dims) else layout for layout in layouts]
        layouts = [layout if layout is larger else over_heads(layout, larger) for layout in layouts]
        one, other = (self.made(node, layout)[1] for layout in layouts)
        if one.axis != other.axis:
            one, other = (self.made(node, layout, "first")[1] for layout in (one, other))
        alike = len(one.dims) == len(other.dims) and one.axis == other.axis and larger.shape == self.shape(node)
        if not alike or not all(spreads(sides_of(a), sides_of(b)) for a, b in zip(one.dims, other.dims, strict=True)):
            self.refuse(
                node, f"it combines tensors of shapes {one.shape} and {other.shape} whose channels stand differently"
            )
        name = self.enter_as(self.inside(node, function), Zip(function, axis=one.axis), (one.name, other.name))
        self.layouts_or_name(node, replace((one, other)[which], name=name))


def over_heads(single: Arrangement, larger: Arrangement) -> Arrangement:
    """A layout in which one channel of a head stands beside many: it is taken as often as there are others."""
    if len(single.dims) != len(larger.dims):
        return single
    for dim, (mine, theirs) in enumerate(zip(single.dims, larger.dims, strict=True)):
        alone = bool(mine) and single.holds(dim, "channel") and single.shape[dim] == 1
        if alone and theirs and larger.holds(dim, "channel"):
            wide = Factor("channel", larger.shape[dim])
            at = channel_factors(single.dims).index(mine[0])
            index = single.index.flatten(at, at + len(mine) - 1).expand(
                *(wide.size if d == at else -1 for d in range(single.index.dim() - len(mine) + 1))
            )
            single = replace(single, dims=(*single.dims[:dim], (wide,), *single.dims[dim + 1 :]), index=index)
    return single


def spreads(one: list[tuple[str, int]], other: list[tuple[str, int]]) -> bool:
    """Whether a dimension is the same for both tensors, or a single pixel of one beside many of the other."""
    single, alike = [("pixel", 1)], {kind for kind, _ in (*one, *other)} == {"pixel"}
    return one == other or (alike and single in (one, other))
