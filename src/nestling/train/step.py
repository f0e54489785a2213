"""One training step: forward, one loss per stage, one gradient per task, combine, update.

In: a batch on the device. Out: the stages' losses, still on the device. Nothing here waits for the device, so a step can
be captured whole in a CUDA graph. It knows neither epochs nor files, and it is the same step on every engine.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.combine import OSGD, SGD, NormOSGD, NormSGD, PCGrad, Report, SumSGD, Weighted
from nestling.errors import NestlingError
from nestling.gradients import Accumulator
from nestling.nets import NestedNet
from nestling.recipe import Recipe, StrategyRecipe, TrainRecipe


def stage_losses(logits: tuple[Tensor, ...], y: Tensor, train: TrainRecipe) -> list[Tensor]:
    """Cross-entropy of every stage; with `distill`, earlier stages also learn from the last one's soft answer."""
    losses = [F.cross_entropy(stage.float(), y, label_smoothing=train.smoothing) for stage in logits]
    if train.distill and len(logits) > 1:
        t = train.distill_temperature
        teacher = (logits[-1].detach().float() / t).softmax(1)
        for index, stage in enumerate(logits[:-1]):
            soft = F.kl_div((stage.float() / t).log_softmax(1), teacher, reduction="batchmean") * t * t
            losses[index] = (1 - train.distill) * losses[index] + train.distill * soft
    return losses


def task_order(strategy: StrategyRecipe, stages: int) -> list[int]:
    """Priorities as task indices, from the recipe's stage numbers."""
    if not strategy.order:
        return list(range(stages))
    if sorted(strategy.order) != list(range(1, stages + 1)):
        raise NestlingError(
            f"strategy.order={','.join(map(str, strategy.order))} is not an order of this network's stages; "
            f"expected each of 1 to {stages} once, most important first."
        )
    return [stage - 1 for stage in strategy.order]


def task_importance(strategy: StrategyRecipe, stages: int) -> list[float]:
    if strategy.importance and len(strategy.importance) != stages:
        raise NestlingError(
            f"strategy.importance has {len(strategy.importance)} values; this network has {stages} stages: give one each."
        )
    return list(strategy.importance) or [1.0] * stages


def make_combiner(strategy: StrategyRecipe, stages: int) -> Weighted:
    """The combiner a recipe names."""
    order, importance = task_order(strategy, stages), task_importance(strategy, stages)
    if strategy.name == "sgd":
        return SGD(importance)
    if strategy.name == "normsgd":
        return NormSGD(importance)
    if strategy.name == "pcgrad":
        return PCGrad(strategy.scope, importance)
    if strategy.name in ("osgd", "osgd-norm"):
        kind = OSGD if strategy.name == "osgd" else NormOSGD
        return kind(order, strategy.scope, importance)
    return SumSGD(importance)


class Step:
    """What happens to one batch."""

    def __init__(self, net: NestedNet, optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
        self.net, self.optimizer, self.train = net, optimizer, recipe.train
        self.device = next(net.parameters()).device
        stages = len(net.plan.heads)
        combine = make_combiner(recipe.strategy, stages)
        diagnose = recipe.train.diagnostics
        # No check for NaN here: it would wait for the device. The losses are looked at once per epoch.
        self.rows = Accumulator(net, combine, refresh=recipe.strategy.refresh, diagnose=diagnose, check=False)
        self.report: Report | None = None
        self.parameters = list(net.parameters())
        self.average = Average(net, recipe.train.average) if recipe.train.average else None

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        if self.train.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.train.precision == "bfloat16"):
            logits = self.net(x)
        losses = stage_losses(logits, y, self.train)
        self.optimizer.zero_grad(set_to_none=True)
        self.report = self.rows.backward(losses)
        if self.train.clip:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.train.clip)
        self.optimizer.step()
        if self.average is not None:
            self.average.update()
        return torch.stack([loss.detach() for loss in losses])


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
