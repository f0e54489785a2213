"""Tensors turned and taken apart: reshapes, permutations, parts of channels and of pixels, followed as layouts.

In: a traced operation that only moves numbers. Out: a node where a plan has room for what comes out; else its layout, until
somebody reads it in a form that a plan has (heads are such a form of channels, windows of pixels).
"""

import itertools
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from nestling.nets.ops import Flatten, Merge, Module, Operation, Rearrange, Select
from nestling.nets.ops.calls import Call, Patches, Repeat, Reshape
from nestling.nets.plan import Node
from nestling.nets.reading.layout import Arrangement, Factor
from nestling.nets.reading.sketch import MIXED, UNPLAIN, Page
from nestling.nets.reading.trace import BATCHES
from nestling.nets.reading.vocabulary import METHODS, RESHAPES

MOVES_ON = {*RESHAPES, torch.permute, torch.transpose}


class Mover(Page):
    """Follows what only moves."""

    # --- layouts --------------------------------------------------------------------------------------------------

    def layout_of(self, node: fx.Node, source: Any) -> Arrangement:
        if source in self.layouts:
            return self.layouts[source]
        return Arrangement.of(self.sketch.nodes[self.computed(node, source)], BATCHES[0])

    def place(self, node: fx.Node, layout: Arrangement | None) -> None:
        """What comes out of an operation that only moved numbers."""
        if self.whole:
            self.refuse(node, "it is taken as it was recorded")
        if layout is None:
            self.refuse(node, MIXED.format(*(self.shape(n) for n in (node, node.all_input_nodes[0]))))
        if layout.is_mixed and layout.merged is not None and not self.moves_on(node):
            self.names[node] = self.merge(node, layout)
            return
        if layout.is_plain:
            self.names[node] = self.made(node, layout)[0]
        else:
            self.layouts[node] = layout

    def moves_on(self, node: fx.Node) -> bool:
        """Whether all that reads a tensor moves it again, so that channels and pixels may come apart."""
        found = [METHODS.get(user.target, user.target) for user in node.users if user.op != "call_module"]
        return len(found) == len(node.users) > 0 and all(each in MOVES_ON for each in found)

    def merge(self, node: fx.Node, layout: Arrangement) -> str:
        """Pixels and channels in one dimension: each pixel's are channels of their own."""
        assert layout.merged is not None
        place, outer = layout.merged
        apart = layout.unmerged()
        read, made = self.made(node, apart)
        op = Merge(apart.shape[place if outer else place + 1], outer, axis=place)
        if made.axis != place + outer or self.sketch.nodes[read].size[place - 1] != op.count:
            self.refuse(node, MIXED.format(*(self.shape(n) for n in (node, node.all_input_nodes[0]))))
        return self.enter_as(self.inside(node, "merged"), op, (read,))

    def made(self, node: fx.Node, layout: Arrangement, where: str = "") -> tuple[str, Arrangement]:
        """The node of a layout in a form that a plan has, and the layout of that."""
        channels, move, made = layout.arranged(where)
        name = layout.name
        if channels != tuple(range(self.channels(name))):
            name = self.enter_as(self.inside(node, "part"), Select(channels, axis=layout.axis), (name,))
        if move is not None:
            name = self.enter_as(self.inside(node, "turned"), move, (name,))
        return name, replace(made, name=name)

    def chosen(self, node: fx.Node, source: fx.Node) -> Arrangement:
        """A tensor in whatever form its node has it, for what treats every number by itself."""
        channels, layout = self.layout_of(node, source).chosen()
        if channels == tuple(range(self.channels(layout.name))):
            return layout
        name = self.enter_as(self.inside(node, "part"), Select(channels, axis=layout.axis), (layout.name,))
        return replace(layout, name=name)

    def enter(self, node: fx.Node, op: Operation, reads: tuple[str, ...]) -> str:
        """A node of which the operation says how wide and how large it is."""
        read = [self.sketch.nodes[name] for name in reads]
        made = self.put(Node(self.name(node), op, reads, (0,) * op.channels(read), op.size(read)))
        self.names[node] = made
        return made

    def enter_as(self, stem: str, op: Operation, reads: tuple[str, ...]) -> str:
        read = [self.sketch.nodes[name] for name in reads]
        return self.put(Node(self.fresh(stem), op, reads, (0,) * op.channels(read), op.size(read)))

    # --- the whole tensor -----------------------------------------------------------------------------------------

    def reshape(self, node: fx.Node) -> None:
        """Flattening, and what changes the shape of each channel only; else what is moved is followed."""
        source = node.all_input_nodes[0]
        shape = self.shape(node)
        kind = self.values[self.trace.record.image].dtype if source in self.masks else self.values[source].dtype
        if self.values[node].dtype != kind:
            self.refuse(
                node, f"it turns {self.values[source].dtype} into {self.values[node].dtype}; nest one type of number"
            )
        if shape == self.shape(source) and source in self.layouts:
            self.place(node, self.layouts[source])
            return
        if shape == self.shape(source):
            self.names[node] = self.computed(node, source)
            return
        if source in self.layouts or self.axis(self.computed(node, source)) != 1:
            self.place(node, self.layout_of(node, source).reshaped(shape))
            return
        read = self.computed(node, source)
        before = self.sketch.nodes[read]
        if len(shape) == 2 and shape[0] == BATCHES[0]:
            self.enter(node, Flatten(), (read,))
        elif shape[:2] == (BATCHES[0], before.channels):
            name = self.name(node)
            self.sketch.layers[name] = Reshape(shape[2:])
            self.add(node, Node(name, Module(), (read,), (0,) * before.channels, shape[2:]))
        else:
            self.place(node, self.layout_of(node, source).reshaped(shape))

    def reorder(self, node: fx.Node, base: Any) -> None:
        """Dimensions in another order."""
        source, rank = node.all_input_nodes[0], self.values[node].dim()
        if base is torch.permute:
            given: Any = node.args[1:] or (node.kwargs["dims"],)
            order = [int(d) % rank for d in (given if isinstance(given[0], int) else given[0])]
        else:
            order = list(range(rank))
            one, other = (
                int(d) % rank for d in self.given(node, "input", "dim0", "dim1").values() if isinstance(d, int)
            )
            order[one], order[other] = other, one
        self.place(node, self.layout_of(node, source).permuted(order))

    def shuffle(self, node: fx.Node, groups: int) -> None:
        read = self.same(node)
        index = torch.arange(self.channels(read)).view(groups, -1).t().flatten()
        self.names[node] = self.take(node, read, tuple(index.tolist()))

    # --- parts ----------------------------------------------------------------------------------------------------

    def take(self, node: fx.Node, read: str, source: tuple[int, ...]) -> str:
        return self.enter(node, Select(source, axis=self.axis(read)), (read,))

    def split(self, node: fx.Node) -> None:
        """Parts along a dimension; of channels they are chosen, of pixels cut out."""
        if self.whole and self.given(node, "input", "sizes", "dim").get("dim", 0) % self.values[node][0].dim() != 1:
            self.refuse(node, "it is taken as it was recorded")
        source, parts = node.all_input_nodes[0], self.values[node]
        dim = self.given(node, "input", "sizes", "dim").get("dim", 0) % parts[0].dim()
        starts = [0]
        for part in parts:
            starts.append(starts[-1] + part.shape[dim])
        pieces = [range(start, stop) for start, stop in itertools.pairwise(starts)]
        self.parts[node] = tuple((dim, piece) for piece in pieces)
        if source not in self.layouts and dim == self.axis(self.computed(node, source)):
            read = self.computed(node, source)
            self.names[node] = tuple(self.take(node, read, tuple(piece)) for piece in pieces)

    def unbind(self, node: fx.Node) -> None:
        if self.whole:
            self.refuse(node, "it is taken as it was recorded")
        rank = self.values[node][0].dim() + 1
        dim = self.given(node, "input", "dim").get("dim", 0) % rank
        self.parts[node] = tuple((dim, place) for place in range(len(self.values[node])))

    def part(self, node: fx.Node, whole: fx.Node, number: int) -> None:
        """One of the parts that a split or unbind has made."""
        dim, which = self.parts[whole][number]
        index: list[Any] = [slice(None)] * (dim + 1)
        index[dim] = which if isinstance(which, int) else slice(which.start, which.stop)
        self.cut(node, whole.all_input_nodes[0], tuple(index))

    def getitem(self, node: fx.Node) -> None:
        """x[:, a:b], x[0], x[:, -1]: slices and single places, of channels or of pixels."""
        index = self.given(node, "input", "index")["index"]
        parts = tuple(index) if isinstance(index, tuple | list) else (index,)
        source = node.all_input_nodes[0]
        if not self.is_tensor(source):
            self.refuse(node, "it takes one of several tensors that were not read apart")
        rank = self.values[source].dim()
        if Ellipsis in parts:
            at = parts.index(Ellipsis)
            left_out = rank - sum(part is not None for part in parts) + 1
            parts = (*parts[:at], *[slice(None)] * left_out, *parts[at + 1 :])
        if not all(part is None or type(part) is int or isinstance(part, slice) for part in parts):
            self.refuse(node, f"only slices and single places are nested; found [{index}]")
        self.cut(node, source, parts)

    def cut(self, node: fx.Node, source: fx.Node, parts: tuple[Any, ...]) -> None:
        """Channels are chosen; of pixels each channel keeps the same ones."""
        layout = self.layout_of(node, source)
        old, dim, pixels = self.values[source].shape, 0, list[Any]()
        for part in parts:
            if part is None:
                dims = [*layout.dims]
                dims.insert(dim, ())
                layout, dim = replace(layout, dims=tuple(dims)), dim + 1
                pixels.append(None)
                continue
            whole = isinstance(part, slice) and range(layout.shape[dim])[part] == range(layout.shape[dim])
            if not whole and any(f.kind == "batch" for f in layout.dims[dim]):
                self.refuse(node, f"[{parts}] takes some images of a batch; only what keeps the batch whole is nested")
            if not whole and layout.dims[dim] and layout.holds(dim, "channel"):
                which = range(layout.shape[dim])[part]
                layout = layout.picked(dim, which if isinstance(which, int) else tuple(which))
                dim += not isinstance(which, int)
                pixels += [] if isinstance(which, int) else [slice(None)]
                continue
            dim += 1
            pixels.append(slice(None) if whole else part)
        if all(part is None or part == slice(None) for part in pixels):
            self.place(node, layout)
            return
        self.cut_pixels(
            node, replace(layout, dims=tuple(d for d, p in zip_dims(layout.dims, pixels))), pixels, tuple(old)
        )

    def cut_pixels(self, node: fx.Node, layout: Arrangement, pixels: Sequence[Any], old: tuple[int, ...]) -> None:
        """Some pixels of every channel, the same of all: [:, 0] of tokens, [..., 1:] of images."""
        if None in pixels:
            self.refuse(node, "it cuts pixels out and adds a dimension at once; do one after the other")
        which = tuple(pixels)
        if not layout.is_plain:
            self.cut_everywhere(node, layout, which, old)
            return
        read, made = self.made(node, layout)
        axis, shape = made.axis, tuple(self.values[node].shape)
        gone = sum(isinstance(part, int) for part in which[:axis])
        name = self.name(node)
        self.sketch.layers[name] = Call(operator.getitem, 0, (None, which), {})
        size = tuple(side for d, side in enumerate(shape) if d not in (0, axis - gone))
        self.add(node, Node(name, Module(axis=axis - gone), (read,), (0,) * self.channels(read), size))

    def unfold(self, node: fx.Node, layer: nn.Unfold) -> None:
        """Patches of each channel: their pixels stand behind it, in one dimension with it."""
        read = self.read_of(node)
        before, many = self.sketch.nodes[read], self.shape(node)[2]
        if self.whole or before.op.axis != 1 or len(before.size) != 2:
            self.refuse(node, f"it takes patches of {before.size} where channels stand at dimension {before.op.axis}")
        count, name = self.shape(node)[1] // before.channels, self.name(node)
        self.sketch.layers[name] = Patches(layer)
        self.put(Node(name, Module(), (read,), before.births, (count, many)))
        made = Arrangement.of(self.sketch.nodes[name], BATCHES[0])
        self.layouts[node] = replace(made, dims=(made.dims[0], (*made.dims[1], *made.dims[2]), made.dims[3]))

    def repeat_images(self, node: fx.Node) -> None:
        """Each image several times, one behind the other: once for each of its windows."""
        given = self.given(node, "input", "repeats", "dim")
        source, count = node.all_input_nodes[0], given.get("repeats")
        layout = self.layout_of(node, source)
        if self.whole or type(count) is not int or [f.kind for f in layout.dims[0]] != ["batch"]:
            self.refuse(node, "only images are repeated, each for its windows")
        read, made = self.made(node, layout, "first")
        before, name = self.sketch.nodes[read], self.fresh(self.inside(node, "repeated"))
        self.sketch.layers[name] = Repeat(count)
        self.put(Node(name, Module(), (read,), before.births, (count, *before.size)))
        side = (Factor("pixel", count),) if count > 1 else ()
        base, dims = (*made.base[:2], side, *made.base[2:]), ((*made.dims[0], *side), *made.dims[1:])
        self.layouts_or_name(node, replace(made, name=name, base=base, dims=dims))

    def cut_everywhere(self, node: fx.Node, layout: Arrangement, which: Sequence[Any], old: tuple[int, ...]) -> None:
        """The same where heads or windows have dimensions of their own."""
        for dim, part in reversed([*enumerate(which)]):
            if part == slice(None):
                continue
            if not layout.holds(dim, "pixel"):
                self.refuse(node, UNPLAIN.format(old))
            taken = range(layout.shape[dim])[part]
            first, last, step = (
                (taken, taken + 1, 1) if isinstance(taken, int) else (taken.start, taken.stop, taken.step)
            )
            layout = self.sliced(node, layout, dim, slice(first, last, step))
            if isinstance(taken, int):
                layout = replace(layout, dims=(*layout.dims[:dim], *layout.dims[dim + 1 :]))
        self.layouts_or_name(node, layout)

    def sliced(self, node: fx.Node, layout: Arrangement, dim: int, part: slice) -> Arrangement:
        """Some of the pixels along one dimension, which stays."""
        read, made = self.made(node, layout.with_side(dim), "first")
        at = made.base.index(made.dims[dim])
        count = len(range(made.shape[dim])[part])
        side = () if count == 1 else (Factor("pixel", count),)
        name, source = self.fresh(self.inside(node, "cut")), self.sketch.nodes[read]
        self.sketch.layers[name] = Call(operator.getitem, 0, (None, (*[slice(None)] * at, part)), {})
        size = (*source.size[: at - 2], count, *source.size[at - 1 :])
        self.put(Node(name, Module(), (read,), source.births, size))
        base, dims = ((*each[:place], side, *each[place + 1 :]) for each, place in ((made.base, at), (made.dims, dim)))
        return replace(made, name=name, base=base, dims=dims)

    def reduced_everywhere(self, node: fx.Node, function: Any, dims: Sequence[int], keepdim: bool) -> bool:
        """A mean, a sum or the like over pixels where heads or windows have dimensions; False if it is over something else."""
        source = node.all_input_nodes[0]
        layout = self.layout_of(node, source)
        if self.whole or not all(layout.holds(dim, "pixel") for dim in dims):
            return False
        for dim in dims:
            layout = layout.with_side(dim)
        read, made = self.made(node, layout, "first")
        places = [made.base.index(made.dims[dim]) for dim in dims]
        name, before = self.fresh(self.inside(node, "reduced")), self.sketch.nodes[read]
        self.sketch.layers[name] = Call(function, 0, (None, tuple(places)), {"keepdim": True})
        size = tuple(1 if side + 2 in places else each for side, each in enumerate(before.size))
        self.put(Node(name, Module(), (read,), before.births, size))
        base = tuple(() if place in places else dim for place, dim in enumerate(made.base))
        left = [() if d in dims else dim for d, dim in enumerate(made.dims) if keepdim or d not in dims]
        self.layouts_or_name(node, replace(made, name=name, base=base, dims=tuple(left)))
        return True

    def layouts_or_name(self, node: fx.Node, layout: Arrangement) -> None:
        if layout.is_plain and tuple(self.values[node].shape) == layout.shape:
            self.names[node] = self.made(node, layout)[0]
        else:
            self.layouts[node] = layout

    def reduced(self, node: fx.Node, function: Any, dims: list[int], options: dict[str, Any]) -> None:
        """A mean, a sum or the like over pixels of tokens: of each channel, its pixels behind it."""
        source = node.all_input_nodes[0]
        read = self.computed(node, source)
        axis, before = self.axis(read), self.sketch.nodes[read]
        turned = self.enter_as(self.inside(node, "turned"), Rearrange.to_axis(before, 1), (read,))
        over = tuple(d + 1 if d < axis else d for d in dims)
        name = self.name(node)
        self.sketch.layers[name] = Call(function, 0, (None, over), options)
        gone = 0 if options.get("keepdim") else sum(d < axis for d in dims)
        shape = tuple(self.values[node].shape)
        size = tuple(side for d, side in enumerate(shape) if d not in (0, axis - gone))
        made = self.put(Node(name, Module(), (turned,), (0,) * before.channels, size))
        if axis - gone != 1:
            made = self.enter_as(f"{name}_back", Rearrange.to_axis(self.sketch.nodes[made], axis - gone), (made,))
        self.names[node] = made


def zip_dims(dims: Sequence[Any], pixels: Sequence[Any]) -> list[tuple[Any, Any]]:
    """The dimensions of a tensor before dimensions were added."""
    padded = [*pixels, *[slice(None)] * (len(dims) - len(pixels))]
    return [(dim, part) for dim, part in zip(dims, padded, strict=True) if part is not None]
