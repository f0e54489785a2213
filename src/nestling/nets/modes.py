"""Modes of a network's modules: evaluation for a while, what its owner has put into evaluation left there, channels held; hooks.

In: a network in training, of which some modules (batch norms of a frozen part) may be in evaluation. Knows nothing of what is
computed meanwhile.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from nestling.errors import NestlingError


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


def hooked(module: nn.Module) -> tuple[str, str] | None:
    """A module of it that has a hook on its calls, and what the hook is called; None where none has."""
    for path, layer in module.named_modules():
        for hooks in (layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks):
            for hook in hooks.values():
                called = getattr(hook, "__name__", type(hook).__name__)
                return f"{path} ({type(layer).__name__})" if path else "it", called
    return None


def unhooked(net: nn.Module, name: str) -> None:
    """Refuse hooks where not the layers of a network are called, but parts of them are computed."""
    if found := hooked(net):
        raise NestlingError(
            f"{name}: {found[0]} has a hook, {found[1]}. Hooks run in net(x) only: stages, subnetworks, exports, fit and "
            "Runtime compute with parts of layers, and would answer as if it were not there. Remove it (handle.remove()) first"
        )


def hold_channels(norm: nn.Module, held: Tensor | None) -> None:
    """Say which channels of a batch norm stay as in evaluation while the others train; None: all train. Whoever computes the norm
    must look."""
    norm.__dict__.pop("held", None)
    if held is not None:
        norm.__dict__["held"] = held


def held_channels(norm: nn.Module) -> Tensor | None:
    found: Tensor | None = norm.__dict__.get("held")
    return found
