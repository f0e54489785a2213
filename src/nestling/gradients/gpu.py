"""Rows on a GPU: the tables that tell the kernels what lies where, and the addresses of this step's tensors.

In come Rows; out come Gram matrices and the update, as in rows.py but in one pass over memory each. Nothing waits
for the device, and all of it can be captured in a CUDA graph after one step outside.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nestling.gradients import kernels
from nestling.gradients.owners import Layout, tasks_of
from nestling.gradients.portions import Portions

if TYPE_CHECKING:
    from nestling.gradients.rows import Rows


@dataclass(eq=False)
class Tables:
    """What the kernels need of a layout's portions, on one device."""

    offsets: list[tuple[int, int, int, int]]  # (slot, task, parameter, entries from the start of the stored tensor)
    flat: bool  # every piece lies in one run of memory, for every owner
    hosted: bool  # every piece has a host row to be written in place of
    aligned: dict[bool, dict[str, Tensor]]  # with wide loads, if addresses allow, and without
    known: list[int] = field(default_factory=list)
    table: Tensor | None = None
    spare: Tensor | None = None
    kept: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def addresses(self, rows: "Rows") -> tuple[Tensor, bool]:
        """This step's addresses (pieces, tasks) on the device, and whether all are aligned to 16 bytes.

        They are staged in pinned memory and uploaded only when they change. A captured CUDA graph replays the
        upload, so what it reads from is kept for good; pinned memory for it is set aside beforehand.
        """
        shape = (len(rows.layout.pieces), rows.tasks)
        size = rows.params[0].element_size()
        found = [0] * (shape[0] * shape[1])
        for slot, task, param, offset in self.offsets:
            stored = rows.stored[task][param]
            assert stored is not None
            found[slot] = stored.data_ptr() + offset * size
        aligned = all(address % 16 == 0 for address in found)
        if rows.device.type != "cuda":  # interpreted, in tests
            return torch.tensor(found, dtype=torch.int64).view(shape), aligned
        capturing = torch.cuda.is_current_stream_capturing()
        if not capturing and self.table is not None and found == self.known:
            return self.table, aligned
        staged = self.spare if self.spare is not None else torch.empty(shape, dtype=torch.int64, pin_memory=True)
        self.spare = None
        staged.copy_(torch.tensor(found, dtype=torch.int64).view(shape))
        table = staged.to(rows.device, non_blocking=True)
        if capturing:
            self.kept.append((staged, table))
        else:
            self.known, self.table = found, table
            self.spare = torch.empty(shape, dtype=torch.int64, pin_memory=True)
        return table, aligned


def runs(view: Tensor) -> tuple[int, int] | None:
    """A tensor as runs of entries, some stride apart: (entries of a run, stride); None if that cannot say it."""
    columns, count, stride = 1, 1, 0
    for size, step in zip(reversed(view.shape), reversed(view.stride()), strict=True):
        if size == 1:
            continue
        if count == 1 and step == columns:
            columns *= size
        elif count == 1:
            count, stride = size, step
        elif step == stride * count:
            count *= size
        else:
            return None
    return columns, stride or columns


def tables(layout: Layout, todo: Portions, device: torch.device) -> Tables | None:
    """The tables of a layout's portions, made once per device; None where the kernels cannot follow the layout."""
    if device not in todo.tables:
        todo.tables[device] = _make(layout, todo, device)
    return todo.tables[device]


def _make(layout: Layout, todo: Portions, device: torch.device) -> Tables | None:
    hosts = layout.hosts()
    columns: list[int] = []
    strides: list[list[int]] = []
    offsets: list[tuple[int, int, int, int]] = []
    for index, piece in enumerate(layout.pieces):
        found: dict[int, tuple[int, int]] = {}
        for task in tasks_of(piece.owners):
            box = layout.boxes[task][piece.param]
            assert box is not None
            stored = torch.empty([stop - start for start, stop in box], device="meta")
            view = stored[tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(piece.box, box, strict=True))]
            run = runs(view)
            if run is None:
                return None
            found[task] = run
            offsets.append((index * layout.tasks + task, task, piece.param, int(view.storage_offset())))
        width = min(run for run, _ in found.values())
        if any(run not in (width, piece.size) for run, _ in found.values()):
            return None
        columns.append(width)
        steps = {task: stride if run == width else width for task, (run, stride) in found.items()}
        strides.append([steps.get(task, 0) for task in range(layout.tasks)])
    sizes = [piece.size for piece in layout.pieces]
    flat = columns == sizes
    given = {
        "sizes": sizes,
        "columns": columns,
        "strides": strides,
        "labels": todo.labels,
        "hosts": [_home(hosts[piece.param], piece.owners) for piece in layout.pieces],
    }
    common = {name: torch.tensor(values, dtype=torch.int64).to(device) for name, values in given.items()}
    aligned = {wide: {**common, **_programs(layout, todo, device, flat and wide)} for wide in (True, False)}
    hosted = all(hosts[piece.param] is not None for piece in layout.pieces)
    return Tables(offsets, flat, hosted, aligned)


def _home(host: int | None, owners: int) -> int:
    """The task whose row a piece's update is written to; without one, any owner: its memory is safe to read."""
    return tasks_of(owners)[-1] if host is None else host


def _programs(layout: Layout, todo: Portions, device: torch.device, wide: bool) -> dict[str, Tensor]:
    """Which program does what, and which partial Gram matrices make up each block."""
    made: dict[str, list[int] | list[list[int]]] = {}
    order: list[int] = []
    for kind, (pieces, starts) in kernels.programs([p.size for p in layout.pieces], layout.tasks, wide).items():
        made[f"{kind} pieces"], made[f"{kind} starts"] = pieces, starts
        order += pieces
    members: list[list[int]] = [[] for _ in range(todo.count)]
    for program, piece in enumerate(order):
        members[todo.labels[piece]].append(program)
    most = max((len(block) for block in members), default=0)
    made["members"] = [block + [len(order)] * (most - len(block)) for block in members]  # the last is a zero
    return {name: torch.tensor(values, dtype=torch.int64).to(device) for name, values in made.items()}


def gram(rows: "Rows", known: Tables, count: int) -> Tensor:
    """Gram matrices (blocks, tasks, tasks)."""
    addresses, aligned = known.addresses(rows)
    tables = known.aligned[aligned]
    partial = kernels.gram(tables, addresses, rows.params[0].dtype)
    if count == 1:
        return partial.sum(0, keepdim=True)
    padded = torch.cat([partial, partial.new_zeros(1, rows.tasks, rows.tasks)])
    return padded[tables["members"]].sum(1)


def write(rows: "Rows", known: Tables, weights: Tensor) -> None:
    """The update, in place of the host rows."""
    addresses, aligned = known.addresses(rows)
    kernels.update(known.aligned[aligned], addresses, weights.contiguous(), rows.params[0].dtype)
