"""MGDA (Désidéri 2012; Sener and Koltun 2018): the shortest vector in the convex hull of the tasks' gradients.

Its weights are the minimiser of w G w over the simplex, found exactly, where the published code goes on by Frank-Wolfe steps.
"""

import torch
from torch import Tensor

from nestling.gradients.combiners.quadratic import minimise
from nestling.gradients.combiners.solved import Solved


class MGDA(Solved):
    """The min-norm point."""

    def solve(self, gram: Tensor) -> Tensor:
        return minimise(gram, torch.zeros(len(gram), dtype=torch.float64), simplex=True)
