"""torch's channel-wise modules as ONNX operators, for networks that were not planned as nests.

In: a module of one tensor. Out: the operators that do the same in evaluation mode, one after another, as (name,
attributes); None where there is no such form here. Writes no graph and knows no stage.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nestling.nets.ops.calls import Call, DropPath

Steps = list[tuple[str, dict[str, Any]]]


def sides(module: nn.Module, value: int | tuple[int, ...]) -> list[int]:
    """One number per side of what a pooling layer pools; its name says how many sides there are."""
    return [value] * int(type(module).__name__[-2]) if isinstance(value, int) else list(value)


def max_pool(module: nn.MaxPool1d | nn.MaxPool2d) -> Steps:
    attributes = {
        "kernel_shape": sides(module, module.kernel_size),
        "strides": sides(module, module.stride),
        "pads": sides(module, module.padding) * 2,
        "dilations": sides(module, module.dilation),
        "ceil_mode": int(module.ceil_mode),
    }
    return [("MaxPool", attributes)]


def average_pool(module: nn.AvgPool1d | nn.AvgPool2d) -> Steps | None:
    if getattr(module, "divisor_override", None) is not None:
        return None
    attributes = {
        "kernel_shape": sides(module, module.kernel_size),
        "strides": sides(module, module.stride),
        "pads": sides(module, module.padding) * 2,
        "ceil_mode": int(module.ceil_mode),
        "count_include_pad": int(module.count_include_pad),
    }
    return [("AveragePool", attributes)]


def global_pool(module: Any) -> Steps | None:
    if set(sides(module, module.output_size)) != {1}:
        return None
    average = isinstance(module, nn.AdaptiveAvgPool1d | nn.AdaptiveAvgPool2d)
    return [("GlobalAveragePool" if average else "GlobalMaxPool", {})]


FORMS: dict[type[nn.Module], Callable[[Any], Steps | None]] = {
    nn.Identity: lambda m: [("Identity", {})],
    DropPath: lambda m: [("Identity", {})],
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
    nn.Softmax: lambda m: [("Softmax", {"axis": m.dim})],
    nn.Softsign: lambda m: [("Softsign", {})],
    nn.MaxPool1d: max_pool,
    nn.MaxPool2d: max_pool,
    nn.AvgPool1d: average_pool,
    nn.AvgPool2d: average_pool,
    nn.AdaptiveAvgPool1d: global_pool,
    nn.AdaptiveAvgPool2d: global_pool,
    nn.AdaptiveMaxPool1d: global_pool,
    nn.AdaptiveMaxPool2d: global_pool,
}


# Functions whose further arguments are those of a module, in the same order or (F.max_pool2d, as torch.fx sees it) by name.
TWINS: dict[Any, type[nn.Module]] = {
    F.relu: nn.ReLU, torch.relu: nn.ReLU, F.sigmoid: nn.Sigmoid, torch.sigmoid: nn.Sigmoid, F.tanh: nn.Tanh,
    torch.tanh: nn.Tanh, F.leaky_relu: nn.LeakyReLU, F.elu: nn.ELU, F.selu: nn.SELU, F.gelu: nn.GELU, F.mish: nn.Mish,
    F.hardswish: nn.Hardswish, F.hardsigmoid: nn.Hardsigmoid, F.softsign: nn.Softsign, F.max_pool2d: nn.MaxPool2d,
    F.avg_pool2d: nn.AvgPool2d, F.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d, F.adaptive_max_pool2d: nn.AdaptiveMaxPool2d,
}  # fmt: skip


def as_onnx(module: nn.Module) -> Steps | None:
    """The operators of a module; None if it has no form here. Subclasses may do anything, so only the very types count."""
    if isinstance(module, Call):  # a function of a network that was traced
        return call(module)
    form = FORMS.get(type(module))
    return form(module) if form else None


def call(made: Call) -> Steps | None:
    if made.place != 0:
        return None
    rest, options = made.arguments[1:], made.options
    if made.function is torch.mean:
        return pixel_mean(*rest, **options)
    if made.function not in TWINS:
        return None
    return as_onnx(TWINS[made.function](*rest, **options))


def pixel_mean(dim: Any = None, keepdim: bool = False, **options: Any) -> Steps | None:
    if options or not isinstance(dim, tuple | list) or sorted(each % 4 for each in dim) != [2, 3]:
        return None
    pooled: Steps = [("GlobalAveragePool", {})]
    return pooled if keepdim else [*pooled, ("Flatten", {})]
