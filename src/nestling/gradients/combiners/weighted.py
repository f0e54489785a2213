"""Combiners that are "Gram matrix to weights": the shared half, from rows to a report.

In come Rows; a subclass turns the Gram matrices of its scope's blocks, (blocks, tasks, tasks), into weights,
(blocks, tasks); the update is the weighted sum of the rows. Importance k and priority order are kept as tensors
on the device, so that nothing is copied there during a step and a changed order reaches a captured CUDA graph.
"""

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from nestling.errors import NestlingError, nearest
from nestling.gradients import SCOPES, Blocks, Combiner, TaskRows
from nestling.gradients.combiners.diagnosis import Report

TaskList = Sequence[int] | Sequence[str]
Order = TaskList | Callable[[int], TaskList]
Importance = Sequence[float] | Callable[[int], Sequence[float]]


class Weighted(Combiner[Report]):
    """Rows to update through one weight per block and task. `importance`: k, one per task, or a function of the epoch that
    gives them (then call `set_epoch` at the start of each epoch); default all one."""

    scope = "all"
    changes = 0  # how often order or importance were set: weights found before no longer hold
    random = False  # whether weights are drawn by chance, so that ranks must agree on them

    def __init__(self, importance: Importance | None = None) -> None:
        self._known: dict[tuple[str, int, torch.device], Tensor] = {}
        self.epoch = 0
        self.importance = importance

    @property
    def importance(self) -> Importance | None:
        return self._importance

    @importance.setter
    def importance(self, importance: Importance | None) -> None:
        self._importance = importance if importance is None or callable(importance) else _numbers(importance)
        self.changes += 1
        self._tell("k", self._importance_of)

    def set_epoch(self, epoch: int) -> None:
        """Tell which epoch it is, for what is a function of it. Epochs count from 0. On CUDA the change takes its place in
        the current stream's work, which must be the one that the steps are in."""
        self.epoch = epoch
        if callable(self._importance):
            self._tell("k", self._importance_of)

    @property
    def owners_matter(self) -> bool:
        """Whether weights depend on who owns what, and not on the rows' values alone."""
        return self.scope in ("shared", "block")

    def weights(self, gram: Tensor, blocks: Blocks) -> Tensor:
        """(blocks, tasks, tasks) float64 to (blocks, tasks)."""
        raise NotImplementedError

    def kept(self, gram: Tensor) -> Tensor:
        """Per task the share of its gradient's norm that the method leaves in: 1 unless it projects."""
        return torch.ones(gram.shape[-1], dtype=gram.dtype, device=gram.device)

    def __call__(self, rows: TaskRows) -> Report:
        gram = rows.gram(self.scope)
        blocks = rows.blocks(self.scope)
        weights = self.weights(gram, blocks)
        if self.random:
            weights = rows.agreed(weights)
        rows.write(weights, self.scope)
        private = blocks.private if rows.certain else None
        return Report(weights=weights, gram=gram, private=private, method=self)

    def k(self, tasks: int, device: torch.device) -> Tensor:
        """Importance as a tensor (tasks,)."""
        return self._tensor("k", self._importance_of(tasks), device, torch.float64)

    def _importance_of(self, tasks: int) -> tuple[float, ...]:
        k = self._importance
        found = _numbers(k(self.epoch)) if callable(k) else tuple(k or (1.0,) * tasks)
        if len(found) != tasks:
            raise NestlingError(f"importance has {len(found)} numbers for {tasks} losses: expected one per task")
        return found

    def _tensor(self, name: str, values: Sequence[float], device: torch.device, dtype: torch.dtype) -> Tensor:
        key = (name, len(values), device)
        if key not in self._known:
            self._known[key] = torch.tensor(values, dtype=dtype).to(device)
        return self._known[key]

    def _tell(self, name: str, values: Callable[[int], Sequence[float]]) -> None:
        """Change what is known on devices in place: a captured CUDA graph keeps reading these tensors."""
        for (kind, tasks, _), known in self._known.items():
            if kind == name:
                now = torch.tensor(values(tasks), dtype=known.dtype)
                known.copy_(now.pin_memory() if known.is_cuda else now, non_blocking=True)


class Prioritised(Weighted):
    """A combiner with a priority order and a scope.

    `order`: task numbers from 0, most important first; or their names, where losses come by name; or a function of the
    epoch that gives them (then call `set_epoch` at the start of each epoch); default: as the losses come. `scope`: what a
    projection sees.
    """

    def __init__(self, order: Order | None = None, scope: str = "all", importance: Importance | None = None) -> None:
        super().__init__(importance)
        if scope not in SCOPES:
            raise NestlingError(
                f"unknown scope {scope!r}: expected {', '.join(SCOPES)}; did you mean {nearest(str(scope), SCOPES)}?"
            )
        self.scope = scope
        self._names: tuple[str, ...] = ()
        self.order = order

    @property
    def order(self) -> Order | None:
        return self._order

    @order.setter
    def order(self, order: Order | None) -> None:
        self._order = order if order is None or callable(order) else _as_tuple(order)
        if isinstance(self._order, tuple) and not _by_name(self._order):
            _check_order(self._order, len(self._order))
        self.changes += 1
        self._tell("order", self.priority)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._tell("order", self.priority)

    def set_tasks(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._tell("order", self.priority)

    def priority(self, tasks: int) -> tuple[int, ...]:
        """The order of this epoch for a number of tasks, checked."""
        if self.order is None:
            return tuple(range(tasks))
        order: tuple[Any, ...] = _as_tuple(self.order(self.epoch)) if callable(self.order) else tuple(self.order)
        if _by_name(order):
            order = self._numbered(order)
        _check_order(order, tasks)
        return order

    def _numbered(self, order: Sequence[str]) -> tuple[int, ...]:
        unknown = [name for name in order if name not in self._names]
        if unknown:
            known = f"the losses' names are {', '.join(self._names)}" if self._names else "the losses have no names"
            raise NestlingError(
                f"order names a task {unknown[0]!r}, but {known}: pass the losses as a dict from name to loss, with every "
                f"task that the order names (None where it is absent)"
            )
        return tuple(self._names.index(name) for name in order)

    def rank(self, gram: Tensor) -> Tensor | None:
        """The order as an index tensor beside `gram`; None when it is the order of the losses for good."""
        tasks = gram.shape[-1]
        if ("order", tasks, gram.device) in self._known:
            return self._known["order", tasks, gram.device]
        if not callable(self.order) and self.priority(tasks) == tuple(range(tasks)):
            return None
        return self._tensor("order", self.priority(tasks), gram.device, torch.int64)

    def as_given(self, gram: Tensor) -> Tensor:
        """The order of the losses, as an index tensor."""
        return self._tensor("as given", range(gram.shape[-1]), gram.device, torch.int64)


def _numbers(importance: Sequence[float]) -> tuple[float, ...]:
    """Importance as plain numbers, checked."""
    learnt = [importance] if isinstance(importance, Tensor) else importance if isinstance(importance, Iterable) else []
    if any(isinstance(k, Tensor) and k.requires_grad for k in learnt):
        raise NestlingError(
            "importance needs a gradient: expected plain numbers, which nothing learns; multiply the losses by your "
            "learnable weights instead, or pass importance.tolist()"
        )
    try:
        found = tuple(float(k) for k in importance)
    except (TypeError, ValueError) as error:
        raise NestlingError(f"importance is {importance!r}: expected one number per task, such as [1, 2, 1]") from error
    for task, k in enumerate(found):
        if not math.isfinite(k) or k < 0:
            raise NestlingError(f"importance of task {task} is {k}: expected a finite number, 0 or more")
    if sum(found) <= 0:
        raise NestlingError("importance is zero for every task: expected at least one above zero")
    return found


def _as_tuple(order: TaskList) -> tuple[Any, ...]:
    """Tasks as numbers, or as names."""
    try:
        found = tuple(order)
        return found if found and _by_name(found) else tuple(operator.index(task) for task in found)  # type: ignore[arg-type]
    except TypeError as error:
        raise NestlingError(
            f"order is {order!r}: expected the tasks from 0, most important first, such as [0, 1, 2], their names, or a "
            f"function of the epoch"
        ) from error


def _by_name(order: Sequence[object]) -> bool:
    return all(isinstance(task, str) for task in order) and len(order) > 0


def _check_order(order: Sequence[int], tasks: int) -> None:
    if sorted(order) != list(range(tasks)):
        raise NestlingError(
            f"order is {list(order)}: expected a permutation of the tasks 0 to {tasks - 1}, most important first "
            "(stages, as in strategy.order of a recipe, count from 1, tasks from 0)"
        )
