"""A trained network that also answers early, and stays what it was: `keep(module, stripes=(1/8, 1/4))`.

In: a module that turns an image into logits, and how wide the new stages are. Out: a network whose last answer is the
module's own: its channels are born last and compute what they always computed. Beside each of its layers stands a narrow
one, born earlier, with a head of its own for every new stage. The narrow layers start as copies of the module's most important
channels. What the early stages are beside is said in early.py, what stays frozen in extended.py.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from nestling.errors import NestlingError
from nestling.nets.births import FINEST, Growth, growth_of
from nestling.nets.early import EARLY, READS, beside, own_part
from nestling.nets.extended import Extended
from nestling.nets.modes import unhooked
from nestling.nets.nest import check_multiple, own_randomness, read_module
from nestling.nets.net import NestedNet, follow
from nestling.nets.plan import Plan
from nestling.nets.reading.assemble import Assembled, built, check_stages, fitted, planned, tail_of
from nestling.nets.reading.ordered import ordered
from nestling.nets.reading.sketch import Sketch
from nestling.nets.reading.trace import Shape


def keep(
    module: nn.Module,
    stripes: Sequence[float] = (1 / 8, 1 / 4),
    shape: Shape = (3, 32, 32),
    reads: bool = False,
    budget: float | None = None,
    name: str = "",
    proof: bool = True,
    early: NestedNet | None = None,
    multiple: int = 1,
) -> Extended:
    """The module with a narrow stage before it for every stripe, as wide as that share of each of its layers.

    The module's own layers are frozen and in evaluation. With `reads` they may also learn to read the early stages, through new
    weights that are zero at first; without, nothing that is trained changes the last answer. `budget` narrows the stripes until
    all that is added costs at most that share of the module's multiply-accumulates; `net.overhead` says what it does cost.
    `early`: a nest that is trained already, all of whose stages come before the module, instead of stripes. `multiple`: the early
    stages' widths are multiples of it where the layer's own is; 8 or 16 fill a chip's vectors, and 8 is what our kernels need.
    """
    net = name or type(module).__name__
    check(stripes, budget, multiple, net)
    if early is not None and (reads or budget is not None):
        raise NestlingError(
            f"{net}: found early= with reads= or budget=, which are for stages made here; leave them out"
        )
    sketch = read_module(module, shape, proof, net)
    with own_randomness(module):
        sketch, _ = fitted(sketch, [EARLY, READS])
        if early is not None:
            return joined_to(sketch, early, False, net).train(module.training)
        shares = tuple(stripes)
        while True:
            made = made_of(sketch, shares, reads, multiple, net)
            if budget is None or made.overhead <= budget:
                break
            shares = narrower(shares, made.overhead, budget, net)
    return made.train(module.training)


def check(stripes: Any, budget: Any, multiple: Any, net: str) -> None:
    shares = stripes if isinstance(stripes, tuple | list) else ()
    if not shares or not all(type(share) in (int, float) and share > 0 for share in shares) or sum(shares) >= 1:
        raise NestlingError(
            f"{net}: found the stripes {stripes!r}; expected shares of each layer's width above 0, together below 1, such as "
            "(1/8, 1/4)"
        )
    if budget is not None and (type(budget) not in (int, float) or budget <= 0):
        raise NestlingError(
            f"{net}: found the budget {budget!r}; expected a share of the module's multiply-accumulates, such as 0.3"
        )
    check_multiple(multiple, net)


def narrower(shares: tuple[float, ...], overhead: float, budget: float, net: str) -> tuple[float, ...]:
    """The stripes for another try: what they cost grows with the square of their width."""
    factor = min(0.95, sqrt(budget / overhead))
    if max(shares) * factor < 1 / FINEST:
        raise NestlingError(
            f"{net}: the narrowest early stages cost {overhead:.1%} of the module's multiply-accumulates, more than the budget "
            f"of {budget:.1%}; give a larger one, or fewer stripes"
        )
    return tuple(share * factor for share in shares)


def made_of(sketch: Sketch, shares: Sequence[float], reads: bool, multiple: int, net: str) -> Extended:
    """The network of a sketch, with early stages of so many shares of its widths."""
    growth = replace(growth_of(shares), multiple=multiple)
    check_stages(sketch, growth, net)
    return joined_to(sketch, early_form(ordered(sketch), growth, net).net, reads, net)


def joined_to(sketch: Sketch, early: NestedNet, reads: bool, net: str) -> Extended:
    """The network of a sketch after the stages of another: what both were, bit for bit."""
    unhooked(early, net)
    own = own_form(sketch, net).net
    for what, mine, theirs in (
        ("images", own.plan.input.shape(own.plan.input.channels), early.plan.input.shape(early.plan.input.channels)),
        ("answers", *(plan.by_name[plan.heads[-1]].channels for plan in (own.plan, early.plan))),
    ):
        if mine != theirs:
            raise NestlingError(f"{net}: the early stages have {what} {theirs}, the module {mine}; expected the same")
    classifiers = [node.name for node in tail_of(sketch, net) if node.op.weighted]
    plan = beside(early.plan, own.plan, reads, alone=classifiers)
    parts: dict[str, nn.Module] = {n.name: own.layer(n.name) for n in own.plan.nodes if n.op.layered}
    parts |= {f"{EARLY}.{n.name}": early.layer(n.name) for n in early.plan.nodes if n.op.layered}
    made = Extended(plan, {n.name: parts[n.name] for n in plan.nodes if n.op.given})
    like = next((p for p in own.parameters() if p.is_floating_point()), torch.zeros(0))
    for node in plan.nodes:
        if not node.op.layered or node.shares:
            continue
        if node.name in parts:
            follow(made.layer(node.name), parts[node.name])
        else:
            made.layer(node.name).to(device=like.device, dtype=like.dtype)
    state: dict[str, Tensor] = {**own.state_dict(), **{f"{EARLY}.{key}": v for key, v in early.state_dict().items()}}
    made.load_state_dict({**made.state_dict(), **state})
    added = [n.name for n in plan.nodes if n.op.weighted and n.name.startswith(f"{READS}.") and not n.shares]
    made.hold(own_part(plan), added)
    made.read_nothing()
    return made


def own_form(sketch: Sketch, net: str) -> Assembled:
    """The module as it is, under its own names."""
    nodes = tuple(replace(node, births=(1,) * node.channels) for node in sketch.nodes.values())
    plan = Plan(net, nodes, (sketch.output,), ("full",))
    return built(plan, sketch.layers, {name: name for name in sketch.layers}, False)


def early_form(sketch: Sketch, growth: Growth, net: str) -> Assembled:
    """A nest of the module's most important channels: all its stages but the last."""
    plan, layers, origins = planned(sketch, growth, True, net)
    plan = Plan(net, plan.nodes, plan.heads[:-1], plan.sizes[:-1])
    return built(plan, layers, origins, False)
