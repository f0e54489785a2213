"""Dynamic weight average (Liu et al. 2019): weights from how losses fell between the last two epochs.

n softmax(r / T), r the last epoch's mean loss over that of the one before; ones until there are two.
"""

import torch
from torch import Tensor

from nestling.gradients.combiners.watched import Watched


class DWA(Watched):
    """Dynamic weight average (Liu et al. 2019): losses that fell slowly from one epoch to the next weigh more. Call
    `set_epoch` at the start of every epoch."""

    def __init__(self, tasks: int, temperature: float = 2.0) -> None:
        super().__init__(tasks)
        self.temperature = temperature
        self.means: list[Tensor] = []  # of the last two epochs
        self.epoch, self.batches = 0, 0
        self.sum: Tensor | None = None

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch and self.sum is not None:
            self.means = [*self.means, self.sum / self.batches][-2:]
            self.sum, self.batches = None, 0
        self.epoch = epoch

    def see(self, values: Tensor) -> None:
        super().see(values)
        self.sum = values.clone() if self.sum is None else self.sum + values
        self.batches += 1

    def share(self) -> Tensor:
        if len(self.means) < 2:
            return torch.ones_like(self.values)
        return self.tasks * torch.softmax(self.means[1] / self.means[0] / self.temperature, 0)
