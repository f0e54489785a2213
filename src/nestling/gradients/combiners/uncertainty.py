"""Uncertainty weighting (Kendall et al. 2018): weights exp(-s) / 2 with a learnt log variance s per task."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nestling.gradients.combiners.watched import Watched


class Uncertainty(Watched):
    """Uncertainty weighting (Kendall et al. 2018): the sum of L exp(-s) / 2 + s / 2. Its gradient with respect to s, one
    log variance per task, is added to `log_variance.grad`."""

    def __init__(self, tasks: int) -> None:
        super().__init__(tasks)
        self.log_variance = nn.Parameter(torch.zeros(tasks))

    def parameters(self) -> Iterator[nn.Parameter]:
        return iter((self.log_variance,))

    def see(self, values: Tensor) -> None:
        super().see(values)
        grad = (0.5 - self.share() * values).to(self.log_variance)
        grad = torch.where(grad.isfinite(), grad, 0.0)  # a step that will be refused teaches nothing
        self.log_variance.grad = grad if self.log_variance.grad is None else self.log_variance.grad + grad

    def share(self) -> Tensor:
        return 0.5 * torch.exp(-self.log_variance.detach().to(self.values))
