"""The kinds of nodes, one method each: from a traced operation whose kind is known to nodes of a plan, still without births.

In: an operation of torch.fx and the page it belongs on. Out: nodes and layers entered on that page, or a refusal that says
why this one cannot be nested. Which operation is of which kind is said in read.py.
"""

import operator
from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from nestling.errors import NestlingError
from nestling.nets.ops import Cat, Flatten, Module, Opaque, Operation, Scale, Select, Zip
from nestling.nets.ops.calls import Call, Reshape
from nestling.nets.ops.weighted_op import WeightedOp
from nestling.nets.plan import Node
from nestling.nets.reading.held import constant_of, functional_layer, norm_layer, own
from nestling.nets.reading.recorded import Recorder, Unknown, work
from nestling.nets.reading.shells import Shell
from nestling.nets.reading.sketch import STRANGE, Page
from nestling.nets.reading.trace import BATCHES, path_of


class Pen(Page):
    """Enters one operation after another on the page."""

    def map(self, node: fx.Node, layer: nn.Module) -> None:
        read, name = self.same(node), self.name(node)
        self.sketch.layers[name] = layer
        self.add(node, Node(name, Module(), (read,), (0,) * self.channels(read), self.size(node)))

    def enter(self, node: fx.Node, op: Operation, reads: tuple[str, ...]) -> str:
        """A node of which the operation says how wide and how large it is."""
        read = [self.sketch.nodes[name] for name in reads]
        made = self.put(Node(self.name(node), op, reads, (0,) * op.channels(read), op.size(read)))
        self.names[node] = made
        return made

    def pointwise(self, node: fx.Node, function: Callable[..., Any]) -> None:
        """A function of one tensor and constants."""
        self.read_of(node)
        found: list[fx.Node] = []
        fx.map_arg(
            (node.args, dict(node.kwargs)), found.append
        )  # all_input_nodes lists a tensor that is read twice once
        if sum(map(self.is_tensor, found)) > 1:
            self.refuse(node, "it reads several tensors; of such functions only sums, products and the like are nested")
        self.map(node, Call.of(node, function))

    def zip(self, node: fx.Node, function: str) -> None:
        reads = (self.read_of(node, 0), self.read_of(node, 0 if node.args[0] is node.args[1] else 1))
        one, other = (self.values[a] for a in node.args[:2] if isinstance(a, fx.Node))
        if node.kwargs or len(node.args) > 2:
            self.refuse(node, f"its further arguments {node.args[2:]} {node.kwargs} are not supported")
        widths = {self.channels(read) for read in reads}
        if one.dim() != other.dim() or len(widths - {1}) > 1:
            self.refuse(node, f"it combines tensors of shapes {tuple(one.shape[1:])} and {tuple(other.shape[1:])}")
        self.enter(node, Zip(function), reads)

    def scale(self, node: fx.Node, function: str) -> None:
        """A tensor and a parameter or buffer with a number for every channel, or with one for all."""
        one, other = (a for a in node.args[:2] if isinstance(a, fx.Node))
        tensor, constant = (one, other) if one in self.names else (other, one)
        read, shape, rank = self.names.get(tensor), tuple(self.values[constant].shape), self.values[tensor].dim()
        if not isinstance(read, str) or node.kwargs or len(node.args) > 2:
            self.refuse(
                node, "it combines what was computed from the image with a constant in a way that is not nested"
            )
        if function not in ("add", "sub", "mul", "div") or (tensor is other and function in ("sub", "div")):
            self.refuse(node, f"{function} of a constant and a tensor is not nested")
        wide = (1,) * (rank - len(shape)) + shape
        per_channel = [1, self.channels(read), *[1] * (rank - 2)]
        if len(shape) > rank or any(side not in (1, most) for side, most in zip(wide, per_channel, strict=True)):
            self.refuse(
                node, f"its constant has the shape {shape}; expected a number for every channel, or one for all"
            )
        held, path = constant_of(self, node, constant)
        layer, learnt = nn.Module(), isinstance(held, nn.Parameter)
        layer.register_parameter("weight", held) if isinstance(held, nn.Parameter) else layer.register_buffer(
            "weight", held
        )
        layer.training = self.module.get_submodule(path_of(node)).training
        self.holders[node] = path.rpartition(".")[0] if learnt else ""
        op, name = Scale(function, learnt), self.name(node)
        shares = own(self, node, name, layer, op)
        self.same(node, read)
        self.add(node, Node(name, op, (read,), (0,) * self.channels(read), self.size(node), shares))

    def layer(self, node: fx.Node, read: str, layer: nn.Module, kind: type[Operation]) -> None:
        """A layer with parameters, by the operation that knows it."""
        name = self.name(node)
        try:
            first, op = kind.of(layer, self.sketch.nodes[read]).apart(layer)
        except NestlingError as error:
            self.refuse(node, str(error))
        if not op.weighted:
            self.same(node, read)
        elif isinstance(op, WeightedOp) and len(op.kernel) != len(self.sketch.nodes[read].size):
            self.refuse(
                node, f"it does not take tensors of shape (N, {self.channels(read)}, *{self.sketch.nodes[read].size})"
            )
        shares = own(self, node, name, layer, op)
        if first is not None:
            read = self.before(f"{name}_pad", read, first)
        channels, size = self.values[node].shape[op.axis], self.size(node)
        if op.size([self.sketch.nodes[read]]) != size:
            self.refuse(node, f"it gives images of {size}, expected {op.size([self.sketch.nodes[read]])}")
        self.add(node, Node(name, op, (read,), (0,) * channels, size, shares))

    def before(self, name: str, read: str, module: nn.Module) -> str:
        """A module between a layer and what it reads."""
        node = self.sketch.nodes[read]
        size = module(torch.empty(1, *node.shape(node.channels), device="meta")).shape[2:]
        made = Node(self.fresh(name), Module(), (read,), node.births, tuple(size))
        self.sketch.layers[made.name] = module
        return self.put(made)

    def functional(self, node: fx.Node, kind: type[WeightedOp]) -> None:
        """A function on parameters of the module, as the layer it stands for."""
        given = self.given(node, "input", "weight", "bias", *kind.words)
        layer = functional_layer(self, node, kind, given)
        # the functional form on a module's own weight goes by that module's name
        self.holders[node] = str(given["weight"].target).rpartition(".")[0]
        self.layer(node, self.computed(node, given["input"]), layer, kind)

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
        """Dropout as a function says by itself whether it drops: with the module's mode, always or never."""
        modes = [self.given(n, "input", "p", "training") for n in (node, self.trace.twins[node][0])]
        default = function is not torch.dropout
        training, evaluation = (bool(given.get("training", given.get("train", default))) for given in modes)
        if len({given.get("p", 0.5) for given in modes}) > 1 or (evaluation and not training):
            self.refuse(node, "it drops otherwise in training than in evaluation, and not only in training")
        if evaluation:
            self.map(node, Call.of(node, function))
        elif training:
            layer: Any = kind(modes[0].get("p", 0.5))
            layer.training = self.module.get_submodule(path_of(node)).training
            self.map(node, layer)
        else:
            self.names[node] = self.read_of(node)

    def reduction(self, node: fx.Node, function: Callable[..., Any]) -> None:
        dims = self.given(node, "input", "dim").get("dim")
        rank = self.values[node.all_input_nodes[0]].dim()
        listed = [dims] if isinstance(dims, int) else list(dims) if isinstance(dims, list | tuple) else [1]
        if {d % rank for d in listed} & {0, 1}:
            self.refuse(node, "it mixes channels, so that early channels would depend on later ones")
        self.pointwise(node, function)

    def reshape(self, node: fx.Node) -> None:
        """Flattening, and what changes the shape of each channel only; else channels are regrouped."""
        if node.all_input_nodes[0] in self.regrouped:
            self.regroup(node)
            return
        read = self.read_of(node)
        before = self.sketch.nodes[read]
        shape = tuple(self.values[node].shape)
        old = (BATCHES[0], before.channels, *before.size)
        if shape == old:
            self.names[node] = read
        elif len(shape) == 2 and shape[0] == BATCHES[0]:
            self.enter(node, Flatten(), (read,))
        elif shape[:2] == old[:2]:
            self.map(node, Reshape(shape[2:]))
        else:
            self.regroup(node)

    def regroup(self, node: fx.Node, order: tuple[int, ...] = ()) -> None:
        """Channels in several dimensions, or those dimensions in another order: what comes out as one dimension again are
        the same channels elsewhere, each with its own birth (channel shuffle)."""
        source = node.all_input_nodes[0]
        read, index = self.regrouped.get(source) or (self.read_of(node), None)
        if index is None:
            index = torch.arange(self.channels(read))
        shape, size = tuple(self.values[node].shape), self.sketch.nodes[read].size
        inner = len(shape) - len(size)
        if order and (order[0] != 0 or order[inner:] != tuple(range(inner, len(shape)))):
            self.refuse(node, "it moves channels to other places, so that stripes would be mixed")
        if shape[0] != BATCHES[0] or shape[inner:] != size or prod(shape[1:inner]) != index.numel():
            old = (self.channels(read), *size)
            self.refuse(node, f"it regroups channels: (N, {old}) becomes {shape}, so births would be mixed")
        index = index.permute([d - 1 for d in order[1:inner]]) if order else index.reshape(shape[1:inner])
        if index.dim() > 1:
            self.regrouped[node] = (read, index)
        else:
            self.names[node] = self.take(node, read, tuple(index.tolist()))

    def reorder(self, node: fx.Node, base: Any) -> None:
        """Dimensions in another order."""
        rank = self.values[node].dim()
        if base is torch.permute:
            given = node.args[1:] if isinstance(node.args[1], int) else node.args[1]
            order = [int(d) % rank for d in given]  # type: ignore[union-attr, arg-type]
        else:
            order, (one, other) = list(range(rank)), (int(d) % rank for d in node.args[1:3])  # type: ignore[arg-type]
            order[one], order[other] = other, one
        self.regroup(node, tuple(order))

    def shuffle(self, node: fx.Node, groups: int) -> None:
        read = self.same(node)
        index = torch.arange(self.channels(read)).view(groups, -1).t().flatten()
        self.names[node] = self.take(node, read, tuple(index.tolist()))

    def join(self, node: fx.Node) -> None:
        given = self.given(node, "tensors", "dim")
        tensors, dim = given["tensors"], given.get("dim", given.get("axis", 0))
        if not isinstance(tensors, list | tuple) or not all(isinstance(t, fx.Node) for t in tensors):
            self.refuse(node, "it joins something else than a list of tensors")
        if dim % self.values[node].dim() != 1:
            self.refuse(node, f"it joins along dimension {dim}; only channels (dimension 1) are joined")
        reads: list[str] = []
        for tensor in tensors:
            name = self.names.get(tensor)
            if not isinstance(name, str):
                self.refuse(node, STRANGE.format(tensor.target))
            if name in reads:  # a plan reads each tensor once: take a copy
                name = self.take(node, name, tuple(range(self.channels(name))))
            reads.append(name)
        self.enter(node, Cat(), tuple(reads))

    def take(self, node: fx.Node, read: str, source: tuple[int, ...]) -> str:
        return self.enter(node, Select(source), (read,))

    def split(self, node: fx.Node) -> None:
        read = self.read_of(node)
        dim = self.given(node, "input", "sizes", "dim").get("dim", 0)
        parts = self.values[node]
        if dim % parts[0].dim() != 1:
            self.refuse(node, f"it splits dimension {dim}; only channels (dimension 1) are split")
        names, start = [], 0
        for part in parts:
            names.append(self.take(node, read, tuple(range(start, start + part.shape[1]))))
            start += part.shape[1]
        self.names[node] = tuple(names)

    def getitem(self, node: fx.Node) -> None:
        """x[:, a:b] takes channels; further slices are of each channel by itself."""
        read = self.read_of(node)
        index = self.given(node, "input", "index")["index"]
        parts = tuple(index) if isinstance(index, tuple | list) else (index,)
        if Ellipsis in parts:
            at, rank = parts.index(Ellipsis), self.values[node.all_input_nodes[0]].dim()
            left_out = rank - sum(part is not None for part in parts) + 1
            parts = (*parts[:at], *[slice(None)] * left_out, *parts[at + 1 :])
        if not all(part is None or isinstance(part, slice) for part in parts) or parts[0] != slice(None):
            self.refuse(node, f"only slices that keep the batch whole are nested; found [{index}]")
        channels = tuple(range(self.channels(read)))
        taken = channels[parts[1]] if len(parts) > 1 and isinstance(parts[1], slice) else channels
        rest = parts[2:]
        if tuple(self.values[node].shape[:2]) != (BATCHES[0], len(taken)):
            self.refuse(node, f"[{index}] puts something else than channels in their place")
        if taken != channels:
            read = self.take(node, read, taken)
            self.names[node] = read
        if any(part != slice(None) for part in rest):
            name = self.name(node)
            self.sketch.layers[name] = Call(operator.getitem, 0, (None, (slice(None), slice(None), *rest)), {})
            self.names[node] = self.put(Node(name, Module(), (read,), (0,) * len(taken), self.size(node)))
        elif taken == channels:
            self.names[node] = read

    def glu(self, node: fx.Node, dim: int) -> None:
        """The first half of the channels, gated by the second."""
        read = self.read_of(node)
        if dim % self.values[node].dim() != 1:
            self.refuse(node, f"it halves dimension {dim}; only channels (dimension 1) are halved")
        half = self.channels(read) // 2
        one, other = self.take(node, read, tuple(range(half))), self.take(node, read, tuple(range(half, 2 * half)))
        gate = self.before(f"{other}_gate", other, Call(torch.sigmoid, 0, (None,), {}))
        self.enter(node, Zip("mul"), (one, gate))

    def expand(self, node: fx.Node) -> None:
        """Each channel over more pixels."""
        traced = node.all_input_nodes[0]
        size, before = self.size(node), tuple(self.values[traced].shape)
        if before[:2] != tuple(self.values[node].shape[:2]) or len(before) != len(size) + 2:
            self.refuse(node, f"it spreads a tensor of shape {before} to {tuple(self.values[node].shape)}")
        read, name = self.computed(node, traced), self.name(node)
        self.sketch.layers[name] = Call(torch.Tensor.expand, 0, (None, -1, -1, *size), {})
        self.add(node, Node(name, Module(), (read,), (0,) * self.channels(read), size))

    def pad(self, node: fx.Node) -> None:
        """Zeros around each image, or further channels of zeros."""
        read = self.read_of(node)
        given = self.given(node, "input", "pad", "mode", "value")
        sides, value = tuple(given["pad"]), given.get("value") or 0
        if len(sides) <= 4:
            self.pointwise(node, F.pad)
            return
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
        op = Opaque(work(piece, tensors), sum(p.numel() for p in piece.parameters()))
        self.add(node, Node(name, op, reads, (0,) * value.shape[1], tuple(value.shape[2:])))

    def zeros(self, node: fx.Node) -> None:
        self.names[node] = self.take(node, self.read_of(node), (-1,) * self.channels(self.read_of(node)))
