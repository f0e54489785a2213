"""Orthogonalised SGD across tasks: Gram-Schmidt in priority order, each task projected off the earlier results.

With G the Gram matrix in priority order and G = L D L^T (L unit lower triangular), the orthogonalised rows are
L^-1 J, and their sum, weighted with k, is w^T J with L^T w = k: no loop over parameters, no wait for the device.
A pivot at most `tolerance` times the row's own square counts as zero, so duplicates, zero gradients and more
tasks than dimensions work. `osgd-norm` normalises first, which only changes k.
"""

import torch
from torch import Tensor

from nestling.errors import NestlingError
from nestling.gradients import Blocks, kernels
from nestling.gradients.combiners.norm import check_constant, factors
from nestling.gradients.combiners.weighted import Importance, Order, Prioritised

TOLERANCE = 1e-12  # sin^2 of the angle to the span of earlier rows; float32 rows carry about 1e-14 of rounding


def orthogonalise(gram: Tensor, tolerance: float = TOLERANCE) -> tuple[Tensor, Tensor]:
    """Gram (blocks, n, n) in priority order to L^-1 (blocks, n, n) and squared norms left (blocks, n)."""
    n = gram.shape[-1]
    eye = torch.eye(n, dtype=gram.dtype, device=gram.device).expand_as(gram)
    work = torch.cat([gram, eye], dim=-1)
    squares = gram.diagonal(dim1=-2, dim2=-1)
    for i in range(n - 1):
        pivot = work[:, i, i]
        live = pivot > tolerance * squares[:, i]
        column = torch.where(live[:, None], work[:, i + 1 :, i] / torch.where(live, pivot, 1.0)[:, None], 0.0)
        work[:, i + 1 :] -= column[:, :, None] * work[:, i : i + 1]
    return work[:, :, n:], work[:, :, :n].diagonal(dim1=-2, dim2=-1)


class OSGD(Prioritised):
    """Sum of the orthogonalised gradients. The last task in priority order always has weight k."""

    def __init__(
        self,
        order: Order | None = None,
        scope: str = "all",
        importance: Importance | None = None,
        tolerance: float = TOLERANCE,
    ) -> None:
        super().__init__(order, scope, importance)
        if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance < 1:
            raise NestlingError(f"tolerance is {tolerance!r}: expected a number from 0 to below 1, such as 1e-12")
        self.tolerance = tolerance

    def row_scales(self, gram: Tensor, blocks: Blocks) -> Tensor:
        """k of each task, (tasks,), in the order of the losses."""
        return self.k(gram.shape[-1], gram.device)

    def weights(self, gram: Tensor, blocks: Blocks) -> Tensor:
        k, rank = self.row_scales(gram, blocks), self.rank(gram)
        if kernels.usable(gram, gram.shape[-1]):
            given = self.as_given(gram) if rank is None else rank
            from nestling.gradients.combiners import osgd_triton  # only where Triton is

            return osgd_triton.weights(gram, k, given, self.tolerance)
        if rank is None:
            return k @ orthogonalise(gram, self.tolerance)[0]
        ordered = gram.index_select(1, rank).index_select(2, rank)
        weights = k.index_select(0, rank) @ orthogonalise(ordered, self.tolerance)[0]
        return torch.empty_like(weights).index_copy_(1, rank, weights)

    def kept(self, gram: Tensor) -> Tensor:
        rank = self.rank(gram)
        ordered = gram if rank is None else gram.index_select(1, rank).index_select(2, rank)
        left = orthogonalise(ordered, self.tolerance)[1].clamp_min(0).sum(0)
        before = ordered.diagonal(dim1=-2, dim2=-1).sum(0)
        share = torch.where(before > 0, left / before.clamp_min(torch.finfo(before.dtype).tiny), 0.0).sqrt()
        return share if rank is None else torch.empty_like(share).index_copy_(0, rank, share)


class NormOSGD(OSGD):
    """OSGD of the gradients normalised as in NormSGD."""

    def __init__(
        self,
        order: Order | None = None,
        scope: str = "all",
        importance: Importance | None = None,
        constant: float = 0.5,
        literal: bool = False,
        tolerance: float = TOLERANCE,
    ) -> None:
        super().__init__(order, scope, importance, tolerance)
        self.constant = check_constant(constant)
        self.literal = literal

    @property
    def owners_matter(self) -> bool:
        return True  # in d

    def row_scales(self, gram: Tensor, blocks: Blocks) -> Tensor:
        return self.k(gram.shape[-1], gram.device) * factors(gram, blocks, self.constant, self.literal)
