"""From a sketch to a nested network: names that fit, births, one head per stage, and the module's own weights.

In: the sketch of a module and a growth order of widths. Out: an `Assembled`: the network with the module's layers under
their own names, the classifier once per stage, and which of its nodes came from which of the sketch's. How modules are read
is read.py's business, which channels are tied ties.py's.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from nestling.errors import NestlingError
from nestling.nets.births import Growth
from nestling.nets.extended import Extended
from nestling.nets.net import NestedNet, cut_state, follow
from nestling.nets.ops import Select
from nestling.nets.ops.weighted_op import WeightedOp
from nestling.nets.plan import Node, Plan
from nestling.nets.reading.sketch import Sketch
from nestling.nets.reading.ties import give_births
from nestling.nets.settle import settle


@dataclass(frozen=True, eq=False)
class Assembled:
    """A nested network and where it came from."""

    net: NestedNet
    plan: Plan  # before what no answer needs was left out
    origins: Mapping[str, str]  # the sketch's name of each node that has a layer

    def cut(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The entries that the network kept of tensors by the names of its own."""
        kept = {n: tuple(row for row, owned in enumerate(bits) if owned) for n, bits in self.plan.owners.items()}
        return cut_state(self.plan, self.net, kept, state)


def assemble(sketch: Sketch, growth: Growth, uneven: bool, net: str, training: bool) -> Assembled:
    """The nested network of a sketch, starting from copies of the weights of the layers in it."""
    check_stages(sketch, growth, net)
    sketch, renamed = fitted(sketch, [f"head{stage}" for stage in range(1, growth.stages + 1)])
    plan, layers, origins = planned(sketch, growth, uneven, net)
    return built(plan, layers, {name: renamed[origin] for name, origin in origins.items()}, training)


def built(
    plan: Plan,
    layers: Mapping[str, nn.Module],
    origins: Mapping[str, str],
    training: bool,
    kind: type[NestedNet] = NestedNet,
) -> Assembled:
    """The network of a plan, with copies of the weights of the layers that its nodes are made from."""
    settled = settle(plan)
    given = {n.name: copy.deepcopy(layers[n.name]) for n in settled.nodes if n.op.given}
    nested = kind(settled, given).train(training)
    for node in settled.nodes:
        if node.name in layers and not node.shares:
            follow(nested.layer(node.name), layers[node.name])
    made = Assembled(nested, plan, origins)
    nested.load_state_dict(made.cut({**nested.state_dict(), **weights(plan, layers)}))
    for node in settled.nodes:
        layer = nested.layer(node.name) if node.op.weighted else None
        if layer is not None and layer.mask is not None:
            layer.weight.data.mul_(layer.mask)
    return made


def check_stages(sketch: Sketch, growth: Growth, net: str) -> None:
    widest = max((node.channels for node in sketch.nodes.values() if node.op.weighted), default=0)
    if growth.stages > max(widest, 1):
        raise NestlingError(
            f"{net}: cannot nest it in {growth.stages} stages: its widest layer has {widest} channels, and every stage needs one "
            "of its own. Use fewer stages."
        )


def fitted(sketch: Sketch, heads: list[str]) -> tuple[Sketch, dict[str, str]]:
    """The sketch with names that a NestedNet has room for, and their old names: a module called `stages` becomes `stages_`."""
    taken = {"plan", "_last_use", "_stages", "_staged", *vars(nn.Module()), *heads}
    firsts = {name.partition(".")[0] for name in sketch.nodes}
    moved: dict[str, str] = {}
    for first in sorted(firsts):
        new = first
        while new in taken or hasattr(Extended, new) or (new != first and new in firsts):
            new += "_"
        taken.add(new)
        moved[first] = new
    rename: dict[str, str] = {}
    for name in sketch.nodes:
        first, *rest = name.split(".")
        new = ".".join([moved[first], *(part + "_" if hasattr(nn.Module, part) else part for part in rest)])
        while new in rename.values():
            new += "_"
        rename[name] = new
    nodes = [
        replace(
            node, name=rename[node.name], reads=tuple(rename[r] for r in node.reads), shares=rename.get(node.shares, "")
        )
        for node in sketch.nodes.values()
    ]
    made = Sketch(
        {node.name: node for node in nodes},
        {rename[name]: layer for name, layer in sketch.layers.items()},
        rename[sketch.output],
        {rename[name]: words for name, words in sketch.mixing.items()},
    )
    return made, {new: old for old, new in rename.items()}


def tail_of(sketch: Sketch, net: str) -> list[Node]:
    """The classifier and what follows it: the last convolution or linear layer, then one channel-by-channel chain."""
    readers: dict[str, int] = {}
    for node in sketch.nodes.values():
        for name in node.reads:
            readers[name] = readers.get(name, 0) + 1
    tail = [sketch.nodes[sketch.output]]
    while not tail[0].op.weighted:
        node = tail[0]
        if not node.op.tail:
            raise NestlingError(
                f"{net}: cannot nest it: its answer comes out of {node.name} ({node.op.kind}), not of one classifier. "
                "Expected a last linear layer or convolution, with nothing but pooling and the like after it."
            )
        tail.insert(0, sketch.nodes[node.reads[0]])
    shared = [node.name for node in tail[:-1] if readers[node.name] > 1] + [n.name for n in tail if n.op.grouped]
    shared += [n.name for n in tail if n.shares] + [n.shares for n in sketch.nodes.values() if n.shares in names(tail)]
    if shared:
        raise NestlingError(
            f"{net}: cannot nest it: {shared[0]} belongs to the classifier but is grouped, shared or read elsewhere, so that it "
            "cannot become one head per stage."
        )
    return tail


def names(nodes: list[Node]) -> set[str]:
    return {node.name for node in nodes}


def planned(
    sketch: Sketch, growth: Growth, uneven: bool, net: str
) -> tuple[Plan, dict[str, nn.Module], dict[str, str]]:
    """The plan of the nest before it is settled, the layer that each of its nodes is made from, and that layer's node."""
    tail = tail_of(sketch, net)
    ends = names(tail)
    for name, words in sketch.mixing.items():
        if name not in ends:
            raise NestlingError(f"{net}: cannot nest {words}.")
    body = [node for node in sketch.nodes.values() if node.name not in ends]
    nodes = give_births(body, growth, uneven, net)
    source = next(node for node in nodes if node.name == tail[0].reads[0])
    layers = dict(sketch.layers)
    origins = {name: name for name in layers}
    heads = []
    for stage in range(1, growth.stages + 1):
        live = tuple(c for c, birth in enumerate(source.births) if birth <= stage)
        if not live:
            raise NestlingError(
                f"{net}: cannot nest {tail[0].name}: none of the channels it reads ({source.name}) is born by stage {stage}. "
                "Something before it takes whole stripes away."
            )
        last = source.name
        if len(live) < source.channels:
            last = f"head{stage}.take"
            while last.partition(".")[2] in ends:
                last += "_"
            births = tuple(source.births[c] for c in live)
            nodes.append(Node(last, Select(live, axis=source.op.axis), (source.name,), births, source.size))
        for node in tail:
            made = f"head{stage}.{node.name}"
            nodes.append(replace(node, name=made, reads=(last,), births=(stage,) * node.channels))
            if node.name in sketch.layers:
                layers[made], origins[made] = copy.deepcopy(sketch.layers[node.name]), node.name
            if node is tail[0]:
                weight: Any = sketch.layers[node.name].weight
                assert isinstance(node.op, WeightedOp)
                some = node.op.reading(weight.detach(), torch.tensor(live))
                layers[made].weight = nn.Parameter(some, weight.requires_grad)
            last = made
        heads.append(last)
    return Plan(net, tuple(nodes), tuple(heads), growth.sizes), layers, origins


def weights(plan: Plan, layers: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """The module's weights and statistics by the names of the nested network's."""
    found = {}
    for node in plan.nodes:
        if node.name not in layers:
            continue
        for key, value in layers[node.name].state_dict().items():
            found[f"{node.name}.{key}"] = node.op.adopted(key, value, node)
    return found
