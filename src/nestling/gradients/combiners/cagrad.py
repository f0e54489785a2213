"""CAGrad (Liu et al. 2021): the best for the worst-off task within a ball around the mean gradient g0.

The update is g0 + c |g0| g_w / |g_w|, where w minimises g_w g0 + c |g0| |g_w| over the simplex. For a given length |g_w| that is
a quadratic program, and the length is found by bisection. `rescale` as in the authors' code: the update over 1 + c^2 (1), over
1 + c (2), or as it is (0).
"""

import torch
from torch import Tensor

from nestling.errors import NestlingError
from nestling.gradients.combiners.quadratic import minimise
from nestling.gradients.combiners.solved import Solved

HALVINGS = 60


class CAGrad(Solved):
    """`c`: the ball's radius in lengths of the mean gradient; 0 is the mean."""

    def __init__(self, c: float = 0.4, scope: str = "shared", rescale: int = 1) -> None:
        super().__init__(scope)
        if not 0 <= c < float("inf"):
            raise NestlingError(f"c is {c}: expected a finite number, 0 or more")
        if rescale not in (0, 1, 2):
            raise NestlingError(f"rescale is {rescale}: expected 0 (no), 1 (over 1 + c^2) or 2 (over 1 + c)")
        self.c, self.rescale = c, rescale

    def solve(self, gram: Tensor) -> Tensor:
        n = len(gram)
        mean = torch.full((n,), 1 / n, dtype=torch.float64)
        radius = self.c * float((mean @ gram @ mean).clamp_min(0).sqrt())
        scale = {0: 1.0, 1: 1 + self.c**2, 2: 1 + self.c}[self.rescale]
        if radius == 0.0:
            return mean / scale
        w = self._worst(gram, gram @ mean, radius)
        length = float((w @ gram @ w).clamp_min(0).sqrt())
        top = float(gram.diagonal().max().sqrt())
        return (mean + (radius / length) * w if length > 1e-12 * top else mean) / scale

    @staticmethod
    def _worst(gram: Tensor, linear: Tensor, radius: float) -> Tensor:
        """w on the simplex with the least w b + radius |g_w|. At the minimum, w also minimises w b + radius w G w / (2 s)
        with s = |g_w|; the length that answers a given s falls short of it above the right one."""
        low, high = 0.0, float(gram.diagonal().max().sqrt())
        w = torch.zeros_like(linear)
        for _ in range(HALVINGS):
            s = (low + high) / 2
            w = minimise(gram * (radius / s), linear, simplex=True)
            if float((w @ gram @ w).clamp_min(0).sqrt()) < s:
                high = s
            else:
                low = s
        return w
