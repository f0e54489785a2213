"""Which task owns which entry of which parameter, cut into pieces that one set of tasks owns.

In come the shapes of the parameters and either one bit mask per parameter (found from the graph) or one int64
tensor per parameter (given by a nested net's births); out comes a Layout: rectangular pieces, and the blocks
that a scope makes of them. Bit t of a mask is set when task t's loss depends on the entry. Everything here is
planned on the host before a step; nothing here sees a gradient.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from nestling.errors import NestlingError, nearest

SCOPES = ("all", "shared", "block", "tensor")
MOST_TASKS = 62  # bits of a non-negative int64
MOST_CELLS = 1024  # a tensor cut finer than this is not a nest of sorted births

Box = tuple[tuple[int, int], ...]  # start and stop along each dimension, in memory order


class MemoryShape(NamedTuple):
    """Shape of a parameter and the order of its dimensions in memory (channels-last is 0, 2, 3, 1)."""

    shape: tuple[int, ...]
    memory: tuple[int, ...]

    @staticmethod
    def of(parameter: Tensor) -> "MemoryShape":
        strides = parameter.stride()
        if parameter.is_contiguous():
            return MemoryShape(tuple(parameter.shape), tuple(range(parameter.dim())))
        return MemoryShape(tuple(parameter.shape), tuple(sorted(range(parameter.dim()), key=lambda d: -strides[d])))

    @property
    def plain(self) -> bool:
        """Whether the dimensions lie in memory in the order of the shape."""
        return self.memory == tuple(range(len(self.memory)))

    @property
    def inverse(self) -> tuple[int, ...]:
        """The permutation that undoes `memory`."""
        return tuple(self.memory.index(d) for d in range(len(self.memory)))

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape in memory order."""
        return tuple(self.shape[d] for d in self.memory)


@dataclass(frozen=True)
class Piece:
    """A box of one parameter whose entries are all owned by the same tasks."""

    param: int
    box: Box
    owners: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)

    @property
    def size(self) -> int:
        size = 1
        for start, stop in self.box:
            size *= stop - start
        return size


@dataclass(frozen=True, eq=False)
class Layout:
    """All pieces of all parameters, for a number of tasks; keeps the portions made of it."""

    specs: tuple[MemoryShape, ...]
    pieces: tuple[Piece, ...]
    tasks: int
    boxes: tuple[tuple[Box | None, ...], ...]  # per task and parameter: the hull of what it owns, which a row stores
    portions: dict[str, object] = field(default_factory=dict)
    counted: tuple[int, ...] | None = None  # d of each task on all ranks together, where these are one rank's shares

    def sizes(self) -> list[int]:
        """d of each task: how many entries it owns."""
        if self.counted is not None:
            return list(self.counted)
        return [sum(p.size for p in self.pieces if p.owners >> t & 1) for t in range(self.tasks)]

    def labels(self, scope: str) -> list[int]:
        """Per piece the number of its block, counted from 0 in order of appearance."""
        if scope not in SCOPES:
            raise NestlingError(
                f"unknown scope {scope!r}: expected {', '.join(SCOPES)}; did you mean {nearest(scope, SCOPES)}?"
            )
        keys: dict[str, list[int]] = {
            "all": [0 for _ in self.pieces],
            "shared": [int(p.owners.bit_count() < 2) for p in self.pieces],
            "block": [p.owners for p in self.pieces],
            "tensor": [p.param for p in self.pieces],
        }
        seen: dict[int, int] = {}
        return [seen.setdefault(key, len(seen)) for key in keys[scope]]

    def per_param(self) -> list[list[int]]:
        """Per parameter the indices of its pieces."""
        found: list[list[int]] = [[] for _ in self.specs]
        for index, piece in enumerate(self.pieces):
            found[piece.param].append(index)
        return found

    def hosts(self) -> list[int | None]:
        """Per parameter a task (the last) that owns every owned entry of it and stores it whole, if there is one."""
        found: list[int | None] = []
        for param, pieces in enumerate(self.per_param()):
            common = -1
            for index in pieces:
                common &= self.pieces[index].owners
            whole = tuple((0, size) for size in self.specs[param].stored)
            able = [t for t in range(self.tasks) if common >> t & 1 and self.boxes[t][param] == whole]
            found.append(able[-1] if pieces and able else None)
        return found


def tasks_of(mask: int) -> list[int]:
    """The tasks whose bits are set."""
    return [t for t in range(mask.bit_length()) if mask >> t & 1]


def _hull(boxes: Sequence[Box]) -> Box:
    return tuple((min(b[0] for b in sides), max(b[1] for b in sides)) for sides in zip(*boxes, strict=True))


def _layout(specs: tuple[MemoryShape, ...], pieces: tuple[Piece, ...], tasks: int) -> Layout:
    boxes: list[tuple[Box | None, ...]] = []
    for task in range(tasks):
        owned: dict[int, list[Box]] = {}
        for piece in pieces:
            if piece.owners >> task & 1:
                owned.setdefault(piece.param, []).append(piece.box)
        boxes.append(tuple(_hull(owned[i]) if i in owned else None for i in range(len(specs))))
    return Layout(specs, pieces, tasks, tuple(boxes))


@lru_cache(maxsize=32)
def from_masks(specs: tuple[MemoryShape, ...], masks: tuple[int, ...], tasks: int) -> Layout:
    """One piece per parameter that any task owns: what the autograd graph tells."""
    pieces = tuple(
        Piece(index, tuple((0, size) for size in spec.stored), mask)
        for index, (spec, mask) in enumerate(zip(specs, masks, strict=True))
        if mask
    )
    return _layout(specs, pieces, tasks)


def share_of(whole: Layout, windows: Sequence[Box]) -> Layout:
    """One rank's share of a layout: every piece cut to the window of its parameter, empty ones kept, so that all ranks
    number blocks alike. Dimensions lie in memory in the order of the shape."""
    pieces = tuple(Piece(p.param, _within(p.box, windows[p.param]), p.owners) for p in whole.pieces)
    shapes = [tuple(stop - start for start, stop in window) for window in windows]
    specs = tuple(MemoryShape(shape, tuple(range(len(shape)))) for shape in shapes)
    return replace(_layout(specs, pieces, whole.tasks), counted=tuple(whole.sizes()))


def _within(box: Box, window: Box) -> Box:
    """The part of a box inside a window, counted from the window's start."""
    starts = [min(max(a, low), high) - low for (a, _), (low, high) in zip(box, window, strict=True)]
    stops = [min(b, high) - low for (_, b), (low, high) in zip(box, window, strict=True)]
    return tuple((start, max(start, stop)) for start, stop in zip(starts, stops, strict=True))


def from_owners(
    named: Sequence[tuple[str, Tensor]], owners: Mapping[str, Tensor] | Mapping[Tensor, Tensor], tasks: int
) -> Layout:
    """Pieces of the given element-wise owners. Keys are parameter names or the parameters themselves."""
    if tasks > MOST_TASKS:
        raise NestlingError(
            f"found {tasks} losses with given owners: expected at most {MOST_TASKS}, a bit of an int64 each; leave owners out "
            f"to find them from the graph"
        )
    by_key: dict[str | int, Tensor] = {
        (key if isinstance(key, str) else id(key)): value for key, value in owners.items()
    }
    specs, pieces = [], []
    for index, (name, parameter) in enumerate(named):
        given = by_key.get(name, by_key.get(id(parameter)))
        if given is None:
            raise NestlingError(
                f"owners has no entry for parameter {name!r}: expected one int64 tensor per trainable parameter; "
                f"closest names given: {nearest(name, [k for k in by_key if isinstance(k, str)])}"
            )
        specs.append(MemoryShape.of(parameter))
        pieces.extend(_cut(index, name, parameter, given, specs[-1], tasks))
    return _layout(tuple(specs), tuple(pieces), tasks)


def _cut(index: int, name: str, parameter: Tensor, given: Tensor, spec: MemoryShape, tasks: int) -> list[Piece]:
    if given.dtype != torch.int64:
        raise NestlingError(f"owners of {name!r} are {given.dtype}: expected int64 bit masks, one bit per task")
    try:
        mask = given.detach().cpu().expand(parameter.shape)
    except RuntimeError as error:
        raise NestlingError(
            f"owners of {name!r} have shape {tuple(given.shape)}: expected something that broadcasts to the "
            f"parameter's shape {tuple(parameter.shape)}"
        ) from error
    mask = mask.permute(spec.memory)
    if mask.numel() and (int(mask.max()) >= 1 << tasks or int(mask.min()) < 0):
        raise NestlingError(
            f"owners of {name!r} name task {int(mask.max()).bit_length() - 1}, but there are {tasks} losses "
            f"(tasks 0 to {tasks - 1}): pass one loss per stage, or the owners of this net"
        )
    cuts = [_cuts(mask, dim) for dim in range(mask.dim())]
    cells = 1
    for edges in cuts:
        cells *= len(edges) - 1
    if cells > MOST_CELLS:
        raise NestlingError(
            f"owners of {name!r} fall into {cells} boxes: expected channels sorted by birth, so that every task "
            f"owns a leading block; sort the channels, or leave owners out to find them from the graph"
        )
    return [p for p in _merged(index, mask, cuts) if p.owners]


def _cuts(mask: Tensor, dim: int) -> list[int]:
    """0, the places along dim where any owner changes, and the size."""
    size = mask.shape[dim]
    if size < 2 or mask.stride(dim) == 0:  # a broadcast dimension never changes
        return [0, size]
    change = (
        (mask.narrow(dim, 1, size - 1) != mask.narrow(dim, 0, size - 1)).movedim(dim, 0).reshape(size - 1, -1).any(1)
    )
    return [0, *(change.nonzero().flatten() + 1).tolist(), size]


def _merged(index: int, mask: Tensor, cuts: list[list[int]]) -> list[Piece]:
    """The cells between the cuts, neighbours along the last cut dimension with equal owners joined."""
    boxes: list[Box] = [()]
    for edges in cuts:
        boxes = [(*box, side) for box in boxes for side in pairwise(edges)]
    pieces: list[Piece] = []
    for box in boxes:
        owners = int(mask[tuple(start for start, _ in box)])
        piece = Piece(index, box, owners)
        if pieces and pieces[-1].owners == owners and (joined := _joined(pieces[-1].box, box)):
            pieces[-1] = Piece(index, joined, owners)
        else:
            pieces.append(piece)
    return pieces


def _joined(first: Box, second: Box) -> Box | None:
    """The union of two boxes that touch along one dimension and agree along all others."""
    differ = [d for d, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    if len(differ) != 1 or first[differ[0]][1] != second[differ[0]][0]:
        return None
    side = (first[differ[0]][0], second[differ[0]][1])
    return tuple(side if d == differ[0] else edges for d, edges in enumerate(first))
