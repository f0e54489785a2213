"""A network's training pass by the fused kernels: where a plan says batch norm, relu, 3x3 convolution, one operation does it.

In: a network on its device. Out: a callable that gives the logits of `net(x)`, to bf16 accuracy, and the same gradients.
Whatever no kernel fits is computed by the network itself. It knows plans and layers, neither losses nor steps.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from nestling.kernels import cuts, hopper, launch, narrow, proof
from nestling.kernels.aside import Aside, Joined
from nestling.kernels.functions import AddAll, Back, Conv, Done, Fan, Linear, NormRelu, NormReluConv, Weight
from nestling.nets import NestedNet, ops
from nestling.nets.plan import Node, Plan

RELU, SUM, HALF = ops.Map("relu"), ops.Zip("add"), ops.Map("pool2")
CHANNELS = range(8, 129, 8)  # a row of pixels is a whole number of 16 bytes, and a tile fits


@dataclass(frozen=True)
class Unit:
    """Consecutive nodes done as one: norm and relu, perhaps a convolution, perhaps the sum that follows it."""

    gives: str  # the node whose value comes out
    norm: Node
    conv: Node | None = None
    shortcut: str = ""


Item = Unit | Node


def items(plan: Plan, on_hopper: bool = False) -> list[Item]:
    """The plan's nodes in order, those that belong together put together. More of them do where hopper.cu runs."""
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
        if conv is not None and fits_halving(plan, conv, on_hopper):
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


def fits_halving(plan: Plan, node: Node, on_hopper: bool) -> bool:
    """A convolution of stride 2 is one of stride 1 of which a quarter is kept: four times the work, which where kernels in CUDA C
    do it is less than cuDNN's many small kernels."""
    read = plan.by_name[node.reads[0]]
    rooms = [narrow.CHANNELS, hopper.CHANNELS] if on_hopper else [narrow.CHANNELS]
    fits = any(node.channels in room and read.channels in room for room in rooms)
    return plain(node, stride=2) and fits and read.size in [(side, side) for side in narrow.SIDES]


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


def fits_pick(plan: Plan, node: Node) -> bool:
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


def suits(net: NestedNet, batch: int) -> bool:
    """Whether the kernels run here, do most of this network's work, and its weights and images lie as they read them."""
    return launch.runs_on(next(net.parameters()).device) and fits(net, batch)


def fits(net: NestedNet, batch: int) -> bool:
    found = items(net.plan, hopper.runs_on(next(net.parameters()).device))
    units = [item for item in found if isinstance(item, Unit)]
    fused = [unit for unit in units if unit.conv is not None]
    convs = [node for node in net.plan.nodes if isinstance(node.op, ops.Conv)]
    sums = [item for item in found if isinstance(item, Node) and fits_sum(net.plan, item)]
    stems = [node for node in net.plan.nodes[1:] if fits_stem(net.plan, node)]
    sizes = [unit.norm.size for unit in units] + [node.size for node in (*sums, *stems)]
    pixels = [batch * prod(size) for size in sizes]
    whole = all(each % cuts.LEAST == 0 and each * CHANNELS[-1] < 2**31 for each in pixels)  # places are 32 bits
    read = [unit.conv.name for unit in fused if unit.conv is not None]
    read += [node.name for node in stems]
    laid = all(launch.can_pack(net.layer(name).weight) for name in read)
    return whole and laid and 2 * len(fused) > len(convs)


class Fused:
    """`net(x)` for training, by kernels. Weights are read where they lie; `refresh` copies them to bf16 first."""

    def __init__(self, net: NestedNet, dtype: torch.dtype = torch.bfloat16) -> None:
        self.net, self.dtype = net, dtype
        self.items = items(net.plan, hopper.runs_on(next(net.parameters()).device))
        self.stems = {node.name for node in net.plan.nodes[1:] if fits_stem(net.plan, node)}
        convs = [item.conv.name for item in self.items if isinstance(item, Unit) and item.conv is not None]
        convs += sorted(self.stems)
        self.shadow = launch.Shadow([net.layer(name).weight.detach() for name in convs], dtype)
        self.shadows = dict(zip(convs, self.shadow.parts, strict=True))
        masks = {name: net.layer(name).mask for name in convs}  # laid out as the weights are
        self.masks = {n: m if m is None else m.contiguous(memory_format=torch.channels_last) for n, m in masks.items()}
        self.readers = count_readers(self.items, net.plan.heads)
        self.measured = {n.reads[0] for n in net.plan.nodes if fits_norm(n)}
        self.aside = Aside(self.shadow.flat.device)
        picks = [node for node in net.plan.nodes if fits_pick(net.plan, node)]
        self.tables = {node.name: self.table(node) for node in picks}
        self.linears = {node.name for node in net.plan.nodes if fits_linear(net, node)}

    def __call__(self, x: Tensor, kept: "Kept | None" = None, known: "Kept | None" = None) -> tuple[Tensor, ...]:
        """The logits. A pass leaves its images in `kept`; that of a subnetwork finds its own among those `known`."""
        self.shadow.refresh()
        layers: list[Any] = [self.net.layer(name) for name in self.shadows]
        weights = dict(zip(self.shadows, Joined.apply(self.aside, *(layer.weight for layer in layers)), strict=True))
        values = Values(self.readers)
        values.put(self.net.plan.input.name, x)
        moments: dict[str, Tensor] = {}
        for item in self.items:
            if isinstance(item, Unit):
                self.unit(item, values, moments, weights, kept, known)
                continue
            made = known.image(item) if known is not None else None
            out = self.node(item, [values.take(read) for read in item.reads], made, moments, weights)
            if kept is not None:
                kept.images[item.name] = out.detach()
            # Vectors are short: as float32 they need no casts to and fro for each head and its loss.
            values.put(item.name, out.float() if out.dim() == 2 else out)
        return tuple(values.take(head) for head in self.net.plan.heads)

    def node(
        self,
        item: Node,
        got: list[Tensor],
        made: Tensor | None,
        moments: dict[str, Tensor],
        weights: dict[str, Tensor],
    ) -> Tensor:
        """A node by itself, by a kernel if one fits; where it is made already, only its way back."""
        out: Tensor
        whole = item.channels in CHANNELS and all(side % 2 == 0 for side in got[0].shape[2:])
        if fits_sum(self.net.plan, item):
            if made is None:
                xs = tuple(self.laid(x.detach()) for x in got)
                made, moments[item.name] = launch.add_all(xs, item.name in self.measured)
            out = AddAll.apply((made,), *got)
        elif item.op == HALF and whole:
            made = launch.halve(self.laid(got[0].detach())) if made is None else made
            out = Back.apply(got[0], (made,), launch.halve_back)
        elif item.name in self.tables:
            there, back = self.tables[item.name]
            made = launch.pick(self.laid(got[0].detach()), there, item.channels) if made is None else made
            out = Back.apply(got[0], (made,), partial(launch.pick, table=back, channels=got[0].shape[1]))
        elif item.name in self.stems and not got[0].requires_grad:
            x, cout, wanted = self.laid(got[0]), item.channels, item.name in self.measured
            if made is None:
                tiles = proof.tiles(x, cout, moments=wanted)
                made, moments[item.name] = launch.conv(x, self.shadows[item.name], cout, moments=wanted, tiles=tiles)
            out = Conv.apply(x, weights[item.name], (made,), self.laid_weight(item.name))
        elif item.name in self.linears:
            layer: Any = self.net.layer(item.name)
            out = Linear.apply(got[0].float().contiguous(), layer.weight, layer.bias)
        else:
            out = self.net.compute(item, got)
        return out

    def unit(
        self,
        unit: Unit,
        values: "Values",
        moments: dict[str, Tensor],
        weights: dict[str, Tensor],
        kept: "Kept | None",
        known: "Kept | None",
    ) -> None:
        name = unit.norm.reads[0]
        z = values.take(name, norm=True)
        shortcut = values.take(unit.shortcut) if unit.shortcut else None
        halving = unit.conv is not None and not plain(unit.conv)
        done = known.unit(unit) if known is not None else None
        if done is None:
            done = self.compute(unit, z.detach(), None if shortcut is None else shortcut.detach(), moments, not halving)
        layer: Any = self.net.layer(unit.norm.name)
        if unit.conv is None:
            out, passed = NormRelu.apply(z, layer.weight, layer.bias, done)
        else:
            laid = self.laid_weight(unit.conv.name)
            weight = weights[unit.conv.name]
            out, passed = NormReluConv.apply(z, layer.weight, layer.bias, weight, shortcut, done, laid)
        if halving:
            made = known.halved(unit) if known is not None else None
            out = Back.apply(out, (launch.thin(done.y) if made is None else made,), launch.thin_back)
        if kept is not None:
            kept.keep(unit, done, out)
        values.put(unit.gives, out)
        values.hand_on(name, passed)

    def compute(
        self, unit: Unit, z: Tensor, shortcut: Tensor | None, moments: dict[str, Tensor], measured: bool
    ) -> Done:
        """A unit's forward pass, by kernels; the moments of what it gives are gathered on the way, if it is `measured`."""
        z, name = self.laid(z), unit.norm.reads[0]
        if name not in moments or not len(moments[name]):
            moments[name] = launch.moments_of(z)
        layer: Any = self.net.layer(unit.norm.name)
        running = (layer.running_mean, layer.running_var) if layer.track_running_stats else None
        affine = launch.finish_moments(
            moments[name], layer.weight, layer.bias, running, launch.rows_of(z), layer.momentum, layer.eps
        )
        if unit.conv is None:
            h = launch.norm_relu(z, affine)
            return Done(z, affine, h, h)
        wanted, cout = unit.gives in self.measured and measured, unit.conv.channels
        h, y, moments[unit.gives] = launch.norm_relu_conv(
            z, affine, self.shadows[unit.conv.name], cout,
            shortcut=None if shortcut is None else self.laid(shortcut), moments=wanted,
            tiles=proof.tiles(z, cout, normed=True, adds=shortcut is not None, moments=wanted),
        )  # fmt: skip
        return Done(z, affine, h, y)

    def laid_weight(self, name: str) -> Weight:
        return Weight(self.shadows[name], self.masks[name], self.aside)

    def table(self, node: Node) -> tuple[Tensor, Tensor]:
        """Where each channel of a selection comes from, and where each channel of its input goes."""
        assert isinstance(node.op, ops.Select)
        place = {channel: i for i, channel in enumerate(node.op.source)}
        back = [place.get(channel, -1) for channel in range(self.net.plan.by_name[node.reads[0]].channels)]
        device = self.shadow.flat.device
        there, back_again = (
            torch.tensor(launch.runs(each, self.dtype), dtype=torch.int32, device=device)
            for each in (node.op.source, back)
        )
        return there, back_again

    def laid(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).contiguous(memory_format=torch.channels_last)


@dataclass
class Kept:
    """The images of a whole network's pass. By the rule of births those of its subnetworks are among them: the same, or their
    first channels."""

    images: dict[str, Tensor] = field(default_factory=dict)
    units: dict[tuple[str, str], Done] = field(default_factory=dict)  # by the names of their norm and of what they give

    def keep(self, unit: Unit, done: Done, out: Tensor) -> None:
        """What a unit computed, apart from the graph that its images have become part of, and what it gives after halving."""
        self.units[unit.norm.name, unit.gives] = Done(*(each.detach() for each in done))
        self.images[unit.gives] = out.detach()

    def image(self, node: Node) -> Tensor | None:
        found = self.images.get(node.name)
        return None if found is None else found[:, : node.channels]

    def unit(self, unit: Unit) -> Done | None:
        done, cin = self.units.get((unit.norm.name, unit.gives)), unit.norm.channels
        if done is None:
            return None
        cout = cin if unit.conv is None else unit.conv.channels
        return Done(done.z[:, :cin], done.affine[:, :cin], done.h[:, :cin], done.y[:, :cout])

    def halved(self, unit: Unit) -> Tensor | None:
        return self.image(unit.conv) if unit.conv is not None and (unit.norm.name, unit.gives) in self.units else None


class Values:
    """The images of one pass, each handed out as often as it is read, then forgotten.

    A norm hands its input on to the next reader; where several others read it, too, each gets a handle of its own, so
    that a kernel of ours adds their gradients."""

    def __init__(self, readers: dict[str, tuple[int, int]]) -> None:
        self.readers = readers  # value -> (norms that read it, others)
        self.handles: dict[str, list[Tensor]] = {}  # the first is the norms'
        self.left: dict[str, int] = {}

    def put(self, name: str, value: Tensor) -> None:
        norms, others = self.readers.get(name, (0, 0))
        if not norms + others:
            return
        wanted = others + (norms > 0)
        worth = others > 1 and wanted <= 8 and value.requires_grad and value.dim() == 4 and value.shape[1] in CHANNELS
        self.handles[name] = list(Fan.apply(wanted, value)) if worth else [value]
        self.left[name] = norms + others

    def take(self, name: str, norm: bool = False) -> Tensor:
        held = self.handles[name]
        value = held[0] if norm or len(held) == 1 else held.pop()
        self.left[name] -= 1
        if not self.left[name]:
            del self.handles[name]
        return value

    def hand_on(self, name: str, value: Tensor) -> None:
        if name in self.handles:
            self.handles[name][0] = value


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
