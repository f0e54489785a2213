"""A Layout seen through one scope: which piece belongs to which block, and in what portions rows are worked on.

In comes a Layout; out come its Portions, made once and kept in the Layout. Pure planning: nothing here sees a gradient.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestling.gradients.owners import Layout, tasks_of

CHUNK = 131_072  # entries per task brought to float64 at a time: stays in a cache on a CPU
SMALL = 16_384  # pieces below this are laid end to end first: fewer calls
GROUP = 1_048_576  # entries written before the rows they came from are let go


class Segment(NamedTuple):
    """Slices `start` to `stop` along the first dimension of a piece."""

    piece: int
    start: int
    stop: int


class Bin(NamedTuple):
    """Segments of one block and the same owners, laid end to end: one set of inner products."""

    block: int
    tasks: list[int]
    segments: list[Segment]


class Group(NamedTuple):
    """Pieces of one block and the same owners, written together in place of the host's row (None: no such row)."""

    block: int
    tasks: list[int]
    host: int | None
    pieces: list[int]
    finished: list[int]  # parameters whose last pieces these are


@dataclass(eq=False)
class Portions:
    """Blocks of a scope and the portions of work."""

    labels: list[int]  # block of each piece
    count: int
    bins: list[Bin]
    groups: list[Group]
    members: list[list[int]]  # per entry of the flat (blocks, tasks, tasks) Gram matrix the inner products in it
    tensors: dict[torch.device, dict[str, Tensor]] = field(default_factory=dict)
    tables: dict[torch.device, Any] = field(default_factory=dict)  # what gpu.py makes of them

    def on(self, device: torch.device, layout: Layout) -> dict[str, Tensor]:
        """Constant tensors on a device, made once."""
        if device not in self.tensors:
            owned = torch.zeros(self.count, layout.tasks, dtype=torch.bool)
            private = owned.clone()
            for label, piece in zip(self.labels, layout.pieces, strict=True):
                tasks = tasks_of(piece.owners)
                owned[label, tasks] = True
                if len(tasks) == 1:
                    private[label, tasks] = True
            made = {
                "owned": owned,
                "private": private,
                "sizes": torch.tensor(layout.sizes(), dtype=torch.float64),
                "members": torch.tensor(self.members, dtype=torch.int64).view(
                    len(self.members), -1 if self.count else 0
                ),
            }
            self.tensors[device] = {name: tensor.to(device) for name, tensor in made.items()}
        return self.tensors[device]


def portions(layout: Layout, scope: str) -> Portions:
    """The portions of a layout under a scope, made once and kept in the layout."""
    kept = layout.portions.get(scope)
    if isinstance(kept, Portions):
        return kept
    labels = layout.labels(scope)
    count = max(labels, default=-1) + 1
    hosts = layout.hosts()
    keyed: dict[tuple[int, int, int | None], list[int]] = {}
    for index, (label, piece) in enumerate(zip(labels, layout.pieces, strict=True)):
        keyed.setdefault((label, piece.owners, hosts[piece.param]), []).append(index)
    made = Portions(labels, count, [], [], [])
    for (label, owners, _), pieces in keyed.items():
        parts = _bins(layout, pieces)
        made.bins.extend(Bin(label, tasks_of(owners), part) for part in parts)
    made.groups.extend(_groups(layout, keyed))
    made.members.extend(_members(made, layout.tasks))
    layout.portions[scope] = made
    return made


def _members(made: Portions, tasks: int) -> list[list[int]]:
    """Inner products come bin by bin, task by task with itself and the ones before; short lists end in a zero's."""
    found: list[list[int]] = [[] for _ in range(made.count * tasks**2)]
    number = 0
    for label, owners, _ in made.bins:
        for i, a in enumerate(owners):
            for b in owners[: i + 1]:
                for place in {(a, b), (b, a)}:
                    found[label * tasks**2 + place[0] * tasks + place[1]].append(number)
                number += 1
    most = max((len(products) for products in found), default=0)
    return [products + [number] * (most - len(products)) for products in found]


def _bins(layout: Layout, pieces: list[int]) -> list[list[Segment]]:
    """Small pieces end to end in bins of about CHUNK entries; large ones alone, cut along their first dimension."""
    bins: list[list[Segment]] = []
    pool: list[Segment] = []
    pooled = 0
    for index in pieces:
        piece = layout.pieces[index]
        slices = piece.shape[0] if piece.shape else 1
        if piece.size < SMALL:
            if pooled + piece.size > CHUNK:
                bins.append(pool)
                pool, pooled = [], 0
            pool.append(Segment(index, 0, slices))
            pooled += piece.size
            continue
        step = max(1, CHUNK * slices // piece.size)
        bins.extend([Segment(index, start, min(start + step, slices))] for start in range(0, slices, step))
    return [*bins, pool] if pool else bins


def _groups(layout: Layout, keyed: dict[tuple[int, int, int | None], list[int]]) -> list[Group]:
    left = [len(pieces) for pieces in layout.per_param()]
    groups: list[Group] = []
    for (label, owners, host), pieces in keyed.items():
        room = 0
        for index in pieces:
            piece = layout.pieces[index]
            if room <= 0:
                groups.append(Group(label, tasks_of(owners), host, [], []))
                room = GROUP
            groups[-1].pieces.append(index)
            room -= piece.size
            left[piece.param] -= 1
            if left[piece.param] == 0:
                groups[-1].finished.append(piece.param)
    return groups
