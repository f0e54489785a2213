"""Births for a network that was not drawn as a nest: which channels must be born together, and when each is born.

In: the nodes of a network in order, without births, and a growth order of widths. Out: the same nodes with births.
Channels that are added or multiplied are tied, because a sum is born with the latest of its terms; then every layer is
cut into stripes as far as its ties leave a choice. Pure: no tensors, and it does not know where the nodes came from.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from nestling.errors import NestlingError
from nestling.nets.births import Growth
from nestling.nets.plan import Node


class Ties:
    """Classes of channels that are born together (a union-find), and the birth of each class once it is known."""

    def __init__(self) -> None:
        self.parent: list[int] = []
        self.birth: dict[int, int] = {}

    def fresh(self, count: int) -> list[int]:
        start = len(self.parent)
        self.parent.extend(range(start, start + count))
        return list(range(start, start + count))

    def root(self, channel: int) -> int:
        while self.parent[channel] != channel:
            self.parent[channel] = self.parent[self.parent[channel]]  # halve the path
            channel = self.parent[channel]
        return channel

    def tie(self, first: int, second: int) -> None:
        one, other = self.root(first), self.root(second)
        if one == other:
            return
        if other in self.birth:  # only the input's channels have births before all ties are known
            one, other = other, one
        self.parent[other] = one


def give_births(nodes: Sequence[Node], growth: Growth, uneven: bool, net: str) -> list[Node]:
    """The nodes with births. The channels of the first node, the input, are all born at stage 1."""
    ties = Ties()
    channels = tie_channels(nodes, ties)
    made: dict[str, Node] = {}
    for node in nodes:
        reads = [made[read] for read in node.reads]
        if any(not any(node.op.tied(node, reads, row)) for row in range(node.channels) if reads):
            choose(node, channels[node.name], ties, growth, uneven or not node.op.weighted, net)
        births = tuple(ties.birth[ties.root(c)] for c in channels[node.name])
        if not node.op.weighted:  # a channel that is broadcast over others is not tied to them, but may be born later
            births = tuple(latest(node, reads, row, birth) for row, birth in enumerate(births))
        made[node.name] = replace(node, births=births)
    return list(made.values())


def latest(node: Node, reads: Sequence[Node], row: int, birth: int) -> int:
    """The latest birth of a channel and of all that it is computed from."""
    parents = node.op.parents(node, reads, row)
    return max(birth, *(read.births[c] for read, mine in zip(reads, parents, strict=True) for c in mine), 0)


def tie_channels(nodes: Sequence[Node], ties: Ties) -> dict[str, list[int]]:
    """For every node, the class of each of its channels."""
    by_name = {node.name: node for node in nodes}
    found: dict[str, list[int]] = {}
    for node in nodes:
        classes, reads = [found[read] for read in node.reads], [by_name[read] for read in node.reads]
        mine = []
        for row in range(node.channels):
            tied = node.op.tied(node, reads, row)
            together = [known[c] for known, some in zip(classes, tied, strict=True) for c in some] or ties.fresh(1)
            mine.append(together[0])
            for other in together[1:]:
                ties.tie(together[0], other)
        if not node.reads:
            ties.birth.update(dict.fromkeys(mine, 1))
        found[node.name] = mine
        if node.shares:  # one entry of a weight has one birth, wherever it is used
            for one, other in zip(
                mine + classes[0], found[node.shares] + found[by_name[node.shares].reads[0]], strict=True
            ):
                ties.tie(one, other)
    return found


def choose(node: Node, channels: list[int], ties: Ties, growth: Growth, uneven: bool, net: str) -> None:
    """Births for the channels of a layer that no tie has settled yet, so that its stripes get their sizes."""
    roots = [ties.root(c) for c in channels]
    free = list(dict.fromkeys(root for root in roots if root not in ties.birth))
    if not free:
        return
    if len(roots) % growth.units and not uneven:
        raise NestlingError(
            f"{net}: cannot nest {node.name}: {len(roots)} channels cannot be cut into stripes {growth.stripes}; expected a "
            f"multiple of {growth.units}. Change the width or the stripes, or pass uneven=True to cut at the nearest channel."
        )
    have = Counter(ties.birth[root] for root in roots if root in ties.birth)
    missing = {b: size - have[b] for b, size in zip(growth.stripe_births, quotas(len(roots), growth), strict=True)}
    taken: Counter[int] = Counter()
    for _ in free:
        neediest = max(missing, key=lambda birth: missing[birth])
        missing[neediest] -= 1
        taken[neediest] += 1
    ties.birth.update(zip(free, sorted(taken.elements()), strict=True))


def quotas(channels: int, growth: Growth) -> list[int]:
    """The size of each stripe of a layer, cut at the nearest channel; the first stripe is never empty."""
    edges, so_far = [0], 0
    for size in growth.stripes:
        so_far += size
        edges.append(max(1, (2 * channels * so_far + growth.units) // (2 * growth.units)))
    return [stop - start for start, stop in itertools.pairwise(edges)]
