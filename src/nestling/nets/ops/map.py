"""Functions of each channel by itself, without parameters: activations and pooling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from nestling.nets.ops import lazy
from nestling.nets.ops.frozen import OnnxWriter, Op
from nestling.nets.ops.operation import Extent, Operation

if TYPE_CHECKING:
    from torch import Tensor

    from nestling.nets.plan import Node


@dataclass(frozen=True)
class MapFunction:
    """The same function three times: of torch.nn.functional, as an ONNX operator, and what it does to a side."""

    torch: str
    options: dict[str, Any]
    onnx: str
    attributes: dict[str, Any]
    side: Callable[[int], int]


HALF = {"kernel_shape": [2, 2], "strides": [2, 2]}
THIRD = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
FUNCTIONS = {
    "relu": MapFunction("relu", {}, "Relu", {}, lambda side: side),
    "pool2": MapFunction("avg_pool2d", {"kernel_size": 2}, "AveragePool", HALF, lambda side: side // 2),
    "pool2up": MapFunction(
        "avg_pool2d",
        {"kernel_size": 2, "ceil_mode": True},
        "AveragePool",
        {**HALF, "ceil_mode": 1},
        lambda side: (side + 1) // 2,
    ),
    "maxpool3": MapFunction(
        "max_pool2d", {"kernel_size": 3, "stride": 2, "padding": 1}, "MaxPool", THIRD, lambda side: (side - 1) // 2 + 1
    ),
}


@dataclass(frozen=True)
class Map(Operation):
    function: str

    kind: ClassVar[str] = "map"
    tail: ClassVar[bool] = True

    @property
    def any_axis(self) -> bool:
        return self.function == "relu"

    def size(self, reads: Sequence[Node]) -> Extent:
        return tuple(FUNCTIONS[self.function].side(side) for side in reads[0].size)

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        does = FUNCTIONS[self.function]
        out: Tensor = getattr(lazy.F, does.torch)(reads[0], **does.options)
        return out

    def write(self, graph: OnnxWriter, op: Op) -> None:
        does = FUNCTIONS[self.function]
        graph.add(does.onnx, op.reads, op.out, does.attributes)
