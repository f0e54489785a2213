"""The images that come in. All their channels are there from the first stage on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from nestling.nets.births import Births
from nestling.nets.ops.operation import Channels, Operation

if TYPE_CHECKING:
    from nestling.nets.plan import Node


@dataclass(frozen=True)
class Input(Operation):
    kind: ClassVar[str] = "input"
    any_axis: ClassVar[bool] = True

    def births(self, node: Node, reads: Sequence[Node]) -> Births:
        return (1,) * node.channels

    def parents(self, node: Node, reads: Sequence[Node], row: int) -> tuple[Channels, ...]:
        return ()
