"""Losses to one gradient row per task, and from there to `.grad`.

In come scalar losses and parameters; each task's backward runs only through what its loss depends on. Rows of
several micro-batches are added and combined once. Fills `.grad` (adding, as torch does) and nothing else: any
optimizer, scheduler, clipping rule and parameter group follows. It does not know how rows are combined.
"""

from collections.abc import Mapping, Sequence
from typing import Generic

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nestling.errors import NestlingError
from nestling.gradients.checks import (
    Losses,
    Params,
    arranged,
    check_combine,
    check_mode,
    check_refresh,
    check_scaler,
    explained,
    named,
    nonfinite,
    nonfinite_gradient,
    nonfinite_losses,
    refuse_hooks,
    refuse_sparse,
    unreached,
)
from nestling.gradients.contract import Combiner, R, Scaler, TaskRows
from nestling.gradients.layered import LayeredRows, take
from nestling.gradients.owners import Layout, from_masks, from_owners, tasks_of
from nestling.gradients.passes import let_go, of_task, of_weighted, put_aside
from nestling.gradients.reduce import Reduction, agree, group_of
from nestling.gradients.rowless import Layer, find
from nestling.gradients.rows import Rows
from nestling.gradients.stacked import refuse_stacked
from nestling.gradients.trained import Statistics, Trained
from nestling.gradients.walks import mixed, refuse_reentrant, refuse_scaled

Owners = Mapping[str, Tensor] | Mapping[Tensor, Tensor]


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
    mode: "rows": a gradient per task of every weight. "layers": of linear and convolution layers none, where a step has one
        micro-batch and owners come from the graph; Gram matrix and update follow from inputs and output gradients.
        "auto": on a CPU, per layer, whichever is cheaper; elsewhere rows.
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
        mode: str = "auto",
    ) -> None:
        check_refresh(refresh)
        check_mode(mode)
        check_combine(combine)
        check_scaler(scaler)
        self.given = named(params)  # the frozen ones too: they may be unfrozen later
        self.net = params if isinstance(params, nn.Module) else None
        self.combine = combine
        self.owners = owners
        self.refresh = refresh
        self.diagnose = diagnose
        self.group = group_of(reduce)
        self.scaler = scaler
        self.mode = mode
        self.names: Sequence[str] | None = None  # of the tasks, where losses come by name
        self.trained: dict[tuple[int, ...], Trained] = {}  # kept for good: a captured CUDA graph may read any
        self.now = self._plan()
        self.check = (self.now.device.type == "cpu" and scaler is None) if check is None else check
        self.renew()
        self.clear()

    def clear(self) -> None:
        """Forget the rows of a step that has begun."""
        self.micro = 0  # micro-batches added since the last fill
        self.broken = False  # whether a later one failed and left its rows half added
        self.reached: bool | None = None  # whether any loss reached any parameter; None: none was asked for
        self.certain = True  # whether the graph could tell who owns what
        self.wrong: set[int] = set()  # tasks whose loss was not finite, to be told to all ranks
        self.tasks = 0
        self.stored: list[list[Tensor | None]] = []  # a row per task, or a single one of the weighted losses
        self.lone: R | None = None  # the report that goes with a single row
        self.pending: list[Reduction] = []
        self.layers: list[Layer] = []  # whose weights have no rows
        self.scale: Tensor | None = None

    def backward(self, losses: Losses, *, retain_graph: bool = False) -> R:
        """Add the losses' gradients and fill `.grad`: a whole step."""
        self.add(losses, final=True, retain_graph=retain_graph)
        return self.fill()

    def add(self, losses: Losses, *, final: bool = False, retain_graph: bool = False) -> None:
        """Run the backward passes of one micro-batch and add its rows.

        With `final` the ranks start averaging a task's row while the next task's backward runs; without, in `fill`. The
        losses come back detached, unless `retain_graph` keeps them for another backward.
        """
        known, names = arranged(losses, self.names)
        if names is not None and names != self.names:
            self.combine.set_tasks(names)
        self.names = names
        self._add(known, final, retain_graph)

    def _add(self, losses: list[Tensor | None], final: bool, retain_graph: bool) -> None:
        """`add`, of losses that were checked."""
        there = [loss for loss in losses if loss is not None]
        self._refuse_broken()
        self._follow()
        if self.micro == 0:
            self.clear()
        elif self.pending:
            raise NestlingError("the ranks already average these rows (final=True): call fill before adding more")
        self._settle_tasks(len(losses))
        refuse_hooks(self.now.named)
        if self.scaler is not None:  # scaling a one tells the scale without asking the device
            self.scale = self.scaler.scale(torch.ones((), device=self.now.device))
            refuse_scaled(there, self.scaler)
        weights = self._weights(len(losses))
        self.broken = self.micro > 0  # until all went well; a first micro-batch that fails leaves nothing behind
        if weights is not None:
            self._add_weighted(losses, weights, retain_graph)
        else:
            self._add_rows(losses, final, retain_graph)
            self._check_owners(there)
        self.broken = False
        self.micro += 1
        if not retain_graph:
            let_go(there)

    def fill(self) -> R:
        """Combine the rows once, add the update to `.grad`, and start anew. Returns the combiner's report."""
        if self.micro == 0:
            raise NestlingError("fill found no rows: call add(losses) first")
        self._refuse_broken()
        try:
            self._refuse_unreached()
            layout = self._settle_layout()
            if self.check and self.lone is not None and self.group is not None:
                self._refuse_wrong_losses()
            if self.group is not None and not self.pending:
                self.pending = [Reduction(row, self.group) for row in self.stored]
            for reduction in self.pending:
                reduction.wait()
            if self.lone is not None:
                report = self.lone
                self._put_lone()
            else:
                assert layout is not None
                self.now.used = layout  # a captured CUDA graph reads tables that live as long as their layout
                report = self.combine(self._rows(layout))
        finally:
            self.clear()
        self._remember(report)
        return report

    def _rows(self, layout: Layout) -> TaskRows:
        part = layout
        if self.layers:
            without = {layer.param for layer in self.layers}
            masks = tuple(0 if i in without else mask for i, mask in enumerate(self._masks()))
            part = from_masks(self.now.specs, masks, self.tasks)
        rows = Rows(
            self.now.params,
            part,
            self.stored,
            scale=self.scale,
            check=self.check,
            group=self.group,
            refresh=self.refresh,
            certain=self.certain,
        )
        return LayeredRows(layout, self.layers, rows) if self.layers else rows

    def renew(self) -> None:
        """Find the weights anew at the next step and count `refresh` from there."""
        self.steps = 0
        self.last: R | None = None

    def _plan(self) -> Trained:
        """What is known of the parameters that need a gradient now: some may be frozen, unfrozen or replaced."""
        if self.net is not None:
            now = list(self.net.parameters())
            if len(now) != len(self.given) or any(p is not q for p, (_, q) in zip(now, self.given, strict=True)):
                self.given = named(self.net)
        needed = tuple(id(p) for _, p in self.given if p.requires_grad)  # kept alive there, so ids are not used again
        if needed not in self.trained:
            self.trained[needed] = Trained(self.given, self.net if self.owners is None else None)
        return self.trained[needed]

    def _follow(self) -> None:
        """Parameters may change from step to step."""
        now = self._plan()
        if now is self.now:
            return
        if self.micro:
            changed = sorted({name for name, _ in now.named} ^ {name for name, _ in self.now.named})
            what = f"{changed[0]} was frozen or unfrozen" if changed else "a parameter was replaced"
            raise NestlingError(
                f"{what} amid a step: expected the same {len(self.now.named)} parameters to "
                f"need a gradient in all its micro-batches; call fill first"
            )
        self.now = now
        self.renew()  # the last weights were those of other parameters

    def _refuse_broken(self) -> None:
        if self.broken:
            raise NestlingError(
                f"micro-batch {self.micro + 1} of this step failed after some of its gradients were added: call clear() "
                f"and begin the step anew"
            )

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
            self.last = report

    def _add_rows(self, losses: Sequence[Tensor | None], final: bool, retain_graph: bool) -> None:
        """A backward per task."""
        early = self.group if final and self.now.layout is not None else None
        statistics = Statistics(self.net)
        if final and self._may_go_without_rows():
            self.layers = find(losses, self.now.params, always=self.mode == "layers")
        if self.micro == 0:
            self.stored = [[None] * len(self.now.params) for _ in losses]
        with put_aside(self.now.params):
            last = max(task for task, loss in enumerate(losses) if loss is not None)
            for task, loss in enumerate(losses):
                if loss is not None:
                    self._add_task(task, loss, retain=retain_graph or task < last)
                    statistics.settle()
                else:
                    self.now.fill_up(task, self.stored[task])
                if early is not None:
                    self.pending.append(Reduction(self.stored[task], early))

    def _may_go_without_rows(self) -> bool:
        """Whether this is a whole step of one process, whose owners the graph tells."""
        whole = self.micro == 0 and self.group is None and self.now.layout is None and self.tasks > 1
        told = self.steps > 0 or not self.combine.owners_matter  # rows are looked at once, for stacks of heads
        here = self.mode == "layers" or (self.mode == "auto" and self.now.device.type == "cpu")
        return whole and told and here

    def _add_weighted(self, losses: Sequence[Tensor | None], weights: Tensor, retain_graph: bool) -> None:
        """One backward of the weighted losses; torch itself adds it up, in place of the caller's gradients."""
        if self.check:
            self.wrong.update(nonfinite(losses))
            if self.group is None:  # else all ranks are told in fill
                self._refuse_wrong_losses()
        pairs = [(w, loss) for w, loss in zip(weights.unbind(), losses, strict=True) if loss is not None]
        there, seeds = [loss for _, loss in pairs], [w.to(loss).view(loss.shape) for w, loss in pairs]
        if self.scale is not None:
            seeds = [seed * self.scale.to(seed) for seed in seeds]
        self.stored = self.stored or [[None] * len(self.now.params)]
        of_weighted(there, seeds, retain_graph, self.now.params, self.stored[0])
        self.reached = any(grad is not None for grad in self.stored[0])

    @torch.no_grad()
    def _put_lone(self) -> None:
        if self.check:
            nonfinite_gradient(self.now.named, self.stored[0])
        for p, grad in zip(self.now.params, self.stored[0], strict=True):
            if grad is not None:
                p.grad = grad if p.grad is None else p.grad.add_(grad)

    def _add_task(self, task: int, loss: Tensor, retain: bool) -> None:
        seed = None if self.scale is None else self.scale.to(loss).view(loss.shape)
        if self.layers:
            self._add_layered(task, loss, seed, retain)
            return
        reached = of_task(loss, seed, retain, task, self.now, self.stored[task])
        if reached is not None:
            self.reached = bool(self.reached) or reached

    def _add_layered(self, task: int, loss: Tensor, seed: Tensor | None, retain: bool) -> None:
        """The same, with output gradients of layers in place of their weights' rows."""
        try:
            found = take(loss, seed, retain, task, self.layers, self.now.params)
        except RuntimeError as error:
            raise explained(error, task) from error
        for i, grad in found.items():
            refuse_sparse(grad, self.now.named[i][0])
            self.stored[task][i] = grad.permute(self.now.specs[i].memory).contiguous()
        reached = {*found, *(layer.param for layer in self.layers if task in layer.tasks)}
        self.now.missed -= reached
        self.reached = bool(self.reached) or bool(reached)

    def _settle_layout(self) -> Layout | None:
        """Who owns what: known, or read off the rows; ranks agree on it once. None for a single row."""
        if self.lone is not None:
            if self.group is not None:
                self.now.agree(self._masks(), self.stored, self.lone is not None, self.group)
            return None
        if self.now.layout is None:
            masks = self._masks()
            if self.group is None:
                return from_masks(self.now.specs, tuple(masks), self.tasks)
            self.now.layout = from_masks(
                self.now.specs, tuple(self.now.agree(masks, self.stored, False, self.group)), self.tasks
            )
            self.now.found = True
        return self.now.layout

    def _check_owners(self, losses: Sequence[Tensor]) -> None:
        """Whether the graph can tell who owns what; looked at again only where it says something new."""
        if self.steps == 0 and self.micro == 0 and self.now.missed:  # hidden, or just unused?
            refuse_reentrant(losses)
        if self.now.layout is not None and not self.now.found:
            return
        masks = tuple(self._masks())
        if masks not in self.now.known:
            matter = self.combine.owners_matter
            lost = mixed(losses)
            if lost and matter:
                raise NestlingError(
                    "these losses come from a net that was compiled whole, whose graph no longer tells which task uses "
                    "which parameter, and this method needs to know: pass owners=, such as nestling.gradients.owners_of("
                    "losses, net.named_parameters()) of one forward pass before compiling; or compile per stage"
                )
            if matter and self.check:
                refuse_stacked(self.now.named, self.stored)
            self.now.known[masks] = not lost
        self.certain = self.certain and self.now.known[masks]

    def _refuse_unreached(self) -> None:
        """Raise if no loss reached any parameter; ranks ask each other at the first step."""
        reached = self.reached
        if self.group is not None:
            if not self.now.met:
                self.now.met = any(agree([int(reached is not False)], 1, self.now.device, self.group))
            reached = self.now.met
        if reached is False:
            raise unreached(self.now.named)

    def _refuse_wrong_losses(self) -> None:
        """Raise if a loss was NaN or infinite, on any rank, naming its task."""
        if self.group is not None:
            mask = sum(1 << task for task in self.wrong)
            joined = agree([mask], self.tasks, self.now.device, self.group)[0]
            self.wrong = set(tasks_of(joined))
        if self.wrong:
            raise nonfinite_losses(sorted(self.wrong), self.tasks)

    def _masks(self) -> list[int]:
        """Per parameter the tasks that reached it, as bits."""
        layers = {layer.param: sum(1 << task for task in layer.tasks) for layer in self.layers}
        reached = [[row[i] is not None for row in self.stored] for i in range(len(self.now.params))]
        return [layers.get(i, sum(1 << task for task, bit in enumerate(bits) if bit)) for i, bits in enumerate(reached)]


def backward(
    losses: Losses,
    params: Params,
    combine: Combiner[R],
    *,
    owners: Owners | None = None,
    diagnose: bool = False,
    reduce: "bool | dist.ProcessGroup" = True,
    scaler: Scaler | None = None,
    check: bool | None = None,
    mode: str = "auto",
    retain_graph: bool = False,
) -> R:
    """Combine the gradients of several losses into `.grad`: takes the place of `sum(losses).backward()`.

    `losses`: one per task, or by name; None where a task is absent. `params`: a module or its parameters. The options are
    those of Accumulator, which does the same with less planning per step, and `retain_graph` as torch's. Adds to `.grad` as
    torch does, so call `optimizer.zero_grad()` as always.
    """
    known, names = arranged(losses, None)  # first: where the arguments are swapped, this says so
    once = Accumulator(
        params, combine, owners=owners, diagnose=diagnose, reduce=reduce, scaler=scaler, check=check, mode=mode
    )
    if names is not None:
        combine.set_tasks(names)
    once._add(known, final=True, retain_graph=retain_graph)
    return once.fill()
