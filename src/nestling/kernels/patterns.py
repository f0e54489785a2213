"""Which nodes of a plan are computed together, and which of them kernels of our own can compute.

In: a plan and a device. Out: its nodes in order, those that one operation does put together as a unit: batch norm and relu,
perhaps a 3x3 convolution, perhaps the sum that follows it. It computes nothing.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch

from nestling.kernels.backends import halves
from nestling.nets import NestedNet, ops
from nestling.nets.plan import Node, Plan

RELU, SUM = ops.Map("relu"), ops.Zip("add")
CHANNELS = range(8, 129, 8)  # a pixel is a whole number of 16 bytes, and a tile fits
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Unit:
    """Consecutive nodes done as one: norm and relu, perhaps a convolution, perhaps the sum that follows it."""

    gives: str  # the node whose value comes out
    norm: Node
    conv: Node | None = None
    shortcut: str = ""


Item = Unit | Node


def items(plan: Plan, device: torch.device = CPU) -> list[Item]:
    """The plan's nodes in order, those that belong together put together; which do depends on the device's kernels."""
    readers: dict[str, list[Node]] = defaultdict(list)
    for node in plan.nodes:
        for read in node.reads:
            readers[read].append(node)
    for head in plan.heads:  # whoever asked the network reads it, too
        readers[head].append(plan.by_name[head])
    place = {node.name: i for i, node in enumerate(plan.nodes)}
    found: dict[int, Item] = dict(enumerate(plan.nodes[1:], 1))
    for norm in plan.nodes:
        relu = only(readers[norm.name])
        if not fits_norm(norm) or relu is None or relu.op != RELU:
            continue
        conv = only(readers[relu.name])
        unit, last = Unit(relu.name, norm), relu
        if conv is not None and fits_halving(plan, conv, device):
            unit, last = Unit(conv.name, norm, conv), conv
        elif conv is not None and fits_conv(plan, conv):
            unit, last = Unit(conv.name, norm, conv), conv
            total = only(readers[conv.name])
            if total is not None and (shortcut := shortcut_of(plan, total, conv, place)):
                unit = Unit(total.name, norm, conv, shortcut)
                del found[place[total.name]]
        for node in (norm, relu, last):
            found.pop(place[node.name], None)
        found[place[last.name]] = unit
    return [found[i] for i in sorted(found)]


def only(nodes: list[Node]) -> Node | None:
    return nodes[0] if len(nodes) == 1 else None


def fits_norm(node: Node) -> bool:
    affine = isinstance(node.op, ops.BatchNorm) and node.op.affine
    return affine and node.channels in CHANNELS and len(node.size) == 2


def plain(node: Node, stride: int = 1) -> bool:
    return node.op == ops.Conv((3, 3), (stride, stride), (1, 1)) and not node.shares


def fits_conv(plan: Plan, node: Node) -> bool:
    return plain(node) and node.channels in CHANNELS and plan.by_name[node.reads[0]].channels in CHANNELS


def fits_halving(plan: Plan, node: Node, device: torch.device) -> bool:
    """A convolution of stride 2 is one of stride 1 of which a quarter is kept: four times the work, which some kernels do sooner
    than cuDNN its many small ones."""
    read = plan.by_name[node.reads[0]]
    return plain(node, stride=2) and halves(device, read.channels, node.channels, read.size)


def fits_stem(plan: Plan, node: Node) -> bool:
    """A convolution of the pictures themselves, which no gradient goes back to."""
    first = node.reads == (plan.input.name,) and plan.input.channels <= CHANNELS[0]
    return plain(node) and node.channels in CHANNELS and first


def fits_sum(plan: Plan, node: Node) -> bool:
    small = len(node.size) == 2 and len(node.reads) <= 8 and node.channels in CHANNELS
    return small and node.op == SUM and all(alike(plan, read, node) for read in node.reads)


def fits_linear(net: NestedNet, node: Node) -> bool:
    """A small linear layer, such as a head."""
    if not isinstance(node.op, ops.Linear):
        return False
    layer: Any = net.layer(node.name)
    whole = layer.mask is None and layer.bias is not None and not node.shares
    laid = layer.weight.dtype == torch.float32 and layer.weight.stride(1) == 1
    return whole and laid and node.channels <= 128 and layer.weight.shape[1] <= 1024


def fits_select(plan: Plan, node: Node) -> bool:
    """Channels of an image put elsewhere, none of them twice."""
    if not isinstance(node.op, ops.Select):
        return False
    taken = [channel for channel in node.op.source if channel >= 0]
    whole = node.channels in CHANNELS and plan.by_name[node.reads[0]].channels in CHANNELS and len(node.size) == 2
    return whole and len(set(taken)) == len(taken)


def alike(plan: Plan, name: str, node: Node) -> bool:
    """Whether two images have the same shape: the kernels do not stretch the smaller one, as torch does."""
    other = plan.by_name[name]
    return (other.channels, other.size) == (node.channels, node.size)


def shortcut_of(plan: Plan, total: Node, conv: Node, place: dict[str, int]) -> str:
    """What a sum of two adds to a convolution, if that is known before the convolution is."""
    if total.op != SUM or len(total.reads) != 2:
        return ""
    (other,) = [read for read in total.reads if read != conv.name] or [""]
    return other if other and place[other] < place[conv.name] and alike(plan, other, conv) else ""


def count_readers(items: list[Item], heads: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    norms: dict[str, int] = defaultdict(int)
    others: dict[str, int] = defaultdict(int)
    for item in items:
        if isinstance(item, Unit):
            norms[item.norm.reads[0]] += 1
        for read in reads(item)[isinstance(item, Unit) :]:
            others[read] += 1
    for head in heads:
        others[head] += 1
    return {name: (norms[name], others[name]) for name in {*norms, *others}}


def reads(item: Item) -> tuple[str, ...]:
    if isinstance(item, Node):
        return item.reads
    return (item.norm.reads[0], item.shortcut) if item.shortcut else (item.norm.reads[0],)
