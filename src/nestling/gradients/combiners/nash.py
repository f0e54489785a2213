"""Nash-MTL (Navon et al. 2022): the bargaining solution, weights a > 0 with G a = 1 / a.

They minimise a G a / 2 - sum log a, which is convex: damped Newton steps from the diagonal's solution. Gradients are brought to
length one first, which the solution follows exactly. Dependent ones have no bounded solution where some combination is zero; a
ridge of 1e-10 bounds it.
"""

import torch
from torch import Tensor

from nestling.gradients.combiners.solved import Solved

STEPS = 100
RIDGE = 1e-10


class NashMTL(Solved):
    """Every task gains the same share: a_i times the i-th task's gain is one."""

    def solve(self, gram: Tensor) -> Tensor:
        n, trace = len(gram), float(gram.trace())
        if trace == 0.0:
            return torch.ones(n, dtype=torch.float64)
        sizes = gram.diagonal().clamp_min(0).sqrt()
        sizes = torch.where(sizes > 0, sizes, trace**0.5)
        known = gram / sizes[:, None] / sizes + RIDGE * torch.eye(n, dtype=torch.float64)
        a = known.diagonal().rsqrt()
        for _ in range(STEPS):
            slope = known @ a - 1 / a
            step = torch.linalg.solve(known + torch.diag(a**-2), slope)
            decrement = float((slope @ step).clamp_min(0).sqrt())
            a = a - step / (1 + decrement) if decrement > 0.25 else a - step  # self-concordant: always stays positive
            if decrement < 1e-13:
                break
        return a / sizes
