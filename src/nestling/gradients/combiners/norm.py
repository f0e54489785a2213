"""NormSGD: every task's gradient brought to a norm that follows the size of its subnetwork, then averaged.

Task s is scaled to norm sqrt(d_s / d_n) * C, with d_s the entries it owns and d_n the most any task owns; each
entry then gets the mean over the tasks that own it. The paper writes sqrt(d_s) * C, which with its C = 1/2 is
about a hundred times too large to train; `literal=True` gives that.
"""

import torch
from torch import Tensor

from nestling.errors import NestlingError
from nestling.gradients import Blocks
from nestling.gradients.combiners.weighted import Importance, Weighted


def factors(gram: Tensor, blocks: Blocks, constant: float, literal: bool) -> Tensor:
    """What to multiply each task's gradient with, (tasks,); 0 for a zero gradient."""
    square = gram.sum(0).diagonal()
    target = blocks.sizes.sqrt() * constant
    if not literal:
        target = target / blocks.sizes.max().sqrt()
    if blocks.scale is not None:  # the rows carry the loss scale, and so must the update
        target = target * blocks.scale.to(target.dtype)
    return torch.where(square == 0, 0.0, target * square.rsqrt())


def check_constant(constant: float) -> float:
    if not 0 < constant < float("inf"):
        raise NestlingError(f"the constant C is {constant}: expected a finite number above 0")
    return constant


class NormSGD(Weighted):
    """Mean over the owners of each entry of the normalised gradients; importance weighs that mean."""

    scope = "block"  # the mean depends on which tasks own an entry, the norm does not

    def __init__(self, importance: Importance | None = None, constant: float = 0.5, literal: bool = False) -> None:
        super().__init__(importance)
        self.constant = check_constant(constant)
        self.literal = literal

    @property
    def owners_matter(self) -> bool:
        return True  # in d

    def weights(self, gram: Tensor, blocks: Blocks) -> Tensor:
        k = self.k(gram.shape[-1], gram.device) * blocks.owned
        shares = k / k.sum(1, keepdim=True).clamp_min(torch.finfo(k.dtype).tiny)
        return shares * factors(gram, blocks, self.constant, self.literal)
