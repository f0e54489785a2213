"""A trained network that is kept while early stages beside it are trained: its weights from its run, and its part in a step.

In: a run's folder and a network with early stages (nets/early.py). Out: the same with the run's weights in it; and, for
the steps, the early stages as a network of their own beside a teacher that never changes.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nestling.errors import NestlingError
from nestling.nets import NestedNet
from nestling.nets.early import early_part, last_part
from nestling.nets.extended import Extended, over
from nestling.recipes.recipe import Recipe
from nestling.runs.open import resolve


def adopt(net: NestedNet, recipe: Recipe) -> None:
    """Put the weights of the kept run into the network."""
    path, network = recipe.network.keep, recipe.network
    run = resolve(path)
    found, expected = run.recipe.network, replace(network, early=(), keep="")
    if replace(found, alone=0) != expected or not found.alone or run.recipe.data.name != recipe.data.name:
        raise NestlingError(
            f"network.keep={path} is a run of {found.name} (network.alone={found.alone}) on {run.recipe.data.name}; expected one "
            f"of {network.name} with network.alone set to its last stage and the same data and widths as here"
        )
    theirs, mine = run.net().state_dict(), net.state_dict()
    strange = [key for key, value in theirs.items() if key not in mine or mine[key].shape != value.shape]
    if strange:
        raise NestlingError(
            f"network.keep={path} has {strange[0]}, for which this network has no place: they differ in size; keep a run "
            "of the last stage's size"
        )
    net.load_state_dict({**mine, **theirs})


class Keeping:
    """The early stages of a network that is kept, and that network as their teacher."""

    def __init__(self, net: Extended, compiled: bool) -> None:
        self.early = over(early_part(net.plan), net)
        own = over(last_part(net.plan), net)
        own.training = False
        self.own: Any = torch.compile(own, fullgraph=True) if compiled else own

    @torch.no_grad()
    def answer(self, x: Tensor) -> Tensor:
        """The kept network's own logits."""
        logits: Tensor = self.own(x)[-1]
        return logits.detach()
