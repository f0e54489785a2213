"""Weights that are made of others (weight norm, spectral norm, pruning), as the plain weights they are now.

In: a module. Out: the module itself, or a copy in which such weights are ordinary parameters, and what was done. A nest
trains the plain weight: what made it is gone, and whoever nests the module is told.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune, remove_spectral_norm, remove_weight_norm

from nestling.errors import NestlingError

# The hooks of the old kind by the names of their classes, and how torch takes them off.
OLD: dict[str, Callable[..., Any]] = {"WeightNorm": remove_weight_norm, "SpectralNorm": remove_spectral_norm}


def baked(module: nn.Module, net: str) -> tuple[nn.Module, list[str]]:
    """The module with plain weights, and the layers whose weights were made of others."""
    found = [path for path, layer in module.named_modules() if old_hooks(layer) or parametrize.is_parametrized(layer)]
    if not found:
        return module, []
    held: list[tuple[nn.Module, str, Tensor]] = []
    for path in found:
        layer = module.get_submodule(path)
        for _, name in old_hooks(layer):  # a plain attribute with a history, which cannot be copied
            held.append((layer, name, getattr(layer, name)))
            setattr(layer, name, held[-1][2].detach())
    try:
        made = copy.deepcopy(module)
    except Exception as error:
        raise NestlingError(f"{net}: cannot nest it: it cannot be copied ({type(error).__name__}: {error}).") from None
    finally:
        for layer, name, value in held:
            setattr(layer, name, value)
    with torch.no_grad():
        for path in found:
            bake(made.get_submodule(path))
    return made, found


def old_hooks(layer: nn.Module) -> list[tuple[Any, str]]:
    """Hooks that make a weight before every run, with the name of that weight."""
    hooks = list(layer._forward_pre_hooks.values())
    norms = [(hook, hook.name) for hook in hooks if type(hook).__name__ in OLD]  # type: ignore[attr-defined]
    return norms + [(hook, hook._tensor_name) for hook in hooks if isinstance(hook, prune.BasePruningMethod)]


def bake(layer: nn.Module) -> None:
    mode = layer.training
    layer.eval()  # spectral norm takes a step of its own in training
    if parametrize.is_parametrized(layer):
        unwrap(layer)
    for hook, name in old_hooks(layer):
        if isinstance(hook, prune.BasePruningMethod):
            prune.remove(layer, name)
        else:
            OLD[type(hook).__name__](layer, name)
    layer.train(mode)


def unwrap(layer: Any) -> None:
    """Of the new kind. By hand: torch's own way changes the class, which a copy shares with the original."""
    weights = {}
    for name, made in layer.parametrizations.items():
        learnt = any(parameter.requires_grad for parameter in made.parameters())
        weights[name] = nn.Parameter(getattr(layer, name).detach().clone(), requires_grad=learnt)
    del layer.parametrizations
    layer.__class__ = type(layer).__bases__[0]
    for name, weight in weights.items():
        layer.register_parameter(name, weight)
