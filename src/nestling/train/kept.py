"""A trained network that is kept while early stages beside it are trained: its weights from its run, and its part in a step.

In: a run's folder and a network with early stages (nets/early.py). Out: the same with the run's weights in it; and, for
the steps, the early stages as a network of their own beside a teacher that never changes.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nestling.errors import NestlingError
from nestling.nets import NestedNet, Plan
from nestling.nets.births import Births
from nestling.nets.early import EARLY, early_part, last_part
from nestling.nets.extended import Extended, over
from nestling.nets.keep import keep
from nestling.nets.ops import Select
from nestling.nets.plan import Node
from nestling.recipes.recipe import Recipe
from nestling.runs.open import resolve


def adopt(net: NestedNet, recipe: Recipe) -> None:
    """Put the weights of the kept run into the network."""
    path, network = recipe.network.keep, recipe.network
    run = resolve(path)
    found, expected = run.recipe.network, network.without_early()
    if replace(found, alone=0) != expected or not found.alone or run.recipe.data.name != recipe.data.name:
        raise NestlingError(
            f"network.keep={path} is a run of {found.name} (network.alone={found.alone}) on {run.recipe.data.name}; expected one "
            f"of {network.name} with network.alone set to its last stage and the same data and widths as here"
        )
    own = run.net()
    theirs, mine = own.state_dict(), net.state_dict()
    strange = [key for key, value in theirs.items() if key not in mine or mine[key].shape != value.shape]
    if strange:
        raise NestlingError(
            f"network.keep={path} has {strange[0]}, for which this network has no place: they differ in size; keep a run "
            "of the last stage's size"
        )
    early = begun(net, recipe) if network.early_from else copies(net, own, network.early)
    net.load_state_dict({**mine, **theirs, **early})


def begun(net: NestedNet, recipe: Recipe) -> dict[str, Tensor]:
    """What the early stages begin with: the first stages of a trained nest of the same widths."""
    path, stages = recipe.network.early_from, len(net.plan.heads) - 1
    run = resolve(path)
    nest = run.net()
    if run.recipe.data.name != recipe.data.name or len(nest.plan.heads) < stages:
        raise NestlingError(
            f"network.early_from={path} is a run on {run.recipe.data.name} with {len(nest.plan.heads)} stages; expected at least "
            f"{stages} of them, on {recipe.data.name}"
        )
    found: dict[str, Tensor] = {}
    for stage in range(1, stages + 1):  # each has its own head, the last all channels
        found |= {f"{EARLY}.{key}": value for key, value in nest.subnet(stage).net.state_dict().items()}
    wanted = {key: value.shape for key, value in net.state_dict().items() if key.startswith(f"{EARLY}.")}
    if {key: value.shape for key, value in found.items()} != wanted:
        strange = next(key for key in (*wanted, *found) if key not in found or found[key].shape != wanted.get(key))
        raise NestlingError(
            f"network.early_from={path} has other first stages than network.early={network_early(recipe)}: they differ in "
            f"{strange}; choose shares of the kept network's width that give the nest's stripes"
        )
    return found


def network_early(recipe: Recipe) -> str:
    return ",".join(f"{share:g}" for share in recipe.network.early)


def copies(net: NestedNet, own: NestedNet, shares: Sequence[float]) -> dict[str, Tensor]:
    """What the early stages begin with: the kept network's most important channels, as `nestling.keep` cuts them out.

    There channels stand where they stood in the kept network, here in the order of their births."""
    image = own.plan.input
    cut = keep(own, tuple(shares), image.shape(image.channels), proof=False)
    classifier, state = own.plan.heads[0], cut.state_dict()
    found: dict[str, Tensor] = {}
    for node in early_part(net.plan).nodes:
        if not node.op.layered:
            continue
        there = cut.plan.by_name[of_cut(node.name, classifier)]
        rows, columns = by_birth(there.births), by_birth(births_read(cut.plan, there))
        for key, _ in net.layer(node.name).named_parameters(recurse=False):
            found[f"{node.name}.{key}"] = node.op.reordered(key, state[f"{there.name}.{key}"], rows, columns)
        for key, buffer in net.layer(node.name).named_buffers(recurse=False):
            if f"{there.name}.{key}" in state and buffer.dim():
                found[f"{node.name}.{key}"] = node.op.reordered(key, state[f"{there.name}.{key}"], rows, columns)
    return found


def of_cut(name: str, classifier: str) -> str:
    """The name that a node of the early stages has in a network that was cut: a head holds the whole classifier."""
    early, _, rest = name.partition(".")
    head, _, last = rest.partition(".")
    own_head, _, own_last = classifier.partition(".")
    return f"{early}.{head}.{own_head}.{own_last}" if last == own_last and head[:4] == own_head[:4] else name


def births_read(plan: Plan, node: Node) -> Births:
    """When the channels that a layer reads were born, before a head took some of them."""
    read = plan.by_name[node.reads[0]]
    if isinstance(read.op, Select):
        before = plan.by_name[read.reads[0]].births
        return tuple(before[channel] if channel >= 0 else 0 for channel in read.op.source)
    return read.births


def by_birth(births: Births) -> Tensor:
    return torch.tensor(births).argsort(stable=True)


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
