"""OSGD's elimination on a GPU: osgd.py's, on each block's Gram matrix, in the registers of one Triton program."""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor


def weights(gram: Tensor, k: Tensor, order: Tensor, tolerance: float) -> Tensor:
    """OSGD's weights, (blocks, tasks), from Gram matrices (blocks, tasks, tasks)."""
    blocks, tasks, _ = gram.shape
    found = torch.empty(blocks, tasks, dtype=torch.float64, device=gram.device)
    if blocks:
        padded = max(2, triton.next_power_of_2(tasks))
        solve[(blocks,)](gram.contiguous(), k, order, found, tolerance, N=tasks, P=padded, num_warps=1)
    return found


@triton.jit
def solve(gram, k, order, weights, tolerance, N: tl.constexpr, P: tl.constexpr):
    """One block: its order, Gram matrix and k to its weights."""
    block = tl.program_id(0)
    i = tl.arange(0, P)
    live = i < N
    rank = tl.load(order + i, mask=live, other=0)
    both = tl.maximum(i[:, None], i[None, :]) < N
    g = tl.load(gram + block * N * N + rank[:, None] * N + rank[None, :], mask=both, other=0.0)
    scale = tl.load(k + rank, mask=live, other=0.0)
    diagonal = i[:, None] == i[None, :]
    squares = tl.sum(tl.where(diagonal, g, 0.0), axis=1)
    inverse = tl.where(diagonal, 1.0, 0.0).to(tl.float64)
    for step in tl.static_range(N - 1):
        here = tl.where(i[:, None] == step, g, 0.0)
        pivots = tl.sum(here, axis=0)
        pivot = tl.sum(tl.where(i == step, pivots, 0.0))
        square = tl.sum(tl.where(i == step, squares, 0.0))
        column = tl.sum(tl.where(i[None, :] == step, g, 0.0), axis=1)
        good = pivot > tolerance * square
        factor = tl.where(i > step, tl.where(good, column / tl.where(good, pivot, 1.0), 0.0), 0.0)
        g -= factor[:, None] * pivots[None, :]
        row = tl.sum(tl.where(i[:, None] == step, inverse, 0.0), axis=0)
        inverse -= factor[:, None] * row[None, :]
    tl.store(weights + block * N + rank, tl.sum(scale[:, None] * inverse, axis=0), mask=live)
