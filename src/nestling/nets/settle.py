"""A plan put in order and checked: the last step of drawing one, before any tensor exists.

In: a plan as drawn. Out: the same without what no answer needs and with nothing born before it is needed, or an error that
says where the rule is broken, work is wasted or a stage is empty. Pure.
"""

from dataclasses import replace

from nestling.errors import NestlingError
from nestling.nets.plan import WEIGHTED, Node, Plan, keep


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
        if node.op not in (*WEIGHTED, "input"):
            first = ((owned & -owned).bit_length() - 1 for owned in plan.owners[node.name])
            births = tuple(max(b, plan.answering[t]) for b, t in zip(node.births, first, strict=True))
            node = replace(node, births=births)
        nodes.append(node)
    return check(replace(plan, nodes=tuple(nodes)))


def check(plan: Plan) -> Plan:
    """Refuse a plan that breaks the rule, wastes work or leaves a stage empty. Runs before any tensor exists."""
    drawn: set[str] = set()
    for node in plan.nodes:
        for read in node.reads:
            if read not in drawn:
                raise NestlingError(f"{plan.name}: {node.name} reads {read!r}, which is not drawn before it.")
        drawn.add(node.name)
    for node in plan.nodes:
        if node.op in WEIGHTED:
            starved = [row for row in range(node.channels) if plan.fan_in(node, row) == 0]
            if starved:
                raise NestlingError(
                    f"{plan.name}: channel {starved[0]} of {node.name} is born at stage {node.births[starved[0]]}, before "
                    "anything it could read. Give its input a channel born by then."
                )
            check_groups(plan, node)
            check_sharing(plan, node)
        else:
            check_group_norm(plan, node)
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
            if node.op != "input" and not owned >> task & 1:
                raise NestlingError(
                    f"{plan.name}: channel {row} of {node.name} is born at stage {birth} but that stage's answer does not "
                    "need it: work would be wasted. Let it be born later, or leave it out."
                )
    for stage in range(1, plan.stages + 1):
        if plan.new_macs(stage) == 0:
            raise NestlingError(f"{plan.name}: stage {stage} adds nothing. Remove it from the growth order.")
    return plan


def check_groups(plan: Plan, node: Node) -> None:
    """A grouped layer can be cut into stages only if, at every stage, its groups grow alike."""
    if node.groups == 1:
        return
    source = plan.by_name[node.reads[0]]
    for stage in sorted(set(node.births)):
        rows = plan.born_at(node, stage)
        groups = sorted({plan.group_of(node, row) for row in rows})
        row_counts = {sum(plan.group_of(node, row) == g for row in rows) for g in groups}
        column_counts = {sum(source.births[c] <= stage for c in plan.group_inputs(node, g)) for g in groups}
        # D_stage by itself is a grouped layer too: all its groups need the same number of rows so far
        so_far = {sum(node.births[row] <= stage for row in group_rows(node, g)) for g in range(node.groups)} - {0}
        if len(row_counts) > 1 or len(column_counts) > 1 or len(so_far) > 1:
            raise NestlingError(
                f"{plan.name}: the {node.groups} groups of {node.name} do not grow alike at stage {stage}: stripes cut "
                "through groups. Use stripes that hold whole groups, or a number of groups that the stripes divide."
            )


def group_rows(node: Node, group: int) -> range:
    """The output channels of one group of a weighted node."""
    per_group = node.channels // node.groups
    return range(group * per_group, (group + 1) * per_group)


def check_group_norm(plan: Plan, node: Node) -> None:
    """A group of a group norm is computed as one, so its channels must be born as one."""
    if node.op != "norm" or node.function != "group":
        return
    for group in range(node.groups):
        found = sorted({node.births[row] for row in group_rows(node, group)})
        if len(found) > 1:
            raise NestlingError(
                f"{plan.name}: group {group + 1} of {node.groups} of {node.name} (group norm) holds channels born at stages "
                f"{found}, so an early stage would depend on later ones. Use groups that lie inside stripes."
            )


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
