"""The loss of every stage. In: logits and labels. Out: scalars on the graph. Knows neither networks nor steps."""

import torch.nn.functional as F
from torch import Tensor

from nestling.recipes.recipe import TrainRecipe


def stage_loss(logits: Tensor, y: Tensor, train: TrainRecipe, teacher: Tensor | None = None) -> Tensor:
    """Cross-entropy of one stage; with `distill`, an earlier stage also learns from the last one's soft answer."""
    loss = F.cross_entropy(logits.float(), y, label_smoothing=train.smoothing)
    if teacher is None or not train.distill:
        return loss
    t = train.distill_temperature
    target = (teacher.detach().float() / t).softmax(1)
    soft = F.kl_div((logits.float() / t).log_softmax(1), target, reduction="batchmean") * t * t
    return (1 - train.distill) * loss + train.distill * soft


def stage_losses(logits: tuple[Tensor, ...], y: Tensor, train: TrainRecipe) -> list[Tensor]:
    *earlier, last = logits
    return [*(stage_loss(stage, y, train, last) for stage in earlier), stage_loss(last, y, train)]
