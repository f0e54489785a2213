"""Losses to one gradient row per task, and from there to `.grad`: the only autograd calls of the library.

In come scalar losses and parameters; each task's backward runs only through what its loss depends on. Rows of
several micro-batches are added and combined once. Fills `.grad` (adding, as torch does) and nothing else: any
optimizer, scheduler, clipping rule and parameter group follows. It does not know how rows are combined.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nestling.errors import NestlingError
from nestling.gradients.checks import (
    Named,
    Params,
    check_combine,
    check_losses,
    explained,
    named,
    refuse_hooks,
    refuse_nonfinite,
    refuse_reentrant,
    refuse_sparse,
    trainable,
)
from nestling.gradients.contract import Combiner, R, Scaler
from nestling.gradients.owners import Box, Layout, Spec, from_masks, from_owners
from nestling.gradients.reduce import Reduction, agree, group_of, refuse_wrapped
from nestling.gradients.rows import Rows

Owners = Mapping[str, Tensor] | Mapping[Tensor, Tensor]


class _Trained:
    """A set of parameters that need a gradient at the same time, and what was planned and found for them."""

    def __init__(self, given: Named, net: nn.Module | None) -> None:
        self.named = trainable(given)
        self.params = [p for _, p in self.named]
        refuse_wrapped(self.params)
        refuse_hooks(self.named)
        self.device = self.params[0].device
        self.specs = tuple(Spec.of(p) for p in self.params)
        self.wholes: list[Box] = [tuple((0, size) for size in spec.stored) for spec in self.specs]
        # Known from the start with owners, and after the first step between ranks; else found anew each step.
        self.layout = _remembered(net, self.named, self.specs) if net is not None else None
        self.used: Layout | None = None
        self.found = False  # whether the layout is what ranks agreed on rather than given
        self.agreed: dict[int, list[int]] = {}  # per number of rows, the owner masks all ranks agreed on
        self.missed = set(range(len(self.params)))  # parameters no task has reached yet


class Accumulator(Generic[R]):
    """Per-task gradients of one set of parameters, kept from micro-batch to micro-batch, combined once.

    `add` runs the backward passes, `fill` combines and adds the update to `.grad`; `backward` is both. Make one
    before the loop and keep it: what can be planned is planned once. Parameters may be frozen and unfrozen between steps.

    owners: element-wise ownership (a nested net's `owners()`); without it the graph tells which task reaches which
        parameter. A module with an `owners()` method is asked for it.
    refresh: find the weights anew every so many steps; in between, one backward of the losses under the last
        weights. Needs one weight per task: scope "all".
    diagnose: get a row per task even where the method needs none (sgd, sgd-sum), for the report's sake.
    reduce: average rows over the ranks when torch.distributed is initialised (False: never; or a process group).
    scaler: with float16, the GradScaler; pass the losses unscaled and step the optimizer through the scaler.
    check: refuse NaN and name the task; None means on a CPU only, since elsewhere it waits for the device.
    """

    def __init__(
        self,
        params: Params,
        combine: Combiner[R],
        *,
        owners: Owners | None = None,
        refresh: int = 1,
        diagnose: bool = False,
        reduce: "bool | dist.ProcessGroup" = True,
        scaler: Scaler | None = None,
        check: bool | None = None,
    ) -> None:
        if refresh < 1:
            raise NestlingError(f"refresh is {refresh}: expected a number of steps, 1 or more")
        check_combine(combine)
        self.given = named(params)  # the frozen ones too: they may be unfrozen later
        self.net = params if isinstance(params, nn.Module) else None
        self.combine = combine
        self.owners = owners
        self.refresh = refresh
        self.diagnose = diagnose
        self.group = group_of(reduce)
        self.scaler = scaler
        self.trained: dict[tuple[bool, ...], _Trained] = {}  # kept for good: a captured CUDA graph may read any
        self.now = self._plan()
        self.check = (self.now.device.type == "cpu" and scaler is None) if check is None else check
        self.renew()
        self._clear()

    def _clear(self) -> None:
        self.micro = 0  # micro-batches added since the last fill
        self.tasks = 0
        self.stored: list[list[Tensor | None]] = []  # a row per task, or a single one of the weighted losses
        self.lone: R | None = None  # the report that goes with a single row
        self.pending: list[Reduction] = []
        self.scale: Tensor | None = None

    def backward(self, losses: Iterable[Tensor]) -> R:
        """Add the losses' gradients and fill `.grad`: a whole step."""
        self.add(losses, final=True)
        return self.fill()

    def add(self, losses: Iterable[Tensor], *, final: bool = False) -> None:
        """Run the backward passes of one micro-batch and add its rows.

        With `final` the ranks start averaging a task's row while the next task's backward runs; without, in `fill`.
        """
        losses = check_losses(losses)
        self._follow()
        if self.micro == 0:
            self._clear()
        elif self.pending:
            raise NestlingError("the ranks already average these rows (final=True): call fill before adding more")
        self._settle_tasks(len(losses))
        if self.scaler is not None:  # scaling a one tells the scale without asking the device
            self.scale = self.scaler.scale(torch.ones((), device=self.now.device))
        weights = self._weights(len(losses))
        if weights is not None:
            self._add_weighted(losses, weights)
        else:
            self._add_rows(losses, final)
            if self.steps == 0 and self.micro == 0 and self.now.missed:  # hidden, or just unused?
                refuse_reentrant(losses)
        self.micro += 1

    def fill(self) -> R:
        """Combine the rows once, add the update to `.grad`, and start anew. Returns the combiner's report."""
        if self.micro == 0:
            raise NestlingError("fill found no rows: call add(losses) first")
        layout = self._settle_layout()
        if self.group is not None and not self.pending:
            self.pending = [Reduction(row, self.group) for row in self.stored]
        for reduction in self.pending:
            reduction.wait()
        try:
            if self.lone is not None:
                report = self.lone
                self._put_lone()
            else:
                assert layout is not None
                self.now.used = layout  # a captured CUDA graph reads tables that live as long as their layout
                rows = Rows(self.now.params, layout, self.stored, scale=self.scale, check=self.check, group=self.group)
                report = self.combine(rows)
        finally:
            self._clear()
        self._remember(report)
        return report

    def renew(self) -> None:
        """Find the weights anew at the next step and count `refresh` from there."""
        self.steps = 0
        self.last: R | None = None

    def _plan(self) -> _Trained:
        needed = tuple(p.requires_grad for _, p in self.given)
        if needed not in self.trained:
            self.trained[needed] = _Trained(self.given, self.net if self.owners is None else None)
        return self.trained[needed]

    def _follow(self) -> None:
        """Parameters may be frozen and unfrozen from step to step."""
        now = self._plan()
        if now is self.now:
            return
        if self.micro:
            changed = sorted({name for name, _ in now.named} ^ {name for name, _ in self.now.named})
            raise NestlingError(
                f"{changed[0]} was frozen or unfrozen amid a step: expected the same {len(self.now.named)} parameters to "
                f"need a gradient in all its micro-batches; call fill first"
            )
        self.now = now
        self.renew()  # the last weights were those of other parameters

    def _settle_tasks(self, tasks: int) -> None:
        if self.now.layout is None and self.owners is not None:
            self.now.layout = from_owners(self.now.named, self.owners, tasks)
        before = self.tasks if self.micro else self.now.layout.tasks if self.now.layout is not None else tasks
        if before != tasks:
            raise NestlingError(
                f"found {tasks} losses, expected {before}: give one loss per task, the same tasks in every "
                f"micro-batch and as many as the owners name"
            )
        if self.micro == 0:
            self.tasks = tasks

    def _weights(self, tasks: int) -> Tensor | None:
        """Weights (tasks,) known before the gradients, if this step has them; decided at its first micro-batch."""
        if self.micro and self.lone is None:
            return None
        fixed = None if self.diagnose else self.combine.fixed(tasks, self.now.device)
        if fixed is not None:
            self.lone = fixed[1]
            return fixed[0]
        if self.last is None or self.steps % self.refresh == 0:
            return None
        assert self.last.weights is not None
        self.lone = self.last.stale()
        return self.last.weights[0]

    def _remember(self, report: R) -> None:
        self.steps += 1
        if self.refresh > 1:
            if report.weights is None or report.weights.shape[0] != 1:
                raise NestlingError(
                    f"refresh={self.refresh} needs one weight per task, but this method and scope give one per "
                    f"block of parameters: use scope='all', or refresh=1"
                )
            self.last = report

    def _add_rows(self, losses: Sequence[Tensor], final: bool) -> None:
        """A backward per task, with the caller's gradients put aside."""
        early = self.group if final and self.now.layout is not None else None
        before = [p.grad for p in self.now.params]
        try:
            for task, loss in enumerate(losses):
                self._add_task(task, loss, retain=task < len(losses) - 1)
                if early is not None:
                    self.pending.append(Reduction(self.stored[task], early))
        finally:
            for p, grad in zip(self.now.params, before, strict=True):
                p.grad = grad

    def _add_weighted(self, losses: Sequence[Tensor], weights: Tensor) -> None:
        """One backward of the weighted losses; torch itself adds it up, in place of the caller's gradients."""
        if self.check:
            refuse_nonfinite(losses)
        seeds = [w.to(loss).view(loss.shape) for w, loss in zip(weights.unbind(), losses, strict=True)]
        if self.scale is not None:
            seeds = [seed * self.scale.to(seed) for seed in seeds]
        before = [p.grad for p in self.now.params]
        row: list[Tensor | None] = self.stored[0] if self.stored else [None] * len(self.now.params)
        for p, grad in zip(self.now.params, row, strict=True):
            p.grad = grad
        try:
            torch.autograd.backward(list(losses), seeds, inputs=self.now.params)
        except RuntimeError as error:
            refuse_reentrant(losses)
            raise explained(error, 0) from error
        finally:
            self.stored = [[p.grad for p in self.now.params]]
            for p, grad in zip(self.now.params, before, strict=True):
                p.grad = grad

    @torch.no_grad()
    def _put_lone(self) -> None:
        for p, grad in zip(self.now.params, self.stored[0], strict=True):
            if grad is not None:
                p.grad = grad if p.grad is None else p.grad.add_(grad)

    def _add_task(self, task: int, loss: Tensor, retain: bool) -> None:
        """One task's backward. Torch accumulates into `.grad`, so that what is taken from there is nobody else's."""
        if self.micro == 0 and task == 0:
            self.stored = [[None] * len(self.now.params) for _ in range(self.tasks)]
        row = self.stored[task]
        boxes = self.now.layout.boxes[task] if self.now.layout is not None else None
        # What ranks agreed on is checked, so everything is asked for; given owners are taken at their word.
        wanted = [i for i in range(len(self.now.params)) if boxes is None or self.now.found or boxes[i] is not None]
        if not wanted:
            return
        cut = [boxes is not None and boxes[i] != self.now.wholes[i] for i in wanted]
        for i, partial in zip(wanted, cut, strict=True):
            kept = row[i]
            self.now.params[i].grad = None if kept is None or partial else kept.permute(self.now.specs[i].inverse)
        seed = None if self.scale is None else self.scale.to(loss).view(loss.shape)
        try:
            torch.autograd.backward(loss, seed, retain_graph=retain, inputs=[self.now.params[i] for i in wanted])
        except RuntimeError as error:
            raise explained(error, task) from error
        for i, partial in zip(wanted, cut, strict=True):
            row[i] = self._kept(i, task, row[i] if partial else None)

    def _kept(self, index: int, task: int, before: Tensor | None) -> Tensor | None:
        """What came into a parameter's `.grad`: in memory order, contiguous, cut to what the task owns."""
        grad, spec = self.now.params[index].grad, self.now.specs[index]
        box = self.now.layout.boxes[task][index] if self.now.layout is not None else None
        if grad is None:
            return before if before is not None or box is None else self._zeros(index, box)
        if box is None and self.now.found:
            raise self._disagreement(index)
        refuse_sparse(grad, self.now.named[index][0])
        self.now.missed.discard(index)
        if not spec.plain:
            grad = grad.permute(spec.memory)
        if box is None or box == self.now.wholes[index]:
            return grad.contiguous()
        grad = grad[tuple(slice(start, stop) for start, stop in box)]
        return grad.contiguous() if before is None else before.add_(grad)

    def _zeros(self, index: int, box: Box) -> Tensor:
        return self.now.params[index].new_zeros([stop - start for start, stop in box])

    def _settle_layout(self) -> Layout | None:
        """Who owns what: known, or read off the rows; ranks agree on it once. None for a single row."""
        if self.lone is not None:
            if self.group is not None:
                self._agree(self._masks())
            return None
        if self.now.layout is None:
            masks = self._masks()
            if self.group is None:
                return from_masks(self.now.specs, tuple(masks), self.tasks)
            self.now.layout = from_masks(self.now.specs, tuple(self._agree(masks)), self.tasks)
            self.now.found = True
        return self.now.layout

    def _masks(self) -> list[int]:
        reached = [[row[i] is not None for row in self.stored] for i in range(len(self.now.params))]
        return [sum(1 << t for t, bit in enumerate(bits) if bit) for bits in reached]

    def _agree(self, masks: list[int]) -> list[int]:
        """Owner masks joined over the ranks, once; what only other ranks reached is a zero here."""
        assert self.group is not None
        count = len(self.stored)
        if count not in self.now.agreed:
            self.now.agreed[count] = agree(masks, count, self.now.device, self.group)
        for i, (mine, joined) in enumerate(zip(masks, self.now.agreed[count], strict=True)):
            if mine & ~joined:
                raise self._disagreement(i)
            for task, row in enumerate(self.stored):
                if row[i] is None and joined >> task & 1:
                    like, whole = self.now.params[i], self.now.wholes[i]
                    row[i] = torch.zeros_like(like) if self.lone is not None else self._zeros(i, whole)
        return self.now.agreed[count]

    def _disagreement(self, index: int) -> NestlingError:
        return NestlingError(
            f"{self.now.named[index][0]} got a gradient from a task that did not reach it on any rank at the first "
            f"step, when the ranks agreed on what to send each other: pass owners=, or use every parameter in the first step"
        )


def backward(
    losses: Iterable[Tensor],
    params: Params,
    combine: Combiner[R],
    *,
    owners: Owners | None = None,
    diagnose: bool = False,
    reduce: "bool | dist.ProcessGroup" = True,
    scaler: Scaler | None = None,
    check: bool | None = None,
) -> R:
    """Combine the gradients of several losses into `.grad`: takes the place of `sum(losses).backward()`.

    `params`: a module or its parameters; the options are those of Accumulator, which does the same with less
    planning per step. Adds to `.grad` as torch does, so call `optimizer.zero_grad()` as always.
    """
    losses = check_losses(losses)  # first: where the arguments are swapped, this says so
    once = Accumulator(params, combine, owners=owners, diagnose=diagnose, reduce=reduce, scaler=scaler, check=check)
    return once.backward(losses)


_layouts: "weakref.WeakKeyDictionary[nn.Module, tuple[tuple[object, ...], Layout]]" = weakref.WeakKeyDictionary()


def _remembered(net: nn.Module, parameters: Named, specs: tuple[Spec, ...]) -> Layout | None:
    """The layout of a net that knows its owners; costly to plan, so kept as long as the net lives."""
    owners = getattr(net, "owners", None)
    if not callable(owners):
        return None
    names = tuple((name, spec) for (name, _), spec in zip(parameters, specs, strict=True))
    kept = _layouts.get(net)
    if kept is not None and kept[0] == names:
        return kept[1]
    given: Mapping[str, Tensor] = owners()
    tasks = max((int(mask.max()).bit_length() for mask in given.values() if mask.numel()), default=1)
    layout = from_owners(parameters, given, tasks)
    _layouts[net] = (names, layout)
    return layout
