"""Your own backbone, nested in width: `nest(module, "w,w")`.

In: an ordinary torch module that turns an image into logits, and a growth order of widths. Out: a NestedNet with the
module's layers under their own names and one head per stage in the place of its classifier. It starts from the module's
weights, of which the rule keeps those that go from earlier or equally early channels to later ones; with one stage it
computes exactly what the module computes, which is proved whenever a module is nested.
"""

import copy
import logging
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import nn

from nestling.errors import NestlingError
from nestling.nets.births import grow
from nestling.nets.modes import unhooked
from nestling.nets.net import Alone, NestedNet
from nestling.nets.ops import Operation
from nestling.nets.plan import Node
from nestling.nets.reading.agree import prove
from nestling.nets.reading.assemble import assemble
from nestling.nets.reading.baked import baked
from nestling.nets.reading.ordered import ordered
from nestling.nets.reading.read import read
from nestling.nets.reading.sketch import Sketch
from nestling.nets.reading.trace import Shape

LOG = logging.getLogger(__name__)


def nest(
    module: nn.Module,
    growth: str = "w,w",
    shape: Shape = (3, 32, 32),
    stripes: tuple[int, ...] = (),
    uneven: bool = False,
    name: str = "",
    proof: bool = True,
    order: bool = True,
    multiple: int = 1,
) -> NestedNet:
    """The width-nested form of a module for images of `shape`, starting from copies of its weights.

    Layers whose channels the stripes do not divide are refused, or cut at the nearest channel if `uneven`. `proof` runs the
    one-stage form beside the module, in training and evaluation, and raises if they differ: turn it off for huge modules.
    `order` puts the most important channels of every layer into the first stripe; without, they are cut as they stand.
    `multiple=8`: layers are cut at the nearest multiple of 8 channels where their own width is one, which `stripes` need not
    divide then; 8 or 16 fill a chip's vectors, and 8 is what our kernels need.
    """
    net = name or type(module).__name__
    check_multiple(multiple, net)
    grown = replace(grow(growth, stripes), multiple=multiple)
    if grown.levels > 1:
        raise NestlingError(
            f"{net}: a module of its own is nested in width only, but the growth order {growth!r} adds depth. "
            'Use "w" for every stage, for example "w,w".'
        )
    sketch = read_module(module, shape, proof, net)
    with own_randomness(module):
        sketch = ordered(sketch) if order and grown.stages > 1 else sketch
        return assemble(sketch, grown, uneven or multiple > 1, net, module.training).net


def check_multiple(multiple: object, net: str) -> None:
    if type(multiple) is not int or multiple < 1:
        raise NestlingError(f"{net}: found multiple={multiple!r}; expected a number of channels, such as 8")


def read_module(module: nn.Module, shape: Shape, proof: bool, net: str) -> Sketch:
    """What a module is made of, said to be right by a `proof`; what is left out or taken as it is now is said."""
    if not isinstance(module, nn.Module):
        raise NestlingError(f"found a {net}, {module!r}; expected a torch module that turns images into logits")
    check_shape(shape, net)
    if isinstance(module, NestedNet | Alone):
        return own_sketch(module.net if isinstance(module, Alone) else module, shape, net)
    module, made_of_others = baked(module, net)
    if made_of_others:
        LOG.warning("%s: the weights of %s are made of others; the nest has them as they are now", net, made_of_others)
    sketch = read(module, shape, net)
    if sketch.made:
        names = [name for name, _ in sketch.made]
        LOG.warning("%s: the weights of %s are made of others; the nest has them as they are now", net, names)
    if sketch.dropped:
        unused = sorted({path.split(".")[0] for path in sketch.dropped})
        LOG.warning(
            "%s: of %s something runs that reaches no answer (such as auxiliary heads); the nest leaves it out",
            net,
            unused,
        )
    if proof:
        with own_randomness(module):
            prove(module, sketch, shape, read, net)
    return sketch


def own_sketch(module: NestedNet, shape: Shape, net: str) -> Sketch:
    """A network of ours with one answer is known already: its plan, without births."""
    plan = module.plan
    unhooked(module, net)
    if len(plan.heads) > 1:
        raise NestlingError(
            f"{net}: it has {len(plan.heads)} stages already; give one of them, as net.subnet({plan.stages})"
        )
    if plan.input.shape(plan.input.channels) != tuple(shape):
        raise NestlingError(
            f"{net}: it takes images of shape {plan.input.shape(plan.input.channels)}, found {tuple(shape)}"
        )
    nodes = {node.name: replace(node, births=(0,) * node.channels) for node in plan.nodes}
    layers = {node.name: torchs(node, module) for node in plan.nodes if node.op.layered and not node.shares}
    return Sketch(nodes, layers, plan.heads[0])


def torchs(node: Node, module: NestedNet) -> nn.Module:
    """A layer of ours with its tensors as torch's own has them, as layers of sketches are expected to."""
    layer: nn.Module = module.layer(node.name)
    if type(node.op).given_back is Operation.given_back:
        return layer
    layer = copy.deepcopy(layer)
    for key, tensor in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)):
        tensor.data = node.op.given_back(key, tensor.data)
    return layer


def own_randomness(module: nn.Module) -> AbstractContextManager[None]:
    """torch draws weights for every new layer; nobody's random numbers change by that."""
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    return torch.random.fork_rng(devices=list(devices))


def check_shape(shape: Shape, net: str) -> None:
    given = shape if isinstance(shape, tuple | list) else ()
    if len(given) not in (1, 2, 3) or not all(type(side) is int and side > 0 for side in given):
        raise NestlingError(
            f"{net}: found images of shape {shape!r}; expected (channels, height, width) in whole numbers, such as (3, 32, 32), "
            "or (channels, length) of a sequence, or (channels,)"
        )
