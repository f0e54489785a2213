"""Rows of which some are not made: layers whose inputs and output gradients give the Gram matrix and the update.

In come the layers with their output gradients, and the rows of all other parameters; out comes what every combiner
asks of rows (contract.py). A layer's weight gradient is made once, of the weighted output gradients.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nestling.gradients.contract import Blocks
from nestling.gradients.owners import Layout
from nestling.gradients.portions import portions
from nestling.gradients.rowless import WeightUse
from nestling.gradients.rows import LaidOutRows, Rows, refuse_nonfinite


def take(
    loss: Tensor, seed: Tensor | None, retain: bool, task: int, layers: Sequence[WeightUse], params: Sequence[Tensor]
) -> dict[int, Tensor]:
    """One task's backward: output gradients go to the layers, those of other parameters are returned by their number."""
    mine = [layer for layer in layers if task in layer.tasks]
    taken = {layer.param for layer in layers}
    rest = [i for i in range(len(params)) if i not in taken]
    inputs: list[Any] = [*(layer.edge for layer in mine), *(params[i] for i in rest)]
    found = torch.autograd.grad(
        [loss], inputs, None if seed is None else [seed], retain_graph=retain, allow_unused=True
    )
    for layer, delta in zip(mine, found, strict=False):
        if delta is not None:
            layer.deltas[task] = delta
        else:  # on the way, but nothing comes through
            layer.tasks = tuple(other for other in layer.tasks if other != task)
    grads = zip(rest, found[len(mine) :], strict=True)
    return {i: grad.clone() for i, grad in grads if grad is not None}  # autograd may hand out one tensor twice


class LayeredRows(LaidOutRows):
    """`rows` has the layout without the layers' weights, `layout` is that of all parameters."""

    def __init__(self, layout: Layout, layers: Sequence[WeightUse], rows: Rows) -> None:
        self.params, self.layout, self.layers, self.rows = rows.params, layout, layers, rows
        self.certain = rows.certain
        self.check, rows.check = rows.check, False  # of the whole, not of the part
        self.grams = [layer.gram() for layer in layers]

    def agreed(self, weights: Tensor) -> Tensor:
        return self.rows.agreed(weights)

    def blocks(self, scope: str) -> Blocks:
        known = portions(self.layout, scope).on(self.device, self.layout)
        return Blocks(known["owned"], known["private"], known["sizes"], self.rows.scale)

    def _block_of(self, scope: str) -> dict[int, int]:
        """Per parameter its block; where ownership comes from the graph, a parameter is one piece."""
        return {piece.param: label for piece, label in zip(self.layout.pieces, self.layout.labels(scope), strict=True)}

    def _blocks_of_rows(self, scope: str) -> list[int]:
        """Per block of the part the block of the whole."""
        block, part = self._block_of(scope), self.rows.layout
        found = {own: block[p.param] for p, own in zip(part.pieces, part.labels(scope), strict=True)}
        return [found[own] for own in range(len(found))]

    def gram(self, scope: str = "all") -> Tensor:
        count = portions(self.layout, scope).count
        total = torch.zeros(count, self.tasks, self.tasks, dtype=torch.float64, device=self.device)
        for place, part in zip(self._blocks_of_rows(scope), self.rows.gram(scope), strict=True):
            total[place] += part
        block = self._block_of(scope)
        for layer, part in zip(self.layers, self.grams, strict=True):
            tasks = list(layer.tasks)
            total[block[layer.param]][torch.tensor(tasks)[:, None], tasks] += part
        if self.check:
            refuse_nonfinite(total)
        return total

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


def _put(weight: Tensor, update: Tensor) -> None:
    if weight.grad is None:
        like = torch.empty_like(weight)  # in the weight's own order of memory, as torch's gradients are
        weight.grad = update if update.stride() == like.stride() else like.copy_(update)
    else:
        weight.grad.add_(update)
