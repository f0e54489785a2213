"""Rows as one dense matrix on the device: few and large kernels, for a GPU and networks that are small beside it.

In: each task's gradients laid end to end, and where those entries stand among all parameters. Out: what every combiner
asks of rows (contract.py). The matrix is made once; entries that a task does not own stay zero in it.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nestling.gradients import kernels
from nestling.gradients.contract import Blocks
from nestling.gradients.owners import Layout
from nestling.gradients.rows import LaidOutRows, Rows

CHUNK = 1024  # entries of one short inner product


class FlatRows(LaidOutRows):
    """`places[t]` says where task t's entries, in the order it hands them over, stand in the flat parameters."""

    def __init__(self, params: Sequence[Tensor], layout: Layout, places: Sequence[Tensor]) -> None:
        self.params, self.layout = params, layout
        self.certain = True
        self.total = sum(p.numel() for p in params)
        padded = -(-self.total // kernels.SPAN) * kernels.SPAN  # zeros at the end change no inner product
        self.places = [place.to(self.device) for place in places]
        self.in_order = [torch.equal(place, torch.arange(len(place), device=place.device)) for place in places]
        self.dense = torch.zeros(len(places), padded, dtype=params[0].dtype, device=self.device)
        self.update = torch.zeros(padded, dtype=params[0].dtype, device=self.device)
        self._labels: dict[str, Tensor] = {}
        self._grads = self._grad_views()
        self._by_piece = self._piece_views()

    def agreed(self, weights: Tensor) -> Tensor:
        """A matrix is of one process: there is nobody to agree with."""
        return weights

    def blocks(self, scope: str) -> Blocks:
        return self._by_piece.blocks(scope)

    def _piece_views(self) -> Rows:
        """The same rows parameter by parameter: views of the matrix."""
        specs = self.layout.specs
        sizes = [p.numel() for p in self.params]
        stored: list[list[Tensor | None]] = [
            [part.view(spec.stored) for part, spec in zip(row[: self.total].split(sizes), specs, strict=True)]
            for row in self.dense
        ]
        wholes = tuple(tuple((0, size) for size in spec.stored) for spec in specs)
        return Rows(self.params, replace(self.layout, boxes=(wholes,) * self.tasks, portions={}), stored)

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
            # Short inner products in the rows' own precision, their sum in float64: as exact as need be, and one pass; on a
            # CPU 3 to 15 times as fast as piece by piece.
            parts = self.dense.view(self.tasks, -1, CHUNK).transpose(0, 1)
            return torch.bmm(parts, parts.transpose(1, 2)).sum(0, dtype=torch.float64)[None]
        return self._by_piece.gram(scope)

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
        self._put()

    def matrix(self) -> Tensor:
        return self.dense[:, : self.total]

    @torch.no_grad()
    def write_vector(self, vector: Tensor) -> None:
        self.update[: self.total].copy_(vector)
        self._put()

    def _put(self) -> None:
        for parameter, grad in zip(self.params, self._grads, strict=True):
            parameter.grad = grad
