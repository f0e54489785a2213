"""Modes of a network's modules: evaluation for a while, what its owner has put into evaluation left there, channels held.

In: a network in training, of which some modules (batch norms of a frozen part) may be in evaluation. Knows nothing of what is
computed meanwhile.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """The network in evaluation; afterwards every module is in the mode it was in."""
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        yield
    finally:
        net.train(modes[0][1])  # what is made of it, such as its stages, follows
        for module, mode in modes:
            module.training = mode


def all_trains(net: nn.Module) -> bool:
    """Whether nothing of it is frozen or stays in evaluation."""
    return all(p.requires_grad for p in net.parameters()) and all(module.training for module in net.modules())


def hold_channels(norm: nn.Module, held: Tensor | None) -> None:
    """Say which channels of a batch norm stay as in evaluation while the others train; None: all train. Whoever computes the norm
    must look."""
    norm.__dict__.pop("held", None)
    if held is not None:
        norm.__dict__["held"] = held


def held_channels(norm: nn.Module) -> Tensor | None:
    found: Tensor | None = norm.__dict__.get("held")
    return found
