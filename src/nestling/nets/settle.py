"""A plan put in order and checked: the last step of making one, before any tensor exists.

In: a plan as it was made. Out: the same without what no answer needs and with nothing born before it is needed, or an error that
says where the rule is broken, work is wasted or a stage is empty. Pure.
"""

from dataclasses import replace

from nestling.errors import NestlingError
from nestling.nets.plan import Node, Plan, keep


def settle(plan: Plan) -> Plan:
    """Nothing is computed that no answer needs, and nothing before the first answer that needs it.

    Only the births of convolutions and linear layers are a choice (they make the mask). All else follows: channels that
    reach no head are dropped, and the others are born with the first stage whose answer depends on them.
    """
    plan = keep(
        plan, {name: tuple(row for row, owned in enumerate(bits) if owned) for name, bits in plan.owners.items()}
    )
    nodes = []
    for node in plan.nodes:
        if node.reads and not node.op.weighted:
            first = ((owned & -owned).bit_length() - 1 for owned in plan.owners[node.name])
            births = tuple(max(b, plan.answering[t]) for b, t in zip(node.births, first, strict=True))
            node = replace(node, births=births)
        nodes.append(node)
    plan = replace(plan, nodes=tuple(nodes))
    nodes = [replace(node, op=node.op.told(node, plan.reads_of(node))) for node in plan.nodes]
    return check(replace(plan, nodes=tuple(nodes)))


def check(plan: Plan) -> Plan:
    """Refuse a plan that breaks the rule, wastes work or leaves a stage empty. Runs before any tensor exists."""
    before: set[str] = set()
    for node in plan.nodes:
        for read in node.reads:
            if read not in before:
                raise NestlingError(f"{plan.name}: {node.name} reads {read!r}, which no node before it gives.")
        before.add(node.name)
    for node in plan.nodes:
        node.op.check(plan.name, node, plan.reads_of(node))
        check_sharing(plan, node)
        if node.op.weighted:
            starved = [row for row in range(node.channels) if plan.row_weights(node, row) == 0]
            if starved:
                raise NestlingError(
                    f"{plan.name}: channel {starved[0]} of {node.name} is born at stage {node.births[starved[0]]}, before "
                    "anything it could read. Give its input a channel born by then."
                )
        else:
            for row, birth in enumerate(node.births):
                for read, channels in plan.parents(node, row):
                    late = [c for c in channels if plan.by_name[read].births[c] > birth]
                    if late:
                        raise NestlingError(
                            f"{plan.name}: channel {row} of {node.name}, born at stage {birth}, reads channel {late[0]} of "
                            f"{read}, born at stage {plan.by_name[read].births[late[0]]}."
                        )
        for row, (birth, owned) in enumerate(zip(node.births, plan.owners[node.name], strict=True)):
            task = plan.answering.index(next((s for s in plan.answering if s >= birth), plan.stages))
            if node.reads and not owned >> task & 1:
                raise NestlingError(
                    f"{plan.name}: channel {row} of {node.name} is born at stage {birth} but that stage's answer does not "
                    "need it: work would be wasted. Let it be born later, or leave it out."
                )
    for stage in range(1, plan.stages + 1):
        if plan.new_macs(stage) == 0:
            raise NestlingError(f"{plan.name}: stage {stage} adds nothing. Remove it from the growth order.")
    return plan


def check_sharing(plan: Plan, node: Node) -> None:
    """Weights that serve several places have one birth per entry: all these places must be born and used alike."""
    if not node.shares:
        return
    first = plan.by_name[node.shares]
    for mine, theirs in ((node, first), (plan.by_name[node.reads[0]], plan.by_name[first.reads[0]])):
        if mine.births != theirs.births or plan.owners[node.name] != plan.owners[first.name]:
            raise NestlingError(
                f"{plan.name}: {node.name} uses the weights of {first.name}, but their channels are not born and used alike. "
                "Give each place a layer of its own."
            )
