"""Your own backbone, nested in width: `nest(module, "w,w")`.

In: an ordinary torch module that turns an image into logits, and a growth order of widths. Out: a NestedNet with the
module's layers under their own names and one head per stage in the place of its classifier. It starts from the module's
weights, of which the rule keeps those that go from earlier or equally early channels to later ones; with one stage it
computes exactly what the module computes. How modules are read is trace.py's business, which channels are tied ties.py's.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nestling.errors import NestlingError
from nestling.nets.births import Growth, grow
from nestling.nets.net import NestedNet, cut_state, follow
from nestling.nets.ops import Select
from nestling.nets.plan import Node, Plan
from nestling.nets.settle import settle
from nestling.nets.sketch import Sketch
from nestling.nets.ties import give_births
from nestling.nets.trace import Shape, read


def nest(
    module: nn.Module,
    growth: str = "w,w",
    shape: Shape = (3, 32, 32),
    stripes: tuple[int, ...] = (),
    uneven: bool = False,
    name: str = "",
) -> NestedNet:
    """The width-nested form of a module for images of `shape`, starting from copies of its weights.

    Layers whose channels the stripes do not divide are refused, or cut at the nearest channel if `uneven`.
    """
    net = name or type(module).__name__
    if not isinstance(module, nn.Module):
        raise NestlingError(f"found a {net}, {module!r}; expected a torch module that turns images into logits")
    grown = grow(growth, stripes)
    if grown.levels > 1:
        raise NestlingError(
            f"{net}: a module of its own is nested in width only, but the growth order {growth!r} adds depth. "
            'Use "w" for every stage, for example "w,w".'
        )
    sketch = fitted(read(module, shape, net))
    plan, layers = drawn(sketch, grown, uneven, net)
    settled = settle(plan)
    given = {n.name: layers[n.name] for n in settled.nodes if n.op.given}
    nested = NestedNet(settled, given).train(module.training)
    for node in settled.nodes:
        if node.name in layers and not node.shares:
            follow(nested.layer(node.name), layers[node.name])
    everything = {n: tuple(row for row, owned in enumerate(bits) if owned) for n, bits in plan.owners.items()}
    nested.load_state_dict(cut_state(plan, nested, everything, weights(plan, layers)))
    for node in settled.nodes:
        layer = nested.layer(node.name) if node.op.weighted else None
        if layer is not None and layer.mask is not None:
            layer.weight.data.mul_(layer.mask)
    return nested


def fitted(sketch: Sketch) -> Sketch:
    """The sketch with names that a NestedNet has room for: a module called `stages` becomes `stages_`."""
    rename = {}
    for name in sketch.nodes:
        first, dot, rest = name.partition(".")
        rename[name] = f"{first}_{dot}{rest}" if hasattr(NestedNet, first) or first == "plan" else name
    nodes = [
        replace(
            node,
            name=rename[node.name],
            reads=tuple(rename[r] for r in node.reads),
            shares=rename.get(node.shares, ""),
        )
        for node in sketch.nodes.values()
    ]
    return Sketch(
        {node.name: node for node in nodes},
        {rename[name]: layer for name, layer in sketch.layers.items()},
        rename[sketch.output],
        {rename[name]: words for name, words in sketch.mixing.items()},
    )


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
    if shared:
        raise NestlingError(
            f"{net}: cannot nest it: {shared[0]} belongs to the classifier but is grouped or read elsewhere too, so that it "
            "cannot become one head per stage."
        )
    return tail


def drawn(sketch: Sketch, growth: Growth, uneven: bool, net: str) -> tuple[Plan, dict[str, nn.Module]]:
    """The plan of the nest before it is settled, and the layer that each of its nodes is made from."""
    tail = tail_of(sketch, net)
    ends = {node.name for node in tail}
    for name, words in sketch.mixing.items():
        if name not in ends:
            raise NestlingError(f"{net}: cannot nest {words}.")
    body = [node for node in sketch.nodes.values() if node.name not in ends]
    nodes = give_births(body, growth, uneven, net)
    source = next(node for node in nodes if node.name == tail[0].reads[0])
    layers = dict(sketch.layers)
    heads = []
    for stage in range(1, growth.stages + 1):
        live = tuple(c for c, birth in enumerate(source.births) if birth <= stage)
        if not live:
            raise NestlingError(
                f"{net}: cannot nest {tail[0].name}: none of the channels it reads ({source.name}) is born by stage {stage}. "
                "Something before it takes whole stripes away."
            )
        births = tuple(source.births[c] for c in live)
        last = source.name
        if len(live) < source.channels:
            last = f"head{stage}.take"
            op = Select(live, axis=source.op.axis)
            nodes.append(Node(last, op, (source.name,), births, source.size))
        for node in tail:
            made = f"head{stage}.{node.name}"
            nodes.append(replace(node, name=made, reads=(last,), births=(stage,) * node.channels))
            if node.name in sketch.layers:
                layers[made] = copy.deepcopy(sketch.layers[node.name])
            if node is tail[0]:
                weight: Any = sketch.layers[node.name].weight
                layers[made].weight = nn.Parameter(weight.detach()[:, torch.tensor(live)], weight.requires_grad)
            last = made
        heads.append(last)
    return Plan(net, tuple(nodes), tuple(heads), growth.sizes), layers


def weights(plan: Plan, layers: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """The module's weights and statistics by the names of the nested network's."""
    found = {}
    for node in plan.nodes:
        if node.name not in layers:
            continue
        for key, value in layers[node.name].state_dict().items():
            found[f"{node.name}.{key}"] = node.op.adopted(key, value, node)
    return found
