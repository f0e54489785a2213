"""IMTL-G (Liu et al. 2021): the update has projections of one length on all gradients.

With d the gradients' norms, w is G^+ d, brought to the sum one.
"""

import torch
from torch import Tensor

from nestling.gradients.combiners.solved import Solved


class IMTLG(Solved):
    """Impartial: no task's direction is favoured."""

    def solve(self, gram: Tensor) -> Tensor:
        found = torch.linalg.pinv(gram, hermitian=True) @ gram.diagonal().clamp_min(0).sqrt()
        total = float(found.sum())
        return found / total if abs(total) >= 1e-12 else torch.zeros_like(found)
