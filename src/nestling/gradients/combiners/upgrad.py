"""UPGrad (Quinton and Rey 2024): each gradient projected onto the dual cone of all, then their mean.

The projection of task i's is J^T v with the least v G v over v >= e_i / n. As in TorchJD, G is divided by its trace, and
`regularise` is added to its diagonal.
"""

import torch
from torch import Tensor

from nestling.gradients.combiners.quadratic import minimise
from nestling.gradients.combiners.solved import Solved


class UPGrad(Solved):
    """No task's loss is made worse, to first order."""

    def __init__(self, scope: str = "shared", regularise: float = 1e-4) -> None:
        super().__init__(scope)
        self.regularise = regularise

    def solve(self, gram: Tensor) -> Tensor:
        n, trace = len(gram), float(gram.trace())
        known = gram / trace if trace > 0 else gram
        known = known + self.regularise * torch.eye(n, dtype=torch.float64)
        least = torch.eye(n, dtype=torch.float64) / n
        return sum((u + minimise(known, known @ u, simplex=False) for u in least), start=torch.zeros_like(gram[0]))
