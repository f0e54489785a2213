"""Operations that put tensors elsewhere: joined, spread, rolled, with tokens before or pixels around them.

In: an operation of torch.fx and the page it belongs on. Out: nodes and layers entered on that page, or a refusal that says
why this one cannot be nested.
"""

import math
import operator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from nestling.nets.ops import Cat, Join, LayerNorm, Module, Scale, Tokens
from nestling.nets.ops.calls import Call
from nestling.nets.plan import Node
from nestling.nets.reading.held import constant_of, own
from nestling.nets.reading.layout import Arrangement, Factor, channel_factors, sides_of
from nestling.nets.reading.parted import Parted
from nestling.nets.reading.sketch import STRANGE, UNPLAIN
from nestling.nets.reading.vocabulary import BINARY, METHODS, MIXES
from nestling.nets.reading.watcher import path_of
from nestling.nets.reading.written import written_norm


class Placing(Parted):
    """What moves numbers and computes none, a scale with its shift, a norm that is written out."""

    def join(self, node: fx.Node) -> None:
        given = self.given(node, "tensors", "dim")
        tensors, dim = given["tensors"], given.get("dim", given.get("axis", 0))
        if not isinstance(tensors, list | tuple) or not all(isinstance(t, fx.Node) for t in tensors):
            self.refuse(node, "it joins something else than a list of tensors")
        at = dim % self.values[node].dim()
        strange = [t for t in tensors if not isinstance(self.names.get(t), str)]
        computed = [t for t in tensors if t not in strange]
        axes = {self.axis(str(self.names[t])) for t in computed}
        if strange and at == 1 and axes == {2} and computed == [tensors[-1]] and not self.whole:
            self.tokens(node, list(tensors))
            return
        if strange and at and not self.whole and all(self.is_known(t) for t in tensors):
            self.join_everywhere(node, [self.layout_of(node, t) for t in tensors], at)
            return
        if strange:
            self.refuse(
                node,
                UNPLAIN.format(self.shape(strange[0]))
                if strange[0] in self.layouts
                else STRANGE.format(strange[0].target),
            )
        if axes != {at}:
            self.join_pixels(node, [str(self.names[t]) for t in computed], at, axes)
            return
        reads: list[str] = []
        for tensor in tensors:
            name = str(self.names[tensor])
            if name in reads:  # a plan reads each tensor once: take a copy
                name = self.take(node, name, tuple(range(self.channels(name))))
            reads.append(name)
        self.enter(node, Cat(axis=at), tuple(reads))

    def join_pixels(self, node: fx.Node, names: list[str], at: int, axes: set[int]) -> None:
        """The pixels of each channel behind each other."""
        if self.whole or at == 0 or len(axes) > 1 or len({self.channels(name) for name in names}) > 1:
            self.refuse(node, f"it joins along dimension {at} tensors whose channels stand at {sorted(axes)}")
        axis, reads = axes.pop(), list[str]()
        for name in names:
            reads.append(self.another(node, name, name if name in reads else ""))
        self.enter(node, Join(at - 1 if at < axis else at - 2, axis=axis), tuple(reads))

    def join_everywhere(self, node: fx.Node, layouts: list[Arrangement], at: int) -> None:
        """The same where heads or windows have dimensions of their own: of pixels, or of parts of each head's channels."""
        if all(layout.holds(at, "channel") and layout.shape == layouts[0].shape for layout in layouts):
            whole = self.gathered(node, [self.made(node, layout)[1] for layout in layouts], at)
            both = (*whole.dims[at], *whole.dims[at + 1])
            self.layouts_or_name(node, replace(whole, dims=(*whole.dims[:at], both, *whole.dims[at + 2 :])))
            return
        if not all(layout.holds(at, "pixel") for layout in layouts):
            self.refuse(node, UNPLAIN.format(layouts[0].shape))
        layouts = [layout for layout in layouts if layout.shape[at]]  # as where there are no class tokens to leave out
        if len(layouts) == 1:
            self.layouts_or_name(node, layouts[0])
            return
        made = [self.made(node, layout.with_side(at), "first")[1] for layout in layouts]
        first, names = made[0], list[str]()
        for each in made:
            alike = all(
                sides_of(a) == sides_of(b)
                for d, (a, b) in enumerate(zip(first.dims, each.dims, strict=True))
                if d != at
            )
            if not alike or len(each.base) != len(first.base):
                self.refuse(node, f"it joins tensors whose channels stand differently: {first.shape}, {each.shape}")
            names.append(self.another(node, each.name, each.name if each.name in names else ""))
        place = first.base.index(first.dims[at])
        name = self.enter_as(self.inside(node, "joined"), Join(place - 2), tuple(names))
        side = (Factor("pixel", sum(each.shape[at] for each in made)),)
        base, dims = ((*all_[:d], side, *all_[d + 1 :]) for all_, d in ((first.base, place), (first.dims, at)))
        self.layouts_or_name(node, replace(first, name=name, base=base, dims=dims))

    def tokens(self, node: fx.Node, tensors: list[fx.Node]) -> None:
        """Tokens of the module's own before those that were computed."""
        read, start = str(self.names[tensors[-1]]), sum(self.values[t].shape[1] for t in tensors[:-1])
        placed: dict[fx.Node, slice] = {}
        for constant in reversed(tensors[:-1]):
            found = constant_of(self, node, constant)
            if found is None:
                self.refuse(
                    node, "its tokens are computed from parameters while running, so they cannot be cut by births"
                )
            held, path = found
            layer, count = nn.Module(), self.values[constant].shape[1]
            if isinstance(held, nn.Parameter):
                layer.register_parameter("weight", held)
            else:
                layer.register_buffer("weight", held)
            if held.numel() != count * self.channels(read):
                self.refuse(node, f"its tokens have the shape {tuple(held.shape)}; expected a number for every channel")
            op, name = Tokens(count, isinstance(held, nn.Parameter), axis=2), self.fresh(f"{path or 'tokens'}_token")
            layer.training = self.module.get_submodule(path_of(node)).training
            if own(self, node, name, layer, op):
                self.refuse(node, "the same tokens are put in several places")
            before = self.sketch.nodes[read]
            read = self.put(Node(name, op, (read,), (0,) * before.channels, op.size([before])))
            placed[constant], start = slice(start - count, start), start - count
        self.names[node] = read
        self.tokens_in.update({constant: (read, where) for constant, where in placed.items()})

    def token(self, node: fx.Node, constant: fx.Node) -> None:
        """A token of the module's own that is read by itself too: it is one of those that it was put before."""
        read, where = self.tokens_in[constant]
        before, name = self.sketch.nodes[read], self.fresh(self.inside(node, "token"))
        self.sketch.layers[name] = Call(operator.getitem, 0, (None, (slice(None), where)), {})
        size = (where.stop - where.start,)
        self.names[constant] = self.put(Node(name, Module(axis=2), (read,), before.births, size))

    def expand(self, node: fx.Node) -> None:
        """Each channel over more pixels, or a single one over many, which sums and products do by themselves."""
        traced = node.all_input_nodes[0]
        if self.broadcasts(node, traced):
            self.names[node] = self.computed(node, traced)
            return
        size, before = self.size(node), tuple(self.values[traced].shape)
        plain = traced not in self.layouts and self.axis(self.computed(node, traced)) == 1
        if not plain or before[:2] != tuple(self.values[node].shape[:2]) or len(before) != len(size) + 2:
            self.refuse(node, f"it spreads a tensor of shape {before} to {tuple(self.values[node].shape)}")
        read, name = self.computed(node, traced), self.name(node)
        self.sketch.layers[name] = Call(torch.Tensor.expand, 0, (None, -1, -1, *size), {})
        self.add(node, Node(name, Module(), (read,), (0,) * self.channels(read), size))

    def broadcasts(self, node: fx.Node, traced: fx.Node) -> bool:
        """Whether a single channel is spread over many, all of its pixels being there, for nothing but sums and products."""
        name, before, after = self.names.get(traced), self.shape(traced), self.shape(node)
        plain = isinstance(name, str) and self.axis(name) == 1 and before[1:2] == (1,) and not self.whole
        binary = all(METHODS.get(user.target, user.target) in BINARY for user in node.users)
        return plain and binary and before[2:] == after[2:] and len(before) == len(after)

    def pad_pixels(self, node: fx.Node, read: str, sides: tuple[int, ...], given: dict[str, Any], value: float) -> bool:
        """Around the pixels of each channel, where the channels stand behind some of them."""
        axis, rank = self.axis(read), self.values[node].dim()
        at = 2 * (rank - 1 - axis)
        if any(sides[at : at + 2]) or len(sides) > 2 * (rank - 1) or self.whole:
            return False
        call = Call(F.pad, 0, (None, sides, given.get("mode", "constant"), value), {})
        self.sketch.layers[self.name(node)] = call
        self.add(
            node, Node(self.name(node), Module(axis=axis), (read,), (0,) * self.channels(read), self.size(node, axis))
        )
        return True

    def pad_everywhere(self, node: fx.Node) -> None:
        """Numbers around pixels where heads or windows have dimensions of their own."""
        given, source = self.given(node, "input", "pad", "mode", "value"), node.all_input_nodes[0]
        layout, sides = self.layout_of(node, source), tuple(given["pad"])
        padded = {
            len(layout.dims) - 1 - i // 2: sides[i : i + 2] for i in range(0, len(sides), 2) if any(sides[i : i + 2])
        }
        if self.whole or given.get("mode", "constant") != "constant":
            self.refuse(node, UNPLAIN.format(layout.shape))
        [*grown] = (dim for dim in padded if layout.dims[dim] and layout.holds(dim, "channel"))
        if grown == [*padded] and len(grown) == 1 < len(layout.channel_dims) and min(padded[grown[0]]) >= 0:
            self.layouts_or_name(node, self.grown(node, layout, grown[0], padded[grown[0]], given.get("value") or 0.0))
            return
        if not all(layout.holds(dim, "pixel") for dim in padded):
            self.refuse(node, UNPLAIN.format(layout.shape))
        for dim in padded:
            layout = layout.with_side(dim)
        read, made = self.made(node, layout, "first")
        before, around = self.sketch.nodes[read], [0] * 2 * (len(made.base) - 2)
        base, dims, size = [*made.base], [*made.dims], [*before.size]
        for dim, (left, right) in padded.items():
            at = made.base.index(made.dims[dim])
            back = 2 * (len(made.base) - 1 - at)
            around[back : back + 2] = [left, right]
            base[at] = dims[dim] = (Factor("pixel", made.shape[dim] + left + right),)
            size[at - 2] += left + right
        name = self.fresh(self.inside(node, "padded"))
        self.sketch.layers[name] = Call(F.pad, 0, (None, tuple(around), "constant", given.get("value") or 0), {})
        self.put(Node(name, Module(), (read,), before.births, tuple(size)))
        self.layouts_or_name(node, replace(made, name=name, base=tuple(base), dims=tuple(dims)))

    def grown(self, node: fx.Node, layout: Arrangement, dim: int, more: tuple[int, ...], value: float) -> Arrangement:
        """Further channels of each head, all of one value."""
        factors, mine = channel_factors(layout.dims), layout.dims[dim]
        at = factors.index(mine[0])
        index = layout.index.flatten(at, at + len(mine) - 1)
        index = F.pad(index, (0, 0) * (index.dim() - 1 - at) + tuple(more), value=-1)
        dims = (*layout.dims[:dim], (Factor("channel", index.shape[at]),), *layout.dims[dim + 1 :])
        read, made = self.made(node, replace(layout, dims=dims, index=index), "last")
        if not value:
            return made
        layer, source = nn.Module(), self.sketch.nodes[read]
        numbers = (index.flatten() < 0).to(self.values[node].dtype) * value
        layer.register_buffer("weight", numbers.to(next(self.module.parameters()).device))
        name = self.fresh(self.inside(node, "value"))
        self.sketch.layers[name] = layer
        self.put(Node(name, Scale("add", False, axis=made.axis), (read,), source.births, source.size))
        return replace(made, name=name)

    def roll(self, node: fx.Node) -> None:
        """Pixels around their image."""
        read = self.read_of(node)
        given, axis, rank = self.given(node, "input", "shifts", "dims"), self.axis(read), self.values[node].dim()
        dims = given.get("dims")
        over = [d % rank for d in (dims if isinstance(dims, list | tuple) else [dims if isinstance(dims, int) else 0])]
        if {0, axis} & {*over} or self.whole:
            self.refuse(node, "it rolls images or channels, or the dimensions are not said; only pixels are rolled")
        shifts, name = given["shifts"], self.name(node)
        turns = zip(shifts if isinstance(shifts, list | tuple) else [shifts], over, strict=True)
        less = tuple(int(math.fmod(shift, self.values[node].shape[d])) for shift, d in turns)  # than once around
        self.sketch.layers[name] = Call(torch.roll, 0, (None, less, tuple(over)), {})
        self.add(node, Node(name, Module(axis=axis), (read,), (0,) * self.channels(read), self.size(node, axis)))

    def written_norm(self, mean: fx.Node) -> None:
        """A mean over channels: of a norm that is written out, which is entered where it ends."""
        found = written_norm(mean, self.values)
        if found is None or not isinstance(self.names.get(found.source), str):
            self.refuse(mean, MIXES)
        read, layer = self.computed(mean, found.source), nn.Module()
        op, name = (
            LayerNorm(found.eps, False, False, False, False, found.variance, axis=self.axis(read)),
            self.name(found.end),
        )
        for word in ("weight", "bias"):
            layer.register_parameter(word, None)
        self.sketch.layers[name] = layer.train(self.module.get_submodule(path_of(mean)).training)
        before = self.sketch.nodes[read]
        self.put(Node(name, op, (read,), (0,) * before.channels, before.size))
        self.written |= {**dict.fromkeys(found.inside, ""), found.end: name}

    def addcmul(self, node: fx.Node) -> None:
        """A shift of the module's own, and a tensor by a scale of its own."""
        given = self.given(node, "input", "tensor1", "tensor2")
        known = [word for word in ("tensor1", "tensor2") if self.is_known(given[word])]
        tensors = [given[word] for word in given if isinstance(given[word], fx.Node)]
        if len(known) != 1 or len(tensors) != 3 or given.get("value", 1) != 1 or self.whole:
            self.refuse(node, "of addcmul only a tensor by a scale and beside a shift is nested, both the module's own")
        scale = given["tensor2" if known == ["tensor1"] else "tensor1"]
        scaled = self.beside(node, self.layout_of(node, given[known[0]]), scale, "mul")
        if self.is_known(given["input"]):
            self.refuse(node, "of addcmul only a tensor by a scale and beside a shift is nested, both the module's own")
        self.layouts_or_name(node, self.beside(node, scaled, given["input"], "add"))

    def zeros(self, node: fx.Node) -> None:
        self.names[node] = self.take(node, self.read_of(node), (-1,) * self.channels(self.read_of(node)))
