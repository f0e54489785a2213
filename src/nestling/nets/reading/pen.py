"""The kinds of nodes, one method each: from a traced operation whose kind is known to nodes of a plan, still without births.

In: an operation of torch.fx and the page it belongs on. Out: nodes and layers entered on that page, or a refusal that says
why this one cannot be nested. Which operation is of which kind is said in read.py.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from nestling.errors import NestlingError
from nestling.nets.ops import (
    BatchNorm,
    LayerNorm,
    Linear,
    Module,
    Opaque,
    Operation,
    PixelLinear,
    Scale,
    Zip,
)
from nestling.nets.ops.calls import Call, DropPath, spelled
from nestling.nets.ops.weighted_op import WeightedOp
from nestling.nets.plan import Node
from nestling.nets.reading.held import functional_layer, norm_layer, numbers_cut, own
from nestling.nets.reading.layout import Arrangement
from nestling.nets.reading.picked import Picking
from nestling.nets.reading.recorded import Recorder, Unknown, work
from nestling.nets.reading.shells import Shell
from nestling.nets.reading.sketch import UNPLAIN
from nestling.nets.reading.trace import BATCHES
from nestling.nets.reading.vocabulary import ALWAYS, MIXES
from nestling.nets.reading.watcher import path_of


class Pen(Picking):
    """Enters one operation after another on the page."""

    def map(self, node: fx.Node, layer: nn.Module) -> None:
        """A module of one tensor that treats each channel by itself."""
        source = next(n for n in node.all_input_nodes if self.is_tensor(n))
        if source in self.layouts:
            self.map_everywhere(node, source, layer)
            return
        read, name = self.read_of(node), self.name(node)
        axis = self.axis(read)
        if axis != 1 and is_spatial(layer):
            self.refuse(node, f"it treats the channels at dimension {axis} of {self.shape(source)} as pixels")
        self.same(node, read)
        self.sketch.layers[name] = layer
        self.add(node, Node(name, Module(axis=axis), (read,), (0,) * self.channels(read), self.size(node, axis)))

    def map_everywhere(self, node: fx.Node, source: fx.Node, layer: nn.Module) -> None:
        """A function of each number by itself, wherever channels and pixels stand."""
        if is_spatial(layer) and self.windowed(node, source, layer):
            return
        if is_spatial(layer) or isinstance(layer, DropPath) or self.shape(node) != self.shape(source):
            self.refuse(node, UNPLAIN.format(self.shape(source)))
        layout, name = self.chosen(node, source), self.name(node)
        read = self.sketch.nodes[layout.name]
        self.sketch.layers[name] = layer
        self.put(Node(name, Module(axis=layout.axis), (read.name,), read.births, read.size))
        self.layouts[node] = replace(layout, name=name)

    def softmax(self, node: fx.Node, dim: int) -> bool:
        """Over pixels, as in attention, over the channels of each head, or over parts; over all channels it is not nested."""
        known = self.is_known(node.all_input_nodes[0]) and type(dim) is int
        return self.within(node, dim, lambda at: nn.Softmax(at), "softmax") or (known and self.softmax_parts(node, dim))

    def normalize(self, node: fx.Node) -> bool:
        """The same for vectors of length one."""
        given = self.given(node, "input", "p", "dim", "eps")
        rest: dict[str, Any] = {key: value for key, value in given.items() if key in ("p", "eps")}
        return self.within(
            node, given.get("dim", 1), lambda at: Call(F.normalize, 0, (None,), {**rest, "dim": at}), "normalized"
        )

    def within(self, node: fx.Node, dim: int, make: Callable[[int], nn.Module], word: str) -> bool:
        """What keeps the shape of a tensor and works along one dimension, if that is pixels or the channels of heads."""
        source = node.all_input_nodes[0]
        if self.whole or not self.is_known(source) or type(dim) is not int:
            return False
        layout = self.layout_of(node, source)
        rank, heads = len(layout.dims), len(layout.channel_dims) > 1
        if (
            dim % rank == rank - 1
            and layout.dims[-1]
            and layout.dims[-1] == layout.base[-1]
            and layout.holds(-1, "pixel")
        ):
            self.map(node, make(-1))
            return True
        made = self.over_pixels(node, layout, dim, make, word)
        if made is None and heads and dim % rank == rank - 1:
            made = self.headwise(node, layout, make(-1), word)
        if made is not None:
            self.layouts_or_name(node, made)
        return made is not None

    def pointwise(self, node: fx.Node, function: Callable[..., Any]) -> None:
        """A function of one tensor and constants."""
        if not any(source in self.layouts for source in node.all_input_nodes):
            self.read_of(node)
        found: list[fx.Node] = []
        fx.map_arg(
            (node.args, dict(node.kwargs)), found.append
        )  # all_input_nodes lists a tensor that is read twice once
        if sum(map(self.is_tensor, found)) > 1:
            self.refuse(node, "it reads several tensors; of such functions only sums, products and the like are nested")
        self.map(node, Call.of(node, function))

    def zip(self, node: fx.Node, function: str) -> None:
        alpha = node.kwargs.get("alpha", 1) if function in ("add", "sub") else 1
        if set(node.kwargs) - {"alpha"} or len(node.args) > 2 or self.values[node].dtype is torch.bool:
            self.refuse(node, f"its further arguments {node.args[2:]} {node.kwargs} are not supported")
        tensors = [a for a in node.args[:2] if isinstance(a, fx.Node)]
        if any(tensor in self.layouts for tensor in tensors) and alpha == 1:
            self.zip_everywhere(node, function, tensors)
            return
        reads = (self.read_of(node, 0), self.read_of(node, 0 if node.args[0] is node.args[1] else 1))
        one, other = (self.values[a] for a in tensors)
        widths, axes = {self.channels(read) for read in reads}, {self.axis(read) for read in reads}
        apart = one.dim() != other.dim() or len(widths - {1}) > 1 or len(axes) > 1
        if apart or max(widths) != self.shape(node)[max(axes)]:
            self.refuse(node, f"it combines tensors of shapes {tuple(one.shape[1:])} and {tuple(other.shape[1:])}")
        if alpha != 1:
            reads = (
                reads[0],
                self.before(self.inside(node, "scaled"), reads[1], Call(torch.mul, 0, (None, alpha), {})),
            )
        self.enter(node, Zip(function, axis=axes.pop()), reads)

    def scale(self, node: fx.Node, function: str) -> None:
        """A tensor and numbers of the module's own: a number for every channel, or one for all, is a parameter or buffer cut by
        births; whatever else is computed from its parameters and buffers stays whole."""
        one, other = (a for a in node.args[:2] if isinstance(a, fx.Node))
        tensor, constant = (one, other) if self.is_known(one) else (other, one)
        if constant in self.tokens_in and not self.whole:
            self.token(node, constant)
            self.zip(node, function)
            return
        if not self.is_known(tensor) or node.kwargs or len(node.args) > 2:
            self.refuse(
                node, "it combines what was computed from the image with a constant in a way that is not nested"
            )
        if function not in ("add", "sub", "mul", "div"):
            self.refuse(node, f"{function} of a constant and a tensor is not nested")
        read = self.names.get(tensor)
        backwards = tensor is other and function in ("sub", "div")
        cut = None if backwards or not isinstance(read, str) else numbers_cut(self, node, constant, read)
        if cut is not None and isinstance(read, str):
            self.enter_numbers(node, read, function, constant, *cut)
        elif self.whole:
            self.refuse(node, "it is taken as it was recorded")
        else:
            self.layouts_or_name(node, self.beside(node, self.layout_of(node, tensor), constant, function, backwards))

    def enter_numbers(
        self,
        node: fx.Node,
        read: str,
        function: str,
        constant: fx.Node,
        held: Tensor,
        path: str,
        pixels: tuple[int, ...],
    ) -> None:
        layer, learnt = nn.Module(), isinstance(held, nn.Parameter)
        layer.register_parameter("weight", held) if isinstance(held, nn.Parameter) else layer.register_buffer(
            "weight", held
        )
        layer.training = self.module.get_submodule(path_of(node)).training
        self.holders[node] = path.rpartition(".")[0] if learnt else ""
        op, name = Scale(function, learnt, pixels, axis=self.axis(read)), self.name(node)
        shares = own(self, node, name, layer, op)
        self.same(node, read)
        self.add(node, Node(name, op, (read,), (0,) * self.channels(read), self.size(node, op.axis), shares))

    def layer(self, node: fx.Node, read: str, layer: nn.Module, kind: type[Operation]) -> None:
        """A layer with parameters, by the operation that knows it."""
        name, before = self.name(node), self.sketch.nodes[read]
        if kind is Linear and before.size and before.op.axis <= len(before.size) and not self.whole:
            self.pixel_linear(node, read, layer)
            return
        if isinstance(layer, nn.GroupNorm) and layer.num_groups == 1 < before.channels and before.op.axis == 1:
            kind = LayerNorm
        if kind not in (Linear, LayerNorm) and before.op.axis != 1:
            self.refuse(
                node,
                f"it treats the channels at dimension {before.op.axis} as pixels; use nestling.exits, which takes it as it is",
            )
        try:
            first, op = kind.of(layer, before).apart(layer)
        except NestlingError as error:
            self.refuse(node, str(error))
        if not op.weighted:
            self.same(node, read)
        elif isinstance(op, WeightedOp) and kind is not Linear and len(op.kernel) != len(before.size):
            self.refuse(node, f"it does not take tensors of shape (N, {before.channels}, *{before.size})")
        shares = own(self, node, name, layer, op)
        if first is not None:
            read = self.before(f"{name}_pad", read, first)
        channels, size = self.values[node].shape[op.axis], self.size(node, op.axis)
        if op.size([self.sketch.nodes[read]]) != size:
            self.refuse(node, f"it gives images of {size}, expected {op.size([self.sketch.nodes[read]])}")
        self.add(node, Node(name, op, (read,), (0,) * channels, size, shares))

    def layer_everywhere(self, node: fx.Node, source: fx.Node, layer: Any, kind: type[Operation]) -> None:
        """A linear layer or a norm over the last dimension, where that is all channels, of windows or parts."""
        if kind is BatchNorm:
            self.batch_norm_everywhere(node, source, layer)
            return
        if kind is LayerNorm and len(self.layout_of(node, source).channel_dims) > 1:
            made = self.headwise(node, self.layout_of(node, source), layer, "norm")
            if made is not None and tuple(layer.normalized_shape) == made.shape[-1:]:
                self.layouts[node] = made
                return
            self.refuse(node, UNPLAIN.format(self.shape(source)))
        read, layout = self.made(node, self.layout_of(node, source), "last")
        last = len(layout.dims) - 1
        if kind not in (Linear, LayerNorm) or layout.channel_dims != [last] or not layout.holds(last, "channel"):
            self.refuse(node, UNPLAIN.format(self.shape(source)))
        before, name = self.sketch.nodes[read], self.name(node)
        try:
            op = kind.of(layer, before)
        except NestlingError as error:
            self.refuse(node, str(error))
        channels, shares = self.values[node].shape[-1], own(self, node, name, layer, op)
        self.put(Node(name, op, (read,), (0,) * channels, before.size, shares))
        made = Arrangement.of(self.sketch.nodes[name], BATCHES[0])
        dims = (*layout.dims[:-1], made.base[-1])
        self.layouts[node] = replace(made, base=(*layout.base[:-1], made.base[-1]), dims=dims)

    def batch_norm_everywhere(self, node: fx.Node, source: fx.Node, layer: Any) -> None:
        """Over images and pixels, wherever they stand, where dimension 1 is all channels."""
        layout = self.layout_of(node, source)
        if layout.channel_dims != [1] or not layout.holds(1, "channel"):
            self.refuse(node, UNPLAIN.format(self.shape(source)))
        read, layout = self.made(node, layout, "first")
        before, name = self.sketch.nodes[read], self.name(node)
        try:
            op = BatchNorm.of(layer, before)
        except NestlingError as error:
            self.refuse(node, str(error))
        shares = own(self, node, name, layer, op)
        self.put(Node(name, op, (read,), before.births, before.size, shares))
        self.layouts[node] = replace(layout, name=name)

    def pixel_linear(self, node: fx.Node, read: str, layer: Any) -> None:
        """Over the last dimension of each channel, the same for all of them."""
        before, name = self.sketch.nodes[read], self.name(node)
        if before.op.axis != 1:
            self.refuse(
                node,
                f"its channels stand in the middle, at dimension {before.op.axis}; move them last, or use nestling.exits",
            )
        op = PixelLinear(layer.in_features, layer.out_features, layer.bias is not None)
        if own(self, node, name, layer, op):
            self.refuse(
                node, "it mixes the pixels of several places with the same weights; give each a layer of its own"
            )
        self.add(node, Node(name, op, (read,), (0,) * before.channels, op.size([before])))

    def functional(self, node: fx.Node, kind: type[WeightedOp]) -> None:
        """A function on parameters of the module, as the layer it stands for; a bias that is computed is added behind it."""
        given = self.given(node, "input", "weight", "bias", *kind.words)
        bias, weight = given.get("bias"), given["weight"]
        late = kind is Linear and isinstance(bias, fx.Node) and bias.op != "get_attr" and not self.whole
        # the functional form on a module's own weight goes by that module's name
        self.holders[node] = str(weight.target).rpartition(".")[0] if weight.op == "get_attr" else path_of(node)
        layer = functional_layer(self, node, kind, {**given, "bias": None} if late else given)
        if given["input"] in self.layouts:
            self.layer_everywhere(node, given["input"], layer, kind)
        else:
            self.layer(node, self.computed(node, given["input"]), layer, kind)
        if late and isinstance(bias, fx.Node):
            self.layouts_or_name(node, self.beside(node, self.layout_of(node, node), bias, "add"))

    def norm(self, node: fx.Node, shell: Shell, kind: type[Operation]) -> None:
        """A function on the module's own parameters and statistics, as the layer it stands for."""
        runs = [self.given(n, *shell.words) for n in (node, self.trace.twins[node][0])]
        read = self.computed(node, runs[0]["input"])
        layer = norm_layer(self, node, shell, runs[0], runs[1], self.sketch.nodes[read])
        owner, weight = path_of(node), runs[0].get("weight")
        layer.training = self.module.get_submodule(owner).training
        self.holders[node] = str(weight.target).rpartition(".")[0] if isinstance(weight, fx.Node) else owner
        self.layer(node, read, layer, kind)

    def dropout(self, node: fx.Node, kind: type[nn.Module], function: Callable[..., Any]) -> None:
        """Dropout as a function says by itself whether it drops: with the module's mode or never; always is refused."""
        modes = [self.given(n, "input", "p", "training") for n in (node, self.trace.twins[node][0])]
        default = function is not torch.dropout
        training, evaluation = (bool(given.get("training", given.get("train", default))) for given in modes)
        if len({given.get("p", 0.5) for given in modes}) > 1 or (evaluation and not training):
            self.refuse(node, "it drops otherwise in training than in evaluation, and not only in training")
        if modes[0].get("p", 0.5) == 0:
            self.names[node] = self.read_of(node)
        elif evaluation:
            self.refuse(node, ALWAYS)
        elif training:
            layer: Any = kind(modes[0].get("p", 0.5))
            layer.training = self.module.get_submodule(path_of(node)).training
            self.map(node, layer)
        else:
            self.names[node] = self.read_of(node)

    def reduction(self, node: fx.Node, function: Callable[..., Any]) -> None:
        given = self.given(node, "input", "dim", "keepdim")
        dims, source = given.get("dim"), node.all_input_nodes[0]
        only = dims[0] if isinstance(dims, list | tuple) and len(dims) == 1 else dims
        if source in self.layouts and type(only) is int and not {*given} - {"input", "dim", "keepdim"}:
            at = only % self.values[source].dim()
            if self.reduced_parts(node, function, at, bool(given.get("keepdim")), source):
                return
        rank = self.values[source].dim()
        if source in self.layouts and dims is not None and not {*given} - {"input", "dim", "keepdim"}:
            over = [d % rank for d in (dims if isinstance(dims, list | tuple) else [dims])]
            if self.reduced_everywhere(node, function, over, bool(given.get("keepdim"))):
                return
        axis = self.axis(self.read_of(node))
        listed = [dims] if isinstance(dims, int) else list(dims) if isinstance(dims, list | tuple) else [axis]
        over = sorted(d % rank for d in listed)
        if over == [axis] and not self.whole:
            self.written_norm(node)
            return
        if {*over} & {0, axis}:
            self.refuse(node, MIXES)
        if axis == 1:
            self.pointwise(node, function)
        else:
            self.reduced(node, function, over, {k: v for k, v in given.items() if k not in ("input", "dim")})

    def pad(self, node: fx.Node) -> None:
        """Zeros around each image, or further channels of zeros."""
        if node.all_input_nodes[0] in self.layouts:
            self.pad_everywhere(node)
            return
        read = self.read_of(node)
        given = self.given(node, "input", "pad", "mode", "value")
        sides, value = tuple(given["pad"]), given.get("value") or 0
        if not any(sides):
            self.names[node] = read
            return
        if len(sides) <= 4 and self.axis(read) == 1:
            self.pointwise(node, F.pad)
            return
        if self.axis(read) != 1 and self.pad_pixels(node, read, sides, given, value):
            return
        if self.axis(read) != 1 or len(sides) < 6:
            self.refuse(node, f"padding {sides} of a tensor with channels at dimension {self.axis(read)}")
        before, after = sides[4:6]
        plain = value == 0 and given.get("mode", "constant") == "constant" and min(before, after) >= 0
        if any(sides[:4]) or any(sides[6:]) or not plain:
            self.refuse(node, f"padding {sides} with {value}: channels may only be padded by themselves, with zeros")
        self.names[node] = self.take(node, read, (-1,) * before + tuple(range(self.channels(read))) + (-1,) * after)

    def opaque(self, node: fx.Node) -> None:
        """An operation as it was recorded, all channels at once.

        What is no tensor with the images first is recorded inside the operations that read it."""
        value = self.values[node]
        if not isinstance(value, Tensor) or value.dim() < 2 or not self.trace.is_batch(node):
            return
        try:
            piece, reads = Recorder(self.trace, self.names, self.memo).record(node)
        except Unknown as error:
            self.refuse(node, str(error))
        name = self.name(node)
        self.sketch.layers[name] = piece
        tensors = [self.tensor_of[read] for read in reads]
        mine = {id(p): p.numel() for p in piece.parameters() if id(p) not in self.counted}
        self.counted |= {*mine}
        op = Opaque(work(piece, tensors), sum(mine.values()))
        self.add(node, Node(name, op, reads, (0,) * value.shape[1], tuple(value.shape[2:])))


SPATIAL = ("pool", "pad", "upsampl", "interpolate", "dropout2d", "featurealpha", "reshape")


def is_spatial(layer: nn.Module) -> bool:
    """Whether a module knows which dimensions are pixels, so that the channels must stand behind the batch."""
    word = spelled(layer.function) if isinstance(layer, Call) else type(layer).__name__
    return any(part in word.lower() for part in SPATIAL)
