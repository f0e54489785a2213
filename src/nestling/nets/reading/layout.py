"""Where the channels and pixels of a plan's tensor stand in a tensor of somebody's module: shapes as lists of factors.

In: a node, and how the module turns its tensor (reshape, permute, parts of the channels). Out: an `Arrangement`: for each
dimension the factors it is made of, which are the batch, pixels or channels, and which channel stands where. So heads, windows
and shuffled channels are followed without computing anything, until `arranged` says how a plan makes the tensor. Pure but for
the table of channels.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from nestling.nets.ops import Rearrange
from nestling.nets.plan import Node


@dataclass(frozen=True, eq=False)
class Factor:
    """A factor of a dimension. Pixels are known by what they are, not by how many."""

    kind: str  # batch | pixel | channel
    size: int


Dims = tuple[tuple[Factor, ...], ...]


@dataclass(frozen=True, eq=False)
class Arrangement:
    """A tensor of the module, made of the node `name`."""

    name: str
    axis: int  # of the node's channels
    base: Dims  # the node's own dimensions; its channels are one factor
    dims: Dims  # those of the module's tensor
    index: Tensor  # which channel stands where, over the channel factors in their order

    @classmethod
    def of(cls, node: Node, batch: int) -> "Arrangement":
        """The node's tensor as it is."""
        dims = [(Factor("batch", batch),), *((Factor("pixel", side),) if side > 1 else () for side in node.size)]
        dims.insert(node.op.axis, (Factor("channel", node.channels),))
        return cls(node.name, node.op.axis, tuple(dims), tuple(dims), torch.arange(node.channels))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size_of(dim) for dim in self.dims)

    @property
    def channel_dims(self) -> list[int]:
        return [d for d, dim in enumerate(self.dims) if any(f.kind == "channel" for f in dim)]

    def holds(self, dim: int, kind: str) -> bool:
        """Whether a dimension is of one kind only."""
        return all(factor.kind == kind for factor in self.dims[dim])

    @property
    def is_plain(self) -> bool:
        """Whether a plan may have it as it is: images first, all channels at one dimension, nothing mixed."""
        [*places] = self.channel_dims
        alone = len(places) == 1 and places[0] > 0 and self.holds(places[0], "channel")
        first = [f.kind for f in self.dims[0]] == ["batch"]
        return alone and first and all(self.holds(d, "pixel") for d in range(1, len(self.dims)) if d not in places)

    @property
    def is_mixed(self) -> bool:
        """Whether channels and something else share a dimension."""
        return any(not self.holds(d, "channel") for d in self.channel_dims)

    # --- turned ---------------------------------------------------------------------------------------------------

    def permuted(self, order: Sequence[int]) -> "Arrangement":
        return self.with_dims(tuple(self.dims[d] for d in order))

    @property
    def swapped(self) -> "Arrangement":
        """Its last two dimensions in the other order."""
        return self.permuted([*range(len(self.dims) - 2), -1, -2])

    def with_dims(self, dims: Dims) -> "Arrangement":
        """The same factors in another order."""
        old, new = channel_factors(self.dims), channel_factors(dims)
        return replace(self, dims=dims, index=self.index.permute([old.index(f) for f in new]))

    def with_side(self, dim: int) -> "Arrangement":
        """The same where a dimension that is a single pixel, of which nothing is known, is a side of its own."""
        if self.dims[dim]:
            return self
        one = (Factor("pixel", 1),)
        dims = [*self.dims]
        dims[dim] = one
        return replace(self, base=((*self.base[0], *one), *self.base[1:]), dims=tuple(dims))

    def reshaped(self, shape: Sequence[int]) -> "Arrangement | None":
        """Factors gathered into other dimensions, and cut in two where a dimension ends inside one."""
        left = [factor for dim in self.dims for factor in dim]
        made, layout = [], self
        for side in shape:
            mine: list[Factor] = []
            while size_of(mine) < side or (side == 1 and left and left[0].kind == "channel" and left[0].size == 1):
                if not left:
                    return None
                rest = side // size_of(mine)
                if left[0].size > rest:
                    if side % size_of(mine) or left[0].size % rest or left[0].kind == "batch":
                        return None
                    parts = Factor(left[0].kind, rest), Factor(left[0].kind, left[0].size // rest)
                    layout = layout.parted(left[0], parts)
                    left[:1] = parts
                mine.append(left.pop(0))
                if side == 1:
                    break
            if size_of(mine) != side:
                return None
            made.append(tuple(mine))
        if any(factor.size > 1 for factor in left):
            return None
        made[-1] = (*made[-1], *left)
        return replace(layout, dims=tuple(made))

    def parted(self, factor: Factor, parts: tuple[Factor, Factor]) -> "Arrangement":
        """One factor as two, everywhere."""
        index = self.index
        if factor.kind == "channel":
            at = channel_factors(self.dims).index(factor)
            index = index.unflatten(at, [part.size for part in parts])
        base, dims = (
            tuple(tuple(p for f in dim for p in (parts if f is factor else (f,))) for dim in each)
            for each in (self.base, self.dims)
        )
        return replace(self, base=self.base if factor.kind == "channel" else base, dims=dims, index=index)

    def picked(self, dim: int, which: Sequence[int] | int) -> "Arrangement":
        """Some of what stands along a dimension of channels, or one of it."""
        factors = channel_factors(self.dims)
        mine = self.dims[dim]
        first = factors.index(mine[0])
        index = self.index.flatten(first, first + len(mine) - 1)
        kept: tuple[Factor, ...] = ()
        if isinstance(which, int):
            index = index.select(first, which)
        else:
            index = index.index_select(first, torch.tensor(which))
            kept = (Factor("channel", len(which)),)
        dims = [kept if d == dim else each for d, each in enumerate(self.dims)]
        if isinstance(which, int):
            del dims[dim]
        return replace(self, dims=tuple(dims), index=index)

    def chosen(self) -> "tuple[tuple[int, ...], Arrangement]":
        """Which channels to take, and this layout of them alone, the rest of the node as it is."""
        flat = self.index.flatten()
        used = flat.sort().values
        base = tuple((Factor("channel", len(flat)),) if d == self.axis else dim for d, dim in enumerate(self.base))
        place = {int(channel): i for i, channel in enumerate(used)}
        index = torch.tensor([place[int(channel)] for channel in flat]).view(self.index.shape)
        return tuple(used.tolist()), replace(self, base=base, index=index)

    # --- as a plan has it -----------------------------------------------------------------------------------------

    def arranged(self, where: str = "") -> "tuple[tuple[int, ...], Rearrange | None, Arrangement]":
        """Which channels to take, how to rearrange them, and this layout of what comes out (still under the old name).

        A plan has the images first, then one dimension for each of the module's that holds pixels, and all channels at one place:
        "first", "last", or where they are if that is one place; a single channel stays where the node has it."""
        places = self.channel_dims
        dims: list[tuple[Factor, ...]] = []
        plain = self.is_plain and not where
        for d, dim in enumerate(self.dims):
            pixels = tuple(f for f in dim if f.kind == "pixel")
            if places == [d] and not where:
                dims += [pixels] if pixels else []
                dims.append((CHANNELS,))
            elif pixels or (plain and d > 0):
                dims.append(pixels)
        if (CHANNELS,) not in dims:
            first = where == "first" or (not where and not places and self.axis == 1)  # a single channel has no place
            dims.insert(0 if first else len(dims), (CHANNELS,))
        batch = next(f for dim in self.dims for f in dim if f.kind == "batch")
        goal = ((batch,), *dims)
        axis = goal.index((CHANNELS,))
        source = tuple((CHANNELS,) if any(f.kind == "channel" for f in dim) else dim for dim in self.base)
        have, want = ([f for dim in each for f in dim] for each in (source, goal))
        move = None
        if source != goal:
            before = tuple(0 if f is CHANNELS else f.size for f in have[1:])
            after = tuple(0 if dim == (CHANNELS,) else size_of(dim) for dim in goal[1:])
            move = Rearrange(before, tuple(have.index(f) for f in want), after, axis=axis)
        flat = self.index.flatten()
        base = tuple((Factor("channel", len(flat)),) if dim == (CHANNELS,) else dim for dim in goal)
        made = Arrangement(self.name, axis, base, self.dims, torch.arange(len(flat)).view(self.index.shape))
        return tuple(flat.tolist()), move, made

    @property
    def bare(self) -> "Arrangement":
        """The same without sides of a single pixel, of which nothing need be known."""
        base, dims = (
            tuple(tuple(f for f in dim if f.kind != "pixel" or f.size > 1) for dim in each)
            for each in (self.base, self.dims)
        )
        return replace(self, base=base, dims=dims)

    @property
    def merged(self) -> "tuple[int, bool] | None":
        """The dimension in which pixels stand before (True) or behind all channels, if that is all that is not plain."""
        [*places] = self.channel_dims
        if len(places) != 1 or not places[0] or [f.kind for f in self.dims[0]] != ["batch"]:
            return None
        kinds = [f.kind for f in self.dims[places[0]]]
        others = all(self.holds(d, "pixel") for d in range(1, len(self.dims)) if d != places[0])
        if not others or "batch" in kinds or kinds not in (sorted(kinds), sorted(kinds, reverse=True)):
            return None
        return places[0], kinds[0] == "pixel"

    def unmerged(self) -> "Arrangement":
        """The same before these pixels became one dimension with the channels."""
        assert self.merged is not None
        place, outer = self.merged
        dim = self.dims[place]
        parts = (tuple(f for f in dim if f.kind == "pixel"), tuple(f for f in dim if f.kind == "channel"))
        return replace(self, dims=(*self.dims[:place], *(parts if outer else parts[::-1]), *self.dims[place + 1 :]))


CHANNELS = Factor("channel", 0)  # all of a node's, wherever they stand


def size_of(dim: Sequence[Factor]) -> int:
    return prod(factor.size for factor in dim)


def sides_of(dim: Sequence[Factor]) -> list[tuple[str, int]]:
    """What a dimension is made of, neighbours of one kind as one."""
    return [(kind, prod(f.size for f in some)) for kind, some in itertools.groupby(dim, key=lambda f: f.kind)]


def channel_factors(dims: Dims) -> list[Factor]:
    return [factor for dim in dims for factor in dim if factor.kind == "channel"]
