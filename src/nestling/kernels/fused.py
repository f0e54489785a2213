"""A network's training pass by kernels of our own: where a plan says batch norm, relu, 3x3 convolution, one operation does it.

In: a network on its device. Out: a callable that gives the logits of `net(x)`, to bf16 accuracy, and the same gradients.
Whatever no kernel fits is computed by the network itself. It knows plans and layers, neither losses nor steps.
"""

from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from nestling.kernels import elementwise, proof
from nestling.kernels.autograd import AddAll, Back, Done, Fan, NormRelu, NormReluConv, PlainConv, PlainLinear, Weight
from nestling.kernels.backends import triton
from nestling.kernels.images import PIXEL_MULTIPLE, count_pixels
from nestling.kernels.patterns import (
    CHANNELS,
    Unit,
    count_readers,
    fits_linear,
    fits_norm,
    fits_select,
    fits_stem,
    fits_sum,
    items,
    plain,
)
from nestling.kernels.side_stream import JoinSideStream, SideStream
from nestling.kernels.weights import PackedWeights, can_pack
from nestling.nets import NestedNet, ops
from nestling.nets.modes import held_channels
from nestling.nets.plan import Node

HALF = ops.Map("pool2")


def suits(net: NestedNet, batch: int) -> bool:
    """Whether the kernels run here, do most of this network's work, and its weights and images lie as they read them."""
    return triton.runs_on(next(net.parameters()).device) and fits(net, batch)


def fits(net: NestedNet, batch: int) -> bool:
    found = items(net.plan, next(net.parameters()).device)
    units = [item for item in found if isinstance(item, Unit)]
    fused = [unit for unit in units if unit.conv is not None]
    convs = [node for node in net.plan.nodes if isinstance(node.op, ops.Conv)]
    sums = [item for item in found if isinstance(item, Node) and fits_sum(net.plan, item)]
    stems = [node for node in net.plan.nodes[1:] if fits_stem(net.plan, node)]
    sizes = [unit.norm.size for unit in units] + [node.size for node in (*sums, *stems)]
    pixels = [batch * prod(size) for size in sizes]
    whole = all(each % PIXEL_MULTIPLE == 0 and each * CHANNELS[-1] < 2**31 for each in pixels)  # offsets are 32 bits
    read = [unit.conv.name for unit in fused if unit.conv is not None]
    read += [node.name for node in stems]
    laid = all(can_pack(net.layer(name).weight) for name in read)
    return whole and laid and 2 * len(fused) > len(convs)


class Fused:
    """`net(x)` for training, by kernels. Weights are read where they lie; `refresh` copies them to bf16 first."""

    def __init__(self, net: NestedNet, dtype: torch.dtype = torch.bfloat16) -> None:
        self.net, self.dtype = net, dtype
        self.items = items(net.plan, next(net.parameters()).device)
        self.stems = {node.name for node in net.plan.nodes[1:] if fits_stem(net.plan, node)}
        convs = [item.conv.name for item in self.items if isinstance(item, Unit) and item.conv is not None]
        convs += sorted(self.stems)
        self.packed = PackedWeights([net.layer(name).weight.detach() for name in convs], dtype)
        self.weights = dict(zip(convs, self.packed.parts, strict=True))
        masks = {name: net.layer(name).mask for name in convs}  # laid out as the weights are
        self.masks = {n: m if m is None else m.contiguous(memory_format=torch.channels_last) for n, m in masks.items()}
        self.readers = count_readers(self.items, net.plan.heads)
        self.measured = {n.reads[0] for n in net.plan.nodes if fits_norm(n)}
        self.side = SideStream(self.packed.flat.device)
        selects = [node for node in net.plan.nodes if fits_select(net.plan, node)]
        self.tables = {node.name: self.table(node) for node in selects}
        self.linears = {node.name for node in net.plan.nodes if fits_linear(net, node)}

    def __call__(self, x: Tensor, kept: "Kept | None" = None, known: "Kept | None" = None) -> tuple[Tensor, ...]:
        """The logits. A pass leaves its images in `kept`; that of a subnetwork finds its own among those `known`."""
        self.packed.refresh()
        layers: list[Any] = [self.net.layer(name) for name in self.weights]
        joined = JoinSideStream.apply(self.side, *(layer.weight for layer in layers))
        weights = dict(zip(self.weights, joined, strict=True))
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
        self, item: Node, got: list[Tensor], made: Tensor | None, moments: dict[str, Tensor], weights: dict[str, Tensor]
    ) -> Tensor:
        """A node by itself, by a kernel if one fits; where it is made already, only its way back."""
        out: Tensor
        whole = item.channels in CHANNELS and all(side % 2 == 0 for side in got[0].shape[2:])
        if fits_sum(self.net.plan, item):
            if made is None:
                xs = tuple(self.channels_last(x.detach()) for x in got)
                made, moments[item.name] = elementwise.add_all(xs, item.name in self.measured)
            out = AddAll.apply((made,), *got)
        elif item.op == HALF and whole:
            made = elementwise.pool2(self.channels_last(got[0].detach())) if made is None else made
            out = Back.apply(got[0], (made,), elementwise.pool2_back)
        elif item.name in self.tables:
            there, back = self.tables[item.name]
            made = (
                elementwise.select(self.channels_last(got[0].detach()), there, item.channels) if made is None else made
            )
            out = Back.apply(got[0], (made,), partial(elementwise.select, table=back, channels=got[0].shape[1]))
        elif item.name in self.stems and not got[0].requires_grad:
            x, cout, wanted = self.channels_last(got[0]), item.channels, item.name in self.measured
            if made is None:
                backend, tiles = proof.for_forward(x, cout, normed=False, moments=wanted)
                weight = self.weights[item.name]
                _, made, moments[item.name] = backend.forward(x, None, weight, cout, tiles, moments=wanted)
            out = PlainConv.apply(x, weights[item.name], (made,), self.weight(item.name))
        elif item.name in self.linears:
            layer: Any = self.net.layer(item.name)
            out = PlainLinear.apply(got[0].float().contiguous(), layer.weight, layer.bias)
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
            weight, read = weights[unit.conv.name], self.weight(unit.conv.name)
            out, passed = NormReluConv.apply(z, layer.weight, layer.bias, weight, shortcut, done, read)
        if halving:
            made = known.halved(unit) if known is not None else None
            made = elementwise.subsample(done.y) if made is None else made
            out = Back.apply(out, (made,), elementwise.subsample_back)
        if kept is not None:
            kept.keep(unit, done, out)
        values.put(unit.gives, out)
        values.hand_on(name, passed)

    def compute(
        self, unit: Unit, z: Tensor, shortcut: Tensor | None, moments: dict[str, Tensor], measured: bool
    ) -> Done:
        """A unit's forward pass, by kernels; the moments of what it gives are gathered on the way, if it is `measured`."""
        z, name = self.channels_last(z), unit.norm.reads[0]
        if name not in moments or not len(moments[name]):
            moments[name] = elementwise.moments_of(z)
        layer: Any = self.net.layer(unit.norm.name)
        running = (layer.running_mean, layer.running_var) if layer.track_running_stats else None
        affine = elementwise.finish_moments(
            moments[name],
            layer.weight,
            layer.bias,
            running,
            count_pixels(z),
            layer.momentum,
            layer.eps,
            held_channels(layer),
        )
        if unit.conv is None:
            h = elementwise.norm_relu(z, affine)
            return Done(z, affine, h, h)
        wanted, cout = unit.gives in self.measured and measured, unit.conv.channels
        weight, shortcut = self.weights[unit.conv.name], None if shortcut is None else self.channels_last(shortcut)
        backend, tiles = proof.for_forward(z, cout, normed=True, adds=shortcut is not None, moments=wanted)
        h, y, moments[unit.gives] = backend.forward(z, affine, weight, cout, tiles, shortcut=shortcut, moments=wanted)
        return Done(z, affine, h, y)

    def weight(self, name: str) -> Weight:
        return Weight(self.weights[name], self.masks[name], self.side)

    def table(self, node: Node) -> tuple[Tensor, Tensor]:
        """Where each channel of a selection comes from, and where each channel of its input goes."""
        assert isinstance(node.op, ops.Select)
        place = {channel: i for i, channel in enumerate(node.op.source)}
        back = [place.get(channel, -1) for channel in range(self.net.plan.by_name[node.reads[0]].channels)]
        device = self.packed.flat.device
        there, back_again = (
            torch.tensor(elementwise.runs(each, self.dtype), dtype=torch.int32, device=device)
            for each in (node.op.source, back)
        )
        return there, back_again

    def channels_last(self, x: Tensor) -> Tensor:
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
