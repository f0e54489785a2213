"""Plain multi-task SGD: the gradient of the (weighted) mean or sum of the losses.

`sgd` is the paper's baseline, sum k L / sum k. `sgd-sum` leaves the division out: the fair control for OSGD,
which sums.
"""

import torch
from torch import Tensor

from nestling.gradients import Blocks
from nestling.gradients.combiners.diagnosis import Report
from nestling.gradients.combiners.weighted import Weighted


class SumSGD(Weighted):
    """The gradient of sum k L."""

    def share(self, tasks: int, device: torch.device) -> Tensor:
        """The weight of each task, (tasks,)."""
        return self.k(tasks, device)

    def weights(self, gram: Tensor, blocks: Blocks) -> Tensor:
        return self.share(gram.shape[-1], gram.device).expand(gram.shape[:-1])

    def fixed(self, tasks: int, device: torch.device) -> tuple[Tensor, Report] | None:
        weights = self.share(tasks, device)
        return weights, Report(weights=weights[None])


class SGD(SumSGD):
    """The gradient of sum k L / sum k."""

    def share(self, tasks: int, device: torch.device) -> Tensor:
        k = self.k(tasks, device)
        return k / k.sum()
