"""One gradient row per task, stored only where the task owns entries, and the linear algebra a combiner needs.

In come the stored gradients and their Layout; out come Gram matrices per block (float64) and, from one weight
per block and task, the update added to `.grad`. Nothing here waits for the device: no value is read back on the
host (except on a CPU, where there is nothing to wait for). It knows neither losses nor how weights are chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from nestling.errors import NestlingError
from nestling.gradients.owners import Layout

CHUNK = 131_072  # entries per task brought to float64 at a time: stays in a cache on a CPU
GROUP = 1_048_576  # entries written before the rows they came from are let go

Segment = tuple[int, int, int]  # piece, first and last slice along its first dimension


@dataclass(frozen=True, eq=False)
class Blocks:
    """What a combiner may know of the blocks of a scope, on the rows' device."""

    owned: Tensor  # (blocks, tasks) bool: the task owns entries of the block
    private: Tensor  # (blocks, tasks) bool: entries of the block that no other task owns
    sizes: Tensor  # (tasks,) float64: d, the number of entries the task owns
    scale: Tensor | None = None  # loss scale the rows still carry (float16 training)


@dataclass(eq=False)
class Plan:
    """A Layout seen through one scope: block of each piece, and pieces grouped for few and cache-sized calls."""

    labels: list[int]
    count: int
    bins: list[tuple[int, list[int], list[Segment]]]  # block, tasks, segments that are laid end to end
    groups: list[tuple[int, list[int], list[int], list[int]]]  # block, tasks, pieces, parameters then finished
    index: list[int]  # where each dot product of the bins goes in the flat (blocks, tasks, tasks) Gram
    mirror: list[int]  # the same for the other half, off the diagonal only (else to the dummy last place)
    tensors: dict[torch.device, dict[str, Tensor]] = field(default_factory=dict)

    def on(self, device: torch.device, layout: Layout) -> dict[str, Tensor]:
        """The plan's constant tensors on a device, made once."""
        if device not in self.tensors:
            owned = torch.zeros(self.count, layout.tasks, dtype=torch.bool)
            private = owned.clone()
            for label, piece in zip(self.labels, layout.pieces, strict=True):
                tasks = _tasks(piece.owners)
                owned[label, tasks] = True
                if len(tasks) == 1:
                    private[label, tasks] = True
            made = {
                "owned": owned,
                "private": private,
                "sizes": torch.tensor(layout.sizes(), dtype=torch.float64),
                "index": torch.tensor(self.index),
                "mirror": torch.tensor(self.mirror),
            }
            self.tensors[device] = {name: tensor.to(device) for name, tensor in made.items()}
        return self.tensors[device]


def _tasks(mask: int) -> list[int]:
    return [t for t in range(mask.bit_length()) if mask >> t & 1]


def plan(layout: Layout, scope: str) -> Plan:
    """The plan of a layout under a scope, made once and kept in the layout."""
    kept = layout.plans.get(scope)
    if isinstance(kept, Plan):
        return kept
    labels = layout.labels(scope)
    count = max(labels, default=-1) + 1
    keyed: dict[tuple[int, int], list[int]] = {}
    for index, (label, piece) in enumerate(zip(labels, layout.pieces, strict=True)):
        keyed.setdefault((label, piece.owners), []).append(index)
    made = Plan(labels, count, [], [], [], [])
    for (label, owners), pieces in keyed.items():
        made.bins.extend((label, _tasks(owners), part) for part in _bins(layout, pieces))
    made.groups.extend(_groups(layout, keyed))
    square = layout.tasks**2
    for label, tasks, _ in made.bins:
        for i, a in enumerate(tasks):
            for b in tasks[: i + 1]:
                made.index.append(label * square + a * layout.tasks + b)
                made.mirror.append(label * square + b * layout.tasks + a if a != b else count * square)
    layout.plans[scope] = made
    return made


def _bins(layout: Layout, pieces: list[int]) -> list[list[Segment]]:
    """Pieces end to end in bins of about CHUNK entries; large pieces cut along their first dimension."""
    bins: list[list[Segment]] = []
    room = 0
    for index in pieces:
        piece = layout.pieces[index]
        slices = piece.shape[0] if piece.shape else 1
        each = max(1, piece.size // max(1, slices))
        start = 0
        while start < slices:
            if room < each:
                bins.append([])
                room = CHUNK
            stop = min(slices, start + max(1, room // each))
            bins[-1].append((index, start, stop))
            room -= (stop - start) * each
            start = stop
    return bins


def _groups(
    layout: Layout, keyed: dict[tuple[int, int], list[int]]
) -> list[tuple[int, list[int], list[int], list[int]]]:
    left = [len(pieces) for pieces in layout.per_param()]
    groups: list[tuple[int, list[int], list[int], list[int]]] = []
    for (label, owners), pieces in keyed.items():
        room = 0
        for index in pieces:
            piece = layout.pieces[index]
            if room <= 0:
                groups.append((label, _tasks(owners), [], []))
                room = GROUP
            groups[-1][2].append(index)
            room -= piece.size
            left[piece.param] -= 1
            if left[piece.param] == 0:
                groups[-1][3].append(piece.param)
    return groups


class Rows:
    """The gradients of all tasks at one step. A combiner asks for `gram` and answers with `write`."""

    def __init__(
        self,
        params: Sequence[Tensor],
        layout: Layout,
        stored: list[list[Tensor | None]],
        scale: Tensor | None = None,
        check: bool = False,
        group: "dist.ProcessGroup | None" = None,
    ) -> None:
        self.params = params
        self.layout = layout
        self.stored = stored  # [task][parameter]: the task's box of the gradient, contiguous in memory order
        self.scale = scale
        self.check = check
        self.group = group  # the ranks that hold equal rows, if there are several

    @property
    def tasks(self) -> int:
        return self.layout.tasks

    @property
    def device(self) -> torch.device:
        return self.params[0].device

    def agreed(self, weights: Tensor) -> Tensor:
        """Weights that were drawn by chance, made those of the first rank."""
        if self.group is not None:
            dist.broadcast(weights, group=self.group, group_src=0)
        return weights

    def blocks(self, scope: str) -> Blocks:
        known = plan(self.layout, scope).on(self.device, self.layout)
        return Blocks(known["owned"], known["private"], known["sizes"], self.scale)

    def view(self, task: int, index: int) -> Tensor:
        """The part of a task's row that lies on a piece."""
        piece = self.layout.pieces[index]
        stored, box = self.stored[task][piece.param], self.layout.boxes[task][piece.param]
        assert stored is not None and box is not None
        if box == piece.box:
            return stored
        where = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(piece.box, box, strict=True))
        return stored[where]

    def gram(self, scope: str = "all") -> Tensor:
        """Inner products of the rows inside each block: (blocks, tasks, tasks), summed in float64."""
        todo = plan(self.layout, scope)
        known = todo.on(self.device, self.layout)
        scratch = torch.empty(self.tasks, CHUNK, dtype=torch.float64, device=self.device)
        dots: list[Tensor] = []
        for _, tasks, segments in todo.bins:
            wide = [self._flat(task, segments, scratch[task]) for task in tasks]
            dots.extend(torch.dot(wide[i], wide[j]) for i in range(len(wide)) for j in range(i + 1))
        flat = torch.zeros(todo.count * self.tasks**2 + 1, dtype=torch.float64, device=self.device)
        if dots:
            values = torch.stack(dots)
            flat.index_add_(0, known["index"], values).index_add_(0, known["mirror"], values)
        gram = flat[:-1].view(todo.count, self.tasks, self.tasks)
        if self.check:
            self._refuse_nonfinite(gram)
        return gram

    def _flat(self, task: int, segments: list[Segment], scratch: Tensor) -> Tensor:
        parts = []
        for index, start, stop in segments:
            view = self.view(task, index)
            if view.dim() and stop - start < view.shape[0]:
                view = view[start:stop]
            parts.append(view.reshape(-1))
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        if flat.numel() > scratch.numel():  # a single slice longer than a chunk
            return flat.double()
        return scratch[: flat.numel()].copy_(flat)

    def _refuse_nonfinite(self, gram: Tensor) -> None:
        finite = torch.isfinite(gram.sum(0).diagonal()).tolist()
        bad = [task for task, good in enumerate(finite) if not good]
        if bad:
            raise NestlingError(
                f"the gradient of task {', '.join(map(str, bad))} (counted from 0) holds NaN or infinity; the "
                f"others are finite. `.grad` was left alone: look at that task's loss, lower the learning rate, "
                f"or pass a GradScaler as scaler= when training in float16"
            )

    @torch.no_grad()
    def write(self, weights: Tensor, scope: str = "all") -> None:
        """Add the sum of weights[block, task] * row to `.grad`, and let the rows go."""
        todo = plan(self.layout, scope)
        cpu = self.device.type == "cpu"
        numbers = weights.tolist() if cpu else []
        known = weights if cpu else weights.to(self.params[0].dtype)
        for label, tasks, pieces, finished in todo.groups:
            total: tuple[Tensor, ...] | list[Tensor] = []
            for task in tasks:
                views = [self.view(task, index) for index in pieces]
                if not total:
                    total = torch._foreach_mul(views, numbers[label][task] if cpu else known[label, task])
                elif cpu:
                    torch._foreach_add_(total, views, alpha=numbers[label][task])
                else:
                    torch._foreach_add_(total, torch._foreach_mul(views, known[label, task]))
            for index, part in zip(pieces, total, strict=True):
                self._put(index, part)
            for param in finished:
                for row in self.stored:
                    row[param] = None

    def _put(self, index: int, part: Tensor) -> None:
        piece = self.layout.pieces[index]
        parameter, spec = self.params[piece.param], self.layout.specs[piece.param]
        if self.layout.whole(piece):
            if not spec.plain:
                part = part.permute([spec.memory.index(d) for d in range(len(spec.memory))])
            if parameter.grad is None:
                parameter.grad = part
            else:
                parameter.grad.add_(part)
            return
        if parameter.grad is None:  # entries no task owns get a zero
            parameter.grad = torch.zeros_like(parameter)
        target = parameter.grad.permute(spec.memory)[tuple(slice(a, b) for a, b in piece.box)]
        target.add_(part)

    def matrix(self) -> Tensor:
        """The padded rows as one dense matrix (tasks, entries), for methods that need it."""
        per_param = self.layout.per_param()
        owned = [param for param, pieces in enumerate(per_param) if pieces]
        columns = sum(self.params[param].numel() for param in owned)
        dense = torch.zeros(self.tasks, columns, dtype=self.params[0].dtype, device=self.device)
        at = 0
        for param in owned:
            size = self.params[param].numel()
            for index in per_param[param]:
                piece = self.layout.pieces[index]
                where = tuple(slice(a, b) for a, b in piece.box)
                for task in _tasks(piece.owners):
                    row = dense[task, at : at + size].view(self.layout.specs[param].stored)
                    row[where] = self.view(task, index)
            at += size
        return dense

    @torch.no_grad()
    def write_vector(self, vector: Tensor) -> None:
        """Add an update over all entries, ordered as in `matrix`, to `.grad`, and let the rows go."""
        at = 0
        for param, pieces in enumerate(self.layout.per_param()):
            if not pieces:
                continue
            parameter, spec = self.params[param], self.layout.specs[param]
            part = vector[at : at + parameter.numel()].view(spec.stored)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.permute(spec.memory).add_(part)
            at += parameter.numel()
        self.stored = [[None] * len(self.params) for _ in range(self.tasks)]
