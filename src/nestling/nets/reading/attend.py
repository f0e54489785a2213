"""Attention as people write it: q k^T, softmax and v, torch's fused form of it, and nn.MultiheadAttention.

In: a traced product of two tensors whose layouts say which dimensions are heads, tokens and channels of a head. Out: nodes of
`Scores` and `Weigh`, or of `Covariance` and `Mingle` where channels look at channels; what is between them is pointwise. A
product of other tensors is refused.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from nestling.nets.ops import Computed, Covariance, Headwise, Linear, Mingle, Module, Scores, Select, Weigh
from nestling.nets.ops.calls import Windows
from nestling.nets.plan import Node
from nestling.nets.reading.held import own
from nestling.nets.reading.layout import Arrangement, Factor, channel_factors, sides_of, size_of
from nestling.nets.reading.numbers import numbers_beside
from nestling.nets.reading.recorded import work
from nestling.nets.reading.trace import BATCHES
from nestling.nets.reading.turn import Mover
from nestling.nets.reading.watcher import path_of

PRODUCT = (
    "it multiplies tensors of shapes {} and {}; of such products only attention is nested, queries by keys and then by values, "
    "where heads are whole and tokens are not channels. What would help: attention without this product (positions added as a "
    "bias, looks made of queries and keys), or nestling.exits, which takes it as it is"
)


class Attend(Mover):
    """Enters attention."""

    def matmul(self, node: fx.Node, one: Any, other: Any) -> None:
        """Queries by keys, or what comes out of that by values."""
        self.layouts_or_name(node, self.product(node, *self.factors(node, one, other)))

    def einsum(self, node: fx.Node) -> None:
        """The same product, spelled by letters."""
        equation, *given = node.args
        tensors = given[0] if isinstance(given[0], list | tuple) else given
        sides, _, out = str(equation).replace(" ", "").partition("->")
        words = sides.split(",")
        if len(tensors) != 2 or len(words) != 2 or not "".join((*words, out)).isalpha():
            self.refuse(node, f"of einsum only a product of two tensors is nested, all letters said; found {equation}")
        one, other = words
        both = [c for c in out if c in one and c in other]
        mine, theirs = ([c for c in out if c in word and c not in both] for word in words)
        inner = [c for c in one if c in other and c not in out]
        left, right = self.factors(node, *tensors)
        if len(mine) != 1 or len(theirs) != 1 or len(inner) != 1 or {len(one), len(other)} != {len(both) + 2}:
            self.refuse(node, PRODUCT.format(left.shape, right.shape))
        made = self.product(
            node,
            left.permuted([one.index(c) for c in (*both, *mine, *inner)]),
            right.permuted([other.index(c) for c in (*both, *inner, *theirs)]),
        )
        self.layouts_or_name(node, made.permuted([(*both, *mine, *theirs).index(c) for c in out]))

    def factors(self, node: fx.Node, one: Any, other: Any) -> tuple[Arrangement, Arrangement]:
        """The layouts of two tensors that are multiplied."""
        if self.whole or not self.is_known(one) or not self.is_known(other):
            self.refuse(node, PRODUCT.format(*(tuple(self.values[each].shape) for each in (one, other))), here=True)
        return self.layout_of(node, one), self.layout_of(node, other)

    def product(self, node: fx.Node, left: Arrangement, right: Arrangement) -> Arrangement:
        """Of the last dimension of one and the last but one of the other."""
        shapes = left.shape, right.shape
        if len(left.dims) != len(right.dims) or len(left.dims) < 3:
            self.refuse(node, PRODUCT.format(*shapes))
        if right.name in self.covariances and kind_of(left, -1) == kind_of(right, -2) == "channel":
            keys, values, scale = self.covariances[right.name]  # multiplied first, and then queries by that
            return self.mingle(node, self.covariance(node, values, keys, scale), left.swapped).swapped
        match tuple(kind_of(each, dim) for each in (left, right.swapped) for dim in (-2, -1)):
            case (_, "channel", _, "channel"):
                return self.scores(node, left, right.swapped, 1.0)
            case ("pixel", "pixel", "channel", "pixel"):
                return self.weigh(node, left, right)
            case ("channel", "pixel", "pixel", "pixel"):
                return self.weigh(node, right.swapped, left.swapped).swapped
            case ("channel", "pixel", "channel", "pixel"):
                return self.covariance(node, left, right.swapped, 1.0)
            case ("channel", "pixel", "pixel", "channel"):
                return self.mingle(node, left, right)
            case ("pixel", "channel", "channel", "pixel"):
                return self.mingle(node, right.swapped, left.swapped).swapped
        self.refuse(node, PRODUCT.format(*shapes))

    def is_known(self, source: Any) -> bool:
        return source in self.layouts or isinstance(self.names.get(source), str)

    def scores(self, node: fx.Node, q: Arrangement, k: Arrangement, scale: float) -> Arrangement:
        """Both as (.., tokens, channels of a head); gives (.., tokens, tokens)."""
        q, k = q.with_side(-2), k.with_side(-2)
        lead = self.check_lead(node, q, k)
        (one, q), (other, k) = self.made(node, q, "last"), self.made(node, k, "last")
        other = self.another(node, other, one)
        heads = channel_factors(tuple(q.dims[d] for d in lead))
        count = size_of(heads)
        width = self.channels(one) // count
        name = self.enter_as(self.inside(node, "scores"), Scores(count, width, scale), (one, other))
        fresh = {f: Factor("channel", f.size) for f in heads}
        dims = tuple(tuple(fresh.get(f, f) for f in q.dims[d]) for d in lead)
        queries, keys = q.dims[-2], tuple(Factor("pixel", f.size) for f in k.dims[-2])
        pixels = [tuple(f for f in dim if f.kind == "pixel") for dim in dims]
        batch = next(f for dim in q.dims for f in dim if f.kind == "batch")
        base = ((batch,), (Factor("channel", count),), *(dim for dim in pixels if dim), queries, keys)
        index = torch.arange(count).view([f.size for f in heads])
        return Arrangement(name, 1, base, (*dims, queries, keys), index).bare

    def weigh(self, node: fx.Node, looks: Arrangement, values: Arrangement) -> Arrangement:
        """(.., tokens, tokens) and (.., tokens, channels of a head) to (.., tokens, channels of a head)."""
        looks, values = looks.with_side(-2).with_side(-1), values.with_side(-2)
        lead = self.check_lead(node, looks, values)
        name, looks = self.made(node, looks, "first")
        read, values = self.made(node, values, "last")
        rank = len(self.sketch.nodes[read].size) + 1
        made = self.enter_as(self.inside(node, "weighed"), Weigh(self.channels(name), axis=rank), (name, read))
        dims = (*(values.dims[d] for d in lead), looks.dims[-2], values.dims[-1])
        pixels = [tuple(f for f in dim if f.kind == "pixel") for dim in values.base[1:-1]]
        base = (values.base[0], *pixels[:-1], looks.dims[-2], values.base[-1])
        return Arrangement(made, rank, base, dims, values.index).bare

    def covariance(self, node: fx.Node, q: Arrangement, k: Arrangement, scale: float) -> Arrangement:
        """Both as (.., channels of a head, tokens); gives (.., channels of a head, channels of a head), the last as pixels."""
        q, k = q.with_side(-1), k.with_side(-1)
        lead = self.check_lead(node, q, k)
        (one, q), (other, k) = self.made(node, q, "last"), self.made(node, k, "last")
        other = self.another(node, other, one)
        heads = channel_factors(tuple(q.dims[d] for d in lead))
        op = Covariance(size_of(heads), scale)
        name = self.enter_as(self.inside(node, "covariance"), op, (one, other))
        made, keys = self.sketch.nodes[name], (Factor("pixel", self.channels(other) // op.heads),)
        pixels = [tuple(f for f in q.dims[d] if f.kind == "pixel") for d in lead]
        base = (q.base[0], (Factor("channel", made.channels),), *(dim for dim in pixels if dim), keys)
        self.covariances[name] = (q, k, scale)
        return Arrangement(name, 1, base, (*q.dims[:-1], keys), q.index)

    def mingle(self, node: fx.Node, looks: Arrangement, values: Arrangement) -> Arrangement:
        """(.., channels of a head, channels of a head as pixels) and (.., channels of a head, tokens) to the like of these."""
        looks, values = looks.with_side(-1), values.with_side(-1)
        lead = self.check_lead(node, looks, values)
        name, looks = self.made(node, looks, "first")
        read, values = self.made(node, values, "last")
        op = Mingle(size_of(channel_factors(tuple(values.dims[d] for d in lead))), axis=values.axis)
        made = self.enter_as(self.inside(node, "mingled"), op, (name, read))
        dims = (*(values.dims[d] for d in lead), looks.dims[-2], values.dims[-1])
        base = (*values.base[:-1], (Factor("channel", self.channels(made)),))
        return Arrangement(made, op.axis, base, dims, looks.index).bare

    def check_lead(self, node: fx.Node, one: Arrangement, other: Arrangement) -> list[int]:
        """The dimensions of images, windows and heads, which must be the same for both."""
        lead = list(range(len(one.dims) - 2))
        alike = all(sides_of(one.dims[d]) == sides_of(other.dims[d]) for d in lead)
        if not alike or not any(f.kind == "batch" for d in lead for f in one.dims[d]):
            self.refuse(node, PRODUCT.format(one.shape, other.shape))
        return lead

    def another(self, node: fx.Node, name: str, other: str) -> str:
        """A copy, where one node would be read twice."""
        if name != other:
            return name
        source = tuple(range(self.channels(name)))
        return self.enter_as(self.inside(node, "again"), Select(source, axis=self.axis(name)), (name,))

    # --- fused ----------------------------------------------------------------------------------------------------

    def fused(self, node: fx.Node) -> None:
        """torch's scaled_dot_product_attention."""
        words = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
        given, evaluated = (self.given(n, *words) for n in (node, self.trace.twins[node][0]))
        mask = given.get("attn_mask")
        if given.get("is_causal") or given.get("enable_gqa"):
            self.refuse(node, "causal attention and grouped queries in torch's fused form are not nested")
        if mask is not None and (self.is_known(mask) or not self.values[mask].is_floating_point()):
            self.refuse(
                node, "its mask is true or false, or follows from the image; only numbers added to q k^T are nested"
            )
        if evaluated.get("dropout_p"):
            self.refuse(node, "it drops in evaluation, too")
        q, k, v = (self.layout_of(node, given[word]) for word in words[:3])
        if self.whole:
            self.refuse(node, "attention is taken as it was recorded")
        scale = given.get("scale")
        scale, drop = q.shape[-1] ** -0.5 if scale is None else scale, given.get("dropout_p") or 0.0
        self.layouts_or_name(node, self.attention(node, (q, k, v), scale, drop, mask))

    def attention(
        self,
        node: fx.Node,
        tensors: tuple[Arrangement, Arrangement, Arrangement],
        scale: float,
        drop: float,
        mask: fx.Node | None = None,
    ) -> Arrangement:
        q, k, v = (for_every_head(each, tensors[0]) for each in tensors)
        training = self.module.get_submodule(path_of(node)).training
        over_channels = [kind_of(each, dim) for each in (q, k, v) for dim in (-2, -1)] == ["channel", "pixel"] * 3
        looks = (self.covariance if over_channels else self.scores)(node, q, k, scale)
        looks = looks if mask is None else self.beside(node, looks, mask, "add")
        weighed = self.over_pixels(node, looks, -1, nn.Softmax, "softmax")
        assert weighed is not None
        looks = weighed
        if drop:
            looks = self.pixelwise(node, looks, nn.Dropout(drop).train(training), "dropout")
        return (self.mingle if over_channels else self.weigh)(node, looks, v)

    def beside(
        self, node: fx.Node, layout: Arrangement, constant: fx.Node, function: str, before: bool = False
    ) -> Arrangement:
        """A tensor and numbers that the module computes from its own."""
        read, layout = self.made(node, layout)
        piece, pixels = numbers_beside(self, node, constant, layout)
        held = sum(p.numel() for p in piece.parameters())
        op, source = (
            Computed(function, pixels, before, held, work(piece, []), axis=layout.axis),
            self.sketch.nodes[read],
        )
        name = self.fresh(self.inside(node, "numbers"))
        self.sketch.layers[name] = piece
        self.put(Node(name, op, (read,), source.births, op.size([source])))
        return replace(layout, name=name)

    def headwise(self, node: fx.Node, layout: Arrangement, layer: nn.Module, word: str) -> Arrangement | None:
        """A module over the last dimension, all channels of each head; None if that dimension is something else."""
        last, all_of = layout.dims[-1], channel_factors(layout.dims)
        if (
            self.whole
            or not last
            or not layout.holds(len(layout.dims) - 1, "channel")
            or all_of[-len(last) :] != [*last]
        ):
            return None
        read, layout = self.made(node, layout, "last")
        width, source = layout.shape[-1], self.sketch.nodes[read]
        op = Headwise(source.channels // width, width, sum(p.numel() for p in layer.parameters()), axis=layout.axis)
        name = self.fresh(self.inside(node, word)) if node.op != "call_module" else self.name(node)
        if own(self, node, name, layer, op):
            self.refuse(node, "it serves several places; give each a layer of its own")
        return replace(layout, name=self.put(Node(name, op, (read,), source.births, source.size)))

    def over_pixels(
        self, node: fx.Node, layout: Arrangement, dim: int, make: Callable[[int], nn.Module], word: str
    ) -> Arrangement | None:
        """A module over one dimension of pixels; None if that dimension is something else."""
        dim %= len(layout.dims)
        if self.whole or not layout.holds(dim, "pixel"):
            return None
        layout = self.made(node, layout.with_side(dim), "first")[1]
        before = sum(any(f.kind == "pixel" for f in each) for each in layout.dims[:dim])
        return self.pixelwise(node, layout, make(2 + before), word).bare

    def windowed(self, node: fx.Node, source: fx.Node, layer: nn.Module) -> bool:
        """Pooling and the like of windows that stand beside the images of the batch; False where that is not what they do."""
        layout = self.layout_of(node, source)
        images = len(layout.dims) == 4 and layout.channel_dims == [1] and layout.holds(1, "channel")
        kinds = {factor.kind for factor in layout.dims[0]}
        if self.whole or not images or kinds != {"batch", "pixel"}:
            return False
        for dim in (2, 3):
            layout = layout.with_side(dim)
        read, made = self.made(node, layout, "first")
        before, size = self.sketch.nodes[read], self.shape(node)[2:]
        if len(before.size) != 3 or self.shape(node)[:2] != self.shape(source)[:2]:
            return False
        name = self.name(node)
        self.sketch.layers[name] = Windows(layer, before.size[0])
        self.put(Node(name, Module(), (read,), before.births, (before.size[0], *size)))
        sides = tuple((Factor("pixel", side),) if side > 1 else () for side in size)
        base, dims = (*made.base[:3], *sides), (*made.dims[:2], *sides)
        self.layouts_or_name(node, replace(made, name=name, base=base, dims=dims))
        return True

    def pixelwise(self, node: fx.Node, layout: Arrangement, layer: nn.Module, word: str) -> Arrangement:
        """A module over what each channel of a node is, which keeps its shape."""
        read = self.sketch.nodes[layout.name]
        name = self.fresh(self.inside(node, word))
        self.sketch.layers[name] = layer
        self.put(Node(name, Module(axis=layout.axis), (read.name,), read.births, read.size))
        return replace(layout, name=name)

    def multihead(self, node: fx.Node, layer: nn.MultiheadAttention) -> None:
        """torch's own layer, of a tensor with itself: one linear layer, attention, another linear layer."""
        words = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")
        given = self.given(node, *words)
        inputs = {given[word] for word in words[:3]}
        plain = layer.in_proj_weight is not None and layer.bias_k is None and not layer.add_zero_attn
        masked = given.get("key_padding_mask") is not None or given.get("attn_mask") is not None
        if self.whole or len(inputs) > 1 or not plain or not layer.batch_first or masked or given.get("is_causal"):
            self.refuse(
                node, "of MultiheadAttention only that of a tensor with itself is nested, batch first, without masks"
            )
        path, read = str(node.target), self.computed(node, inputs.pop())
        tokens, width = self.sketch.nodes[read].size, layer.embed_dim
        if self.axis(read) != 2 or self.channels(read) != width:
            self.refuse(node, f"it attends over {tokens}; expected (N, tokens, channels)")
        first = nn.Linear(1, 1, bias=layer.in_proj_bias is not None, device="meta")
        first.weight, first.training = layer.in_proj_weight, layer.training
        if layer.in_proj_bias is not None:
            first.bias = layer.in_proj_bias
        made = self.linear(node, f"{path}.in_proj", first, read, 3 * width)
        whole = Arrangement.of(self.sketch.nodes[made], BATCHES[0])
        parts = [whole.picked(2, range(i * width, (i + 1) * width)) for i in range(3)]
        heads = (whole.shape[0], tokens[0], layer.num_heads, layer.head_dim)
        q, k, v = (part.reshaped(heads).permuted((0, 2, 1, 3)) for part in parts)  # type: ignore[union-attr]
        made_of_all = self.attention(node, (q, k, v), layer.head_dim**-0.5, layer.dropout)
        out = made_of_all.permuted((0, 2, 1, 3)).reshaped((whole.shape[0], tokens[0], width))
        assert out is not None
        self.names[node] = (self.linear(node, f"{path}.out_proj", layer.out_proj, self.made(node, out)[0], width), "")

    def linear(self, node: fx.Node, name: str, layer: nn.Linear, read: str, width: int) -> str:
        op = Linear(bias=layer.bias is not None, axis=self.axis(read))
        name = self.fresh(name) if name in self.sketch.nodes else name
        shares = own(self, node, name, layer, op)
        return self.put(Node(name, op, (read,), (0,) * width, self.sketch.nodes[read].size, shares))


def for_every_head(single: Arrangement, many: Arrangement) -> Arrangement:
    """Keys or values of one head for all: taken as often as there are heads of queries, which are then born together."""
    if len(single.dims) != len(many.dims):
        return single
    for dim in range(len(many.dims) - 2):
        if not single.dims[dim] and many.dims[dim] and many.holds(dim, "channel"):
            heads, at = Factor("channel", many.shape[dim]), len(channel_factors(single.dims[:dim]))
            index = single.index.unsqueeze(at)
            index = index.expand(*(heads.size if d == at else -1 for d in range(index.dim())))
            single = replace(single, dims=(*single.dims[:dim], (heads,), *single.dims[dim + 1 :]), index=index)
    return single


def kind_of(layout: Arrangement, dim: int) -> str:
    """What a dimension is: channels, pixels (or a single one), or a mixture of things."""
    if not layout.dims[dim] or layout.holds(dim, "pixel"):
        return "pixel"
    return "channel" if layout.holds(dim, "channel") else ""
