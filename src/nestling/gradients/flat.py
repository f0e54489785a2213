"""Rows as one dense matrix on the device: few and large kernels, for a GPU and networks that are small beside it.

In: each task's gradients laid end to end, and where those entries stand among all parameters. Out: the same `gram`,
`blocks` and `write` that every combiner uses. The matrix is made once; entries that a task does not own stay zero in it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nestling.gradients import kernels
from nestling.gradients.owners import Layout
from nestling.gradients.rows import Rows

CHUNK = 1024  # entries of one short inner product


class FlatRows(Rows):
    """`places[t]` says where task t's entries, in the order it hands them over, stand in the flat parameters."""

    def __init__(self, params: Sequence[Tensor], layout: Layout, places: Sequence[Tensor]) -> None:
        super().__init__(params, layout, [])
        total = sum(p.numel() for p in params)
        padded = -(-total // kernels.SPAN) * kernels.SPAN  # zeros at the end change no inner product
        self.places = [place.to(self.device) for place in places]
        self.in_order = [torch.equal(place, torch.arange(len(place), device=place.device)) for place in places]
        self.dense = torch.zeros(len(places), padded, dtype=params[0].dtype, device=self.device)
        self.update = torch.zeros(padded, dtype=params[0].dtype, device=self.device)
        self._labels: dict[str, Tensor] = {}
        self._grads = self._grad_views()

    def _grad_views(self) -> list[Tensor]:
        """`.grad` of every parameter as a view of the flat update, laid out in memory as the parameter is."""
        views, start = [], 0
        for parameter, spec in zip(self.params, self.layout.specs, strict=True):
            part = self.update[start : start + parameter.numel()].view(spec.stored)
            views.append(part.permute([spec.memory.index(d) for d in range(len(spec.memory))]))
            start += parameter.numel()
        return views

    def put(self, task: int, grads: Sequence[Tensor]) -> None:
        """Store one task's gradients, in the order of its places."""
        flat = [grad.reshape(-1) for grad in grads]
        if self.in_order[task]:
            torch.cat(flat, out=self.dense[task, : len(self.places[task])])
        else:
            self.dense[task].index_copy_(0, self.places[task], torch.cat(flat))

    def labels(self, scope: str) -> Tensor:
        """The block of every entry; entries that no task owns are zero in every row, so theirs does not matter."""
        if scope not in self._labels:
            found = [torch.zeros(spec.stored, dtype=torch.int64) for spec in self.layout.specs]
            for label, piece in zip(self.layout.labels(scope), self.layout.pieces, strict=True):
                found[piece.param][tuple(slice(a, b) for a, b in piece.box)] = label
            rest = torch.zeros(self.dense.shape[1] - sum(f.numel() for f in found), dtype=torch.int64)
            self._labels[scope] = torch.cat([*(f.reshape(-1) for f in found), rest]).to(self.device)
        return self._labels[scope]

    @property
    def by_kernels(self) -> bool:
        return self.dense.dtype == torch.float32 and kernels.usable(self.dense, self.tasks)

    def gram(self, scope: str = "all") -> Tensor:
        if scope == "all" and self.by_kernels:
            return kernels.gram_of_matrix(self.dense).sum(0)[None]
        if scope == "all":
            # Short inner products in the rows' own precision, their sum in float64: as exact as need be, and one pass.
            parts = self.dense.view(self.tasks, -1, CHUNK).transpose(0, 1)
            return torch.bmm(parts, parts.transpose(1, 2)).sum(0, dtype=torch.float64)[None]
        wide = self.dense.double()
        count = self.blocks(scope).owned.shape[0]
        labels = self.labels(scope)
        gram = torch.zeros(count, self.tasks, self.tasks, dtype=torch.float64, device=self.device)
        for i in range(self.tasks):
            for j in range(i + 1):
                gram[:, i, j].index_add_(0, labels, wide[i] * wide[j])
        return gram + gram.tril(-1).transpose(1, 2)

    @torch.no_grad()
    def write(self, weights: Tensor, scope: str = "all") -> None:
        """Put (not add) the weighted sum of the rows into `.grad`: the step clears it anyway."""
        known = weights.to(self.dense.dtype)
        if scope == "all" and self.by_kernels:
            kernels.update_of_matrix(self.dense, known[0], self.update)
        elif scope == "all":
            torch.mv(self.dense.T, known[0], out=self.update)
        else:
            torch.sum(self.dense * known.T[:, self.labels(scope)], 0, out=self.update)
        for parameter, grad in zip(self.params, self._grads, strict=True):
            parameter.grad = grad
