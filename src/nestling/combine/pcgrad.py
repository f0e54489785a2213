"""PCGrad (Yu et al. 2020): each task projected off every other task's original gradient it conflicts with.

A rival, here for comparison: symmetric where OSGD has priorities. Works on the Gram matrix like the others. The
order of projections is drawn anew at each step, by the first rank for all.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nestling.combine.weighted import Prioritised
from nestling.gradients import Blocks


class PCGrad(Prioritised):
    """Sum of the gradients after projection. `shuffle=False` projects in the order of the losses."""

    def __init__(
        self,
        scope: str = "all",
        importance: Sequence[float] | None = None,
        generator: torch.Generator | None = None,
        shuffle: bool = True,
    ) -> None:
        super().__init__(None, scope, importance)
        self.generator = generator
        self.random = self.shuffle = shuffle

    def weights(self, gram: Tensor, blocks: Blocks) -> Tensor:
        n = gram.shape[-1]
        eye = torch.eye(n, dtype=gram.dtype, device=gram.device)
        mixed = eye.expand_as(gram).clone()  # row i: what task i's projected gradient is made of
        draws = torch.rand(n, n, generator=self.generator, device=gram.device) if self.shuffle else eye * 0
        turns = (draws + 2 * eye.to(draws.dtype)).argsort(dim=1, stable=True)  # per task; itself comes last
        squares = gram.diagonal(dim1=-2, dim2=-1)[:, None, :].expand_as(gram)
        for turn in range(n - 1):
            other = turns[:, turn].expand(gram.shape[0], n)[:, :, None]
            inner = (mixed @ gram).gather(2, other)
            square = squares.gather(2, other)
            step = torch.where((inner < 0) & (square > 0), inner / torch.where(square > 0, square, 1.0), 0.0)
            mixed.scatter_add_(2, other, -step)
        return self.k(gram.shape[-1], gram.device) @ mixed
