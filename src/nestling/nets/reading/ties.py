"""Births for a network that was not planned as a nest: which channels must be born together, and when each is born.

In: the nodes of a network in order, without births, and a growth order of widths. Out: the same nodes with births.
Channels that are added or multiplied are tied, because a sum is born with the latest of its terms; then every layer is
cut into stripes as far as its ties leave a choice. Pure: no tensors, and it does not know where the nodes came from.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace

from nestling.errors import NestlingError
from nestling.nets.births import Births, Growth
from nestling.nets.ops import Select
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
    whole: set[str] = set()  # layers whose groups are born whole, because stripes would cut them
    while True:
        made = born(nodes, growth, uneven, net, whole)
        by_name = {node.name: node for node in made}
        torn = {node.name for node in made if node.op.weighted and is_torn(node, by_name[node.reads[0]])}
        if not uneven or torn <= whole:
            return made
        whole |= torn


def groups_of(node: Node, read: Node) -> list[tuple[Births, Births]]:
    """The births of the rows and of the inputs of each group of a layer, where groups read several channels each."""
    groups = getattr(node.op, "groups", 1)
    rows, inputs = node.channels // groups, read.channels // groups
    if groups == 1 or inputs == 1:
        return []
    return [(node.births[g * rows :][:rows], read.births[g * inputs :][:inputs]) for g in range(groups)]


def is_torn(node: Node, read: Node) -> bool:
    """Whether some groups of a layer have no rows for inputs that are born, or no inputs for rows, and others have."""
    parts = groups_of(node, read)
    began_apart = any(min(mine) != min(theirs) for mine, theirs in parts)
    unread = {sum(birth > max(mine) for birth in theirs) for mine, theirs in parts}
    return began_apart or len(unread) > 1


def is_whole(node: Node, read: Node) -> bool:
    """Whether each group of a layer is born at once, with all that it reads."""
    return all(len({*mine, *theirs}) == 1 for mine, theirs in groups_of(node, read))


def born(nodes: Sequence[Node], growth: Growth, uneven: bool, net: str, whole: Set[str]) -> list[Node]:
    """The nodes with births, the groups of the layers `whole` each at once."""
    ties = Ties()
    channels = tie_channels(nodes, ties, growth if uneven else None, whole)
    parts = parts_of(nodes, channels, ties)
    made: dict[str, Node] = {}
    for node in nodes:
        reads = [made[read] for read in node.reads]
        if any(not any(node.op.tied(node, reads, row)) for row in range(node.channels) if reads):
            mine, loose = channels[node.name], uneven or not node.op.weighted
            for part in split(mine, parts, ties, growth, loose):
                choose(node, part, ties, growth, loose, net)
        births = tuple(ties.birth[ties.root(c)] for c in channels[node.name])
        if not node.op.weighted:  # a channel that is broadcast over others is not tied to them, but may be born later
            births = tuple(latest(node, reads, row, birth) for row, birth in enumerate(births))
        made[node.name] = replace(node, births=births)
    return list(made.values())


def put_off(nodes: Sequence[Node], needed: Mapping[str, Sequence[int]], growth: Growth, uneven: bool) -> list[Node]:
    """The nodes with births no earlier than the first stage that needs one of the channels that are born together; nor, where
    no other place or group binds it, than the first that needs the channel itself (a gate of what is only squeezed at first).

    So a layer before fewer heads than stages does not work for nobody."""
    ties, by_name = Ties(), {node.name: node for node in nodes}
    whole = {node.name for node in nodes if node.op.weighted and is_whole(node, by_name[node.reads[0]])}
    channels = tie_channels(nodes, ties, growth if uneven else None, whole)
    first: dict[int, int] = {}
    for node in nodes:
        for channel, stage in zip(channels[node.name], needed[node.name], strict=True):
            root = ties.root(channel)
            if stage and root not in ties.birth:
                first[root] = min(first.get(root, stage), stage)
    made: dict[str, Node] = {}
    bound = {node.shares for node in nodes} | {node.name for node in nodes if node.shares or not node.reads}
    bound |= {node.name for node in nodes if node.op.weighted and groups_of(node, by_name[node.reads[0]])}
    for node in nodes:
        reads = [made[read] for read in node.reads]
        births = tuple(
            max(birth, first.get(ties.root(c), 0), 0 if node.name in bound else stage)
            for birth, c, stage in zip(node.births, channels[node.name], needed[node.name], strict=True)
        )
        if not node.op.weighted:
            births = tuple(latest(node, reads, row, birth) for row, birth in enumerate(births))
        made[node.name] = replace(node, births=births)
    return list(made.values())


def latest(node: Node, reads: Sequence[Node], row: int, birth: int) -> int:
    """The latest birth of a channel and of all that it is computed from."""
    parents = node.op.parents(node, reads, row)
    return max(birth, *(read.births[c] for read, mine in zip(reads, parents, strict=True) for c in mine), 0)


def parts_of(nodes: Sequence[Node], channels: dict[str, list[int]], ties: Ties) -> dict[int, set[str]]:
    """For every class of channels, the nodes that take it out of a wider tensor (chunks, splits, slices)."""
    found: dict[int, set[str]] = {}
    for node in nodes:
        if isinstance(node.op, Select) and 0 < len(node.op.source) < len(channels[node.reads[0]]):
            for channel, source in zip(channels[node.name], node.op.source, strict=True):
                if source >= 0:
                    found.setdefault(ties.root(channel), set()).add(node.name)
    return found


def split(channels: list[int], parts: dict[int, set[str]], ties: Ties, growth: Growth, uneven: bool) -> list[list[int]]:
    """The channels that are taken out together: each such part is cut into stripes by itself, so that every stage finds
    something in it. All together where the parts cannot be cut so."""
    found: dict[frozenset[str], list[int]] = {}
    for channel in channels:
        found.setdefault(frozenset(parts.get(ties.root(channel), ())), []).append(channel)
    fits = uneven or all(len(part) % growth.units == 0 for part in found.values())
    return list(found.values()) if fits else [channels]


def whole_groups(node: Node, reads: Sequence[Node], growth: Growth, whole: Set[str]) -> Iterator[tuple[range, range]]:
    """The rows and inputs of each group of a layer whose groups stripes can neither hold whole nor cut alike."""
    groups = getattr(node.op, "groups", 1)
    if not node.op.weighted or groups in (1, reads[0].channels):
        return
    rows, inputs = node.channels // groups, reads[0].channels // groups
    if node.name in whole or not (grow_alike(groups, rows, growth) and grow_alike(groups, inputs, growth)):
        for group in range(groups):
            yield range(group * rows, (group + 1) * rows), range(group * inputs, (group + 1) * inputs)


def grow_alike(groups: int, each: int, growth: Growth) -> bool:
    """Whether stripes cut so many groups of so many channels at their borders, or else inside the first only."""
    edges = list(itertools.accumulate(quotas(groups * each, growth)))
    cut = [edge // each for edge in edges if edge % each]
    return not cut or (max(cut) == 0 and each in edges)


def tie_channels(
    nodes: Sequence[Node], ties: Ties, uneven: Growth | None = None, whole: Set[str] = frozenset()
) -> dict[str, list[int]]:
    """For every node, the class of each of its channels. With `uneven` stripes, groups that they would cut are born whole."""
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
        for rows, inputs in whole_groups(node, reads, uneven, whole) if uneven else ():
            for one, other in itertools.pairwise([*(mine[row] for row in rows), *(classes[0][c] for c in inputs)]):
                ties.tie(one, other)
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
    sizes = Counter(roots)
    for root in free:  # a class may hold many channels: a whole group
        neediest = max(missing, key=lambda birth: missing[birth])
        missing[neediest] -= sizes[root]
        taken[neediest] += 1
    first = growth.stripe_births[0]
    if (
        not have[first] and not taken[first]
    ):  # never empty: one head or group of several stripes is there from the start
        taken[max(taken, key=lambda birth: taken[birth])] -= 1
        taken[first] += 1
    ties.birth.update(zip(free, sorted(taken.elements()), strict=True))


def quotas(channels: int, growth: Growth) -> list[int]:
    """The size of each stripe of a layer, cut at the nearest channel, or the nearest multiple of several (of two equally near the
    smaller) if the layer has a multiple of them; the first stripe is never empty."""
    step = growth.multiple if channels % growth.multiple == 0 else 1
    edges, so_far = [0], 0
    for size in growth.stripes:
        so_far += size
        nearest = (2 * channels * so_far + growth.units) // (2 * growth.units)
        edges.append(max(step, -((step - 2 * nearest) // (2 * step)) * step))
    return [stop - start for start, stop in itertools.pairwise(edges)]
