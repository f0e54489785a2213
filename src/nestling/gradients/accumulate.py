"""Losses to one gradient row per task, and from there to `.grad`.

In come scalar losses and parameters; each task's backward runs only through what its loss depends on. Rows of
several micro-batches are added and combined once. Fills `.grad` (adding, as torch does) and nothing else: any
optimizer, scheduler, clipping rule and parameter group follows. It does not know how rows are combined.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
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
    check_flag,
    check_mode,
    check_owners,
    check_refresh,
    check_scaler,
    named,
    refuse_hooks,
    with_graphs,
)
from nestling.gradients.compiled import EagerFirst, compiled_inside
from nestling.gradients.contract import Combiner, R, Scaler
from nestling.gradients.gathered import Gathered
from nestling.gradients.owners import from_owners
from nestling.gradients.passes import let_go
from nestling.gradients.reduce import group_of
from nestling.gradients.replaced import Followed
from nestling.gradients.rowless import find
from nestling.gradients.trained import Statistics, Trained
from nestling.gradients.walks import refuse_scaled
from nestling.gradients.wrapped import unwrapped

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
    mean: a step's rows are the mean over its micro-batches, of which all ranks add as many, rather than their sum. It is added
        up in float64, so that it does not depend on which rank has which.
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
        mean: bool = False,
    ) -> None:
        check_refresh(refresh)
        check_mode(mode)
        check_combine(combine)
        check_scaler(scaler)
        check_owners(owners)
        self.given = named(params)  # the frozen ones too: they may be unfrozen later
        self.net = unwrapped(params) if isinstance(params, nn.Module) else None
        self.combine = combine
        self.owners = owners
        self.refresh = refresh
        self.diagnose = diagnose
        self.scaler = scaler
        self.mode = mode
        self.mean = mean
        self.names: Sequence[str] | None = None  # of the tasks, where losses come by name
        self.trained: dict[tuple[int, ...], Trained] = {}  # kept for good: a captured CUDA graph may read any
        self.now = self._plan()
        self.group = self._group(reduce)
        self.asked = check
        self.check = (self.now.device.type == "cpu" and scaler is None) if check is None else check
        whole = compiled_inside(params) if isinstance(params, nn.Module) else None
        asked = whole is not None and owners is None and self.now.layout is None and combine.owners_matter
        self.eager = EagerFirst(whole) if whole is not None and asked else None
        told = self.now.layout is not None or owners is not None or self.now.route is not None
        self.followed = None if self.net is not None or told else Followed()
        self.renew()
        self.clear()

    def clear(self) -> None:
        """Forget the rows of a step that has begun."""
        self.step: Gathered[R] = Gathered(self.now, self.group, self.check, self.mean, self._may_look())

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
        check_flag("retain_graph", retain_graph)
        if any(loss is None for loss in losses):
            self._refuse_absent()
        losses = with_graphs(losses, self._idle)
        there = [loss for loss in losses if loss is not None]
        self.step.refuse_broken()
        self._follow()
        if self.step.micro == 0:
            self.clear()
        elif self.step.pending:
            raise NestlingError("the ranks already average these rows (final=True): call fill before adding more")
        step = self.step
        self._settle_tasks(len(losses))
        refuse_hooks(self.now.named)
        if self.scaler is not None:  # scaling a one tells the scale without asking the device
            step.scale = self.scaler.scale(torch.ones((), device=self.now.device))
            refuse_scaled(there, self.scaler)
        if getattr(self.combine, "watches", False):
            self.combine.see(step.values_of(losses))
        weights = self._weights(len(losses))
        step.broken = step.micro > 0  # until all went well; a first micro-batch that fails leaves nothing behind
        if weights is not None:
            step.add_weighted(losses, weights, retain_graph)
        else:
            if final and self._may_go_without_rows():
                step.layers = find(losses, self.now.params, always=self.mode == "layers")
            step.add_rows(losses, Statistics(self.net), final, retain_graph)
            step.check_owners(losses, self.combine.owners_matter, first=self.steps == 0)
            if self.eager is not None and self.now.told:
                self.eager.done()
                self.eager = None
        if self.followed is not None and (len(there) == len(losses) or self.followed.used) and step.reached:
            self.followed.look(there, self.now.named, step.used())
        step.sum_up()
        step.broken = False
        step.micro += 1
        if not retain_graph:
            let_go(there)

    def _refuse_absent(self) -> None:
        """Raise where ranks exchange inside a backward pass: one that has none would let the others wait."""
        synced = self.net is not None and any(isinstance(module, nn.SyncBatchNorm) for module in self.net.modules())
        if self.now.sharded is not None or (self.group is not None and synced):
            what = "has SyncBatchNorm" if self.now.sharded is None else "is sharded by FSDP"
            raise NestlingError(
                f"a loss is None, and the model {what}, whose ranks must run every backward pass together: give "
                f"a zero of this batch's graph, such as 0 * output.sum(), for a task that is absent"
            )

    def fill(self) -> R:
        """Combine the rows once, add the update to `.grad`, and start anew. Returns the combiner's report."""
        step = self.step
        if step.micro == 0:
            raise NestlingError("fill found no rows: call add(losses) first")
        step.refuse_broken()
        try:
            step.refuse_unreached()
            step.stored = step.sums or step.stored
            layout = step.settle_layout()
            step.average()
            with self.now.sharded.lent() if self.now.sharded is not None else nullcontext():
                if layout is None:
                    report = step.put_lone()
                else:
                    self.now.used = layout  # a captured CUDA graph reads tables that live as long as their layout
                    report = self.combine(step.rows(layout, self.refresh))
        finally:
            self.clear()
        self._remember(report)
        return report

    def renew(self) -> None:
        """Find the weights anew at the next step and count `refresh` from there."""
        self.steps = 0
        self.last: R | None = None
        self.seen = self._changes()

    def _changes(self) -> int:
        """How often the method's order and importance were set."""
        return int(getattr(self.combine, "changes", 0))

    def _plan(self) -> Trained:
        """What is known of the parameters that need a gradient now: some may be frozen, unfrozen or replaced."""
        if self.net is not None:
            now = list(self.net.parameters())
            if len(now) != len(self.given) or any(p is not q for p, (_, q) in zip(now, self.given, strict=True)):
                self.given = named(self.net)
        needed = tuple(id(p) for _, p in self.given if p.requires_grad)  # kept alive there, so ids are not used again
        if needed not in self.trained:
            self.trained[needed] = Trained(self.given, self.net, asked=self.owners is None)
        return self.trained[needed]

    def _idle(self) -> list[int]:
        """The tasks of which nothing trains, where it is known who owns what."""
        layout = self._plan().layout
        return [task for task, size in enumerate(layout.sizes()) if size == 0] if layout is not None else []

    def _group(self, reduce: "bool | dist.ProcessGroup") -> "dist.ProcessGroup | None":
        """The ranks to average over."""
        if self.now.sharded is not None and self.mean:
            raise NestlingError(
                "mean= is given, but the model is sharded by FSDP, which sums in an order of its own: leave it out"
            )
        if self.now.sharded is not None and reduce is not True:
            raise NestlingError(
                "reduce= is given, but the model is sharded by FSDP, which averages itself: leave it out"
            )
        return group_of(reduce, None if self.now.route is None else self.now.route.group)

    def _follow(self) -> None:
        """Parameters may change from step to step."""
        now = self._plan()
        if now is self.now:
            return
        if self.step.micro:
            changed = sorted({name for name, _ in now.named} ^ {name for name, _ in self.now.named})
            what = f"{changed[0]} was frozen or unfrozen" if changed else "a parameter was replaced"
            raise NestlingError(
                f"{what} amid a step: expected the same {len(self.now.named)} parameters to "
                f"need a gradient in all its micro-batches; call fill first"
            )
        self.now = now
        self.renew()  # the last weights were those of other parameters

    def _settle_tasks(self, tasks: int) -> None:
        if self.now.layout is None and self.owners is not None:
            self.now.layout = self.now.share_of(from_owners(self.now.named, self.owners, tasks))
        before = self.step.tasks if self.step.micro else self.now.layout.tasks if self.now.layout is not None else tasks
        if before != tasks:
            raise NestlingError(
                f"found {tasks} losses, expected {before}: give one loss per task, the same tasks in every "
                f"micro-batch and as many as the owners name"
            )
        self.step.tasks = tasks

    def _weights(self, tasks: int) -> Tensor | None:
        """Weights (tasks,) known before the gradients, if this step has them; decided at its first micro-batch."""
        if self.step.micro and self.step.lone is None:
            return None
        fixed = None if self.diagnose else self.combine.fixed(tasks, self.now.device)
        if fixed is not None:
            self.step.lone = fixed[1]
            return fixed[0]
        if self.refresh > 1 and self._changes() != self.seen:
            self.renew()
        if self.last is None or self.steps % self.refresh == 0:
            return None
        assert self.last.weights is not None
        self.step.lone = self.last.stale()
        return self.last.weights[0]

    def _remember(self, report: R) -> None:
        self.steps += 1
        if self.refresh > 1:
            self.last = report

    def _may_look(self) -> bool:
        """Whether a first step may read rows to see who owns what: not where waiting is forbidden, or cannot be."""
        kind = self.now.device.type
        return (
            self.asked is not False
            and kind != "meta"
            and not (kind == "cuda" and torch.cuda.is_current_stream_capturing())
        )

    def _may_go_without_rows(self) -> bool:
        """Whether this is a whole step of one process, whose owners the graph tells."""
        alone = self.group is None and self.now.route is None and not self.mean
        whole = alone and self.step.micro == 0 and self.now.layout is None and self.step.tasks > 1
        told = self.steps > 0 or not self.combine.owners_matter  # rows are looked at once, for stacks of heads
        here = self.mode == "layers" or (self.mode == "auto" and self.now.device.type == "cpu")
        return whole and told and here
