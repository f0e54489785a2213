"""SumSGD, in which weights born early hear later losses more softly.

A weight belongs to the first task that owns it. That task's gradient counts in full there, those of later tasks are multiplied
by `damping`: 1 is SumSGD; 0 trains every stage as if there were no later ones, all at once (greedy training without
phases). Needs tasks that come in the order of their nesting.
"""

import torch
from torch import Tensor

from nestling.errors import NestlingError
from nestling.gradients import Blocks
from nestling.gradients.combiners.weighted import Importance, Weighted


class Damped(Weighted):
    """The gradient of sum k L, where later losses reach weights born earlier at a share of `damping`."""

    scope = "block"

    def __init__(self, damping: float = 0.0, importance: Importance | None = None) -> None:
        super().__init__(importance)
        if not 0 <= damping <= 1:
            raise NestlingError(
                f"damping is {damping}: expected a share from 0 (no later loss is heard) to 1 (plain sum)"
            )
        self.damping = float(damping)

    def weights(self, gram: Tensor, blocks: Blocks) -> Tensor:
        owned = blocks.owned.to(torch.uint8)
        before = owned.cumsum(1) - owned  # how many earlier tasks own the block
        return self.k(gram.shape[-1], gram.device) * torch.where(before > 0, self.damping, 1.0).to(gram.dtype)
