"""Functions as modules, which somebody's network calls on one tensor: what the operation `Module` is given.

A function that works on each channel is kept as a `Call`, a module of that function with its other arguments fixed.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn

Function = Callable[..., Any]


def spelled(target: Any) -> str:
    """The name of a function as people write it."""
    if isinstance(target, str):
        return f".{target}"
    named = {F.max_pool2d: "max_pool2d", F.adaptive_max_pool2d: "adaptive_max_pool2d"}  # torch hides these names
    return named.get(target) or str(getattr(target, "__name__", target))


def inplace_position(function: Function) -> int | None:
    """Which argument of a function says that it works in place, if one does."""
    try:
        names = list(inspect.signature(function).parameters)
    except ValueError:  # torch's built-in functions tell no signature, and have no such argument
        return None
    return names.index("inplace") if "inplace" in names else None


def mask(x: Tensor, function: Function, other: float) -> Tensor:
    """Ones where a comparison holds, zeros elsewhere."""
    made: Tensor = function(x, other)
    return made.to(x.dtype)


def largest(x: Tensor, dim: int, keepdim: bool) -> Tensor:
    return x.max(dim, keepdim)[0]


def smallest(x: Tensor, dim: int, keepdim: bool) -> Tensor:
    return x.min(dim, keepdim)[0]


class Call(nn.Module):
    """A function of one tensor, its other arguments fixed. `place` says which argument the tensor is."""

    def __init__(
        self, function: Function, place: int | str, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        super().__init__()
        self.function, self.place, self.arguments, self.options = function, place, arguments, options

    @classmethod
    def of(cls, node: fx.Node, function: Function) -> "Call":
        """The call that a traced operation makes, never in place: other stages may still need what it would overwrite."""
        tensor = node.all_input_nodes[0]
        arguments, options = fx.map_arg((node.args, dict(node.kwargs)), lambda a: None)
        position = inplace_position(function)
        if position is not None and len(arguments) > position:  # F.relu(x, True)
            arguments = (*arguments[:position], False, *arguments[position + 1 :])
        options = {key: value for key, value in options.items() if key != "inplace"}
        places: list[int | str] = [i for i, a in enumerate(node.args) if a is tensor]
        places += [k for k, a in node.kwargs.items() if a is tensor]
        return cls(function, places[0], tuple(arguments), options)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.place, str):
            out: Tensor = self.function(*self.arguments, **{**self.options, self.place: x})
        else:
            out = self.function(*self.arguments[: self.place], x, *self.arguments[self.place + 1 :], **self.options)
        return out

    def extra_repr(self) -> str:
        shown = ["x" if i == self.place else repr(a) for i, a in enumerate(self.arguments)]
        shown += [f"{k}={'x' if k == self.place else repr(v)}" for k, v in self.options.items()]
        return f"{spelled(self.function)}({', '.join(shown)})"


DROP_PATHS = ("DropPath", "StochasticDepth")  # as timm and torchvision call it


class DropPath(nn.Module):
    """Stochastic depth: in training, each image (or the whole batch) passes with a probability, or is zero."""

    def __init__(self, p: float, scaled: bool = True, each: bool = True) -> None:
        super().__init__()
        self.p, self.scaled, self.each = p, scaled, each

    @classmethod
    def of(cls, layer: Any) -> "DropPath":
        """After timm's DropPath or torchvision's StochasticDepth."""
        made = cls(
            getattr(layer, "drop_prob", getattr(layer, "p", 0.0)) or 0.0,
            getattr(layer, "scale_by_keep", True),
            getattr(layer, "mode", "row") == "row",
        )
        return made.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        shape = (x.shape[0] if self.each else 1, *[1] * (x.dim() - 1))
        passes = x.new_empty(shape).bernoulli_(1 - self.p)
        if self.scaled and self.p < 1.0:
            passes.div_(1 - self.p)
        return x * passes

    def extra_repr(self) -> str:
        return f"p={self.p}"


class Reshape(nn.Module):
    """Each channel by itself in another shape."""

    def __init__(self, size: tuple[int, ...]) -> None:
        super().__init__()
        self.size = tuple(size)

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], x.shape[1], *self.size)

    def extra_repr(self) -> str:
        return f"{self.size}, {math.prod(self.size)} pixels a channel"


class Windows(nn.Module):
    """A module of images on the windows of each channel, (N, channels, windows, height, width)."""

    def __init__(self, layer: nn.Module, count: int) -> None:
        super().__init__()
        self.layer, self.count = layer, count

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x.flatten(1, 2))
        return made.unflatten(1, (-1, self.count))


class Repeat(nn.Module):
    """Each channel so many times, along a side of its own before the others."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(2).expand(-1, -1, self.count, *[-1] * (x.dim() - 2)).contiguous()


class Patches(nn.Module):
    """torch's Unfold, with the pixels of a patch behind their channel: (N, channels, pixels, patches)."""

    def __init__(self, layer: nn.Unfold) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x)
        return made.unflatten(1, (x.shape[1], -1))
