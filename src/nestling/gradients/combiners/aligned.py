"""Aligned-MTL (Senushkin et al. 2023): the gradients' principal components brought to the length of the shortest.

With G = V L V^T, the weights are sqrt(l_min) V L^(-1/2) V^T applied to the mean.
"""

import torch
from torch import Tensor

from nestling.gradients.combiners.solved import Solved


class AlignedMTL(Solved):
    """The mean of the aligned gradients."""

    def solve(self, gram: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(gram)
        kept = values > values.max() * len(gram) * torch.finfo(gram.dtype).eps
        mean = torch.full((len(gram),), 1 / len(gram), dtype=gram.dtype)
        if not bool(kept.any()):
            return mean
        values, vectors = values[kept], vectors[:, kept]
        return values.min().sqrt() * (vectors / values.sqrt()) @ (vectors.T @ mean)
