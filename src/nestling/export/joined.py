"""The same network with some of its stages joined: D_s at once, instead of one stage after another.

In: a network and where joined stages end. Out: a network of fewer stages, whose first may be D_s for any s. Channels that were
born one after another are now born together, and computed by one dense operation in which the connections that the rule
forbids are zeros: more arithmetic, in fewer and larger pieces. Which way is faster is for whoever runs it to measure.
"""

from dataclasses import replace

from nestling.nets import NestedNet
from nestling.nets.modes import unhooked
from nestling.nets.plan import Plan

VECTOR = 16  # channels that the widest vectors compute at once: narrower stripes take as long as this

Ends = tuple[int, ...]  # the last birth of each stage that is made of several, or of one


def joined(net: NestedNet, ends: Ends, first: int = 1) -> NestedNet:
    """The network with births up to each end joined; heads before the stage `first` are left out. `net` keeps its weights."""
    unhooked(net, net.plan.name)
    plan = join(net.plan, ends, first)
    given = {node.name: net.layer(node.name) for node in plan.nodes if node.op.given}
    made = NestedNet(plan, given)
    state = dict(net.state_dict())
    for node in plan.nodes:
        if node.op.weighted and not node.shares:
            state[f"{node.name}.weight"] = net.layer(node.name).live_weight()
    made.load_state_dict(state)
    return made


def join(plan: Plan, ends: Ends, first: int = 1) -> Plan:
    """The plan of `joined`."""
    place = {birth: 1 + sum(end < birth for end in ends) for birth in range(1, plan.stages + 1)}
    nodes = tuple(replace(node, births=tuple(place[birth] for birth in node.births)) for node in plan.nodes)
    kept = slice(first - 1, None)
    answering = tuple(place[birth] for birth in plan.answering[kept])
    return replace(plan, nodes=nodes, heads=plan.heads[kept], sizes=plan.sizes[kept], answering=answering)


def ways(plan: Plan, stage: int) -> list[Ends]:
    """How D_stage may be computed at once, and the later stages after it: all of it dense, stripes joined until they fill a
    vector, or stripe by stripe. Only one where they are the same work, as in depth."""
    births, later = plan.answering[:stage], plan.answering[stage:]
    firsts = dict.fromkeys([(births[-1],), filled(plan, births), births])
    work = {first: sum(map(join(plan, (*first, *later)).new_macs, range(1, len(first) + 1))) for first in firsts}
    if len(set(work.values())) == 1:
        return [(births[-1], *later)]
    return [(*first, *later) for first in firsts]


def filled(plan: Plan, births: Ends) -> Ends:
    """Where joined stages must end so that each adds no channels to a layer, or at least a vector of them."""
    ends: list[int] = []
    begin = 0
    for birth in births:
        added = (sum(begin < b <= birth for b in node.births) for node in plan.nodes if node.op.weighted and node.size)
        if all(count == 0 or count >= VECTOR for count in added):
            ends.append(birth)
            begin = birth
    return (*ends[:-1], births[-1]) if ends else births[-1:]
