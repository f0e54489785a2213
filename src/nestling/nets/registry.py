"""The networks by name, and how to build one: as a nest, as the independent net of one stage's size, kept
beside early stages, or as an ensemble.

In: a NetworkRecipe (a name and what to change about it), the number of classes and the input shape. Out: a plan, or a
network with weights drawn from a generator. What one looks like inside is said in resnet.py, sparse.py, cascade.py, msdnet.py.
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from nestling.errors import NestlingError, nearest
from nestling.nets.births import Growth, alone, grow, growth_of
from nestling.nets.cascade import cascade
from nestling.nets.early import beside, own_part
from nestling.nets.heads import with_heads
from nestling.nets.msdnet import msdnet
from nestling.nets.plan import Node, Plan
from nestling.nets.resnet import resnet
from nestling.nets.settle import check
from nestling.nets.sparse import sparse_resnet
from nestling.recipes.recipe import NetworkRecipe

if TYPE_CHECKING:
    import torch

    from nestling.nets.net import NestedNet

ImageShape = tuple[int, int, int]


@dataclass(frozen=True)
class Architecture:
    """A named network: which function plans it, and with which numbers."""

    kind: str  # resnet | sparse | cascade | msdnet
    growth: str
    widths: tuple[int, ...]  # channels of each group at full width
    blocks: tuple[int, ...]  # blocks of each group at full depth
    stripes: tuple[int, ...] = ()  # empty: every width step doubles
    exits: tuple[int, ...] = ()  # cascade, msdnet: blocks, layers before each exit
    exit_width: int = 128
    stem: str = "small"
    bottleneck: int = 1
    shape: ImageShape = (3, 32, 32)
    classes: int = 10

    def plan(self, name: str, growth: Growth, shape: ImageShape, classes: int) -> Plan:
        if self.kind == "resnet":
            return resnet(name, growth, self.widths, self.blocks, shape, classes, self.stem, self.bottleneck)
        if self.kind == "sparse":
            return sparse_resnet(name, growth, self.widths, self.blocks, shape, classes, self.stem)
        by_exits = msdnet if self.kind == "msdnet" else cascade
        return by_exits(name, self.exits, self.widths, self.blocks, shape, classes, self.exit_width)

    def stage_alone(self, growth: Growth, stage: int) -> "Architecture":
        """The architecture of one stage's size, to be trained by itself with all its connections."""
        if self.exits:
            return self._cut(stage)
        size = alone(growth, stage)
        widths = tuple(size.channels(width) for width in self.widths)
        return replace(self, growth="", stripes=(), widths=widths, blocks=tuple(map(size.blocks, self.blocks)))

    def _cut(self, stage: int) -> "Architecture":
        """A network's prefix up to one exit, with that exit only."""
        if not 1 <= stage <= len(self.exits):
            raise NestlingError(f"stage {stage} does not exist: this cascade has stages 1 to {len(self.exits)}.")
        left, blocks = self.exits[stage - 1], []
        for count in self.blocks:
            if left > 0:
                blocks.append(min(left, count))
            left -= count
        widths = (
            self.widths if self.kind == "msdnet" else self.widths[: len(blocks)]
        )  # whose scales are all there at once
        return replace(self, blocks=tuple(blocks), widths=widths, exits=(self.exits[stage - 1],))


DIGITS: ImageShape = (1, 8, 8)
IMAGENET: ImageShape = (3, 224, 224)
TINY: ImageShape = (3, 64, 64)  # Tiny ImageNet

NETS: dict[str, Architecture] = {
    # the paper's networks for CIFAR-10, and its baselines
    "width-resnet42": Architecture("resnet", "w,w", (32, 64, 128), (7, 7, 7)),
    "even-resnet42": Architecture("resnet", "w,w,w", (32, 64, 128), (7, 7, 7), stripes=(1, 1, 1, 1)),
    "depth-sparse98": Architecture("sparse", "d,d,d", (16, 32, 64), (16, 16, 16)),
    "alternate-sparse98": Architecture("sparse", "w,d,w,d", (16, 32, 64), (16, 16, 16)),
    "together-sparse98": Architecture("sparse", "wd,wd", (16, 32, 64), (16, 16, 16)),
    "cascade-sparse98": Architecture("cascade", "", (16, 32, 64), (16, 16, 16), exits=(6, 12, 24, 48)),
    # the paper's networks for ImageNet
    "width-resnet50": Architecture(
        "resnet",
        "w,w",
        (256, 512, 1024, 2048),
        (3, 4, 6, 3),
        stem="imagenet",
        bottleneck=4,
        shape=IMAGENET,
        classes=1000,
    ),
    "depth-sparse66": Architecture(
        "sparse", "d,d", (64, 128, 256, 512), (8, 8, 8, 8), stem="imagenet", shape=IMAGENET, classes=1000
    ),
    # for Tiny ImageNet: ResNet-18 with a narrower end, 16 MB in half precision
    "width-resnet18": Architecture("resnet", "w,w", (64, 128, 256, 384), (2, 2, 2, 2), shape=TINY, classes=200),
    # not the paper's, for comparison
    "msdnet": Architecture("msdnet", "", (16, 32, 64), (6, 6, 4), exits=(4, 6, 8, 10, 12, 14, 16)),
    # the same ideas, small enough for 8x8 digits on a laptop
    "width-digits": Architecture("resnet", "w,w", (16, 32), (2, 2), shape=DIGITS),
    "even-digits": Architecture("resnet", "w,w,w", (16, 32), (2, 2), stripes=(1, 1, 1, 1), shape=DIGITS),
    "depth-digits": Architecture("sparse", "d,d", (8, 16), (4, 4), shape=DIGITS),
    "alternate-digits": Architecture("sparse", "w,d,w,d", (16, 32), (4, 4), shape=DIGITS),
    "together-digits": Architecture("sparse", "wd,wd", (16, 32), (4, 4), shape=DIGITS),
    "cascade-digits": Architecture("cascade", "", (8, 16), (4, 4), exits=(2, 4, 8), exit_width=16, shape=DIGITS),
}


def architecture(recipe: NetworkRecipe) -> Architecture:
    """The named architecture with the recipe's changes."""
    if recipe.own:
        raise NestlingError(
            f"{recipe.name} builds a network of your own, which is not planned by name; call it instead"
        )
    if recipe.name not in NETS:
        near = nearest(recipe.name, NETS)
        raise NestlingError(
            f"unknown network {recipe.name!r}; did you mean {near}? (nestling describe --help lists all)"
        )
    arch = NETS[recipe.name]
    if recipe.growth and arch.exits:
        raise NestlingError(f"{recipe.name} grows by its exits; it takes no growth order (found {recipe.growth!r}).")
    changed = replace(
        arch,
        growth=recipe.growth or arch.growth,
        # stripes belong to a growth order: a new order without stripes goes back to doubling
        stripes=tuple(recipe.stripes) or (() if recipe.growth else arch.stripes),
        widths=tuple(recipe.widths) or arch.widths,
        blocks=tuple(recipe.blocks) or arch.blocks,
    )
    if len(changed.widths) != len(changed.blocks):
        raise NestlingError(
            f"{recipe.name}: {len(changed.widths)} widths {changed.widths} but {len(changed.blocks)} block counts "
            f"{changed.blocks}; give one of each per group."
        )
    if min(changed.widths + changed.blocks) < 1:
        raise NestlingError(f"{recipe.name}: widths {changed.widths} and blocks {changed.blocks} must be at least 1.")
    return changed


def plan(recipe: NetworkRecipe, classes: int | None = None, shape: ImageShape | None = None) -> Plan:
    """The plan of a recipe's network. Pure: errors in growth orders and sizes show up here, before any tensor."""
    arch = architecture(recipe)
    classes, shape = classes or arch.classes, shape or arch.shape
    growth = grow(arch.growth, arch.stripes)
    if recipe.alone and recipe.ensemble:
        raise NestlingError("network.alone and network.ensemble exclude each other: set one of them.")
    if recipe.heads != "own" and (recipe.ensemble or recipe.early):
        raise NestlingError(
            f"network.heads={recipe.heads} would change the answers of networks that are kept as they are; leave it out with "
            "network.ensemble and network.early"
        )
    if recipe.ensemble:
        count = len(arch.exits) or growth.stages
        members = [arch.stage_alone(growth, s) for s in range(1, count + 1)]
        plans = [m.plan(recipe.name, grow(m.growth, m.stripes), shape, classes) for m in members]
        nest = arch.plan(recipe.name, growth, shape, classes)
        return ensemble(f"{recipe.name}-ensemble", plans, nest.sizes)
    if recipe.early:
        own = plan(replace(recipe.without_early(), alone=growth.stages), classes, shape)
        return kept(recipe, arch.stage_alone(growth, growth.stages), own, shape, classes)
    if recipe.alone:
        sizes = arch.plan(recipe.name, growth, shape, classes).sizes
        single = arch.stage_alone(growth, recipe.alone)
        planned = single.plan(f"{recipe.name}-alone", grow(single.growth, single.stripes), shape, classes)
        return with_heads(replace(planned, sizes=(sizes[recipe.alone - 1],)), recipe.heads)
    return with_heads(arch.plan(recipe.name, growth, shape, classes), recipe.heads)


def kept(recipe: NetworkRecipe, arch: Architecture, own: Plan, shape: ImageShape, classes: int) -> Plan:
    """A network with early stages beside it, each as wide as that share of its layers."""
    if arch.exits:
        raise NestlingError(f"{recipe.name} has its exits already; network.early is for networks without them.")
    growth = growth_of(recipe.early)
    stripes = growth.stripes[:-1]
    narrow = replace(arch, widths=early_widths(recipe, arch.widths, Fraction(sum(stripes), growth.units), sum(stripes)))
    order = ",".join("w" for _ in stripes[1:])
    early = narrow.plan(recipe.name, grow(order, stripes), shape, classes)
    return replace(beside(early, own), name=f"{recipe.name}-kept")


def early_widths(recipe: NetworkRecipe, widths: tuple[int, ...], share: Fraction, stripes: int) -> tuple[int, ...]:
    """How wide the early stages are together: as the recipe says, or their share of the network's widths."""
    if recipe.early_widths and len(recipe.early_widths) != len(widths):
        raise NestlingError(
            f"network.early_widths={recipe.early_widths}; expected {len(widths)} widths, one for each of {recipe.name}'s groups"
        )
    wanted = [Fraction(width) for width in recipe.early_widths] or [width * share for width in widths]
    uneven = [whole for whole, width in zip(recipe.early_widths or widths, wanted, strict=True) if width % stripes]
    if uneven:
        raise NestlingError(
            f"network.early={','.join(f'{share:g}' for share in recipe.early)} would cut {uneven[0]} channels inside one; use "
            f"shares such as {1 / uneven[0]:g} times a whole number"
        )
    return tuple(int(width) for width in wanted)


def ensemble(name: str, plans: list[Plan], sizes: tuple[str, ...]) -> Plan:
    """Independent networks run one after another, as a nest that shares nothing but its input."""
    nodes: list[Node] = [plans[0].input]
    heads = []
    for stage, member in enumerate(plans, start=1):
        rename = {n.name: n.name if n is member.input else f"net{stage}.{n.name}" for n in member.nodes}
        for node in member.nodes[1:]:
            reads = tuple(rename[read] for read in node.reads)
            nodes.append(replace(node, name=rename[node.name], reads=reads, births=(stage,) * node.channels))
        heads.append(rename[member.heads[-1]])
    return check(Plan(name, tuple(nodes), tuple(heads), sizes))


def image(shape: tuple[int, ...]) -> ImageShape:
    """The shape of images, which is what the networks of the registry take."""
    if len(shape) != 3:
        raise NestlingError(
            f"found inputs of shape {shape}; the networks by name take images (channels, height, width)"
        )
    channels, height, width = shape
    return channels, height, width


def build(
    recipe: NetworkRecipe,
    classes: int | None = None,
    shape: tuple[int, ...] | None = None,
    generator: "torch.Generator | None" = None,
) -> "NestedNet":
    """The network of a recipe, with weights drawn from `generator` (seed 0 without one); of the user's own, as they come."""
    import torch  # here, because plans are made without it

    from nestling.nets.extended import Extended
    from nestling.nets.net import NestedNet
    from nestling.nets.ways import own_net

    if recipe.own:
        return own_net(recipe, shape)
    planned = plan(recipe, classes, image(shape) if shape else None)
    seed = generator if generator is not None else torch.Generator().manual_seed(0)
    if not recipe.early:
        return NestedNet(planned).reset(seed)
    net = Extended(planned).reset(seed)  # of all its layers: none is held yet
    return net.hold(own_part(planned))
