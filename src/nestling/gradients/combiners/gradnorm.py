"""GradNorm (Chen et al. 2018): learnt weights that bring the tasks' gradients to comparable norms.

As in LibMTL, weights are n softmax(scale), and rates are taken from the first step's losses.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nestling.gradients import Blocks
from nestling.gradients.combiners.diagnosis import Report
from nestling.gradients.combiners.watched import Watched


class GradNorm(Watched):
    """GradNorm (Chen et al. 2018): gradients' norms over what tasks share are drawn to their mean, times each task's
    relative training rate to the power `alpha`. The gradient of that is added to `scale.grad`."""

    scope = "shared"

    def __init__(self, tasks: int, alpha: float = 1.5) -> None:
        super().__init__(tasks)
        self.alpha = alpha
        self.scale = nn.Parameter(torch.ones(tasks))
        self.first: Tensor | None = None  # the first step's losses

    def parameters(self) -> Iterator[nn.Parameter]:
        return iter((self.scale,))

    def fixed(self, tasks: int, device: torch.device) -> tuple[Tensor, Report] | None:
        return None

    def see(self, values: Tensor) -> None:
        super().see(values)
        self.first = values.clone() if self.first is None else self.first

    def weights(self, gram: Tensor, blocks: Blocks) -> Tensor:
        assert self.first is not None
        shared = ~blocks.private.any(1)
        norms = gram[shared].sum(0).diagonal().clamp_min(0).sqrt()
        rate = self.values.to(gram) / self.first.to(gram)
        with torch.enable_grad():
            weights = self.tasks * torch.softmax(self.scale.to(gram), 0)
            lengths = weights * norms
            goal = (lengths.mean() * (rate / rate.mean()) ** self.alpha).detach()
            grad = torch.autograd.grad((lengths - goal).abs().sum(), self.scale)[0]
        self.scale.grad = grad if self.scale.grad is None else self.scale.grad + grad
        return weights.detach().expand(gram.shape[:-1])
