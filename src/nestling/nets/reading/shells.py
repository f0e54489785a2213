"""Layers that stand for functions on a module's own tensors: batch norm, group norm and PReLU as people's subclasses call them.

In: the arguments of the function, in training and in evaluation. Out: torch's layer that does the same, holding the very
tensors of the module; or a reason why there is none.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nestling.errors import NestlingError
from nestling.nets.ops import BatchNorm, GroupNorm, LayerNorm, Operation, PReLU
from nestling.nets.plan import Node

Given = Mapping[str, Any]


@dataclass(frozen=True)
class Shell:
    """One function: the names of its arguments, which of them are tensors of the module, and how to make the layer."""

    words: tuple[str, ...]
    tensors: tuple[str, ...]
    layer: Callable[[Given, Given, Given, Node], nn.Module]


def batch_norm(training: Given, evaluation: Given, tensors: Given, read: Node) -> nn.Module:
    if (bool(training.get("training")), bool(evaluation.get("training"))) != (True, False):
        raise NestlingError(
            "batch norm is nested where it uses the batch in training and its statistics in evaluation; here it does one of "
            "them in both"
        )
    if tensors["running_mean"] is None or tensors["running_var"] is None:
        raise NestlingError("batch norm needs running statistics")
    kinds = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d}
    if len(read.size) not in kinds:
        raise NestlingError(f"it normalises tensors of shape (N, {read.channels}, *{read.size})")
    numbers = (training.get("eps", 1e-5), training.get("momentum", 0.1))
    return filled(kinds[len(read.size)](read.channels, *numbers, affine=affine(tensors), device="meta"), tensors)


def group_norm(training: Given, evaluation: Given, tensors: Given, read: Node) -> nn.Module:
    groups, eps = training["num_groups"], training.get("eps", 1e-5)
    there = any(tensors[word] is not None for word in NORM) if groups == 1 else affine(tensors)
    layer = filled(nn.GroupNorm(groups, read.channels, eps, there, device="meta"), tensors)
    for word in NORM if there else ():  # of one group, a scale or a shift may be there alone
        if tensors[word] is None:
            layer.register_parameter(word, None)
    return layer


def layer_norm(training: Given, evaluation: Given, tensors: Given, read: Node) -> nn.Module:
    shape, there = tuple(training["normalized_shape"]), tensors["weight"] is not None
    bias = tensors["bias"] is not None
    return filled(nn.LayerNorm(shape, training.get("eps", 1e-5), there, bias, device="meta"), tensors)


def rms_norm(training: Given, evaluation: Given, tensors: Given, read: Node) -> nn.Module:
    shape, there = tuple(training["normalized_shape"]), tensors["weight"] is not None
    return filled(nn.RMSNorm(shape, training.get("eps"), there, device="meta"), tensors)


def prelu(training: Given, evaluation: Given, tensors: Given, read: Node) -> nn.Module:
    return filled(nn.PReLU(tensors["weight"].numel(), device="meta"), tensors)


def affine(tensors: Given) -> bool:
    if (tensors["weight"] is None) != (tensors["bias"] is None):
        raise NestlingError("it has a scale or a shift but not both")
    return tensors["weight"] is not None


def filled(layer: nn.Module, tensors: Given) -> nn.Module:
    """The layer with the module's tensors; a count of batches is not kept."""
    layer.register_buffer("num_batches_tracked", None)
    for name, tensor in tensors.items():
        if tensor is not None:
            if name in ("weight", "bias") and not isinstance(tensor, nn.Parameter):
                raise NestlingError(f"its {name} is no parameter of the module")
            setattr(layer, name, tensor)
    return layer


NORM = ("weight", "bias")
SHELLS: dict[Any, tuple[Shell, type[Operation]]] = {
    F.batch_norm: (
        Shell(
            ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
            ("running_mean", "running_var", *NORM),
            batch_norm,
        ),
        BatchNorm,
    ),
    F.group_norm: (Shell(("input", "num_groups", "weight", "bias", "eps"), NORM, group_norm), GroupNorm),
    F.layer_norm: (Shell(("input", "normalized_shape", "weight", "bias", "eps"), NORM, layer_norm), LayerNorm),
    F.rms_norm: (Shell(("input", "normalized_shape", "weight", "eps"), ("weight",), rms_norm), LayerNorm),
    F.prelu: (Shell(("input", "weight"), ("weight",), prelu), PReLU),
    torch.prelu: (Shell(("input", "weight"), ("weight",), prelu), PReLU),
}
