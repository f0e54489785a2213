"""From a sketch to a nested network: names that fit, births, one head per stage, and the module's own weights.

In: the sketch of a module and a growth order of widths. Out: an `Assembled`: the network with the module's layers under
their own names, the classifier once per stage, and which of its nodes came from which of the sketch's. How modules are read
is read.py's business, which channels are tied ties.py's.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn

from nestling.errors import NestlingError
from nestling.nets.births import Growth
from nestling.nets.extended import Extended
from nestling.nets.net import NestedNet, cut_state, follow
from nestling.nets.ops import Cat, Select, Zip
from nestling.nets.ops.weighted_op import WeightedOp
from nestling.nets.plan import Node, Plan
from nestling.nets.reading.sketch import Sketch
from nestling.nets.reading.ties import give_births, put_off
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
    settled, memo = settle(plan), dict[int, Any]()  # one memo: what lends to another still does
    check_lending(settled, layers)
    given = {n.name: copy.deepcopy(layers[n.name], memo) for n in settled.nodes if n.op.given}
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


def check_lending(plan: Plan, layers: Mapping[str, nn.Module]) -> None:
    """Who borrows a parameter may not be there without the one that holds it, nor be needed by other tasks."""
    holders = {id(layers[node.name]): node.name for node in plan.nodes if node.op.given}
    for node in (node for node in plan.nodes if node.op.given):
        for [lender], _ in getattr(layers[node.name], "borrowed", {}).values():
            holder = holders.get(id(lender), "")
            mine, theirs = (reduce(or_, plan.owners.get(name, ()), 0) for name in (node.name, holder))
            if mine & ~theirs:
                raise NestlingError(
                    f"{plan.name}: cannot nest {node.name}: its constant has parameters of {holder or 'what no answer needs'}, "
                    "which is not needed by the same stages; give each place parameters of its own."
                )


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
    """The classifier and what follows it channel by channel: the last convolution or linear layer. Or several of them, whose
    answers are added or the like, or stand side by side."""
    found: dict[str, Node] = {}
    open_ends = [sketch.output]
    while open_ends:
        node = sketch.nodes[open_ends.pop()]
        several = isinstance(node.op, Zip | Cat) and len({*node.reads}) > 1
        if not (node.op.weighted or node.op.tail or several):
            raise NestlingError(
                f"{net}: cannot nest it: its answer comes out of {node.name} ({node.op.kind}), not of one classifier. "
                "Expected a last linear layer or convolution, or several added or side by side, and nothing but pooling and the "
                "like after it."
            )
        found[node.name] = node
        open_ends += () if node.op.weighted else node.reads
    tail = [node for name, node in sketch.nodes.items() if name in found]
    shared = [r for node in sketch.nodes.values() if node.name not in found for r in node.reads if r in found]
    shared += [n.name for n in tail if n.op.grouped or n.shares]
    shared += [n.shares for n in sketch.nodes.values() if n.shares in found]
    if shared:
        raise NestlingError(
            f"{net}: cannot nest it: {shared[0]} belongs to the classifier but is grouped, shared or read elsewhere, so that it "
            "cannot become one head per stage."
        )
    return tail


def planned(
    sketch: Sketch, growth: Growth, uneven: bool, net: str
) -> tuple[Plan, dict[str, nn.Module], dict[str, str]]:
    """The plan of the nest before it is settled, the layer that each of its nodes is made from, and that layer's node."""
    tail = tail_of(sketch, net)
    ends = {node.name for node in tail}
    for name, words in sketch.mixing.items():
        if name not in ends:
            raise NestlingError(f"{net}: cannot nest {words}.")
    body = [n for n in sketch.nodes.values() if n.name not in ends]
    if growth.stages > 1:  # else it goes on computing what it did
        body = [replace(n, op=n.op.untold(net, n, [sketch.nodes[read] for read in n.reads])) for n in body]
    body = give_births(body, growth, uneven, net)
    while True:
        made = Heads(sketch, tail, body, growth, net)
        later = put_off(body, made.needed(), growth, uneven) if growth.stages > 1 else body
        if later == body:
            return made.plan, made.layers, made.origins
        body = later


class Heads:
    """The plan of a body with births and of one copy of the tail for every stage."""

    def __init__(self, sketch: Sketch, tail: list[Node], body: list[Node], growth: Growth, net: str) -> None:
        self.sketch, self.tail, self.net = sketch, tail, net
        self.body, self.nodes = {node.name: node for node in body}, list(body)
        self.layers = dict(sketch.layers)
        self.origins = {name: name for name in self.layers}
        heads = tuple(self.head(stage) for stage in range(1, growth.stages + 1))
        self.plan = Plan(net, tuple(self.nodes), heads, growth.sizes)

    def head(self, stage: int) -> str:
        """The answer of a stage."""
        made: dict[str, str] = {}
        memo: dict[int, Any] = {}  # of one stage: what lends to another still does
        for node in self.tail:
            made[node.name] = name = f"head{stage}.{node.name}"
            if node.name in self.sketch.layers:
                self.layers[name], self.origins[name] = copy.deepcopy(self.sketch.layers[node.name], memo), node.name
            if node.op.weighted:
                reads: tuple[str, ...] = (self.classifier(node, name, stage),)
            else:
                reads = tuple(made[read] for read in node.reads)
            births = (stage,) * node.channels
            self.nodes.append(replace(node, name=name, reads=reads, births=births))
        return made[self.sketch.output]

    def classifier(self, node: Node, name: str, stage: int) -> str:
        """What a classifier reads: the channels born by its stage, for which its weights are cut."""
        source = self.body[node.reads[0]]
        live = tuple(c for c, birth in enumerate(source.births) if birth <= stage)
        if not live:
            raise NestlingError(
                f"{self.net}: cannot nest {node.name}: none of the channels it reads ({source.name}) is born by stage {stage}. "
                "Something before it takes whole stripes away."
            )
        weight: Any = self.sketch.layers[node.name].weight
        assert isinstance(node.op, WeightedOp)
        self.layers[name].weight = nn.Parameter(
            node.op.reading(weight.detach(), torch.tensor(live)), weight.requires_grad
        )
        if len(live) == source.channels:
            return source.name
        taken = f"head{stage}.take"
        while taken in {each.name for each in self.nodes} or taken.partition(".")[2] in self.sketch.nodes:
            taken += "_"
        births = tuple(source.births[c] for c in live)
        self.nodes.append(Node(taken, Select(live, axis=source.op.axis), (source.name,), births, source.size))
        return taken

    def needed(self) -> dict[str, tuple[int, ...]]:
        """Of each channel of the body, the first stage whose answer needs it; 0 where none does."""
        owners = self.plan.owners
        return {name: tuple((bits & -bits).bit_length() for bits in owners[name]) for name in self.body}


def weights(plan: Plan, layers: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """The module's weights and statistics by the names of the nested network's."""
    found = {}
    for node in plan.nodes:
        if node.name not in layers:
            continue
        for key, value in layers[node.name].state_dict().items():
            if node.op.given or "." not in key:  # what hangs below a layer by name says so itself
                found[f"{node.name}.{key}"] = node.op.adopted(key, value, node)
    return found
