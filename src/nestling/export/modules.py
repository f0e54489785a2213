"""torch's channel-wise modules as ONNX operators, for networks that were not drawn as nests.

In: a module of one tensor. Out: the operators that do the same in evaluation mode, one after another, as (name,
attributes); None where there is no such form here. Writes no graph and knows no stage.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nestling.nets.operations import Call

Steps = list[tuple[str, dict[str, Any]]]


def pair(value: int | tuple[int, ...]) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


def max_pool(module: nn.MaxPool2d) -> Steps:
    attributes = {
        "kernel_shape": pair(module.kernel_size),
        "strides": pair(module.stride),
        "pads": pair(module.padding) * 2,
        "dilations": pair(module.dilation),
        "ceil_mode": int(module.ceil_mode),
    }
    return [("MaxPool", attributes)]


def average_pool(module: nn.AvgPool2d) -> Steps | None:
    if module.divisor_override is not None:
        return None
    attributes = {
        "kernel_shape": pair(module.kernel_size),
        "strides": pair(module.stride),
        "pads": pair(module.padding) * 2,
        "ceil_mode": int(module.ceil_mode),
        "count_include_pad": int(module.count_include_pad),
    }
    return [("AveragePool", attributes)]


def global_pool(module: nn.AdaptiveAvgPool2d | nn.AdaptiveMaxPool2d) -> Steps | None:
    if module.output_size not in (1, (1, 1)):
        return None
    return [("GlobalAveragePool" if isinstance(module, nn.AdaptiveAvgPool2d) else "GlobalMaxPool", {})]


FORMS: dict[type[nn.Module], Callable[[Any], Steps | None]] = {
    nn.Identity: lambda m: [("Identity", {})],
    nn.Dropout: lambda m: [("Identity", {})],
    nn.Dropout2d: lambda m: [("Identity", {})],
    nn.ReLU: lambda m: [("Relu", {})],
    nn.LeakyReLU: lambda m: [("LeakyRelu", {"alpha": m.negative_slope})],
    nn.ELU: lambda m: [("Elu", {"alpha": m.alpha})],
    nn.SELU: lambda m: [("Selu", {})],
    nn.GELU: lambda m: [("Gelu", {"approximate": m.approximate})],
    nn.Hardswish: lambda m: [("HardSwish", {})],
    nn.Hardsigmoid: lambda m: [("HardSigmoid", {"alpha": 1 / 6, "beta": 0.5})],
    nn.Mish: lambda m: [("Mish", {})],
    nn.Sigmoid: lambda m: [("Sigmoid", {})],
    nn.Tanh: lambda m: [("Tanh", {})],
    nn.Softsign: lambda m: [("Softsign", {})],
    nn.MaxPool2d: max_pool,
    nn.AvgPool2d: average_pool,
    nn.AdaptiveAvgPool2d: global_pool,
    nn.AdaptiveMaxPool2d: global_pool,
}


FUNCTIONS: dict[Any, str] = {
    F.relu: "Relu", torch.relu: "Relu", F.sigmoid: "Sigmoid", torch.sigmoid: "Sigmoid", F.tanh: "Tanh", torch.tanh: "Tanh"
}  # fmt: skip


def as_onnx(module: nn.Module) -> Steps | None:
    """The operators of a module; None if it has no form here. Subclasses may do anything, so only the very types count."""
    if isinstance(module, Call):  # a function of a network that was traced
        plain = not any(module.arguments) and not any(module.options.values())
        return [(FUNCTIONS[module.function], {})] if plain and module.function in FUNCTIONS else None
    form = FORMS.get(type(module))
    return form(module) if form else None
