"""What a combiner is to those who gather gradients, and what rows are to a combiner.

Every combiner of combiners/ is a Combiner, and so is any object of yours that has these methods; to inherit from it is to
get all but one. TaskRows is what both kinds of rows offer: stored where owned (rows.py), or as a matrix (flat.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor


class Reported(Protocol):
    """What a combiner hands back: at least its weights, (blocks, tasks), where it has any."""

    @property
    def weights(self) -> Tensor | None: ...

    def stale(self) -> Self: ...


R = TypeVar("R", bound=Reported)
R_co = TypeVar("R_co", bound=Reported, covariant=True)


@dataclass(frozen=True, eq=False)
class Blocks:
    """What a combiner may know of the blocks of a scope, on the rows' device."""

    owned: Tensor  # (blocks, tasks) bool: the task owns entries of the block
    private: Tensor  # (blocks, tasks) bool: entries of the block that no other task owns
    sizes: Tensor  # (tasks,) float64: d, the number of entries the task owns
    scale: Tensor | None = None  # loss scale the rows still carry (float16 training)


class TaskRows(Protocol):
    """The gradients of all tasks at one step: ask for `gram`, answer with `write`; or `matrix` and `write_vector`."""

    certain: bool  # whether it is known who owns what, and not only where rows may be other than zero

    @property
    def tasks(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def blocks(self, scope: str) -> Blocks: ...

    def gram(self, scope: str = "all") -> Tensor:
        """Inner products of the rows inside each block: (blocks, tasks, tasks), float64."""
        ...

    def write(self, weights: Tensor, scope: str = "all") -> None:
        """Put the sum of weights[block, task] * row into `.grad`, and let the rows go."""
        ...

    def matrix(self) -> Tensor:
        """The padded rows as one dense matrix (tasks, entries), for methods that need it."""
        ...

    def shared(self) -> Tensor:
        """Which entries several tasks own, (entries,) bool, ordered as in `matrix`."""
        ...

    def write_vector(self, vector: Tensor) -> None:
        """Put an update over all entries, ordered as in `matrix`, into `.grad`, and let the rows go."""
        ...

    def agreed(self, weights: Tensor) -> Tensor:
        """Weights that were drawn by chance, made those of the first rank."""
        ...


class Combiner(Protocol[R_co]):
    """Rows to update: `__call__` reads `rows.gram`, calls `rows.write` once and returns a report."""

    def __call__(self, rows: TaskRows) -> R_co: ...

    def fixed(self, tasks: int, device: torch.device) -> tuple[Tensor, R_co] | None:
        """Weights (tasks,) that depend on no gradient, and the report that goes with them: then one weighted backward
        does the work of all. None where gradients decide."""
        return None

    def set_epoch(self, epoch: int) -> None:
        """Tell which epoch it is, counted from 0; for those whose priorities or chance follow from it."""
        return None

    def set_tasks(self, names: Sequence[str]) -> None:
        """Tell the tasks' names, in the order of the losses; for those who may be told priorities by name."""
        return None

    watches: bool = False  # whether it is told the values of the losses

    def see(self, values: Tensor) -> None:
        """Tell the values of this step's losses, (tasks,), their mean over the ranks; only to those who watch them."""
        return None

    @property
    def owners_matter(self) -> bool:
        """Whether it matters who owns what, and not the rows' values alone; if not, nets compiled whole are fine."""
        return True


class Scaler(Protocol):
    """torch.amp.GradScaler, of which only `scale` is used."""

    def scale(self, outputs: Tensor) -> Tensor: ...
