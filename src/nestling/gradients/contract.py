"""What a combiner is to those who gather gradients, and what they ask of torch's scaler.

Every combiner of combine/ is one, and so is any object of yours that has these two methods.
"""

from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from nestling.gradients.rows import Rows


class Reported(Protocol):
    """What a combiner hands back: at least its weights, (blocks, tasks), where it has any."""

    @property
    def weights(self) -> Tensor | None: ...

    def stale(self) -> Self: ...


R = TypeVar("R", bound=Reported)
R_co = TypeVar("R_co", bound=Reported, covariant=True)


class Combiner(Protocol[R_co]):
    """Rows to update: `__call__` reads `rows.gram`, calls `rows.write` once and returns a report.

    `fixed` gives weights (tasks,) that depend on no gradient, and the report that goes with them, or None: then
    one weighted backward does the work of all. One whose weights depend on the rows' values alone and not on who owns
    what may say so by an attribute `owners_matter = False`: it then also takes nets that were compiled whole.
    """

    def __call__(self, rows: Rows) -> R_co: ...

    def fixed(self, tasks: int, device: torch.device) -> tuple[Tensor, R_co] | None: ...


class Scaler(Protocol):
    """torch.amp.GradScaler, of which only `scale` is used."""

    def scale(self, outputs: Tensor) -> Tensor: ...
