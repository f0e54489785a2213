"""What frozen programs are made of: operations with copies of their weights, and the graph that they are written into.

Pure words: the tensors are made by the operations (`Operation.freeze`), the graph is export's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from nestling.nets.ops import lazy

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nestling.nets.ops.operation import Operation


@dataclass(frozen=True, eq=False)
class Op:
    """One operation of a frozen stage. Every value has one writer; `reads` are names of values."""

    does: Operation
    out: str
    reads: tuple[str, ...]
    shape: tuple[int, ...]  # of the value, without the batch
    weight: Tensor | None = None
    bias: Tensor | None = None
    module: nn.Module | None = None  # somebody's own, which then computes it

    @property
    def kind(self) -> str:
        return self.does.kind


class OnnxWriter(Protocol):
    """An ONNX graph while it is being written."""

    def add(self, kind: str, reads: Sequence[str], out: str, attributes: Mapping[str, Any] | None = None) -> str:
        """A node; returns the name of what it gives."""

    def constant(self, name: str, value: Any) -> str: ...

    def ints(self, name: str, *values: int) -> str:
        """A constant list of 64-bit integers."""

    def weights(self, op: Op) -> list[str]:
        """An operation's weight and bias, as its further inputs."""


def own(tensor: Tensor) -> Tensor:
    """A copy in float32 on the CPU."""
    return tensor.detach().to("cpu", lazy.torch.float32, copy=True).contiguous()
