"""Combiners whose weights are the answer to a small problem about one Gram matrix: the shared half.

In come the Gram matrices of a scope's blocks; a subclass answers for one block and the tasks that own it (`solve`). In
entries that one task alone owns, it moves as if alone. Reads the Gram matrix back to the host: a step waits for the device.
"""

import torch
from torch import Tensor

from nestling.errors import NestlingError, nearest
from nestling.gradients import SCOPES, Blocks
from nestling.gradients.combiners.weighted import Weighted


class Solved(Weighted):
    """`scope`: what one problem is about. By default what tasks share, as these methods were published."""

    def __init__(self, scope: str = "shared") -> None:
        super().__init__()
        if scope not in SCOPES:
            raise NestlingError(
                f"unknown scope {scope!r}: expected {', '.join(SCOPES)}; did you mean {nearest(str(scope), SCOPES)}?"
            )
        self.scope = scope

    def solve(self, gram: Tensor) -> Tensor:
        """(tasks, tasks) float64 on the host to (tasks,); at least two tasks."""
        raise NotImplementedError

    def weights(self, gram: Tensor, blocks: Blocks) -> Tensor:
        known, owned, private = gram.cpu(), blocks.owned.cpu(), blocks.private.cpu()
        found = torch.zeros(known.shape[:2], dtype=torch.float64)
        apart = self.scope in ("shared", "block")  # there, a block with private entries has no others
        for block in range(len(known)):
            tasks = owned[block].nonzero().flatten()
            if len(tasks) < 2 or (apart and bool(private[block].any())):
                found[block, tasks] = 1.0
            elif bool(torch.isfinite(known[block]).all()):
                found[block, tasks] = self.solve(known[block][tasks][:, tasks])
            else:
                found[block, tasks] = torch.nan
        return found.to(gram.device)
