"""HuggingFace's Trainer with one gradient per task: a mixin that takes the place of its training step.

`class Mine(PerTask, Trainer)` says what the losses are (`compute_losses`) and how they are combined (`combine`); everything else
is the Trainer's: micro-batches, several processes, clipping, logging, schedules. Imports nothing of HuggingFace's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nestling.errors import NestlingError
from nestling.gradients.accumulate import Accumulator
from nestling.gradients.contract import Combiner, Reported


class PerTask:
    """Put it before Trainer: `class Mine(PerTask, Trainer)`. `report`: that of the last step; `reported`: its losses."""

    combine: Combiner[Any]
    report: Reported | None = None
    reported: dict[str, Tensor]
    _made: tuple[Accumulator[Any] | None, nn.Module | None, Combiner[Any] | None] = (None, None, None)

    def compute_losses(
        self, model: nn.Module, inputs: dict[str, Any]
    ) -> Mapping[str, Tensor | None] | Sequence[Tensor]:
        """One loss per task, a mean over the batch."""
        raise NestlingError(
            "PerTask needs compute_losses(model, inputs): expected one loss per task, or a dict of them"
        )

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """One micro-batch; the last one of a step fills `.grad`."""
        trainer: Any = self
        model.train()
        inputs = trainer._prepare_inputs(inputs)
        with trainer.compute_loss_context_manager():
            losses = self.compute_losses(model, inputs)
        parts = trainer.current_gradient_accumulation_steps
        named = dict(losses) if isinstance(losses, Mapping) else {f"task {t}": loss for t, loss in enumerate(losses)}
        last = bool(trainer.accelerator.sync_gradients)
        total = torch.stack([loss.detach() for loss in named.values() if loss is not None]).sum() / parts
        rows = self._rows(model)
        rows.add({name: None if loss is None else loss / parts for name, loss in named.items()}, final=last)
        if last:
            self.report = rows.fill()
        self.reported = {name: loss.detach() for name, loss in named.items() if loss is not None}
        return total

    def _rows(self, model: nn.Module) -> Accumulator[Any]:
        """Made once for a model and a method."""
        known, *made_for = self._made
        if known is None or made_for[0] is not model or made_for[1] is not self.combine:
            trainer: Any = self
            known = Accumulator(model, self.combine, scaler=trainer.accelerator.scaler)
            self._made = (known, model, self.combine)
        return known
