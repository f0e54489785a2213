"""A trained network that teaches another: the last stage of a run, asked about every training batch.

In: a run's folder and the pupil. Out: logits, without gradients. Like the pupil it normalises by the batch's own
statistics, and keeps no count of them. It changes nothing about its run.
"""

from typing import Any

import torch
from torch import Tensor

from nestling.errors import NestlingError
from nestling.evaluate import network
from nestling.nets import NestedNet, Plan
from nestling.recipe import TrainRecipe
from nestling.rundir import RunDir


class Teacher:
    """Callable: images to the logits of the teacher's last stage. `faster` makes a network's forward pass quick."""

    def __init__(self, train: TrainRecipe, pupil: NestedNet, faster: Any = None) -> None:
        net = last_stage(train.teacher)
        check(train.teacher, net.plan, pupil.plan)
        memory = torch.channels_last if train.channels_last else torch.contiguous_format
        net = net.to(next(pupil.parameters())).to(memory_format=memory)  # type: ignore[call-overload]
        net.train().requires_grad_(False)
        for module in net.modules():
            if hasattr(module, "track_running_stats"):
                module.track_running_stats = False
        self.net: Any = faster(net, train) if faster else net

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)[-1]
        return logits.detach()


def last_stage(path: str) -> NestedNet:
    """The run's largest subnetwork, by itself."""
    run = RunDir.open(path)
    net = network(run)
    return net.subnet(net.plan.stages) if len(net.plan.heads) > 1 else net


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
