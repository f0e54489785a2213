"""Every task through its own subnetwork: D_s over D_n's memory, all tasks at once on a GPU.

In: a batch. Out: `.grad` filled by a combiner, and the losses. A narrow task pays for its narrow subnetwork and not for
the full width, and on CUDA the tasks run side by side on streams of their own. The mathematics (rows, combiners) is that
of the other rooms; this one only decides how the rows are obtained.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nestling.gradients.combiners import Report
from nestling.gradients.contract import Combiner
from nestling.gradients.flat import FlatRows
from nestling.gradients.owners import from_owners
from nestling.kernels import HIGH_PRIORITY, Fused, Kept, suits
from nestling.nets import NestedNet
from nestling.nets.modes import all_trains
from nestling.nets.within import can_live_within, leads, memory_order, positions, within
from nestling.recipes.recipe import TrainRecipe
from nestling.train.losses import inner_teacher, stage_loss


def worth_own_subnets(net: NestedNet) -> bool:
    """On CUDA wherever possible (tasks run side by side); on a CPU where width is nested, since there a shared forward
    pass makes every task pay the full width, while in depth it is the cheaper way. Not where parts are frozen."""
    masked = any(getattr(module, "mask", None) is not None for module in net.modules())
    on_cuda = next(net.parameters()).device.type == "cuda"
    return len(net.plan.heads) > 1 and (masked or on_cuda) and can_live_within(net.plan) and all_trains(net)


def by_kernels(net: NestedNet, train: TrainRecipe) -> bool:
    """Whether kernels of our own compute the network's training pass."""
    return train.precision == "bfloat16" and suits(net, train.batch)


def faster(net: NestedNet, train: TrainRecipe) -> Any:
    """The network's forward pass with its small operations fused: by kernels of our own where they fit, else by torch."""
    return Fused(net) if by_kernels(net, train) else torch.compile(net, fullgraph=True)


class Tasks:
    """One subnetwork per task, and the rows they fill."""

    def __init__(
        self,
        net: NestedNet,
        combine: Combiner[Report],
        train: TrainRecipe,
        compiled: bool,
        shares: bool = False,  # targets are shares of classes
    ) -> None:
        self.combine, self.train, self.shares = combine, train, shares
        stages = net.plan.answering
        whole = dict(net.named_parameters())
        smalls = [within(net, stage) for stage in stages]
        # Leaves stand in the network's order of parameters and are read in its order of memory: that is how places count.
        mine = [dict(small.named_parameters()) for small in smalls]
        self.leaves = [[leaves[name] for name in whole if name in leaves] for leaves in mine]
        self.orders = [[memory_order(whole[name]) for name in whole if name in leaves] for leaves in mine]
        self.nets: list[Any] = [faster(small, train) if compiled else small for small in smalls]
        fused = all(isinstance(each, Fused) for each in self.nets)
        self.shares_images = fused and all(leads(net.plan, stage, stages[-1]) for stage in stages)
        layout = from_owners(list(whole.items()), net.owners(), len(stages))
        self.rows = FlatRows(list(whole.values()), layout, [positions(net, stage) for stage in stages])
        on_cuda = self.rows.device.type == "cuda"
        self.streams = [torch.cuda.Stream(priority=HIGH_PRIORITY) for _ in stages] if on_cuda else []

    def __call__(self, x: Tensor, y: Tensor, teacher: Tensor | None = None) -> tuple[Tensor, Report]:
        """`teacher`: soft targets from outside; see losses.py for who learns from them."""
        last = len(self.nets) - 1
        losses: list[Tensor] = [y] * (last + 1)
        kept = Kept() if self.shares_images else None  # held until all streams have read it
        inner: Tensor | None = None
        answered: torch.cuda.Event | None = None
        main = torch.cuda.current_stream() if self.streams else None
        for task in range(last, -1, -1):  # the longest first: the others read its images and learn from its answer
            with self.beside(task, main):
                if answered is not None:  # wait for that answer, not for the backward pass
                    self.streams[task].wait_event(answered)
                logits = self.forward(task, x, kept)
                if task == last and (kept is not None or self.train.distill):
                    inner = inner_teacher(logits, self.train, teacher)
                    answered = self.streams[task].record_event() if self.streams else None
                losses[task] = self.learn(task, logits, y, inner if task < last else teacher)
        if main is not None:
            for stream in self.streams:
                main.wait_stream(stream)
        with torch.autocast(y.device.type, enabled=False):  # which would round the rows before it multiplies them
            report = self.combine(self.rows)
        return torch.stack(losses), report

    def forward(self, task: int, x: Tensor, kept: Kept | None) -> Tensor:
        """A task's logits. By the rule of births the longest has computed all the images of the others on its way."""
        role = {} if kept is None else {"kept": kept} if task == len(self.nets) - 1 else {"known": kept}
        (logits,) = self.nets[task](x, **role)
        found: Tensor = logits
        return found

    @contextmanager
    def beside(self, task: int, main: "torch.cuda.Stream | None") -> Iterator[None]:
        """A task's own stream, which goes on from where the main one is; on a CPU nothing."""
        if main is None:
            yield
            return
        self.streams[task].wait_stream(main)
        with torch.cuda.stream(self.streams[task]):
            yield

    def learn(self, task: int, logits: Tensor, y: Tensor, teacher: Tensor | None) -> Tensor:
        """Loss and backward of one task; its gradients become its row."""
        with torch.autocast(y.device.type, enabled=False):
            loss = stage_loss(logits, y, self.train, teacher, self.shares)
            grads = torch.autograd.grad(loss, self.leaves[task])
            self.rows.put(task, [g.permute(order) for g, order in zip(grads, self.orders[task], strict=True)])
        return loss.detach()
