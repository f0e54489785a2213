"""Combiners that are "Gram matrix to weights": the shared half, from rows to a report.

In come Rows; a subclass turns the Gram matrices of its scope's blocks, (blocks, tasks, tasks), into weights,
(blocks, tasks); the update is the weighted sum of the rows. Importance k and priority order are kept as tensors
on the device, so that nothing is copied there during a step and a changed order reaches a captured CUDA graph.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nestling.errors import NestlingError, nearest
from nestling.gradients import SCOPES, Blocks, Rows
from nestling.gradients.combiners.report import Report

Order = Sequence[int] | Callable[[int], Sequence[int]]


class Weighted:
    """Rows to update through one weight per block and task. `importance`: k, one per task; default all one."""

    scope = "all"
    random = False  # whether weights are drawn by chance, so that ranks must agree on them

    def __init__(self, importance: Sequence[float] | None = None) -> None:
        self.importance = None if importance is None else tuple(float(k) for k in importance)
        for task, k in enumerate(self.importance or ()):
            if not math.isfinite(k) or k < 0:
                raise NestlingError(f"importance of task {task} is {k}: expected a finite number, 0 or more")
        if self.importance is not None and sum(self.importance) <= 0:
            raise NestlingError("importance is zero for every task: expected at least one above zero")
        self._known: dict[tuple[str, int, torch.device], Tensor] = {}

    def weights(self, gram: Tensor, blocks: Blocks) -> Tensor:
        """(blocks, tasks, tasks) float64 to (blocks, tasks)."""
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Tell which epoch it is; only an order that is a function of it listens."""

    def fixed(self, tasks: int, device: torch.device) -> tuple[Tensor, Report] | None:
        """Weights (tasks,) that depend on no gradient, with their report; None where gradients decide."""
        return None

    def kept(self, gram: Tensor) -> Tensor:
        """Per task the share of its gradient's norm that the method leaves in: 1 unless it projects."""
        return torch.ones(gram.shape[-1], dtype=gram.dtype, device=gram.device)

    def __call__(self, rows: Rows) -> Report:
        gram = rows.gram(self.scope)
        blocks = rows.blocks(self.scope)
        weights = self.weights(gram, blocks)
        if self.random:
            weights = rows.agreed(weights)
        rows.write(weights, self.scope)
        return Report(weights=weights, gram=gram, private=blocks.private, method=self)

    def k(self, tasks: int, device: torch.device) -> Tensor:
        """Importance as a tensor (tasks,)."""
        if self.importance is not None and len(self.importance) != tasks:
            raise NestlingError(
                f"importance has {len(self.importance)} numbers for {tasks} losses: expected one per task"
            )
        return self._tensor("k", self.importance or (1.0,) * tasks, device, torch.float64)

    def _tensor(self, name: str, values: Sequence[float], device: torch.device, dtype: torch.dtype) -> Tensor:
        key = (name, len(values), device)
        if key not in self._known:
            self._known[key] = torch.tensor(values, dtype=dtype).to(device)
        return self._known[key]


class Prioritised(Weighted):
    """A combiner with a priority order and a scope.

    `order`: task numbers from 0, most important first, or a function of the epoch that gives them (then call
    `set_epoch` at the start of each epoch); default: as the losses come. `scope`: what a projection sees.
    """

    def __init__(
        self, order: Order | None = None, scope: str = "all", importance: Sequence[float] | None = None
    ) -> None:
        super().__init__(importance)
        if scope not in SCOPES:
            raise NestlingError(
                f"unknown scope {scope!r}: expected {', '.join(SCOPES)}; did you mean {nearest(scope, SCOPES)}?"
            )
        self.scope = scope
        self.order = order if order is None or callable(order) else tuple(order)
        self.epoch = 0
        if isinstance(self.order, tuple):
            _check_order(self.order, len(self.order))

    def set_epoch(self, epoch: int) -> None:
        """Tell which epoch it is, for an order that is a function of it. Epochs count from 0. On CUDA the change takes its
        place in the current stream's work, which must be the one that the steps are in."""
        self.epoch = epoch
        for (name, tasks, _), known in self._known.items():
            if name == "order":  # in place: a captured CUDA graph keeps reading this tensor
                order = torch.tensor(self.priority(tasks))
                known.copy_(order.pin_memory() if known.is_cuda else order, non_blocking=True)

    def priority(self, tasks: int) -> tuple[int, ...]:
        """The order of this epoch for a number of tasks, checked."""
        if self.order is None:
            return tuple(range(tasks))
        order = tuple(self.order(self.epoch)) if callable(self.order) else self.order
        _check_order(order, tasks)
        return order

    def rank(self, gram: Tensor) -> Tensor | None:
        """The order as an index tensor beside `gram`; None when it is the order of the losses for good."""
        tasks = gram.shape[-1]
        if not callable(self.order) and self.priority(tasks) == tuple(range(tasks)):
            return None
        if ("order", tasks, gram.device) in self._known:
            return self._known["order", tasks, gram.device]
        return self._tensor("order", self.priority(tasks), gram.device, torch.int64)

    def as_given(self, gram: Tensor) -> Tensor:
        """The order of the losses, as an index tensor."""
        return self._tensor("as given", range(gram.shape[-1]), gram.device, torch.int64)


def _check_order(order: Sequence[int], tasks: int) -> None:
    if sorted(order) != list(range(tasks)):
        raise NestlingError(
            f"order is {list(order)}: expected a permutation of the tasks 0 to {tasks - 1}, most important first"
        )
