"""Births for a network that was not drawn as a nest: which channels must be born together, and when each is born.

In: the nodes of a network in order, without births, and a growth order of widths. Out: the same nodes with births.
Channels that are added or multiplied are tied, because a sum is born with the latest of its terms; then every layer is
cut into stripes as far as its ties leave a choice. Pure: no tensors, and it does not know where the nodes came from.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod

from nestling.errors import NestlingError
from nestling.nets.births import Births, Growth
from nestling.nets.plan import WEIGHTED, Node


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
    by_name = {node.name: node for node in nodes}
    ties = Ties()
    channels = tie_channels(nodes, by_name, ties)
    born: dict[str, Births] = {}
    made = []
    for node in nodes:
        chooses = (node.op in WEIGHTED and not is_depthwise(node, by_name)) or (
            node.op == "select" and -1 in node.source
        )
        if chooses:
            choose(node, channels[node.name], ties, growth, uneven or node.op == "select", net)
        if node.op == "zip":
            births = tuple(max(column) for column in zip(*(spread(born[r], node) for r in node.reads), strict=True))
        else:
            births = tuple(ties.birth[ties.root(c)] for c in channels[node.name])
        born[node.name] = births
        made.append(replace(node, births=births))
    return made


def spread(births: Births, node: Node) -> Births:
    """A single channel that is broadcast over all channels of a zip."""
    return births * node.channels if len(births) == 1 else births


def is_depthwise(node: Node, by_name: dict[str, Node]) -> bool:
    """Whether each output channel reads one input channel only, so that it is born with it."""
    return node.groups > 1 and by_name[node.reads[0]].channels == node.groups


def tie_channels(nodes: Sequence[Node], by_name: dict[str, Node], ties: Ties) -> dict[str, list[int]]:
    """For every node, the class of each of its channels."""
    found: dict[str, list[int]] = {}
    for node in nodes:
        reads = [found[read] for read in node.reads]
        if node.op == "input":
            mine = ties.fresh(node.channels)
            ties.birth.update(dict.fromkeys(mine, 1))
        elif node.op in WEIGHTED:
            times = node.channels // node.groups
            mine = (
                [c for c in reads[0] for _ in range(times)]
                if is_depthwise(node, by_name)
                else ties.fresh(node.channels)
            )
        elif node.op == "cat":
            mine = [c for read in reads for c in read]
        elif node.op == "flatten":
            mine = [c for c in reads[0] for _ in range(prod(by_name[node.reads[0]].size))]
        elif node.op == "select":
            mine = [reads[0][c] if c >= 0 else ties.fresh(1)[0] for c in node.source]
        elif node.op == "zip":
            mine = next(read for read in reads if len(read) == node.channels)
            for read in reads:
                if len(read) == node.channels:
                    for one, other in zip(mine, read, strict=True):
                        ties.tie(one, other)
        else:
            mine = reads[0]
        found[node.name] = mine
        if node.shares:  # one entry of a weight has one birth, wherever it is used
            for one, other in zip(
                mine + reads[0], found[node.shares] + found[by_name[node.shares].reads[0]], strict=True
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
