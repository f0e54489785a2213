"""A trained network that teaches another: the last stage of a run, or a module of the user's, asked about every training batch.

In: a run's folder or a function that gives a module, and the pupil. Out: logits, without gradients. A run's network normalises
by the batch's own statistics, like the pupil, and keeps no count of them; a module answers as in evaluation. Neither is changed.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from nestling.errors import NestlingError
from nestling.nets import NestedNet, Plan
from nestling.nets.synced import synchronise
from nestling.recipes.code import handed
from nestling.recipes.recipe import TrainRecipe
from nestling.runs.open import load


class Teacher:
    """Callable: images to the logits of the teacher's last stage. `faster` makes a network's forward pass quick."""

    def __init__(self, train: TrainRecipe, pupil: NestedNet, faster: Any = None) -> None:
        self.net: Any
        self.ours = True
        if ":" in train.teacher:
            self.net = alone(train.teacher, next(pupil.parameters()))
            self.ours = isinstance(self.net, NestedNet)
            return
        net = last_stage(train.teacher)
        check(train.teacher, net.plan, pupil.plan)
        memory = torch.channels_last if train.channels_last else torch.contiguous_format
        net = net.to(next(pupil.parameters())).to(memory_format=memory)  # type: ignore[call-overload]
        net.train().requires_grad_(False)
        if train.sync_norms:
            synchronise(net)
        for module in net.modules():
            if hasattr(module, "track_running_stats"):
                module.track_running_stats = False
        self.net = faster(net, train) if faster else net

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        return asked(self.net, x, self.ours)


def asked(module: Any, x: Tensor, ours: bool) -> Tensor:
    """What a module answers; a network of ours with its last stage. Of several answers of a user's nobody knows which."""
    try:
        found = module(x)
    except RuntimeError as error:
        kind = next((p.dtype for p in module.parameters() if p.is_floating_point()), x.dtype)
        if kind == x.dtype:
            raise
        raise NestlingError(
            f"the teacher computes in {kind}, the inputs are {x.dtype} ({error}); convert it, such as by teacher.to({x.dtype})"
        ) from error
    logits = found[-1] if isinstance(found, tuple | list) and found and (ours or len(found) == 1) else found
    if not isinstance(logits, Tensor):
        raise NestlingError(
            f"the teacher answers with a {type(logits).__name__}; expected a tensor: hand over a module that returns the one to "
            "learn from"
        )
    return logits.detach()


def alone(name: str, like: Tensor) -> nn.Module:
    """A copy of the user's module, in evaluation, where the pupil is."""
    module = handed(name, "its teacher", "--teacher {0} (in Python nestling.fit(..., teacher=...))")()
    if not isinstance(module, nn.Module):
        raise NestlingError(f"{name} gives a {type(module).__name__}; expected a torch module that teaches")
    return copy.deepcopy(module).to(like.device).eval().requires_grad_(False)


def last_stage(path: str) -> NestedNet:
    """The run's largest subnetwork, by itself."""
    net = load(path)
    return net.subnet(net.plan.stages).net if len(net.plan.heads) > 1 else net


def check(path: str, found: Plan, pupil: Plan) -> None:
    """Teacher and pupil must take the same images and know the same classes."""
    for what, theirs, ours in (
        ("images", (found.input.channels, *found.input.size), (pupil.input.channels, *pupil.input.size)),
        ("classes", found.by_name[found.heads[-1]].channels, pupil.by_name[pupil.heads[-1]].channels),
    ):
        if theirs != ours:
            raise NestlingError(
                f"train.teacher={path} has {what} {theirs}, this network {ours}; give a run that was trained on the same data"
            )
