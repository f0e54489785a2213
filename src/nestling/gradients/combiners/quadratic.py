"""Small convex quadratic programs, solved exactly: one entry per task, an active set that grows and shrinks.

In come a positive semidefinite matrix and a vector; out comes the minimiser of x H x / 2 + q x over x >= 0, or over the simplex.
Runs on the host in float64. It does not know what the numbers stand for.
"""

import torch
from torch import Tensor

EXACT = 1e-11  # of the problem's own scale
RIDGE = 1e-12


def minimise(hessian: Tensor, linear: Tensor, simplex: bool) -> Tensor:
    """x >= 0 (and with `simplex` sum x = 1) with the least x H x / 2 + q x."""
    n = len(linear)
    size = float(hessian.diagonal().max()) + float(linear.abs().max())
    x = torch.zeros(n, dtype=torch.float64)
    if size == 0.0:
        return x + 1 / n if simplex else x
    hessian = hessian / size + RIDGE * torch.eye(
        n, dtype=torch.float64
    )  # where it is flat, the slope leads to a border
    linear = linear / size
    if simplex:
        x[int((hessian.diagonal() / 2 + linear).argmin())] = 1.0
    for _ in range(20 * n + 20):  # every pass lowers the value; it ends long before
        free = (x > 0).nonzero().flatten()
        x = _descend(hessian, linear, x, free, simplex)
        free = (x > 0).nonzero().flatten()
        slope = hessian @ x + linear
        price = float(slope[free].mean()) if simplex else 0.0  # what one more unit of a free entry costs
        worth = slope - price
        worth[free] = 0.0
        if float(worth.min()) >= -EXACT:
            return x
        x[int(worth.argmin())] = 1e-300  # let it in
    return x


def _descend(hessian: Tensor, linear: Tensor, x: Tensor, free: Tensor, simplex: bool) -> Tensor:
    """To the minimum among the free entries; those that would turn negative on the way stay at zero."""
    while len(free):
        goal = torch.zeros_like(x)
        goal[free] = _stationary(hessian[free][:, free], linear[free], simplex)
        if bool((goal[free] > 0).all()):
            return goal
        low = free[goal[free] <= 0]
        step = float((x[low] / (x[low] - goal[low]).clamp_min(1e-300)).clamp(0, 1).min())
        x = x + step * (goal - x)
        x[low[x[low] <= 1e-15]] = 0.0
        left = (x > 0).nonzero().flatten()
        if len(left) == len(free):  # rounding left the one that blocks: it goes
            x[low[x[low].argmin()]] = 0.0
            left = (x > 0).nonzero().flatten()
        free = left
    if simplex and float(x.sum()) == 0.0:
        x[int((hessian.diagonal() / 2 + linear).argmin())] = 1.0
    return x


def _stationary(hessian: Tensor, linear: Tensor, simplex: bool) -> Tensor:
    """Where the slope is zero, or equal for all entries if their sum is to be one."""
    n = len(linear)
    if not simplex:
        return torch.linalg.solve(hessian, -linear)
    system = torch.zeros(n + 1, n + 1, dtype=torch.float64)
    system[:n, :n], system[:n, n], system[n, :n] = hessian, 1.0, 1.0
    return torch.linalg.solve(system, torch.cat([-linear, torch.ones(1, dtype=torch.float64)]))[:n]
