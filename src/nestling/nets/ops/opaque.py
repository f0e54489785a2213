"""A piece of somebody's module as it was recorded: it may mix all channels, so they are all born at once.

For births in depth, where whole blocks are born together; a nest in width cannot use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from nestling.errors import NestlingError
from nestling.nets.births import Births
from nestling.nets.ops.module import Module
from nestling.nets.ops.operation import Channels

if TYPE_CHECKING:
    from nestling.nets.plan import Node


@dataclass(frozen=True)
class Opaque(Module):
    work: int = 0  # multiply-accumulates of an image
    held: int = 0  # parameters

    kind: ClassVar[str] = "opaque"
    any_axis: ClassVar[bool] = True
    tail: ClassVar[bool] = False

    def births(self, node: Node, reads: Sequence[Node]) -> Births:
        return (max(birth for read in reads for birth in read.births),) * node.channels

    def parents(self, node: Node, reads: Sequence[Node], row: int) -> tuple[Channels, ...]:
        """Everything; said of the first row only, since all rows go together."""
        return tuple(tuple(range(read.channels)) if row == 0 else () for read in reads)

    def wants(self, node: Node, reads: Sequence[Node], rows: Channels, stage: int) -> tuple[Channels, ...]:
        return tuple(tuple(range(read.channels)) for read in reads)

    def spread(self, node: Node, reads: Sequence[Node], mine: Sequence[int], theirs: Sequence[list[int]]) -> None:
        """Whoever needs one row has all of them computed."""
        assert isinstance(mine, list)
        owned = 0
        for bits in mine:
            owned |= bits
        mine[:] = [owned] * len(mine)
        super().spread(node, reads, mine, theirs)

    def check(self, plan: str, node: Node, reads: Sequence[Node]) -> None:
        if len(set(node.births)) > 1:
            raise NestlingError(
                f"{plan}: {node.name} was not read channel by channel, so that its channels cannot be born at the different "
                f"stages {sorted(set(node.births))}."
            )

    def params(self, node: Node, reads: Sequence[Node]) -> tuple[int, ...]:
        return (self.held, *[0] * (node.channels - 1))

    def macs(self, node: Node, reads: Sequence[Node]) -> tuple[int, ...]:
        return (self.work, *[0] * (node.channels - 1))
