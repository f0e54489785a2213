"""Growth orders to births: at which stage every stripe of width and every level of depth first exists.

In: a growth order such as "w,d,w,d" and the sizes of the stripes. Out: a `Growth`, which answers what is born when,
and the sparse links of depth nesting. One rule stands behind all of it: a channel born at stage s reads only channels
born at or before s. Pure: no tensors, and it knows nothing of layers or networks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

from nestling.errors import NestlingError

Births = tuple[int, ...]  # the stage at which each channel first exists, channel by channel


@dataclass(frozen=True)
class Growth:
    """What grows at each stage: width by whole stripes of channels, depth by whole levels of blocks."""

    stripes: tuple[int, ...]  # how wide each stripe is, in units of the narrowest subnetwork
    stripe_births: tuple[int, ...]  # the stage at which each stripe is born
    level_births: tuple[int, ...]  # the stage at which each level of blocks is born
    stages: int
    multiple: int = 1  # of so many channels are stripes that are cut at the nearest place

    @property
    def units(self) -> int:
        """Width of the full network, in units."""
        return sum(self.stripes)

    def width_at(self, stage: int) -> int:
        """Width of D_stage, in units."""
        return sum(u for u, b in zip(self.stripes, self.stripe_births, strict=True) if b <= stage)

    def level_at(self, stage: int) -> int:
        """How many levels of depth exist at `stage`."""
        return sum(b <= stage for b in self.level_births)

    @property
    def levels(self) -> int:
        return len(self.level_births)

    @property
    def sizes(self) -> tuple[str, ...]:
        """The paper's name of every stage: "w2", "d4" or "w2d4"."""
        names = []
        for stage in range(1, self.stages + 1):
            width = f"w{self.width_at(stage)}" if len(self.stripes) > 1 else ""
            depth = f"d{2 ** (self.level_at(stage) - 1)}" if self.levels > 1 else ""
            names.append(width + depth or "full")
        return tuple(names)

    def channel_births(self, channels: int, level: int = 1, what: str = "layer") -> Births:
        """Births of a layer's channels, stripe by stripe: max(birth of the stripe, birth of the level)."""
        if channels % self.units:
            raise NestlingError(
                f"{what}: {channels} channels cannot be cut into stripes {self.stripes}; "
                f"expected a multiple of {self.units}. Change the widths or the stripes."
            )
        floor = self.level_births[level - 1]
        unit = channels // self.units
        births: list[int] = []
        for size, birth in zip(self.stripes, self.stripe_births, strict=True):
            births += [max(birth, floor)] * (size * unit)
        return tuple(births)

    def stripe_of(self, channels: int) -> tuple[int, ...]:
        """Which stripe each of a layer's channels belongs to (0, 1, ...)."""
        unit = channels // self.units
        return tuple(i for i, size in enumerate(self.stripes) for _ in range(size * unit))


def doubling(count: int) -> tuple[int, ...]:
    """Stripes 1, 1, 2, 4, ...: every stage doubles the width."""
    return (1,) + tuple(2**i for i in range(count - 1))


def grow(order: str, stripes: tuple[int, ...] = ()) -> Growth:
    """Read a growth order. Each comma starts a stage that adds width (w), depth (d) or both (wd); stage 1 is the seed.

    "w,d,w,d" has five stages, "" has one. Without `stripes` every width step doubles the width.
    """
    if not isinstance(order, str):
        raise NestlingError(f'found the growth order {order!r}; expected text such as "w,w", or "" for one stage')
    if isinstance(stripes, str) or not all(type(size) is int for size in stripes):
        raise NestlingError(f"found the stripes {stripes!r}; expected whole numbers such as (1, 1, 2)")
    steps = [step.strip() for step in order.split(",")] if order.strip() else []
    for position, step in enumerate(steps, start=2):
        if not step:
            raise NestlingError(
                f"growth order {order!r}: stage {position} is empty and would add nothing. "
                'Write "w", "d" or "wd" between commas, for example "w,d,w,d".'
            )
        if sorted(step) not in (["w"], ["d"], ["d", "w"]):
            raise NestlingError(
                f"growth order {order!r}: stage {position} reads {step!r}; expected w (width), d (depth) or wd (both)."
            )
    stripe_births = (1,) + tuple(stage for stage, step in enumerate(steps, start=2) if "w" in step)
    level_births = (1,) + tuple(stage for stage, step in enumerate(steps, start=2) if "d" in step)
    stripes = tuple(stripes) or doubling(len(stripe_births))
    if len(stripes) != len(stripe_births):
        raise NestlingError(
            f"growth order {order!r} has {len(stripe_births)} widths but {len(stripes)} stripes {stripes} were given; "
            "give one stripe size for the seed and one for every w."
        )
    if any(size < 1 for size in stripes):
        raise NestlingError(f"stripes {stripes}: every stripe needs at least one unit of width, or its stage is empty.")
    return Growth(stripes, stripe_births, level_births, 1 + len(steps))


FINEST = 64  # a stripe given as a share of a layer is so many 64ths of it, or a simpler fraction


def growth_of(shares: Sequence[float]) -> Growth:
    """A stripe for each of some shares of a layer's width, and one for the rest."""
    parts = [max(Fraction(share).limit_denominator(FINEST), Fraction(1, FINEST)) for share in shares]
    units = lcm(*(part.denominator for part in parts))
    stripes = [int(part * units) for part in parts]
    if sum(stripes) >= units:
        raise NestlingError(
            f"found the stripes {tuple(shares)}; expected shares of a width that together are below 1, such as 1/8, 1/4"
        )
    return grow(",".join("w" for _ in parts), (*stripes, units - sum(stripes)))


def alone(growth: Growth, stage: int) -> "Size":
    """The size of D_stage as fractions of the full network, for the independent net of equal size."""
    if not 1 <= stage <= growth.stages:
        raise NestlingError(f"stage {stage} does not exist: this network has stages 1 to {growth.stages}.")
    return Size(growth.width_at(stage), growth.units, 2 ** (growth.levels - growth.level_at(stage)))


@dataclass(frozen=True)
class Size:
    """A fraction of a network: `width` of `units` channels, one block in every `thinning`."""

    width: int
    units: int
    thinning: int

    def channels(self, full: int) -> int:
        return full * self.width // self.units

    def blocks(self, full: int) -> int:
        return full // self.thinning


# --- depth: levels of blocks and their sparse links ---------------------------------------------------------------


def level_lists(blocks: int, levels: int) -> tuple[tuple[int, ...], ...]:
    """The ordered blocks (1-based) of D_1 ... D_levels: odd numbering, recursively. 16 blocks: {1,9}, {1,5,9,13}, ..."""
    step = 2 ** (levels - 1)
    if blocks < 1 or blocks % step:
        raise NestlingError(
            f"{blocks} blocks a group cannot be halved into {levels} levels of depth; "
            f"expected a multiple of {step}. Change the blocks or the growth order."
        )
    return tuple(tuple(range(1, blocks + 1, 2 ** (levels - level))) for level in range(1, levels + 1))


def block_levels(blocks: int, levels: int) -> tuple[int, ...]:
    """The level of every block: the first D_l that holds it."""
    lists = level_lists(blocks, levels)
    return tuple(next(lv for lv, members in enumerate(lists, 1) if b in members) for b in range(1, blocks + 1))


def sparse_links(members: tuple[int, ...], position: int) -> tuple[int, ...]:
    """What position p of an ordered list reads: p-1, p-2, p-4, ... as block numbers, 0 being the group's input."""
    reads = []
    reach = 1
    while position - reach >= 0:
        where = position - reach
        reads.append(members[where - 1] if where else 0)
        reach *= 2
    return tuple(sorted(reads))


def depth_links(blocks: int, levels: int) -> tuple[tuple[int, ...], ...]:
    """What every block reads: the sparse rule applied inside the ordered list of the block's own level."""
    lists = level_lists(blocks, levels)
    links = []
    for block, level in enumerate(block_levels(blocks, levels), start=1):
        members = lists[level - 1]
        links.append(sparse_links(members, members.index(block) + 1))
    return tuple(links)


def output_links(blocks: int, levels: int) -> tuple[tuple[int, ...], ...]:
    """What the group's output reads, for each level: the same fetch at position last + 1."""
    return tuple(sparse_links(members, len(members) + 1) for members in level_lists(blocks, levels))
