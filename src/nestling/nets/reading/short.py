"""A shorter way to the same channels: a part that is taken out of tensors joined together is one of those tensors.

In: a sketch. Out: the same sketch, in which whoever read such a part reads that tensor, and joins that nobody reads any more are
left out. So classifiers whose answers are stacked and averaged are seen to be several classifiers. Knows no births.
"""

from dataclasses import replace

from nestling.nets.ops import Cat, Select
from nestling.nets.plan import Node
from nestling.nets.reading.sketch import Sketch


def short(sketch: Sketch) -> Sketch:
    instead: dict[str, str] = {}
    nodes: dict[str, Node] = {}
    for name, node in sketch.nodes.items():
        part = part_of(node, nodes)
        if part and name != sketch.output:
            instead[name] = part
        else:
            nodes[name] = replace(node, reads=tuple(instead.get(read, read) for read in node.reads))
    joins = {read for name in instead for read in sketch.nodes[name].reads}
    kept = {read for node in nodes.values() for read in node.reads} | {sketch.output}
    return replace(sketch, nodes={name: node for name, node in nodes.items() if name in kept or name not in joins})


def part_of(node: Node, nodes: dict[str, Node]) -> str:
    """The tensor among those joined that a node takes all channels of, in their order; "" if there is none."""
    source = nodes.get(node.reads[0]) if isinstance(node.op, Select) else None
    if source is None or not isinstance(source.op, Cat) or source.op.axis != node.op.axis:
        return ""
    start = 0
    for read in source.reads:
        width = nodes[read].channels
        if isinstance(node.op, Select) and node.op.source == tuple(range(start, start + width)):
            return read
        start += width
    return ""
