"""torch's channel-wise modules and functions as ONNX operators, for networks that were not planned as nests.

In: a module of one tensor. Out: the operators that do the same in evaluation mode, one after another; None where there is no
such form here, and torch's exporter must trace the stage, which takes seconds. Writes no graph and knows no stage.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.nets.ops.calls import Call, DropPath, Repeat, Reshape, largest, mask, smallest

GIVEN, LAST, BEFORE = (
    "given",
    "last",
    "before",
)  # what may be read: the module's input, what the last operator or that before it gave


class OnnxStep(NamedTuple):
    """One operator: its name, attributes, and what it reads, numbers among it."""

    kind: str
    attributes: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    reads: tuple[Any, ...] = (LAST,)


Steps = list[OnnxStep]


def one(kind: str, *numbers: Any, **attributes: Any) -> Steps:
    """A single operator, with constants as further inputs."""
    return [OnnxStep(kind, attributes, (LAST, *map(constant, numbers)))]


def constant(value: Any) -> Any:
    """A number as float32, whole ones in lists as 64 bits; nothing stays nothing."""
    if value is None:
        return None
    return np.array(value, np.int64) if isinstance(value, list) else np.array(value, np.float32)


def sides(module: nn.Module, value: int | tuple[int, ...]) -> list[int]:
    """One number per side of what a pooling layer pools; its name says how many sides there are."""
    return [value] * int(type(module).__name__[-2]) if isinstance(value, int) else list(value)


def every(module: nn.Module, stride: int | tuple[int, ...]) -> Steps:
    """Pooling single pixels leaves some out. As a pool, ONNX Runtime would join it with padding before it, and refuse that."""
    steps = sides(module, stride)
    axes = list(range(-len(steps), 0))
    return one("Slice", [0] * len(steps), [FAR] * len(steps), axes, steps)


FAR = 2**31 - 1  # behind the last pixel of any image


def max_pool(module: nn.MaxPool1d | nn.MaxPool2d) -> Steps:
    if set(sides(module, module.kernel_size)) == {1}:
        return every(module, module.stride)
    attributes = {
        "kernel_shape": sides(module, module.kernel_size),
        "strides": sides(module, module.stride),
        "pads": sides(module, module.padding) * 2,
        "dilations": sides(module, module.dilation),
        "ceil_mode": int(module.ceil_mode),
    }
    return one("MaxPool", **attributes)


def average_pool(module: nn.AvgPool1d | nn.AvgPool2d) -> Steps | None:
    if getattr(module, "divisor_override", None) is not None:
        return None
    if set(sides(module, module.kernel_size)) == {1}:
        return every(module, module.stride)
    attributes = {
        "kernel_shape": sides(module, module.kernel_size),
        "strides": sides(module, module.stride),
        "pads": sides(module, module.padding) * 2,
        "ceil_mode": int(module.ceil_mode),
        "count_include_pad": int(module.count_include_pad),
    }
    return one("AveragePool", **attributes)


def global_pool(module: Any) -> Steps | None:
    if set(sides(module, module.output_size)) != {1}:
        return None
    average = isinstance(module, nn.AdaptiveAvgPool1d | nn.AdaptiveAvgPool2d)
    return one("GlobalAveragePool" if average else "GlobalMaxPool")


def softplus(module: nn.Softplus) -> Steps:
    """Beyond its threshold torch returns x itself, which the exact form then equals to the last bit but one."""
    if module.beta == 1:
        return one("Softplus")
    return [*one("Mul", module.beta), *one("Softplus"), *one("Div", module.beta)]


def padding(sides: tuple[int, ...] | int, mode: str, value: float | None, axes: int) -> Steps | None:
    """Pads of the last sides, as torch lists them: of the last side first, before and behind."""
    given = (sides,) * (2 * axes) if isinstance(sides, int) else tuple(sides)
    if mode not in PADS or min(given) < 0:
        return None
    count = len(given) // 2
    pads = [given[2 * i] for i in reversed(range(count))] + [given[2 * i + 1] for i in reversed(range(count))]
    fill = (value or 0.0) if mode == "constant" else None
    return [
        OnnxStep("Pad", {"mode": PADS[mode]}, (LAST, constant(pads), constant(fill), constant(list(range(-count, 0)))))
    ]


PADS = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def resize(
    size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: Any = None, **other: Any
) -> Steps | None:
    """Up-sampling by whole factors, which alone is the same to the last pixel everywhere."""
    factors = tuple(scale_factor) if isinstance(scale_factor, tuple | list) else (scale_factor,) * 2
    whole = all(isinstance(factor, int | float) and factor == int(factor) >= 1 for factor in factors)
    if size is not None or not whole or any(other.values()) or mode not in ("nearest", "bilinear") or len(factors) != 2:
        return None
    how = "asymmetric" if mode == "nearest" else "align_corners" if align_corners else "half_pixel"
    attributes = {"mode": "nearest" if mode == "nearest" else "linear", "coordinate_transformation_mode": how}
    if mode == "nearest":
        attributes["nearest_mode"] = "floor"
    scales = np.array([1.0, 1.0, *map(float, factors)], np.float32)
    return [OnnxStep("Resize", attributes, (LAST, None, scales))]


def softmax(kind: str, dim: int | None) -> Steps | None:
    return None if dim is None else one(kind, axis=dim)


def normalised(p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None) -> Steps | None:
    """torch's normalize: by a length that is never less than `eps`."""
    if p not in (1, 2):
        return None
    length = OnnxStep(f"ReduceL{int(p)}", {"keepdims": 1}, (LAST, constant([dim])))
    return [length, *one("Clip", float(eps)), OnnxStep("Div", {}, (GIVEN, LAST))]


def rolled(shifts: Any, dims: Any) -> Steps:
    """Along one dimension after another, by less than its length: what stands behind a place, and what stands before it."""
    steps: Steps = []
    shifts, dims = ([each] if isinstance(each, int) else each for each in (shifts, dims))
    for shift, dim in zip(shifts, dims, strict=True):
        if shift:
            behind = OnnxStep("Slice", {}, (LAST, *map(constant, ([-shift], [FAR], [dim], [1]))))
            before = OnnxStep("Slice", {}, (BEFORE, *map(constant, ([0], [-shift], [dim], [1]))))
            steps += [behind, before, OnnxStep("Concat", {"axis": dim}, (BEFORE, LAST))]
    return steps or one("Identity")


SAME: Callable[[Any], Steps] = lambda m: one("Identity")  # noqa: E731
FORMS: dict[type[nn.Module], Callable[[Any], Steps | None]] = {
    nn.Identity: SAME, DropPath: SAME, nn.Dropout: SAME, nn.Dropout1d: SAME, nn.Dropout2d: SAME, nn.Dropout3d: SAME,
    nn.AlphaDropout: SAME, nn.FeatureAlphaDropout: SAME,
    Reshape: lambda m: one("Reshape", [0, 0, *m.size]),
    Repeat: lambda m: [*one("Unsqueeze", [2]), OnnxStep("Concat", {"axis": 2}, (LAST,) * m.count)],
    nn.ReLU: lambda m: one("Relu"),
    nn.ReLU6: lambda m: one("Clip", 0.0, 6.0),
    nn.Hardtanh: lambda m: one("Clip", m.min_val, m.max_val),
    nn.SiLU: lambda m: [*one("Sigmoid"), OnnxStep("Mul", {}, (GIVEN, LAST))],
    nn.LeakyReLU: lambda m: one("LeakyRelu", alpha=m.negative_slope),
    nn.RReLU: lambda m: one("LeakyRelu", alpha=(m.lower + m.upper) / 2),
    nn.ELU: lambda m: one("Elu", alpha=m.alpha),
    nn.CELU: lambda m: one("Celu", alpha=m.alpha),
    nn.SELU: lambda m: one("Selu"),
    nn.GELU: lambda m: one("Gelu", approximate=m.approximate),
    nn.Hardswish: lambda m: one("HardSwish"),
    nn.Hardsigmoid: lambda m: one("HardSigmoid", alpha=1 / 6, beta=0.5),
    nn.Mish: lambda m: one("Mish"),
    nn.Softplus: softplus,
    nn.LogSigmoid: lambda m: [*one("Neg"), *one("Softplus"), *one("Neg")],
    nn.Sigmoid: lambda m: one("Sigmoid"),
    nn.Tanh: lambda m: one("Tanh"),
    nn.Tanhshrink: lambda m: [*one("Tanh"), OnnxStep("Sub", {}, (GIVEN, LAST))],
    nn.Softshrink: lambda m: one("Shrink", lambd=float(m.lambd), bias=float(m.lambd)),
    nn.Hardshrink: lambda m: one("Shrink", lambd=float(m.lambd), bias=0.0),
    nn.Softsign: lambda m: one("Softsign"),
    nn.Threshold: lambda m: [*one("Greater", m.threshold), OnnxStep("Where", {}, (LAST, GIVEN, constant(float(m.value))))],
    nn.Softmax: lambda m: softmax("Softmax", m.dim),
    nn.LogSoftmax: lambda m: softmax("LogSoftmax", m.dim),
    nn.Softmax2d: lambda m: one("Softmax", axis=-3),
    nn.MaxPool1d: max_pool, nn.MaxPool2d: max_pool, nn.AvgPool1d: average_pool, nn.AvgPool2d: average_pool,
    nn.AdaptiveAvgPool1d: global_pool, nn.AdaptiveAvgPool2d: global_pool,
    nn.AdaptiveMaxPool1d: global_pool, nn.AdaptiveMaxPool2d: global_pool,
    nn.Upsample: lambda m: resize(m.size, m.scale_factor, m.mode, m.align_corners),
    nn.UpsamplingNearest2d: lambda m: resize(m.size, m.scale_factor),
    nn.UpsamplingBilinear2d: lambda m: resize(m.size, m.scale_factor, "bilinear", True),
    nn.ZeroPad2d: lambda m: padding(m.padding, "constant", 0.0, 2),
    nn.ConstantPad2d: lambda m: padding(m.padding, "constant", m.value, 2),
    nn.ReflectionPad2d: lambda m: padding(m.padding, "reflect", None, 2),
    nn.ReplicationPad2d: lambda m: padding(m.padding, "replicate", None, 2),
}  # fmt: skip


# Functions whose further arguments are those of a module, in the same order or (F.max_pool2d, as torch.fx sees it) by name.
TWINS: dict[Any, type[nn.Module]] = {
    F.relu: nn.ReLU, torch.relu: nn.ReLU, F.sigmoid: nn.Sigmoid, torch.sigmoid: nn.Sigmoid, F.tanh: nn.Tanh,
    torch.tanh: nn.Tanh, F.leaky_relu: nn.LeakyReLU, F.elu: nn.ELU, F.selu: nn.SELU, F.gelu: nn.GELU, F.mish: nn.Mish,
    F.hardswish: nn.Hardswish, F.hardsigmoid: nn.Hardsigmoid, F.softsign: nn.Softsign, F.max_pool2d: nn.MaxPool2d,
    F.avg_pool2d: nn.AvgPool2d, F.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d, F.adaptive_max_pool2d: nn.AdaptiveMaxPool2d,
    F.relu6: nn.ReLU6, F.silu: nn.SiLU, F.hardtanh: nn.Hardtanh, F.softplus: nn.Softplus, F.celu: nn.CELU, torch.celu: nn.CELU,
    F.logsigmoid: nn.LogSigmoid, F.tanhshrink: nn.Tanhshrink, F.softshrink: nn.Softshrink, F.hardshrink: nn.Hardshrink,
    torch.selu: nn.SELU, F.max_pool1d: nn.MaxPool1d, F.avg_pool1d: nn.AvgPool1d, F.softmax: nn.Softmax,
    F.log_softmax: nn.LogSoftmax, F.threshold: nn.Threshold,
}  # fmt: skip
TWINS |= {Tensor.contiguous: nn.Identity}
TWINS |= {getattr(Tensor, name): kind for name, kind in (("relu", nn.ReLU), ("sigmoid", nn.Sigmoid), ("tanh", nn.Tanh))}
PLAIN = {"abs": "Abs", "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "neg": "Neg", "reciprocal": "Reciprocal", "erf": "Erf",
         "sin": "Sin", "cos": "Cos", "floor": "Floor", "ceil": "Ceil", "sign": "Sign", "round": "Round", "atan": "Atan",
         "sinh": "Sinh", "cosh": "Cosh", "asinh": "Asinh", "detach": "Identity"}  # fmt: skip
OPERATORS: dict[Any, str] = {
    getattr(room, name): kind
    for name, kind in PLAIN.items()
    for room in (torch, Tensor, operator)
    if hasattr(room, name)
}
ARITHMETIC: dict[Any, str] = {
    getattr(room, name): kind
    for name, kind in {"add": "Add", "sub": "Sub", "mul": "Mul", "truediv": "Div", "div": "Div", "pow": "Pow"}.items()
    for room in (operator, torch, Tensor)
    if hasattr(room, name)
}
COMPARED: dict[Any, list[str]] = {
    getattr(room, name): kinds
    for name, kinds in {
        "gt": ["Greater"], "ge": ["GreaterOrEqual"], "lt": ["Less"], "le": ["LessOrEqual"], "eq": ["Equal"],
        "ne": ["Equal", "Not"],
    }.items()
    for room in (operator, torch)
}  # fmt: skip
FLOAT = 1  # ONNX's number for it
POWERS: dict[Any, Steps] = {
    torch.square: [OnnxStep("Mul", {}, (GIVEN, GIVEN))],
    torch.rsqrt: [*one("Sqrt"), *one("Reciprocal")],
}
REDUCED: dict[Any, str] = {
    torch.sum: "ReduceSum", Tensor.sum: "ReduceSum", torch.amax: "ReduceMax", torch.amin: "ReduceMin",
}  # fmt: skip
CLAMPS = {torch.clamp, Tensor.clamp, torch.clip, Tensor.clip}


def as_onnx(module: nn.Module) -> Steps | None:
    """The operators of a module; None if it has no form here. Subclasses may do anything, so only the very types count."""
    if isinstance(module, Call):  # a function of a network that was traced
        return call(module)
    form = FORMS.get(type(module))
    return form(module) if form else None


def call(made: Call) -> Steps | None:
    """A function of a tensor, the others of its arguments numbers."""
    if made.function in ARITHMETIC:
        return arithmetic(made)
    if made.place != 0:
        return None
    rest, options = made.arguments[1:], made.options
    if made.function in (torch.mean, Tensor.mean):
        return pixel_mean(*rest, **options)
    if made.function in REDUCED:
        return reduced(REDUCED[made.function], *rest, **options)
    if made.function is F.normalize:
        return normalised(*rest, **options)
    if made.function is torch.roll:
        return rolled(*rest, **options)
    if made.function in OPERATORS:
        return None if rest or options else one(OPERATORS[made.function])
    if made.function in CLAMPS:
        return clamp(*rest, **options)
    if made.function in POWERS:
        return None if rest or options else POWERS[made.function]
    if made.function is operator.getitem:
        return picked(*rest)
    if made.function is mask:
        first, *others = COMPARED[rest[0]]
        return [*one(first, float(rest[1])), *(step for kind in others for step in one(kind)), *one("Cast", to=FLOAT)]
    if made.function in (largest, smallest):
        kind = "ReduceMax" if made.function is largest else "ReduceMin"
        return one(kind, [rest[0]], keepdims=int(rest[1]))
    if made.function is F.interpolate:
        return resize(*rest, **options)
    if made.function is F.pad:
        return pad(*rest, **options)
    if made.function not in TWINS:
        return None
    try:
        return as_onnx(TWINS[made.function](*rest, **options))
    except TypeError:  # an option of the function that the module does not have
        return None


def arithmetic(made: Call) -> Steps | None:
    """A tensor and a number, in either order."""
    numbers = [each for place, each in enumerate(made.arguments) if place != made.place]
    if made.options or len(numbers) != 1 or type(numbers[0]) not in (int, float) or made.place not in (0, 1):
        return None
    number = constant(float(numbers[0]))
    return [OnnxStep(ARITHMETIC[made.function], {}, (LAST, number) if made.place == 0 else (number, LAST))]


def clamp(min: Any = None, max: Any = None) -> Steps | None:
    if any(each is not None and type(each) not in (int, float) for each in (min, max)):
        return None
    return one("Clip", *(None if each is None else float(each) for each in (min, max)))


def pad(pad: Any, mode: str = "constant", value: float | None = None) -> Steps | None:
    whole = isinstance(pad, tuple | list) and all(type(side) is int for side in pad)
    return padding(tuple(pad), mode, value, 2) if whole else None


def picked(which: Any) -> Steps | None:
    """Slices and single places of a tensor."""
    parts = list(enumerate(which)) if isinstance(which, tuple) else []
    slices = [(d, part) for d, part in parts if isinstance(part, slice) and part != slice(None)]
    places = [(d, part) for d, part in reversed(parts) if type(part) is int]
    if len(slices) + len(places) + sum(part == slice(None) for _, part in parts) != len(parts) or not parts:
        return None
    if any(part.step is not None and part.step < 1 for _, part in slices):
        return None
    edges = [[part.start or 0, FAR if part.stop is None else part.stop, part.step or 1] for _, part in slices]
    starts, stops, steps = (list(each) for each in zip(*edges, strict=True)) if edges else ([], [], [])
    made = one("Slice", starts, stops, [d for d, _ in slices], steps) if slices else []
    for d, place in places:
        made += [*one("Gather", [place], axis=d), *one("Squeeze", [d])]
    return made or one("Identity")


def reduced(kind: str, dim: Any = None, keepdim: bool = False, **options: Any) -> Steps | None:
    """Along dimensions that are said."""
    if options or not isinstance(dim, int | tuple | list) or dim == ():
        return None
    return one(kind, [dim] if isinstance(dim, int) else list(dim), keepdims=int(keepdim))


def pixel_mean(dim: Any = None, keepdim: bool = False, **options: Any) -> Steps | None:
    if options or isinstance(dim, int) or not dim or sorted(each % 4 for each in dim) != [2, 3]:
        return reduced("ReduceMean", dim, keepdim, **options)
    pooled = one("GlobalAveragePool")
    return pooled if keepdim else [*pooled, *one("Flatten")]
