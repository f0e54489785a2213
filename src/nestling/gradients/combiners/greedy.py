"""Greedy stage-wise training (the paper's Algorithm 1) as a schedule over any optimizer.

Stage s trains its own loss on the entries born at s alone: owned by its task and by no earlier one. Everything else
stays as it is, bit for bit, whatever the optimizer does (momentum, weight decay): entries of other stages, in the
same tensor or not, and their batch statistics. In come a net, its owners and an optimizer; `backward` takes the
place of nestling.backward, `set_epoch` goes from stage to stage. It knows neither data nor learning rates.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from nestling.errors import NestlingError
from nestling.gradients import Accumulator
from nestling.gradients.combiners.diagnosis import Report
from nestling.gradients.combiners.sgd import SumSGD
from nestling.nets.modes import hold_channels
from nestling.nets.synced import batch_norm


def stage_of(epoch: int, epochs: int, stages: int) -> tuple[int, int]:
    """Stage (from 1) and epoch within it (from 0), when every stage has `epochs` epochs. Pure."""
    if not 0 <= epoch < epochs * stages:
        raise NestlingError(
            f"epoch {epoch} is outside a greedy training of {stages} stages with {epochs} epochs each: expected 0 to "
            f"{epochs * stages - 1}"
        )
    return epoch // epochs + 1, epoch % epochs


class Greedy:
    """`epochs` for each stage; call `set_epoch` before each epoch and `backward(losses)` in each step.

    `owners` as for nestling.backward; by default the net's own. `mean` as for an Accumulator. `stage` and `epoch` (within the
    stage, for the learning rate) say where it stands. The optimizer's state starts anew with every stage. Stages all frozen
    have no turn.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: torch.optim.Optimizer,
        epochs: int = 1,
        owners: Mapping[str, Tensor] | None = None,
        mean: bool = False,
    ) -> None:
        ask = getattr(net, "owners", None)
        if owners is None and not callable(ask):
            raise NestlingError(
                f"{type(net).__name__} does not say which stage owns what: expected a net with an owners() method, "
                f"or owners=, a mapping from parameter names to int64 bit masks"
            )
        self.net, self.optimizer, self.epochs, self.mean = net, optimizer, epochs, mean
        given: Mapping[str, Tensor] = owners if owners is not None else ask()  # type: ignore[misc]
        self.owners = {name: given[name].expand_as(p).to(p.device) for name, p in net.named_parameters()}
        masks = [int(mask.max()) for mask in self.owners.values() if mask.numel()]
        self.stages = max((mask.bit_length() for mask in masks), default=1)
        self.trained = [stage for stage in range(1, self.stages + 1) if not self._frozen(stage)]
        self.stage = 0
        self.epoch = 0
        self.rows: Accumulator[Report] | None = None
        self.kept: list[tuple[Tensor, Tensor, Tensor]] = []  # parameter, what trains, values of the rest
        self.hook = optimizer.register_step_post_hook(lambda *_: self._restore())

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch of the whole training, counted from 0. Mid-stage the optimizer keeps its state."""
        turn, self.epoch = stage_of(epoch, self.epochs, len(self.trained))
        if self.trained[turn - 1] != self.stage:
            self.start(self.trained[turn - 1], anew=self.epoch == 0)

    def _born(self, stage: int) -> dict[str, Tensor]:
        """Per parameter, the entries that the task of a stage owns and no earlier one does."""
        task, earlier = 1 << (stage - 1), (1 << (stage - 1)) - 1
        return {name: (mask & task != 0) & (mask & earlier == 0) for name, mask in self.owners.items()}

    def _frozen(self, stage: int) -> bool:
        """Whether all that a stage would train is frozen, as in a network that is kept: it has no turn then."""
        born = self._born(stage)
        mine = [p for name, p in self.net.named_parameters() if bool(born[name].any())]
        return bool(mine) and not any(p.requires_grad for p in mine)

    def start(self, stage: int, anew: bool = True) -> None:
        """Train this stage (from 1) from here on; everything outside it stays as it is now."""
        self._thaw()
        self.stage = stage
        trains = self._born(stage)
        named = [(name, p) for name, p in self.net.named_parameters() if p.requires_grad and bool(trains[name].any())]
        if not named:
            raise NestlingError(f"stage {stage} owns nothing that no earlier stage owns: nothing is left to train")
        if anew:  # only here: the questions above have waited for the device, which may have been using it
            self.optimizer.state.clear()
        for p in self.net.parameters():
            p.grad = None  # an optimizer leaves what has no gradient alone
        self.kept = [(p, trains[n], p.detach().clone()) for n, p in named if not bool(trains[n].all())]
        masks = {name: trains[name].long() for name, _ in named}
        self.rows = Accumulator(named, SumSGD(), owners=masks, diagnose=True, mean=self.mean)
        for name, module in self.net.named_modules():
            if isinstance(module, _BatchNorm) and f"{name}.weight" in trains:
                self._freeze_statistics(module, trains[f"{name}.weight"])

    def backward(self, losses: Sequence[Tensor | None]) -> Report:
        """Fill `.grad` with the gradient of the stage's own loss where the stage trains; zero or None elsewhere."""
        self.add(losses, final=True)
        return self.fill()

    def add(self, losses: Sequence[Tensor | None], *, final: bool = False) -> None:
        """The gradients of one micro-batch."""
        if self.rows is None:
            raise NestlingError("no stage has begun: call set_epoch or start first")
        if len(losses) != self.stages:
            raise NestlingError(f"found {len(losses)} losses, expected {self.stages}, one per stage")
        self.rows.add([losses[self.stage - 1]], final=final)

    def fill(self) -> Report:
        """Fill `.grad` from the micro-batches added."""
        if self.rows is None:
            raise NestlingError("no stage has begun: call set_epoch or start first")
        return self.rows.fill()

    def close(self) -> None:
        """Leave the net and the optimizer as they were found."""
        self._thaw()
        self.hook.remove()

    @torch.no_grad()
    def _restore(self) -> None:
        """After a step: put back what weight decay or momentum moved outside the stage."""
        for parameter, trains, before in self.kept:
            parameter.copy_(torch.where(trains, parameter, before))

    def _thaw(self) -> None:
        self.kept = []
        for module in self.net.modules():
            if isinstance(module, _BatchNorm):
                module.__dict__.pop("forward", None)
                hold_channels(module, None)

    def _freeze_statistics(self, module: _BatchNorm, trains: Tensor) -> None:
        if module.track_running_stats and not bool(trains.all()):
            some = trains if bool(trains.any()) else None
            module.__dict__["forward"] = partial(_half_frozen, module, some)
            hold_channels(module, ~trains)  # for kernels that compute the norm themselves


def _half_frozen(module: _BatchNorm, trains: Tensor | None, x: Tensor, *rest: Any) -> Tensor:
    """Batch norm whose channels outside `trains` use their running statistics, as in inference, and keep them."""
    mean, var = module.running_mean, module.running_var
    assert mean is not None and var is not None
    if trains is None or not module.training:
        return F.batch_norm(x, mean, var, module.weight, module.bias, False, 0.0, module.eps)
    old_mean, old_var = mean.clone(), var.clone()  # backward reads what forward was given: not to be changed below
    frozen = F.batch_norm(x, old_mean, old_var, module.weight, module.bias, False, 0.0, module.eps)
    new_mean, new_var = mean.clone(), var.clone()
    momentum = 0.1 if module.momentum is None else module.momentum
    synced = getattr(module, "synced", False)
    live = batch_norm(x, new_mean, new_var, module.weight, module.bias, True, momentum, module.eps, synced)
    mean.copy_(torch.where(trains, new_mean, old_mean))
    var.copy_(torch.where(trains, new_var, old_var))
    return torch.where(trains.view(-1, *[1] * (x.dim() - 2)), live, frozen)
