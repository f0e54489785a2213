"""What the micro-batches of one step have given so far: rows, or a single row of the losses under weights.

In come losses; out come the rows with who owns what, averaged over the ranks. What is wrong with them is refused here, with
the task named. It lives for one step; it does not know when a step ends, nor how rows are combined.
"""

from collections.abc import Sequence
from typing import Generic

import torch
import torch.distributed as dist
from torch import Tensor

from nestling.errors import NestlingError
from nestling.gradients.checks import (
    nonfinite,
    nonfinite_gradient,
    nonfinite_losses,
    nonfinite_places,
    unreached,
)
from nestling.gradients.contract import R, TaskRows
from nestling.gradients.layered import LayeredRows, taken
from nestling.gradients.owners import Layout, tasks_of
from nestling.gradients.passes import added, of_task, of_weighted, put_aside
from nestling.gradients.reduce import Reduction, agree
from nestling.gradients.rowless import WeightUse
from nestling.gradients.rows import Rows
from nestling.gradients.stacked import of_a_stack, stacked, unused
from nestling.gradients.trained import Statistics, Trained
from nestling.gradients.walks import doubtful, mixed, refuse_reentrant


class Gathered(Generic[R]):
    """The gradients of a step that has begun, of the parameters that are trained now."""

    def __init__(
        self, now: Trained, group: dist.ProcessGroup | None, check: bool, mean: bool = False, look: bool = False
    ) -> None:
        """`look`: whether rows may be read once to see who owns what, though that waits for the device."""
        self.now = now
        self.group = group
        self.check = check
        self.look = look
        self.sums: list[list[Tensor | None]] | None = [] if mean else None  # of the micro-batches so far, in float64
        self.tasks = 0
        self.micro = 0  # micro-batches added
        self.broken = False  # whether a later one failed and left its rows half added
        self.reached: bool | None = None  # whether any loss reached any parameter; None: none was asked for
        self.certain = True  # whether the graph could tell who owns what
        self.wrong: set[int] = set()  # tasks whose loss was not finite, to be told to all ranks
        self.stored: list[list[Tensor | None]] = []  # a row per task, or a single one of the weighted losses
        self.lone: R | None = None  # the report that goes with a single row
        self.pending: list[Reduction] = []
        self.layers: list[WeightUse] = []  # whose weights have no rows
        self.scale: Tensor | None = None

    def values_of(self, losses: Sequence[Tensor | None]) -> Tensor:
        """The losses' values, (tasks,), their mean over the ranks; for methods that follow from them."""
        there = [loss for loss in losses if loss is not None]
        if self.micro or len(there) < len(losses):
            raise NestlingError(
                "this method follows from the losses' values: expected one micro-batch a step, with every task's loss"
            )
        values = torch.stack([loss.detach().reshape(()).double() for loss in there])
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
            values /= dist.get_world_size(self.group)
        return values

    def add_rows(
        self, losses: Sequence[Tensor | None], statistics: Statistics, final: bool, retain_graph: bool
    ) -> None:
        """A backward per task. With `final` the ranks average a task's row while the next task's backward runs."""
        final = final and self.sums is None
        early = self.group if final and self.now.layout is not None and self.now.sharded is None else None
        if self.micro == 0 or self.sums is not None:
            self.stored = [[None] * len(self.now.params) for _ in losses]
        with put_aside(self.now.params), statistics.watched():
            last = max(task for task, loss in enumerate(losses) if loss is not None)
            for task, loss in enumerate(losses):
                if loss is not None:
                    self._add_task(task, loss, retain=retain_graph or task < last)
                    statistics.settle()
                else:
                    self.now.fill_up(task, self.stored[task])
                if early is not None:
                    self.pending.append(Reduction(self.stored[task], early))

    def add_weighted(self, losses: Sequence[Tensor | None], weights: Tensor, retain_graph: bool) -> None:
        """One backward of the weighted losses; torch itself adds it up, in place of the caller's gradients."""
        if self.check:
            self.wrong.update(nonfinite(losses))
            if self.group is None:  # else all ranks are told in fill
                self._refuse_wrong_losses()
        pairs = [(w, loss) for w, loss in zip(weights.unbind(), losses, strict=True) if loss is not None]
        there, seeds = [loss for _, loss in pairs], [w.to(loss).view(loss.shape) for w, loss in pairs]
        if self.scale is not None:
            seeds = [seed * self.scale.to(seed) for seed in seeds]
        if not self.stored or self.sums is not None:
            self.stored = [[None] * len(self.now.params)]
        of_weighted(there, seeds, retain_graph, self.now, self.stored[0])
        self.reached = any(grad is not None for grad in self.stored[0])

    @torch.no_grad()
    def sum_up(self) -> None:
        """Add this micro-batch's rows to those before it: in float64, where the order of so few makes no difference."""
        if self.sums is not None:
            before = self.sums or [[None] * len(row) for row in self.stored]
            pairs = [zip(kept, row, strict=True) for kept, row in zip(before, self.stored, strict=True)]
            self.sums = [[added(kept, None if g is None else g.double()) for kept, g in row] for row in pairs]

    @torch.no_grad()
    def put_lone(self) -> R:
        """Add a single row to `.grad`; the report that was known before it."""
        assert self.lone is not None
        if self.check:
            self._refuse_wrong_gradients(self.stored[0])
        for p, grad in zip(self.now.params, self.stored[0], strict=True):
            if grad is not None:
                p.grad = grad if p.grad is None else p.grad.add_(grad)
        return self.lone

    def _add_task(self, task: int, loss: Tensor, retain: bool) -> None:
        seed = None if self.scale is None else self.scale.to(loss).view(loss.shape)
        without = [layer.param for layer in self.layers]
        with taken(self.layers, task) as edges:
            reached = of_task(loss, seed, retain, task, self.now, self.stored[task], without, edges)
        through = [layer.param for layer in self.layers if task in layer.tasks]
        self.now.missed.difference_update(through)
        if reached is not None:
            self.reached = bool(self.reached) or reached or bool(through)

    def check_owners(self, losses: Sequence[Tensor | None], matter: bool, first: bool) -> None:
        """Whether the graph can tell who owns what; looked at again only where it says something new."""
        there = [loss for loss in losses if loss is not None]
        if first and self.micro == 0 and self.now.missed:  # hidden, or just unused?
            refuse_reentrant(there)
        if self.now.layout is not None and not self.now.found:
            return
        masks, now = tuple(self.masks()), self.now
        new = masks not in now.known or not now.clear
        if new:
            certain = not mixed(there) and not (now.sharded is not None and now.sharded.fills_up)
            now.known[masks] = certain and self._looked(losses, matter)
        if now.known[masks]:
            self._leave_unused()
            if len(there) == self.tasks:
                now.told[self.tasks] = tuple(self.masks())
        elif self.tasks in now.told:
            self._keep_owned(now.told[self.tasks], look=new or self.check)
        elif matter:
            raise NestlingError(
                "these losses come from a net that was compiled whole, whose graph no longer tells which task uses which "
                "parameter, and this method needs to know: give the compiled module itself to an Accumulator made before the "
                "first step, which then runs uncompiled; or pass owners=, such as nestling.gradients.owners_of(losses, "
                "net.named_parameters()) of one forward pass before compiling; or compile per stage"
            )
        else:
            self.certain = False

    def _looked(self, losses: Sequence[Tensor | None], matter: bool) -> bool:
        """Whether it is known who owns what, once the rows were read where the graph leaves it open."""
        now, wants = self.now, self.check or (matter and self.look)
        doubts = {task: now.places(doubtful(loss)) for task, loss in enumerate(losses) if loss is not None}
        if not wants or not any(doubts.values()):  # told not to look: the graph is taken at its word
            return matter or not any(doubts.values())
        grads = [[self._gradient(task, i) for i in range(len(now.params))] for task in range(self.tasks)]
        found, now.clear = unused(grads, doubts, now.sharded)
        now.unused |= found
        stack = stacked(grads, now.sharded, [p.shape for _, p in now.named])
        if matter and stack is not None:
            raise of_a_stack(now.named[stack][0])
        return stack is None

    def _gradient(self, task: int, param: int) -> Tensor | None:
        """A task's row of a parameter; of a layer without rows whether there is any, by output."""
        delta = next((layer.deltas.get(task) for layer in self.layers if layer.param == param), None)
        return self.stored[task][param] if delta is None else delta.transpose(0, 1).flatten(1).any(1)

    def _leave_unused(self) -> None:
        """Let go of zeros of what a task does not use; what is no longer zero is used after all."""
        for task, i in sorted(self.now.unused):
            grad = self._gradient(task, i)
            if grad is None:
                continue
            if self.check and self.now.sharded is None and bool(grad.any()):
                self.now.unused.discard((task, i))
                continue
            self.stored[task][i] = None
            for layer in self.layers:
                if layer.param == i:
                    layer.tasks = tuple(other for other in layer.tasks if other != task)

    def _keep_owned(self, told: Sequence[int], look: bool) -> None:
        """Let go of the zeros that a compiled graph made of what a task does not own, by what an eager one told."""
        for task, row in enumerate(self.stored):
            for i, grad in enumerate(row):
                if grad is not None and not told[i] >> task & 1:
                    if look and bool(grad.any()):
                        raise NestlingError(
                            f"{self.now.named[i][0]} got a gradient from task {task}, which did not use it in the step before "
                            f"compiling: pass owners=, or make a new Accumulator when the net changes"
                        )
                    row[i] = None
        for layer in self.layers:
            layer.tasks = tuple(task for task in layer.tasks if told[layer.param] >> task & 1)

    def settle_layout(self) -> Layout | None:
        """Who owns what: known, or read off the rows; ranks agree on it once. None for a single row."""
        if self.lone is not None:
            if self.group is not None:
                self.now.agree(self.masks(), self.stored, True, self.group)
            return None
        if self.now.layout is None:
            masks = self.masks()
            if self.group is None:
                return self.now.reached_by(masks, self.tasks)
            self.now.layout = self.now.reached_by(self.now.agree(masks, self.stored, False, self.group), self.tasks)
            self.now.found = True
        return self.now.layout

    def rows(self, layout: Layout, refresh: int) -> TaskRows:
        """What a combiner is given."""
        part = layout
        if self.layers:
            without = {layer.param for layer in self.layers}
            part = self.now.reached_by([0 if i in without else m for i, m in enumerate(self.masks())], self.tasks)
        rows = Rows(
            self.now.params,
            part,
            self.stored,
            scale=self.scale,
            check=self.check,
            group=self.group,
            refresh=refresh,
            certain=self.certain,
            shards=None if self.group is None or self.now.sharded is None else self.now.sharded.shards,
        )
        return LayeredRows(layout, self.layers, rows) if self.layers else rows

    def average(self) -> None:
        """Over the ranks, unless that has begun; wait for it. Where it is asked for, over their micro-batches, too."""
        wide, ranks = self.sums is not None, 1
        if self.group is not None:
            ranks = dist.get_world_size(self.group)
            if self.check and self.lone is not None:
                self._refuse_wrong_losses()
            if self.now.sharded is not None:  # FSDP has averaged them
                return
            for reduction in self.pending or [Reduction(row, self.group, wide) for row in self.stored]:
                reduction.wait()
        if wide:
            for row in self.stored:
                row[:] = [
                    None if g is None else g.div_(self.micro * ranks).to(p)
                    for p, g in zip(self.now.params, row, strict=True)
                ]

    def refuse_broken(self) -> None:
        if self.broken:
            raise NestlingError(
                f"micro-batch {self.micro + 1} of this step failed after some of its gradients were added: call clear() "
                f"and begin the step anew"
            )

    def refuse_unreached(self) -> None:
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

    def _refuse_wrong_gradients(self, row: Sequence[Tensor | None]) -> None:
        """Raise if a summed gradient is not finite; where each rank sees its share alone, all are told."""
        wrong = nonfinite_places(row)
        if self.group is not None and self.now.sharded is not None:
            seen = agree([int(i in wrong) for i in range(len(row))], 1, self.now.device, self.group)
            wrong = [i for i, bad in enumerate(seen) if bad]
        if wrong:
            raise nonfinite_gradient(self.now.named[wrong[0]][0])

    def used(self) -> list[bool]:
        """Per parameter whether a loss reached it."""
        without = {layer.param for layer in self.layers if layer.tasks}
        return [i in without or any(row[i] is not None for row in self.stored) for i in range(len(self.now.params))]

    def masks(self) -> list[int]:
        """Per parameter the tasks that reached it, as bits."""
        layers = {layer.param: sum(1 << task for task in layer.tasks) for layer in self.layers}
        reached = [[row[i] is not None for row in self.stored] for i in range(len(self.now.params))]
        return [layers.get(i, sum(1 << task for task, bit in enumerate(bits) if bit)) for i, bits in enumerate(reached)]
