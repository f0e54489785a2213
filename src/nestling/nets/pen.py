"""The kinds of nodes, one method each: from a traced operation whose kind is known to nodes of a plan, still without births.

In: an operation of torch.fx and the page it belongs on. Out: nodes and layers entered on that page, or a refusal that says
why this one cannot be nested. Which operation is of which kind is said in trace.py.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from nestling.nets.operations import REASONS, Call, Reshape
from nestling.nets.ops import BatchNorm, Cat, Conv, Flatten, GroupNorm, Linear, Module, Operation, PReLU, Select, Zip
from nestling.nets.plan import Node
from nestling.nets.sketch import Page
from nestling.nets.trace import BATCHES, attribute, path_of


class Pen(Page):
    """Draws one operation after another on the page."""

    def map(self, node: fx.Node, layer: nn.Module) -> None:
        read, name = self.same(node), self.name(node)
        self.sketch.layers[name] = layer
        self.add(node, Node(name, Module(), (read,), (0,) * self.channels(read), self.size(node)))

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
        self.add(node, Node(self.name(node), Zip(function), reads, (0,) * max(widths), self.size(node)))

    def own(self, node: fx.Node, name: str, layer: nn.Module) -> str:
        """Remember a layer with parameters; returns the node whose weights it uses, if it is not the first to use them."""
        mine = list(layer.parameters(recurse=False))
        for parameter in mine:
            if not parameter.is_floating_point():
                self.refuse(
                    node, f"its weights are {parameter.dtype}; nest the network in floating point, then quantise"
                )
        first = {self.weights_of.setdefault(id(p), name) for p in mine}
        if first <= {name}:
            self.sketch.layers[name] = layer
            return ""
        sharer = first.pop()
        whole = not first and isinstance(layer, nn.Conv2d | nn.Linear) and self.sketch.nodes[sharer].op.weighted
        if not whole or {*map(id, mine)} != {*map(id, self.sketch.layers[sharer].parameters(recurse=False))}:
            self.refuse(
                node, "some of its parameters serve other places too; only whole convolutions and linear layers may"
            )
        return sharer

    def conv(self, node: fx.Node, read: str, layer: Any) -> None:
        name = self.name(node)
        shares = self.own(node, name, layer)
        padding = layer.padding
        if isinstance(padding, str):
            total = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
            if padding == "same" and any(t % 2 for t in total):
                self.refuse(node, 'padding "same" with an even kernel pads one side more than the other')
            padding = tuple(t // 2 if padding == "same" else 0 for t in total)
        if layer.padding_mode != "zeros" and any(padding):
            high, wide = padding
            sides = (wide, wide, high, high)
            pad = Call(F.pad, 0, (None, sides), {"mode": layer.padding_mode})
            before, size = self.fresh(f"{name}_pad"), self.sketch.nodes[read].size
            self.sketch.layers[before] = pad
            size = (size[0] + 2 * high, size[1] + 2 * wide)
            read = self.put(Node(before, Module(), (read,), (0,) * self.channels(read), size))
            padding = (0, 0)
        numbers = (layer.kernel_size, layer.stride, padding, layer.dilation)
        op = Conv(*numbers, groups=layer.groups, bias=layer.bias is not None)
        self.add(node, Node(name, op, (read,), (0,) * layer.out_channels, self.size(node), shares))

    def linear(self, node: fx.Node, read: str, layer: Any) -> None:
        name = self.name(node)
        if self.values[node].dim() != 2:
            self.refuse(node, "it reads the last dimension of an image, not its channels; flatten or pool before it")
        op, shares = Linear(bias=layer.bias is not None), self.own(node, name, layer)
        self.add(node, Node(name, op, (read,), (0,) * layer.out_features, (), shares))

    def functional(self, node: fx.Node, function: Callable[..., Any]) -> None:
        """F.conv2d and F.linear on parameters of the module, as the layer they stand for."""
        words = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
        given = self.given(node, *words)
        weight, bias = given.get("weight"), given.get("bias")
        for tensor in (weight, bias):
            if isinstance(tensor, fx.Node) and tensor.op != "get_attr":
                self.refuse(node, "its weight is computed while running, so it cannot be cut by births")
        assert isinstance(weight, fx.Node)
        held = attribute(self.module, str(weight.target))
        if not isinstance(held, nn.Parameter):
            self.refuse(node, f"its weight {weight.target} is no parameter of the module")
        if function is F.linear:
            layer: Any = nn.Linear(held.shape[1], held.shape[0], bias=bias is not None, device="meta")
        else:
            options = {key: given[key] for key in words[3:] if key in given}
            width = held.shape[1] * options.get("groups", 1)
            kernel = (held.shape[2], held.shape[3])
            layer = nn.Conv2d(width, held.shape[0], kernel, bias=bias is not None, device="meta", **options)
        layer.weight = held
        if isinstance(bias, fx.Node):
            layer.bias = attribute(self.module, str(bias.target))
            if not isinstance(layer.bias, nn.Parameter):
                self.refuse(node, f"its bias {bias.target} is no parameter of the module")
        read, holder = self.names.get(given["input"]), str(weight.target).rpartition(".")[0]
        if not isinstance(read, str):
            self.refuse(node, "it does not read a tensor that was computed from the image")
        if holder:  # the functional form on a module's own weight goes by that module's name
            node.op, node.target = "call_module", holder
        (self.linear if function is F.linear else self.conv)(node, read, layer)

    def norm(self, node: fx.Node, layer: Any) -> None:
        read, name = self.same(node), self.name(node)
        births, size = (0,) * self.channels(read), self.size(node)
        original = self.module.get_submodule(str(node.target))
        if isinstance(layer, nn.PReLU):
            made: Operation = PReLU()
        elif isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            if len(size) not in (0, 2):
                self.refuse(
                    node, f"it normalises sequences of shape {(len(births), *size)}; only images and vectors are nested"
                )
            if layer.num_features != len(births):
                self.refuse(node, f"it normalises {layer.num_features} channels but reads {len(births)}")
            if layer.momentum is None or not layer.track_running_stats:
                self.refuse(node, "batch norm needs running statistics with a momentum")
            made = BatchNorm(layer.eps, layer.momentum, layer.affine)
        else:  # instance norm is group norm with a group for every channel
            if getattr(layer, "track_running_stats", False):
                self.refuse(node, "instance norm with running statistics is not nested")
            groups = layer.num_groups if isinstance(layer, nn.GroupNorm) else len(births)
            if groups == 1 and len(births) > 1:
                self.refuse(node, REASONS[nn.LayerNorm])
            made = GroupNorm(groups, layer.eps, layer.affine)
        self.own(node, name, original)
        self.add(node, Node(name, made, (read,), births, size))

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
        """Flattening, and what changes the shape of each channel only; anything else would regroup channels."""
        read = self.read_of(node)
        before = self.sketch.nodes[read]
        shape = tuple(self.values[node].shape)
        old = (BATCHES[0], before.channels, *before.size)
        if shape == old:
            self.names[node] = read
        elif len(shape) == 2 and shape[0] == BATCHES[0]:
            self.add(node, Node(self.name(node), Flatten(), (read,), (0,) * shape[1], ()))
        elif shape[:2] == old[:2]:
            self.map(node, Reshape(shape[2:]))
        else:
            self.refuse(node, f"it regroups channels: (N, {old[1:]}) becomes {shape}, so births would be mixed")

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
                self.refuse(
                    node, f"it reads {tensor.target}, which is neither computed from the image nor part of a layer"
                )
            if name in reads:  # a plan reads each tensor once: take a copy
                name = self.take(node, name, tuple(range(self.channels(name))))
            reads.append(name)
        width = sum(map(self.channels, reads))
        self.add(node, Node(self.name(node), Cat(), tuple(reads), (0,) * width, self.size(node)))

    def take(self, node: fx.Node, read: str, source: tuple[int, ...]) -> str:
        size = self.sketch.nodes[read].size
        return self.put(Node(self.name(node), Select(source), (read,), (0,) * len(source), size))

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
        parts = index if isinstance(index, tuple) else (index,)
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

    def zeros(self, node: fx.Node) -> None:
        self.names[node] = self.take(node, self.read_of(node), (-1,) * self.channels(self.read_of(node)))
