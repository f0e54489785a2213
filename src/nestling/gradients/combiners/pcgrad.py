"""PCGrad (Yu et al. 2020): each task projected off every other task's original gradient it conflicts with.

A rival, here for comparison: symmetric where OSGD has priorities. Works on the Gram matrix like the others. The
order of projections is drawn anew at each step, by the first rank for all. With a seed, an epoch's orders are
drawn at its beginning and wait on the device: nothing comes from the host during a step, as a CUDA graph needs it.
"""

import torch
from torch import Tensor

from nestling.errors import NestlingError
from nestling.gradients import Blocks
from nestling.gradients.combiners.weighted import Importance, Prioritised

DRAWN = 1024  # orders drawn for an epoch; a longer one begins again with the first


class PCGrad(Prioritised):
    """Sum of the gradients after projection. `shuffle=False` projects in the order of the losses.

    Orders are drawn from `generator`, by default torch's own; or, with a `seed`, they follow from the seed, the epoch
    (`set_epoch`) and the number of the step in it alone: the same on every device, and after resuming at an epoch.
    """

    def __init__(
        self,
        scope: str = "all",
        importance: Importance | None = None,
        generator: torch.Generator | None = None,
        shuffle: bool = True,
        seed: int | None = None,
    ) -> None:
        super().__init__(None, scope, importance)
        if generator is not None and seed is not None:
            raise NestlingError("PCGrad got a generator and a seed: expected one of the two to draw orders from")
        self.generator, self.seed = generator, seed
        self.random = self.shuffle = shuffle
        # Per number of tasks and device: the epoch's orders, (DRAWN, tasks, tasks), and the number of the next, (1,).
        self._drawn: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def set_epoch(self, epoch: int) -> None:
        """Tell which epoch it is. Its orders take the place of the last one's in the current stream's work, which must be
        the one that the steps are in."""
        super().set_epoch(epoch)
        for (tasks, _), (orders, step) in self._drawn.items():  # in place: a captured CUDA graph keeps reading these
            drawn = self._draw(tasks)
            orders.copy_(drawn.pin_memory() if orders.is_cuda else drawn, non_blocking=True)
            step.zero_()

    def weights(self, gram: Tensor, blocks: Blocks) -> Tensor:
        n = gram.shape[-1]
        mixed = torch.eye(n, dtype=gram.dtype, device=gram.device).expand_as(gram).clone()
        turns = self._turns(n, gram.device)  # row i: in which order task i, by mixed[i], is projected off the others
        squares = gram.diagonal(dim1=-2, dim2=-1)[:, None, :].expand_as(gram)
        for turn in range(n - 1):
            other = turns[:, turn].expand(gram.shape[0], n)[:, :, None]
            inner = (mixed @ gram).gather(2, other)
            square = squares.gather(2, other)
            step = torch.where((inner < 0) & (square > 0), inner / torch.where(square > 0, square, 1.0), 0.0)
            mixed.scatter_add_(2, other, -step)
        return self.k(gram.shape[-1], gram.device) @ mixed

    def _turns(self, tasks: int, device: torch.device) -> Tensor:
        """The order of this step, (tasks, tasks)."""
        if not self.shuffle:
            return ordered(torch.zeros(tasks, tasks, device=device))
        if self.seed is None:
            return ordered(torch.rand(tasks, tasks, generator=self.generator, device=device))
        if (tasks, device) not in self._drawn:
            self._drawn[tasks, device] = self._draw(tasks).to(device), torch.zeros(1, dtype=torch.int64, device=device)
        orders, step = self._drawn[tasks, device]
        turns = orders.index_select(0, step)[0]
        step.add_(1).remainder_(DRAWN)
        return turns

    def _draw(self, tasks: int) -> Tensor:
        """The epoch's orders. Their generator's number lies half-way between two seeds, where no epoch's shuffling is."""
        assert self.seed is not None
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + 500_000 + self.epoch)
        return ordered(torch.rand(DRAWN, tasks, tasks, generator=generator))


def ordered(draws: Tensor) -> Tensor:
    """For every task the tasks in the order of its draws, equal ones as they come; itself last."""
    own = torch.eye(draws.shape[-1], dtype=draws.dtype, device=draws.device)
    return (draws + 2 * own).argsort(dim=-1, stable=True)
