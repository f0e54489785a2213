"""FAMO (Liu et al. 2023): one backward a step, with weights that make all losses fall at the same rate.

Weights z / (L - b), brought to the sum one, z the softmax of logits that learn from how much each loss's logarithm fell.
"""

import torch
from torch import Tensor, nn

from nestling.gradients.combiners.watched import Watched

TINY = 1e-8  # as in the authors' code


class FAMO(Watched):
    """FAMO (Liu et al. 2023): all losses are to fall at the same rate. After the optimizer's step, call `update` with
    the same batch's losses once more; the logits have an Adam of their own."""

    def __init__(self, tasks: int, lr: float = 0.025, weight_decay: float = 1e-3, lowest: Tensor | float = 0.0) -> None:
        super().__init__(tasks)
        self.logits = nn.Parameter(torch.zeros(tasks, dtype=torch.float64))
        self.optimizer = torch.optim.Adam([self.logits], lr=lr, weight_decay=weight_decay)
        self.lowest = lowest

    def share(self) -> Tensor:
        z = torch.softmax(self.logits.detach().to(self.values), 0) / (self.values - self.lowest + TINY)
        return z / z.sum()

    def update(self, losses: "list[Tensor] | Tensor") -> None:
        """What the losses of the same batch are after the step; on several ranks, their mean."""
        now = torch.stack([torch.as_tensor(loss).detach().reshape(()).to(self.values) for loss in losses])
        fell = (self.values - self.lowest + TINY).log() - (now - self.lowest + TINY).log()
        with torch.enable_grad():
            shares = torch.softmax(self.logits, 0)
            self.logits.grad = torch.autograd.grad(shares, self.logits, fell.to(self.logits))[0]
        self.optimizer.step()
        self.logits.grad = None
