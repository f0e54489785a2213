"""The channels of a network put in order of importance, the most important first, so that early stripes get those.

In: a sketch with the module's layers. Out: a sketch that computes the same, of the same nodes, with channels and weights
moved. Channels that stand at the same place of tensors that are added or multiplied move together: a residual stream has one
order. What the plan itself numbers (selections, groups, the image, the classes) stays where it is. Nothing is learnt here.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor, nn

from nestling.errors import NestlingError
from nestling.nets.ops import (
    BatchNorm,
    Cat,
    Flatten,
    Join,
    LayerNorm,
    Map,
    Mean,
    Module,
    PReLU,
    Rearrange,
    Scale,
    Tokens,
    Zip,
)
from nestling.nets.ops.weighted_op import WeightedOp
from nestling.nets.plan import Node
from nestling.nets.reading.sketch import Sketch

EACH = (
    BatchNorm,
    Join,
    LayerNorm,
    Map,
    Mean,
    Module,
    PReLU,
    Rearrange,
    Scale,
    Tokens,
    Zip,
)  # what keeps every channel at its place


def ordered(sketch: Sketch) -> Sketch:
    """The sketch with its channels in order of importance; copies of the layers."""
    if any(tensor.is_meta for layer in sketch.layers.values() for tensor in layer.parameters()):
        raise NestlingError(
            "its weights are on the device meta, and have no order; give them numbers, or say order=False"
        )
    order = Streams(sketch).orders()
    layers = dict(sketch.layers)
    for name, layer in sketch.layers.items():
        node = sketch.nodes[name]
        if node.op.given or not node.reads:
            continue
        rows, columns = order[name], order[node.reads[0]]
        layers[name] = copy.deepcopy(layer)
        for key, tensor in own_tensors(layers[name]):
            tensor.data = node.op.reordered(key, tensor.data, rows, columns)
    return Sketch(dict(sketch.nodes), layers, sketch.output, dict(sketch.mixing), set(sketch.dropped))


def own_tensors(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from layer.named_parameters(recurse=False)
    yield from layer.named_buffers(recurse=False)


class Streams:
    """Which nodes have the same channels at the same places, and in which order each such stream may be put."""

    def __init__(self, sketch: Sketch) -> None:
        self.sketch, self.nodes = sketch, sketch.nodes
        self.above: dict[str, str] = {name: name for name in self.nodes}  # towards the node that stands for the stream
        self.fixed: set[str] = {next(iter(self.nodes)), sketch.output}
        self.made_of: dict[str, Node] = {}  # streams whose order is that of others put together
        for node in list(self.nodes.values())[1:]:
            self.enter(node)
        self.settle()

    def stream(self, name: str) -> str:
        while self.above[name] != name:
            name = self.above[name]
        return name

    def join(self, one: str, other: str) -> None:
        self.above[self.stream(other)] = self.stream(one)

    def enter(self, node: Node) -> None:
        read = self.nodes[node.reads[0]]
        if (isinstance(node.op, EACH) and not node.op.grouped) or self.is_same(node):
            reads = [self.nodes[name] for name in node.reads]
            alike = [each.name for each in reads if each.channels == node.channels]
            for name in alike:
                self.join(name, node.name)
            if not alike or any(each.channels not in (1, node.channels) for each in reads):
                self.fixed |= {node.name, *node.reads}
        elif isinstance(node.op, WeightedOp) and node.op.groups == node.channels == read.channels > 1:
            self.join(read.name, node.name)  # depthwise
        elif not isinstance(node.op, Cat | Flatten) and not (isinstance(node.op, WeightedOp) and node.op.groups == 1):
            self.fixed |= {node.name, *node.reads}  # groups, selections, and whatever else has a number for a channel
        if node.shares:  # the same weights in the same order
            self.join(node.shares, node.name)
            self.join(self.nodes[node.shares].reads[0], read.name)

    def is_same(self, node: Node) -> bool:
        """Whether it puts nothing together: the only pixel of each channel, or a single tensor."""
        single = isinstance(node.op, Cat | Flatten) and len(node.reads) == 1
        return single and node.channels == self.nodes[node.reads[0]].channels

    def settle(self) -> None:
        """What is put together of others has their order; where that meets another order, all of them stay as they are."""
        for node in self.nodes.values():
            if isinstance(node.op, Cat | Flatten) and not self.is_same(node):
                mine = self.stream(node.name)
                rivals = [other for other in self.nodes.values() if self.stream(other.name) == mine]
                kept = [each for each in rivals if isinstance(each.op, EACH) or depthwise(each) or self.is_same(each)]
                makers = [other for other in rivals if other not in kept]
                if len(makers) > 1:
                    self.fixed |= {mine}
                self.made_of[mine] = node
        before = -1
        while len(self.fixed) != before:
            before = len(self.fixed)
            self.fixed |= {self.stream(name) for name in self.fixed}
            for mine, node in self.made_of.items():
                if mine in self.fixed:
                    self.fixed |= {self.stream(read) for read in node.reads}

    def orders(self) -> dict[str, Tensor]:
        """For every node, which of its old channels stands at each place."""
        found: dict[str, Tensor] = {}
        scores = self.scores()
        for name, node in self.nodes.items():
            mine = self.stream(name)
            if mine in found:
                found[name] = found[mine]
                continue
            maker = self.made_of.get(mine)
            if mine in self.fixed:
                order = torch.arange(node.channels)
            elif maker is not None:
                order = together(maker, [(self.nodes[read], found[read]) for read in maker.reads])
            else:
                order = scores[mine].argsort(descending=True, stable=True)
            found[mine] = found[name] = order
        return found

    def scores(self) -> dict[str, Tensor]:
        """How much each channel of a stream is used: the size of what its readers multiply it with, all readers alike."""
        total: dict[str, Tensor] = defaultdict(lambda: torch.zeros(1))
        for node in self.nodes.values():
            weight = getattr(self.sketch.layers.get(node.shares or node.name), "weight", None)
            read = self.nodes[node.reads[0]] if node.reads else node
            if isinstance(node.op, WeightedOp) and node.op.groups == 1 and weight is not None:
                used = reading_strength(node, weight.detach(), read.channels) * self.gain(read)
                for stream, part in self.parts(read, used / used.mean().clamp_min(1e-30)):
                    total[stream] = total[stream] + part
        return {self.stream(name): total[self.stream(name)].expand(node.channels) for name, node in self.nodes.items()}

    def parts(self, read: Node, used: Tensor) -> Iterator[tuple[str, Tensor]]:
        """How much each channel of what a node is put together of is used."""
        mine = self.stream(read.name)
        maker = self.made_of.get(mine)
        if maker is None:
            yield mine, used
            return
        sources = [self.nodes[name] for name in maker.reads]
        if isinstance(maker.op, Flatten):
            yield from self.parts(sources[0], used.view(sources[0].channels, -1).sum(1))
            return
        for source, part in zip(sources, used.split([each.channels for each in sources]), strict=True):
            yield from self.parts(source, part)

    def gain(self, node: Node) -> Tensor:
        """The scale of the batch norm through which channels come, ones where there is none."""
        while isinstance(node.op, EACH) and len(node.reads) == 1:
            layer = self.sketch.layers.get(node.shares or node.name)
            if isinstance(node.op, BatchNorm | LayerNorm) and layer is not None and layer.weight is not None:
                scale: Tensor = layer.weight.detach().abs().cpu().double()  # type: ignore[operator]
                return scale
            node = self.nodes[node.reads[0]]
        return torch.ones(1, dtype=torch.float64)


def depthwise(node: Node) -> bool:
    return isinstance(node.op, WeightedOp) and node.op.groups > 1


def reading_strength(node: Node, weight: Tensor, inputs: int) -> Tensor:
    """The norm of what a layer multiplies each of its inputs with."""
    assert isinstance(node.op, WeightedOp)
    ours = node.op.adopted("weight", weight.cpu().double(), node)  # (rows, columns, *kernel)
    return ours.transpose(0, 1).reshape(inputs, -1).norm(dim=1)


def together(maker: Node, parts: list[tuple[Node, Tensor]]) -> Tensor:
    """The order of channels that are put behind each other, or of a channel's pixels."""
    if isinstance(maker.op, Flatten):
        [(read, order)] = parts
        pixels = prod(read.size)
        return (order[:, None] * pixels + torch.arange(pixels)).flatten()
    found, start = [], 0
    for read, order in parts:
        found.append(order + start)
        start += read.channels
    return torch.cat(found)
