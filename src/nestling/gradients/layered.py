"""Rows of which some are not made: layers whose inputs and output gradients give the Gram matrix and the update.

In come the layers with their output gradients, and the rows of all other parameters; out comes what every combiner
asks of rows (contract.py). A layer's weight gradient is made once, of the weighted output gradients.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from nestling.gradients.contract import Blocks
from nestling.gradients.owners import Layout
from nestling.gradients.portions import portions
from nestling.gradients.rowless import WeightUse
from nestling.gradients.rows import LaidOutRows, Rows, refuse_nonfinite

EXACT = 1e-6  # of the update; products in float32 that leave less are made again in float64


@contextmanager
def taken(layers: Sequence[WeightUse], task: int) -> Iterator[list[GradientEdge]]:
    """Inside, a backward pass to these edges leaves the task's output gradients with the layers."""
    mine = [layer for layer in layers if task in layer.tasks]
    hooks = [layer.node.register_prehook(partial(_keep, layer.deltas, task)) for layer in mine]
    try:
        yield [layer.edge for layer in mine]
    finally:
        for hook in hooks:
            hook.remove()
    for layer in mine:
        if task not in layer.deltas:  # on the way, but nothing comes through
            layer.tasks = tuple(other for other in layer.tasks if other != task)


def _keep(deltas: dict[int, Tensor], task: int, given: tuple[Tensor | None, ...]) -> None:
    if given[0] is not None:
        deltas[task] = given[0]


class LayeredRows(LaidOutRows):
    """`rows` has the layout without the layers' weights, `layout` is that of all parameters."""

    def __init__(self, layout: Layout, layers: Sequence[WeightUse], rows: Rows) -> None:
        self.params, self.layout, self.layers, self.rows = rows.params, layout, layers, rows
        self.certain = rows.certain
        self.check, rows.check = rows.check, False  # of the whole, not of the part

    def agreed(self, weights: Tensor) -> Tensor:
        return self.rows.agreed(weights)

    def blocks(self, scope: str) -> Blocks:
        known = portions(self.layout, scope).on(self.device, self.layout)
        return Blocks(known["owned"], known["private"], known["sizes"], self.rows.scale)

    def _block_of(self, scope: str) -> dict[int, int]:
        """Per parameter its block; where ownership comes from the graph, a parameter is one piece."""
        labels = portions(self.layout, scope).labels
        return {piece.param: label for piece, label in zip(self.layout.pieces, labels, strict=True)}

    def _blocks_of_rows(self, scope: str) -> list[int]:
        """Per block of the part the block of the whole."""
        block, part = self._block_of(scope), self.rows.layout
        found = {own: block[p.param] for p, own in zip(part.pieces, portions(part, scope).labels, strict=True)}
        return [found[own] for own in range(len(found))]

    @torch.no_grad()
    def gram(self, scope: str = "all") -> Tensor:
        count = portions(self.layout, scope).count
        rows = torch.zeros(count, self.tasks, self.tasks, dtype=torch.float64, device=self.device)
        for place, part in zip(self._blocks_of_rows(scope), self.rows.gram(scope), strict=True):
            rows[place] += part
        total, noise = rows, None
        if self.device.type == "cpu":  # elsewhere a second look would wait for the device
            total, noise = self._with_layers(rows, scope, torch.float32)
        if noise is None or not exact(total, noise):
            total, _ = self._with_layers(rows, scope, torch.float64)
        if self.check:
            refuse_nonfinite(total)
        return total

    def _with_layers(self, rows: Tensor, scope: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The layers' inner products added to those of the rows, and what rounding may have done to them."""
        total, noise, block = rows.clone(), rows.new_zeros(rows.shape[:2]), self._block_of(scope)
        for layer in self.layers:
            tasks, at = list(layer.tasks), block[layer.param]
            part, moved = layer.gram(torch.promote_types(dtype, layer.weight.dtype))
            total[at][torch.tensor(tasks)[:, None], tasks] += part
            noise[at, tasks] += moved
        return total, noise

    @torch.no_grad()
    def write(self, weights: Tensor, scope: str = "all") -> None:
        self.rows.refuse_stale(weights)
        block = self._block_of(scope)
        self.rows.write(weights[self._blocks_of_rows(scope)], scope)
        known = weights.tolist() if self.device.type == "cpu" else weights.to(self.layers[0].weight.dtype)
        for layer in self.layers:
            _put(layer.weight, layer.update(known[block[layer.param]]))
            layer.deltas.clear()

    def matrix(self) -> Tensor:
        return self._made().matrix()

    def write_vector(self, vector: Tensor) -> None:
        self._made().write_vector(vector)

    def _made(self) -> Rows:
        """All rows after all."""
        if self.layers:
            for layer in self.layers:
                memory = self.layout.specs[layer.param].memory
                for task in layer.tasks:
                    self.rows.stored[task][layer.param] = layer.row(task).permute(memory).contiguous()
            self.rows.layout, self.layers = self.layout, []
        return self.rows


def exact(gram: Tensor, noise: Tensor) -> bool:
    """Whether weights found from a Gram matrix are right to EXACT, for all that rounding moved it, (blocks, tasks): what
    nearly parallel gradients differ by is the smallest eigenvalue of their cosines."""
    squares = gram.diagonal(dim1=-2, dim2=-1)
    if not bool(gram.isfinite().all()):
        return False
    size = squares.clamp_min(0).sqrt()
    unit = torch.where(size > 0, size, 1.0)
    cosines = gram / (unit[:, :, None] * unit[:, None, :]) + torch.diag_embed((size == 0).to(gram.dtype))
    apart = torch.linalg.eigvalsh(cosines)[:, :1]
    return bool((noise <= EXACT * apart * squares).all())


def _put(weight: Tensor, update: Tensor) -> None:
    if weight.grad is None:
        like = torch.empty_like(weight)  # in the weight's own order of memory, as torch's gradients are
        weight.grad = update if update.stride() == like.stride() else like.copy_(update)
    else:
        weight.grad.add_(update)
