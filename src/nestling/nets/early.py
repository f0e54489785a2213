"""Early stages beside a network that stays as it is: two plans as one, the network's own channels born last.

In: the plan of the early stages and that of the network, both of the same image. Out: their common plan, in which the
network keeps its names and the early stages stand under `early.`. With `reads`, its layers also read, through weights of
their own (`reads.`), the early channels that stand beside what they read. Pure: no tensors.
"""

from collections.abc import Collection
from dataclasses import replace

from nestling.nets.ops import Zip
from nestling.nets.ops.weighted_op import WeightedOp
from nestling.nets.plan import Node, Plan
from nestling.nets.settle import check

EARLY, READS = "early", "reads"


def beside(early: Plan, own: Plan, reads: bool = False, alone: Collection[str] = ()) -> Plan:
    """The early stages, then the network. The layers named in `alone`, such as its classifier, read what they always read."""
    image = own.input.name
    rename = {node.name: image if node is early.input else f"{EARLY}.{node.name}" for node in early.nodes}
    nodes = [own.input]
    for node in early.nodes[1:]:
        shares = f"{EARLY}.{node.shares}" if node.shares else ""
        nodes.append(replace(node, name=rename[node.name], reads=tuple(rename[r] for r in node.reads), shares=shares))
    there = {node.name: node for node in nodes}
    last = early.stages + 1
    whole: dict[str, str] = {}  # of each node of the network, the one that later nodes read
    for node in own.nodes[1:]:
        source, births = node.reads[0], (last,) * node.channels
        nodes.append(replace(node, reads=tuple(whole.get(read, read) for read in node.reads), births=births))
        twin = there.get(rename.get(source, ""))
        if reads and twin is not None and source != image and node.name not in alone and reads_all(node):
            added = replace(
                node,
                name=f"{READS}.{node.name}",
                op=replace(node.op, bias=False),  # type: ignore[call-arg]
                reads=(twin.name,),
                births=births,
                shares=f"{READS}.{node.shares}" if node.shares else "",
            )
            total = f"{READS}.{node.name}.sum"
            nodes += [added, Node(total, Zip("add", axis=node.op.axis), (node.name, added.name), births, node.size)]
            whole[node.name] = total
    heads = (*(rename[head] for head in early.heads), own.heads[-1])
    return check(Plan(own.name, tuple(nodes), heads, (*sizes(early), own.sizes[-1])))


def reads_all(node: Node) -> bool:
    """Whether a layer reads all channels of its input, so that more of them are just more columns."""
    return isinstance(node.op, WeightedOp) and node.op.groups == 1


def sizes(early: Plan) -> tuple[str, ...]:
    return tuple(f"{EARLY}{stage}" for stage in early.answering)


def own_part(plan: Plan) -> tuple[str, ...]:
    """The nodes that are the network's own."""
    new = (f"{EARLY}.", f"{READS}.")
    return tuple(node.name for node in plan.nodes[1:] if not node.name.startswith(new))


def early_part(plan: Plan) -> Plan:
    """The early stages alone."""
    nodes = tuple(node for node in plan.nodes[1:] if node.name.startswith(f"{EARLY}."))
    return Plan(plan.name, (plan.input, *nodes), plan.heads[:-1], plan.sizes[:-1])


def last_part(plan: Plan) -> Plan:
    """The network alone."""
    return replace(plan.restrict(plan.stages), name=plan.name)
