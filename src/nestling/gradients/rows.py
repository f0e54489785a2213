"""One gradient row per task, stored only where the task owns entries, and the linear algebra a combiner needs.

In come the stored gradients and their Layout; out come Gram matrices per block (float64) and, from one weight
per block and task, the update added to `.grad`. Nothing here waits for the device: no value is read back on the
host (except on a CPU, where there is nothing to wait for). It knows neither losses nor how weights are chosen.
"""

from collections.abc import Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from nestling.errors import NestlingError
from nestling.gradients import gpu, kernels
from nestling.gradients.checks import numbers, others
from nestling.gradients.contract import Blocks, TaskRows
from nestling.gradients.owners import Layout, tasks_of
from nestling.gradients.portions import CHUNK, Portions, Segment, portions


class LaidOutRows(TaskRows):
    """Rows of known parameters, with a layout that says who owns what."""

    params: Sequence[Tensor]
    layout: Layout

    @property
    def tasks(self) -> int:
        return self.layout.tasks

    @property
    def device(self) -> torch.device:
        return self.params[0].device

    def shared(self) -> Tensor:
        per_param = [
            (spec, pieces) for spec, pieces in zip(self.layout.specs, self.layout.per_param(), strict=True) if pieces
        ]
        found = [torch.zeros(spec.stored, dtype=torch.bool) for spec, _ in per_param]
        for mask, (_, pieces) in zip(found, per_param, strict=True):
            for piece in (self.layout.pieces[index] for index in pieces):
                mask[tuple(slice(a, b) for a, b in piece.box)] = piece.owners.bit_count() > 1
        return torch.cat([mask.reshape(-1) for mask in found]).to(self.device)


MANY = 16  # tasks from which one product is cheaper than inner products two by two


class Rows(LaidOutRows):
    """The gradients of all tasks at one step. A combiner asks for `gram` and answers with `write`."""

    def __init__(
        self,
        params: Sequence[Tensor],
        layout: Layout,
        stored: list[list[Tensor | None]],
        scale: Tensor | None = None,
        check: bool = False,
        group: "dist.ProcessGroup | None" = None,
        refresh: int = 1,
        certain: bool = True,
        shards: "dist.ProcessGroup | None" = None,
    ) -> None:
        self.params = params
        self.layout = layout
        self.stored = stored  # [task][parameter]: the task's box of the gradient, contiguous in memory order
        self.scale = scale
        self.check = check
        self.group = group  # the ranks that hold equal rows, if there are several
        self.refresh = refresh  # for how many steps the weights are to serve
        self.shards = shards  # the ranks that hold the rest of every row, if there are any
        self.certain = certain  # whether the layout says who owns what, and not only where rows may be other than zero

    def agreed(self, weights: Tensor) -> Tensor:
        """Weights that were drawn by chance, made those of the first rank."""
        if self.group is not None:
            dist.broadcast(weights, group=self.group, group_src=0)
        return weights

    def blocks(self, scope: str) -> Blocks:
        known = portions(self.layout, scope).on(self.device, self.layout)
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
        todo = portions(self.layout, scope)
        tables = self._tables(scope)
        if tables is not None:
            gram = gpu.gram(self, tables, todo.count)
        else:
            members = todo.on(self.device, self.layout)["members"]
            gram = self._products(todo)[members].sum(1).view(todo.count, self.tasks, self.tasks)
        if self.shards is not None:
            dist.all_reduce(gram, group=self.shards)
        if self.check:
            refuse_nonfinite(gram)
        return gram

    def _tables(self, scope: str) -> gpu.Tables | None:
        """What the GPU's kernels need, where they can be used."""
        first = self.params[0]
        if self.shards is not None and not all(piece.size for piece in self.layout.pieces):
            return None
        if not kernels.usable(first, self.tasks) or any(p.dtype != first.dtype for p in self.params):
            return None
        return gpu.tables(self.layout, portions(self.layout, scope), self.device)

    def _products(self, todo: Portions) -> Tensor:
        """The inner products of all bins, and a zero."""
        scratch = torch.empty(self.tasks, CHUNK, dtype=torch.float64, device=self.device)
        dots: list[Tensor] = []
        for _, tasks, segments in todo.bins:
            wide = [self._flat(task, segments, scratch[task]) for task in tasks]
            if len(tasks) > MANY:
                stacked = torch.stack(wide)
                rows, columns = torch.tril_indices(len(tasks), len(tasks), device=self.device)
                dots.extend((stacked @ stacked.T)[rows, columns].unbind())
            else:
                dots.extend(torch.dot(wide[i], wide[j]) for i in range(len(wide)) for j in range(i + 1))
        return torch.stack([*dots, torch.zeros((), dtype=torch.float64, device=self.device)])

    def _part(self, task: int, segment: Segment) -> Tensor:
        view = self.view(task, segment.piece)
        if view.dim() and segment.stop - segment.start < view.shape[0]:
            view = view[segment.start : segment.stop]
        return view.reshape(-1)

    def _flat(self, task: int, segments: list[Segment], scratch: Tensor) -> Tensor:
        parts = [self._part(task, segment) for segment in segments]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        if flat.numel() > scratch.numel():  # a single slice longer than a chunk
            return flat.double()
        return scratch[: flat.numel()].copy_(flat)

    @torch.no_grad()
    def write(self, weights: Tensor, scope: str = "all") -> None:
        """Add the sum of weights[block, task] * row to `.grad`, and let the rows go.

        Where one task owns all of a parameter, the sum is made in place of that task's row, which becomes `.grad`.
        """
        self.refuse_stale(weights)
        todo = portions(self.layout, scope)
        tables = self._tables(scope)
        if tables is not None and tables.hosted:
            gpu.write(self, tables, weights)
            for param, host in enumerate(self.layout.hosts()):
                if host is not None:
                    self._put_row(param, host)
            self.stored = [[None] * len(self.params) for _ in range(self.tasks)]
            return
        cpu = self.device.type == "cpu"
        weigh = weights.tolist() if cpu else weights.to(self.params[0].dtype)
        for label, tasks, host, pieces, finished in todo.groups:
            first = tasks[-1] if host is None else host
            views = [self.view(first, index) for index in pieces]
            weight = weigh[label][first]
            total = list(torch._foreach_mul(views, weight)) if host is None else views
            if host is not None and not (cpu and weight == 1.0):
                torch._foreach_mul_(total, weight)
            for task in tasks:
                if task != first:
                    _add(total, [self.view(task, index) for index in pieces], weigh[label][task])
            if host is None:
                for index, part in zip(pieces, total, strict=True):
                    self._put(index, part)
            for param in finished:
                if host is not None:
                    self._put_row(param, host)
                for row in self.stored:
                    row[param] = None

    def refuse_stale(self, weights: Tensor | None) -> None:
        """Raise where the next steps could not go on with these weights alone."""
        if self.refresh > 1 and (weights is None or weights.shape[0] != 1):
            raise NestlingError(
                f"refresh={self.refresh} needs one weight per task, but this method and scope give one per "
                f"block of parameters, or none: use scope='all', or refresh=1"
            )

    def _put_row(self, param: int, host: int) -> None:
        """Make a task's row, by now the update, the gradient of a parameter."""
        parameter, spec, update = self.params[param], self.layout.specs[param], self.stored[host][param]
        assert update is not None
        if not spec.plain:
            update = update.permute(spec.inverse)
        if parameter.grad is None:
            parameter.grad = update
        else:
            parameter.grad.add_(update)

    def _put(self, index: int, part: Tensor) -> None:
        """Add a piece of the update to a gradient that no single task owns; what nobody owns stays zero."""
        piece = self.layout.pieces[index]
        parameter, spec = self.params[piece.param], self.layout.specs[piece.param]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.permute(spec.memory)[tuple(slice(a, b) for a, b in piece.box)].add_(part)

    def matrix(self) -> Tensor:
        """The padded rows as one dense matrix (tasks, entries), for methods that need it."""
        if self.shards is not None:
            raise NestlingError(
                "this method needs whole rows, and FSDP leaves every rank a share of them: expected one that the Gram matrix "
                "is enough for, such as nestling's own or TorchJD's Gramian-based aggregators"
            )
        per_param = self.layout.per_param()
        owned = [param for param, pieces in enumerate(per_param) if pieces]
        columns = sum(self.params[param].numel() for param in owned)
        dtype = reduce(torch.promote_types, (p.dtype for p in self.params))
        dense = torch.zeros(self.tasks, columns, dtype=dtype, device=self.device)
        at = 0
        for param in owned:
            size = self.params[param].numel()
            for index in per_param[param]:
                piece = self.layout.pieces[index]
                where = tuple(slice(a, b) for a, b in piece.box)
                for task in tasks_of(piece.owners):
                    row = dense[task, at : at + size].view(self.layout.specs[param].stored)
                    row[where] = self.view(task, index)
            at += size
        return dense

    @torch.no_grad()
    def write_vector(self, vector: Tensor) -> None:
        """Add an update over all entries, ordered as in `matrix`, to `.grad`, and let the rows go."""
        self.refuse_stale(None)
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


def _add(total: list[Tensor], views: list[Tensor], weight: "float | Tensor") -> None:
    if isinstance(weight, Tensor):
        torch._foreach_add_(total, torch._foreach_mul(views, weight))
    else:
        torch._foreach_add_(total, views, alpha=weight)


def refuse_nonfinite(gram: Tensor) -> None:
    """Raise if a task's gradient is not finite. Waits for the device."""
    finite = torch.isfinite(gram.sum(0).diagonal()).tolist()
    bad = [task for task, good in enumerate(finite) if not good]
    if bad:
        raise NestlingError(
            f"the gradient of task {numbers(bad)} (counted from 0) holds NaN or infinity; "
            f"{others(bad, len(finite))}. `.grad` was left alone: look at the loss of what is not, lower the learning "
            f"rate, or pass a GradScaler as scaler= when training in float16"
        )
