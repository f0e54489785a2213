"""Other heads for a plan: logits that are added to those of earlier stages, or a hidden layer before them.

In: a plan whose heads are linear layers. Out: the same network with those heads. By itself the first stage is as before; costs,
owners and stages follow from the plan. Pure; knows no particular network.
"""

from dataclasses import replace

from nestling.errors import NestlingError
from nestling.nets.ops import Linear, Map, Zip
from nestling.nets.plan import Node, Plan
from nestling.nets.settle import settle


def with_heads(plan: Plan, kind: str) -> Plan:
    """`kind` as in network.heads: "own" (as it is), "added" or "hidden"."""
    if kind == "own":
        return plan
    stages = dict(zip(plan.heads, plan.answering, strict=True))
    last = ""  # the answer so far
    nodes: list[Node] = []
    heads: list[str] = []
    for node in plan.nodes:
        if node.name not in stages:
            nodes.append(node)
            continue
        if not isinstance(node.op, Linear):
            raise NestlingError(
                f"network.heads={kind} is for linear heads; {plan.name} answers by {node.name} ({node.op.kind})"
            )
        made = hidden(plan, node, stages[node.name]) if kind == "hidden" else added(node, last)
        last = made[-1].name
        nodes += made
        heads.append(last)
    return settle(replace(plan, nodes=tuple(nodes), heads=tuple(heads)))


def added(head: Node, last: str) -> list[Node]:
    """Logits, and their sum with the last answer: what is learnt is a correction. All of it is born with the stage."""
    if not last:
        return [head]
    total = replace(head, name=f"{head.name}.sum", op=Zip("add"), reads=(last, head.name))
    return [head, total]


def hidden(plan: Plan, head: Node, stage: int) -> list[Node]:
    """A layer of the stage's own before its head, as wide as what the head reads."""
    (read,) = plan.reads_of(head)
    first = Node(f"{head.name}.hidden", Linear(bias=True), (read.name,), (stage,) * read.channels, read.size)
    live = replace(first, name=f"{first.name}.relu", op=Map("relu"), reads=(first.name,))
    return [first, live, replace(head, reads=(live.name,))]
