"""A plan seen from further away: blocks instead of layers, and which block reads which.

In: a plan of any network. Out: a `Survey`: blocks in order with the births of their channels, joins (sums that belong to
no block), heads, and the links between them with the stage at which each link begins. Pure; knows nothing of pictures.
"""

from collections import Counter
from dataclasses import dataclass

from nestling.nets.plan import Node, Plan

MOST = 60  # blocks that can still be told apart


@dataclass(frozen=True)
class Block:
    """Layers of one name, a join, or a head. `stripes` counts the channels of each birth, earliest first."""

    name: str
    kind: str  # block | join | head
    stripes: tuple[tuple[int, int], ...]  # (birth, channels)
    size: tuple[int, ...]

    @property
    def channels(self) -> int:
        return sum(count for _, count in self.stripes)

    @property
    def birth(self) -> int:
        return self.stripes[0][0]


@dataclass(frozen=True)
class Link:
    source: str  # a block's name, or "input"
    reader: str
    birth: int  # the first stage that uses the link


@dataclass(frozen=True)
class Survey:
    blocks: tuple[Block, ...]  # in order, joins among them, heads last
    links: tuple[Link, ...]


def survey(plan: Plan) -> Survey:
    """The blocks of a plan and their links."""
    owner = block_names(plan)
    blocks: dict[str, list[Node]] = {}
    for node in plan.nodes:
        if node.name in owner:
            blocks.setdefault(owner[node.name], []).append(node)
    heads = {owner[head]: stage for head, stage in zip(plan.heads, plan.answering, strict=True)}
    made = [made_block(name, nodes, name in heads) for name, nodes in blocks.items()]
    ordered = [b for b in made if b.kind != "head"] + [b for b in made if b.kind == "head"]
    return Survey(tuple(ordered), tuple(find_links(plan, owner)))


def made_block(name: str, nodes: list[Node], is_head: bool) -> Block:
    """A block is as wide as its last layer."""
    layers = [node for node in nodes if node.op.weighted]
    last = (layers or nodes)[-1]
    kind = "head" if is_head else "block" if layers else "join"
    return Block(name, kind, tuple(sorted(Counter(last.births).items())), last.size)


def block_names(plan: Plan) -> dict[str, str]:
    """The block of every node that belongs to one: layers by what stands before the last dot of their name, unless that
    makes too many; other nodes by the block their name begins with; sums outside all blocks are joins of their own."""
    layers = [node.name for node in plan.nodes if node.op.weighted]
    deepest = max(name.count(".") for name in layers)
    names: dict[str, str] = {}
    for depth in range(deepest, -1, -1):
        names = {name: ".".join(name.split(".")[: max(1, min(depth, name.count(".")))]) for name in layers}
        above = {block[:i] for block in names.values() for i, letter in enumerate(block) if letter == "."}
        names = {name: name if block in above else block for name, block in names.items()}  # beside blocks, not around
        if len(set(names.values()) - {names[h] for h in plan.heads if h in names}) <= MOST:
            break
    known = set(names.values())
    for node in plan.nodes:
        if node.name in names or node is plan.input:
            continue
        parts = node.name.split(".")
        prefixes = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
        home = next((prefix for prefix in prefixes if prefix in known), None)
        if home:
            names[node.name] = home
        elif node.op.joins:
            names[node.name] = node.name
    return names


def find_links(plan: Plan, owner: dict[str, str]) -> list[Link]:
    """Who reads whom, passing through whatever belongs to no block; the earliest stage where a link appears twice."""
    sources: dict[str, set[str]] = {plan.input.name: {"input"}}  # what blocks a node's value comes from
    first: dict[tuple[str, str], int] = {}
    for node in plan.nodes[1:]:
        mine = owner.get(node.name)
        read = set().union(*(sources[r] for r in node.reads))
        if mine is None:
            sources[node.name] = read
            continue
        sources[node.name] = {mine}
        for name in node.reads:
            birth = max(min(node.births), min(plan.by_name[name].births))
            for source in sources[name] - {mine}:
                first[source, mine] = min(birth, first.get((source, mine), birth))
    return [Link(source, reader, birth) for (source, reader), birth in first.items()]
