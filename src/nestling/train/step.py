"""One training step: forward, one loss per stage, one gradient per task, combine, update.

In: a batch on the device. Out: the stages' losses, still on the device. Nothing here waits for the device, so a step can
be captured whole in a CUDA graph. It knows neither epochs nor files, and it is the same step on every engine.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from nestling.errors import NestlingError
from nestling.gradients import Accumulator
from nestling.gradients.combiners import Report, make_combiner
from nestling.gradients.combiners.greedy import Greedy
from nestling.gradients.contract import Combiner
from nestling.gradients.reduce import group_of
from nestling.nets import NestedNet
from nestling.nets.extended import Extended
from nestling.nets.modes import all_trains
from nestling.recipes.recipe import Recipe
from nestling.train.kept import Keeping
from nestling.train.losses import stage_loss, stage_losses
from nestling.train.micro import MicroBatches
from nestling.train.tasks import Tasks, by_kernels, faster, worth_own_subnets
from nestling.train.teacher import Teacher


class Step:
    """What happens to one batch.

    Weights known beforehand (sgd) need one backward of the weighted losses. Otherwise every task has a backward of its
    own: through one shared forward pass, or, in width nests, through its own narrow subnetwork (see tasks.py).
    """

    def __init__(
        self, net: NestedNet, optimizer: torch.optim.Optimizer, recipe: Recipe, compiled: bool = False
    ) -> None:
        self.net, self.optimizer, self.train = net, optimizer, recipe.train
        self.device = next(net.parameters()).device
        self.shares = recipe.data.cutmix > 0  # targets are shares of classes
        self.parameters = [p for p in net.parameters() if p.requires_grad]
        self.report: Report | None = None
        self.average = Average(net, recipe.train.average) if recipe.train.average else None
        self.keeping = Keeping(net, compiled) if isinstance(net, Extended) and net.apart else None
        if self.keeping is not None:
            net = self.keeping.early
        self.teacher: Teacher | None = None
        if recipe.train.teacher:
            self.teacher = Teacher(recipe.train, net, faster if compiled else None)
        micro = recipe.train.micro_batches
        self.micro = MicroBatches(self.net, micro, recipe.train.seed) if micro else None
        self.greedy: Greedy | None = None
        if recipe.strategy.name == "greedy":
            self.greedy = Greedy(net, optimizer, recipe.train.epochs, mean=micro > 0)
        # What the network's owner has frozen our kernels do not see, and what greedy training holds torch.compile does not.
        fast = compiled and all_trains(net) and (self.greedy is None or by_kernels(net, recipe.train))
        self.forward: Callable[[Tensor], tuple[Tensor, ...]] = faster(net, recipe.train) if fast else net
        self.combine: Combiner[Report] | None = None
        self.tasks: Tasks | None = None
        self.rows: Accumulator[Report] | None = None
        if self.greedy is not None:  # which trains one task at a time, by an accumulator of its own
            return
        stages, seed = len(net.plan.heads), recipe.train.seed
        self.combine = combine = make_combiner(recipe.strategy, stages, recipe.train.epochs, seed)
        needs_rows = combine.fixed(stages, self.device) is None or recipe.train.diagnostics
        whole = group_of(True) is None and not micro
        if needs_rows and recipe.strategy.refresh == 1 and whole and worth_own_subnets(net):
            self.tasks = Tasks(net, combine, recipe.train, compiled, self.shares)
        else:
            # No check for NaN here: it would wait for the device. The losses are looked at once per epoch.
            refresh, diagnose = recipe.strategy.refresh, recipe.train.diagnostics
            self.rows = Accumulator(net, combine, refresh=refresh, diagnose=diagnose, check=False, mean=micro > 0)

    def begin(self, epoch: int) -> None:
        """Call before every epoch (from 0): greedy training goes from stage to stage with it, priorities may change."""
        if self.micro is not None:
            self.micro.begin(epoch)
        if self.combine is not None:
            self.combine.set_epoch(epoch)
        if self.greedy is not None:
            self.greedy.set_epoch(epoch)
        if self.rows is not None:
            self.rows.renew()  # else a resumed run would go on with other weights than one never stopped

    @property
    def form(self) -> int:
        """Steps of one form do the same to every batch; greedy training has one for every stage."""
        return 0 if self.greedy is None else self.greedy.stage

    def close(self) -> None:
        """Let go of the network and the optimizer, so that another step can take them."""
        if self.greedy is not None:
            self.greedy.close()

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        losses = self.gradients(x, y) if self.micro is None else self.in_parts(x, y, self.micro)
        if self.train.clip:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.train.clip)
        self.optimizer.step()
        if self.average is not None:
            self.average.update()
        return losses

    def in_parts(self, x: Tensor, y: Tensor, micro: MicroBatches) -> Tensor:
        """Fill `.grad` with what micro-batches give; their mean losses come back, (stages,)."""
        kept = [self.gradients(*part, fill=False) for part in micro.parts(x, y)]
        self.report = self.source.fill()
        (mean,) = micro.mean([torch.stack(kept).double().sum(0)])
        return mean.to(kept[0])

    @property
    def source(self) -> "Greedy | Accumulator[Report]":
        found = self.greedy or self.rows
        assert found is not None
        return found

    def gradients(self, x: Tensor, y: Tensor, fill: bool = True) -> Tensor:
        """Fill `.grad`, unless more is to be added before; the stages' losses come back detached, (stages,)."""
        own: Tensor | None = None
        if self.train.channels_last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.train.precision == "bfloat16"):
            teacher = self.teacher(x) if self.teacher is not None else None
            if self.keeping is not None:
                own = self.keeping.answer(x)
                teacher = own if teacher is None else teacher
            if self.tasks is not None:
                losses, self.report = self.tasks(x, y, teacher)
            else:
                logits = self.forward(x)
        if self.tasks is None:
            losses_now = stage_losses(logits, y, self.train, teacher, self.shares)
            if not any(loss.requires_grad for loss in losses_now):
                raise NestlingError(
                    "no stage's loss depends on a parameter that trains; make the loss of the output by torch's operations, "
                    "without detach() or item()"
                )
            # A stage of which nothing trains has a loss but no gradient.
            self.source.add([loss if loss.requires_grad else None for loss in losses_now], final=fill)
            if fill:
                self.report = self.source.fill()
            losses = torch.stack([loss.detach() for loss in losses_now])
        return losses if own is None else torch.cat([losses, stage_loss(own, y, self.train, shares=self.shares)[None]])


class Average:
    """A moving average of all weights and statistics, used for evaluation and saved as the result."""

    def __init__(self, net: NestedNet, decay: float) -> None:
        self.decay = decay
        self.live = {k: v for k, v in net.state_dict().items() if v.is_floating_point()}
        self.kept = {k: v.clone() for k, v in self.live.items()}

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(list(self.kept.values()), list(self.live.values()), 1 - self.decay)

    @torch.no_grad()
    def swap(self) -> None:
        for key, kept in self.kept.items():
            live = self.live[key]
            mine = live.clone()
            live.copy_(kept)
            kept.copy_(mine)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The network with its averaged weights, for as long as the block lasts."""
        self.swap()
        try:
            yield
        finally:
            self.swap()
