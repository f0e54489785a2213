"""One training step: forward, one loss per stage, one gradient per task, combine, update.

In: a batch on the device. Out: the stages' losses, still on the device. Nothing here waits for the device, so a step can
be captured whole in a CUDA graph. It knows neither epochs nor files, and it is the same step on every engine.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from nestling.combine import OSGD, SGD, NormOSGD, NormSGD, PCGrad, Report, SumSGD, Weighted
from nestling.combine.greedy import Greedy
from nestling.combine.weighted import Order
from nestling.errors import NestlingError
from nestling.gradients import Accumulator
from nestling.gradients.reduce import group_of
from nestling.nets import NestedNet
from nestling.recipe import Recipe, StrategyRecipe
from nestling.train.losses import stage_losses
from nestling.train.tasks import Tasks, faster, worth_own_subnets
from nestling.train.teacher import Teacher


def task_orders(strategy: StrategyRecipe, stages: int) -> list[list[int]]:
    """Priorities as task indices, from the recipe's stage numbers: one order, or several to follow each other."""
    order = strategy.order or tuple(range(1, stages + 1))
    parts = [order[start : start + stages] for start in range(0, len(order), stages)]
    if any(sorted(part) != list(range(1, stages + 1)) for part in parts):
        raise NestlingError(
            f"strategy.order={','.join(map(str, strategy.order))} is not an order of this network's stages; "
            f"expected each of 1 to {stages} once, most important first (or several such orders one after another)."
        )
    return [[stage - 1 for stage in part] for part in parts]


def task_importance(strategy: StrategyRecipe, stages: int) -> list[float]:
    if strategy.importance and len(strategy.importance) != stages:
        raise NestlingError(
            f"strategy.importance has {len(strategy.importance)} values; this network has {stages} stages: give one each."
        )
    return list(strategy.importance) or [1.0] * stages


def make_combiner(strategy: StrategyRecipe, stages: int, epochs: int = 1, seed: int = 0) -> Weighted:
    """The combiner a recipe names. Several orders share the epochs equally, one after another; `seed` is for chance."""
    orders, importance = task_orders(strategy, stages), task_importance(strategy, stages)
    several: Order = lambda epoch: orders[min(epoch * len(orders) // max(1, epochs), len(orders) - 1)]  # noqa: E731
    order = several if len(orders) > 1 else orders[0]
    if strategy.name == "sgd":
        return SGD(importance)
    if strategy.name == "normsgd":
        return NormSGD(importance)
    if strategy.name == "pcgrad":
        return PCGrad(strategy.scope, importance, seed=seed)
    if strategy.name in ("osgd", "osgd-norm"):
        kind = OSGD if strategy.name == "osgd" else NormOSGD
        return kind(order, strategy.scope, importance)
    return SumSGD(importance)


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
        self.parameters = list(net.parameters())
        self.report: Report | None = None
        self.average = Average(net, recipe.train.average) if recipe.train.average else None
        self.forward: Callable[[Tensor], tuple[Tensor, ...]] = faster(net, recipe.train) if compiled else net
        self.teacher: Teacher | None = None
        if recipe.train.teacher:
            self.teacher = Teacher(recipe.train, net, faster if compiled else None)
        self.greedy = Greedy(net, optimizer, recipe.train.epochs) if recipe.strategy.name == "greedy" else None
        stages, seed = len(net.plan.heads), recipe.train.seed
        self.combine = combine = make_combiner(recipe.strategy, stages, recipe.train.epochs, seed)
        needs_rows = combine.fixed(stages, self.device) is None or recipe.train.diagnostics
        self.tasks: Tasks | None = None
        if needs_rows and recipe.strategy.refresh == 1 and group_of(True) is None and worth_own_subnets(net):
            self.tasks = Tasks(net, combine, recipe.train, compiled)
        else:
            # No check for NaN here: it would wait for the device. The losses are looked at once per epoch.
            self.rows = Accumulator(
                net, combine, refresh=recipe.strategy.refresh, diagnose=recipe.train.diagnostics, check=False
            )

    def begin(self, epoch: int) -> None:
        """Call before every epoch (from 0): greedy training goes from stage to stage with it, priorities may change."""
        self.combine.set_epoch(epoch)
        if self.greedy is not None:
            self.greedy.set_epoch(epoch)
        if self.tasks is None:
            self.rows.renew()  # else a resumed run would go on with other weights than one never stopped

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        if self.train.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        self.optimizer.zero_grad(set_to_none=True)
        losses = self.gradients(x, y)
        if self.train.clip:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.train.clip)
        self.optimizer.step()
        if self.average is not None:
            self.average.update()
        return losses

    def gradients(self, x: Tensor, y: Tensor) -> Tensor:
        """Fill `.grad`; the stages' losses come back detached, (stages,)."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.train.precision == "bfloat16"):
            teacher = self.teacher(x) if self.teacher is not None else None
            if self.tasks is not None:
                losses, self.report = self.tasks(x, y, teacher)
                return losses
            logits = self.forward(x)
        losses_now = stage_losses(logits, y, self.train, teacher)
        self.report = (self.greedy or self.rows).backward(losses_now)
        return torch.stack([loss.detach() for loss in losses_now])


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
