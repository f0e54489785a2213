"""What one combining did, as tensors on the device: reading them is up to the caller.

In come weights and Gram matrices; out come cosines, shares kept and flipped heads. Nothing is computed before it
is asked for, and only `check` and `numbers` wait for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nestling.errors import NestlingError

if TYPE_CHECKING:
    from nestling.gradients.combiners.weighted import Weighted


@dataclass(frozen=True, eq=False)
class Report:
    """Diagnostics of one step. Blocks are those of the combiner's scope."""

    weights: Tensor | None  # (blocks, tasks); None for methods without weights
    gram: Tensor | None = None  # (blocks, tasks, tasks) float64; None when no rows were needed
    private: Tensor | None = None  # (blocks, tasks) bool: the block holds entries that only this task owns, if known
    method: "Weighted | None" = None
    refreshed: bool = True  # False between two refreshes: weights and Gram are those of the last one

    @property
    def whole(self) -> Tensor:
        """Gram matrix of the padded rows, (tasks, tasks)."""
        return self._gram.sum(0)

    @property
    def _gram(self) -> Tensor:
        if self.gram is None:
            raise NestlingError(
                "this step had one backward for all tasks, so there are no per-task gradients to report on: "
                "expected rows; pass diagnose=True to get them"
            )
        return self.gram

    @property
    def norms(self) -> Tensor:
        """Norm of each task's gradient, (tasks,)."""
        return self.whole.diagonal().clamp_min(0).sqrt()

    @property
    def cosines(self) -> Tensor:
        """Cosine of every two tasks' gradients, (tasks, tasks); 0 where one of them is zero."""
        norms = self.norms
        bottom = norms[:, None] * norms[None, :]
        return torch.where(bottom > 0, self.whole / bottom.clamp_min(torch.finfo(bottom.dtype).tiny), 0.0)

    @property
    def kept(self) -> Tensor:
        """Share of each task's gradient norm left after projection, (tasks,)."""
        if self.method is None:
            return torch.ones_like(self.norms)
        return self.method.kept(self._gram)

    @property
    def flips(self) -> Tensor:
        """Whether a task's head (entries it alone owns) is moved against its own gradient, (tasks,) bool."""
        if self.weights is None:
            return torch.zeros_like(self.norms, dtype=torch.bool)
        if self.private is None:
            raise NestlingError(
                "a net compiled whole does not tell which entries are a task's own, so flips are not known: pass owners= "
                "to backward, or compile per stage"
            )
        return ((self.weights < 0) & self.private).any(0)

    def stale(self) -> "Report":
        """The same report for a step between two refreshes."""
        return replace(self, refreshed=False)

    def check(self) -> None:
        """Raise if a task's gradient was not finite, naming it. Waits for the device."""
        finite = torch.isfinite(self.whole.diagonal()).tolist()
        bad = ", ".join(str(task) for task, good in enumerate(finite) if not good)
        if bad:
            raise NestlingError(
                f"the gradient of task {bad} (counted from 0) held NaN or infinity: look at that task's loss, "
                f"lower the learning rate, or train in bfloat16 or float32"
            )

    def numbers(self) -> dict[str, list[float] | list[list[float]] | list[bool]]:
        """All of it as plain numbers for a log. Waits for the device."""
        return {
            "weights": [] if self.weights is None else self.weights.tolist(),
            "norms": self.norms.tolist(),
            "cosines": self.cosines.tolist(),
            "kept": self.kept.tolist(),
            "flips": [] if self.weights is not None and self.private is None else self.flips.tolist(),
        }

    def scalars(self, names: Sequence[str] | None = None) -> dict[str, float]:
        """One number per name, for TensorBoard, Weights & Biases or `log_dict`: what is known of this step. `names`: of the
        tasks. Waits for the device."""
        tasks = self.weights if self.weights is not None else self._gram
        called = [str(task) for task in range(tasks.shape[-1])] if names is None else list(names)
        found: dict[str, float] = {}
        if self.weights is not None:
            for block, row in enumerate(self.weights.tolist()):
                where = f"weight/{block}" if len(self.weights) > 1 else "weight"
                found.update({f"{where}/{name}": value for name, value in zip(called, row, strict=True)})
        if self.gram is not None:
            found.update({f"norm/{name}": value for name, value in zip(called, self.norms.tolist(), strict=True)})
            found.update({f"kept/{name}": value for name, value in zip(called, self.kept.tolist(), strict=True)})
            cosines = self.cosines.tolist()
            found.update(
                {f"cosine/{a}/{b}": cosines[i][j] for i, a in enumerate(called) for j, b in enumerate(called[:i])}
            )
        return found
