"""Engines: how the steps of an epoch are carried out. The step itself is the same in both.

`Eager` calls it batch by batch, on any device, from any split. `Captured` captures one whole step on CUDA (fetching and
augmenting the batch, forward, backward, combining, update) and replays it on a stream of its own: no Python, no waiting
between steps nor between epochs. A step that has changed its form is captured anew. Both leave an epoch's losses in a
tensor on the device; what is to be done between two epochs belongs in their `lane`. Rates come in as numbers.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from nestling.data import MemorySplit, Split
from nestling.data.own import LoaderSplit
from nestling.errors import NestlingError
from nestling.gradients.reduce import group_of
from nestling.kernels import HIGH_PRIORITY
from nestling.recipes.recipe import Recipe
from nestling.train.progress import Startup
from nestling.train.step import Step


def steps_per_epoch(split: Split, batch: int) -> int:
    """Full batches only: every step then sees the same number of images, as a captured graph must. A DataLoader has its own."""
    if isinstance(split, LoaderSplit):
        return split.steps
    if len(split) < batch:
        raise NestlingError(f"train.batch={batch} is more than the {len(split)} training images; lower train.batch.")
    return len(split) // batch


def batch_of(split: Split, batch: int) -> int:
    """The inputs of a step: those that were asked for, or of a DataLoader its own."""
    own = split.loader.batch_size if isinstance(split, LoaderSplit) else None
    return own or batch


class Eager:
    """Step by step from Python."""

    def __init__(self, step: Step, split: Split, batch: int) -> None:
        self.step, self.split, self.batch = step, split, batch
        self.steps = steps_per_epoch(split, batch)

    def epoch(self, generator: torch.Generator, rates: list[float]) -> Iterator[int]:
        """Run one epoch, yielding after every step; afterwards `losses` is (steps, stages)."""
        kept: list[Tensor] = []
        for index, (x, y) in enumerate(self.split.batches(self.batch, generator, drop_last=True)):
            set_rate(self.step.optimizer, rates[index])
            kept.append(self.taken(*share(x, y)))
            yield index
        self.losses = torch.stack(kept)

    def taken(self, x: Tensor, y: Tensor) -> Tensor:
        """One step; a batch of one, as a loader's last may be, has no statistics."""
        try:
            return self.step(x, y)
        except ValueError as error:
            if len(x) > 1:
                raise
            raise NestlingError(
                f"a training batch has a single input, which batch norms cannot take ({error}); make the loader with "
                "drop_last=True, or with another batch size"
            ) from error

    def lane(self) -> AbstractContextManager[None]:
        """Where work between two epochs takes its place in the device's order: just here."""
        return nullcontext()


class Captured:
    """One captured step, replayed. Needs CUDA and images that lie in its memory."""

    def __init__(self, step: Step, split: MemorySplit, batch: int, startup: Startup | None = None) -> None:
        self.step, self.split, self.batch = step, split, batch
        self.steps = steps_per_epoch(split, batch)
        device = split.images.device
        stages = len(step.net.plan.heads)
        n = self.steps * batch
        self.order = torch.arange(n, device=device).view(self.steps, batch)
        self.offsets = torch.zeros(self.steps, batch, 2, dtype=torch.int64, device=device)
        self.flips = torch.zeros(self.steps, batch, dtype=torch.bool, device=device)
        self.boxes = torch.zeros(self.steps, batch, 4, device=device) if split.cutmix else None
        self.rates = torch.zeros(self.steps, device=device)
        self.losses = torch.zeros(self.steps, stages, device=device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.stream = torch.cuda.Stream(device, priority=HIGH_PRIORITY)
        self.startup = startup or Startup()
        self.form = step.form
        self.graph: torch.cuda.CUDAGraph | None = self._capture()

    def _batch(self) -> Tensor:
        """The step that is captured: everything it needs is found through the counter, on the device."""
        at = self.counter
        chosen = self.order.index_select(0, at)[0]
        offsets, flips = self.offsets.index_select(0, at)[0], self.flips.index_select(0, at)[0]
        boxes = None if self.boxes is None else self.boxes.index_select(0, at)[0]
        x, y = self.split.shown(chosen, offsets, flips, boxes)
        for group in self.step.optimizer.param_groups:
            group["lr"].copy_(self.rates.index_select(0, at)[0])
        losses = self.step(x, y)
        self.losses.index_copy_(0, at, losses[None])
        self.counter += 1
        return losses

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Warm up (kernels are compiled and chosen), put everything back, capture; put it back also where that fails."""
        torch.backends.cudnn.benchmark = True  # shapes never change: let cuDNN try its kernels once
        before = snapshot(self.step)
        self.stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            try:
                for name in ("kernels", "warm up", "warm up"):
                    with self.startup.step(name):
                        self.counter.zero_()
                        self._batch()
                        self.stream.synchronize()
                restore(self.step, before)
                self.counter.zero_()
                self.stream.synchronize()
                with self.startup.step("capture"), torch.cuda.graph(graph, stream=self.stream):
                    self._batch()
            finally:
                restore(self.step, before)
                self.counter.zero_()
        self.stream.synchronize()
        return graph

    def epoch(self, generator: torch.Generator, rates: list[float]) -> Iterator[int]:
        """Queue one epoch, yielding after every step; afterwards `losses` is (steps, stages), in the order of the lane.

        The epoch before may still be running: random numbers and rates come from pinned memory, in the lane, too.
        """
        if self.step.form != self.form:  # greedy training goes on to its next stage: another step, another graph
            self.stream.synchronize()
            self.graph = None  # its memory goes first
            self.graph, self.form = self._capture(), self.step.form
        assert self.graph is not None
        drawn = self.split.drawn(generator)
        n = self.steps * self.batch
        with self.lane():
            for here, there in (
                (self.order, drawn.order[:n]),
                (self.offsets, drawn.offsets[:n]),
                (self.flips, drawn.flips[:n]),
                *([] if self.boxes is None or drawn.boxes is None else [(self.boxes, drawn.boxes[:n])]),
                (self.rates, torch.tensor(rates)),
            ):
                here.copy_(there.view_as(here).pin_memory(), non_blocking=True)
            self.counter.zero_()
        for index in range(self.steps):
            with self.lane():
                self.graph.replay()
            yield index

    def lane(self) -> AbstractContextManager[None]:
        """Where work between two epochs takes its place in the device's order: this engine's own stream."""
        return torch.cuda.stream(self.stream)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def share(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's part of a batch; all of it in a lone process."""
    group = group_of(True)
    if group is None:
        return x, y
    rank, world = group.rank(), group.size()
    if len(x) % world:
        raise NestlingError(
            f"train.batch={len(x)} cannot be shared equally by {world} ranks; use a multiple of {world}."
        )
    return x[rank::world], y[rank::world]


def tensors_of(step: Step) -> list[Tensor]:
    """Everything a step changes: weights, statistics, momentum, averages."""
    found = list(step.net.state_dict().values())
    for state in step.optimizer.state.values():
        found += [value for value in state.values() if isinstance(value, Tensor)]
    return found + list(step.average.kept.values() if step.average else ())


def snapshot(step: Step) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors_of(step)]


@torch.no_grad()
def restore(step: Step, before: list[Tensor]) -> None:
    """Put a snapshot back. Momentum that did not exist then becomes zero, which is what it was."""
    now = tensors_of(step)
    kept = len(list(step.net.state_dict().values()))
    extra = len(now) - len(before)
    for tensor, old in zip(now[:kept] + now[kept + extra :], before, strict=True):
        tensor.copy_(old)
    for tensor in now[kept : kept + extra]:
        tensor.zero_()


def kind(recipe: Recipe, device: torch.device, split: Split) -> str:
    """The recipe's engine, "eager" or "graph"; "auto" is graph wherever it can be had."""
    reasons = {
        "this run is on the CPU": device.type != "cuda",
        "images are streamed, not in memory": not isinstance(split, MemorySplit),
        "several processes train together": group_of(True) is not None,
        "train.micro_batches are computed one after another": recipe.train.micro_batches > 0,
        "strategy.refresh makes steps differ": recipe.strategy.refresh > 1,
    }
    against = [reason for reason, holds in reasons.items() if holds]
    if recipe.train.engine == "graph" and against:
        raise NestlingError(f"train.engine=graph cannot be used: {against[0]}. Use train.engine=auto or eager.")
    return "eager" if against or recipe.train.engine == "eager" else "graph"


def start(name: str, step: Step, split: Split, batch: int, startup: Startup | None = None) -> "Eager | Captured":
    if name == "graph":
        assert isinstance(split, MemorySplit)
        return Captured(step, split, batch, startup)
    return Eager(step, split, batch)
