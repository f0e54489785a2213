"""The loss of every stage. In: logits and labels. Out: scalars on the graph. Knows neither networks nor steps."""

import torch.nn.functional as F
from torch import Tensor

from nestling.recipe import TrainRecipe


def stage_loss(logits: Tensor, y: Tensor, train: TrainRecipe, teacher: Tensor | None = None) -> Tensor:
    """Cross-entropy of one stage; with `distill`, it also learns from a teacher's soft answer."""
    loss = F.cross_entropy(logits.float(), y, label_smoothing=train.smoothing)
    if teacher is None or not train.distill:
        return loss
    t = train.distill_temperature
    target = (teacher.detach().float() / t).softmax(1)
    soft = F.kl_div((logits.float() / t).log_softmax(1), target, reduction="batchmean") * t * t
    return (1 - train.distill) * loss + train.distill * soft


def stage_losses(
    logits: tuple[Tensor, ...], y: Tensor, train: TrainRecipe, teacher: Tensor | None = None
) -> list[Tensor]:
    """One loss per stage. Without a teacher from outside the last stage teaches the earlier ones."""
    *earlier, last = logits
    inner = last if teacher is None else teacher
    return [*(stage_loss(stage, y, train, inner) for stage in earlier), stage_loss(last, y, train, teacher)]
