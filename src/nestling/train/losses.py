"""The loss of every stage. In: outputs and targets. Out: scalars on the graph. Knows neither networks nor steps."""

import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.errors import NestlingError
from nestling.recipes.recipe import TrainRecipe
from nestling.runs.goal import task_loss


def stage_loss(
    logits: Tensor, y: Tensor, train: TrainRecipe, teacher: Tensor | None = None, shares: bool = False
) -> Tensor:
    """What one stage's output is to learn; with `distill`, also from a teacher's answer. `shares`: the targets are numbers, but
    each is the share of a class (CutMix)."""
    numbers = y.is_floating_point() and not shares
    loss = task_loss(train, numbers)(wide(logits), y)
    if teacher is None or not train.distill:
        return loss
    soft = imitation(wide(logits), wide(teacher.detach()), numbers, train)
    return (1 - train.distill) * loss + train.distill * soft


def wide(logits: Tensor) -> Tensor:
    """In float32 at least: losses are not for half precision."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def imitation(found: Tensor, teacher: Tensor, numbers: bool, train: TrainRecipe) -> Tensor:
    """How far an output is from the teacher's: of classes as distributions (KL), of numbers squared."""
    if found.shape != teacher.shape:
        raise NestlingError(
            f"the teacher's output has shape {tuple(teacher.shape)}, the network's {tuple(found.shape)}; expected the same task"
        )
    if numbers:
        return F.mse_loss(found, teacher)
    t = train.distill_temperature
    target = (teacher / t).softmax(1)
    soft = F.kl_div((found / t).log_softmax(1), target, reduction="batchmean") * t * t
    return soft / (found[0, 0].numel())  # of dense answers the mean over pixels, as the loss is


def stage_losses(
    logits: tuple[Tensor, ...], y: Tensor, train: TrainRecipe, teacher: Tensor | None = None, shares: bool = False
) -> list[Tensor]:
    """One loss per stage. Where no teacher from outside does, the last stage teaches the earlier ones."""
    *earlier, last = logits
    inner = inner_teacher(last, train, teacher)
    return [
        *(stage_loss(stage, y, train, inner, shares) for stage in earlier),
        stage_loss(last, y, train, teacher, shares),
    ]


def inner_teacher(last: Tensor, train: TrainRecipe, teacher: Tensor | None) -> Tensor:
    """Whose answer the earlier stages learn from: the last stage's, unless a teacher from outside teaches all."""
    return last.detach() if teacher is None or train.teaches == "last" else teacher
