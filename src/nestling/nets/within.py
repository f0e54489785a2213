"""D_s inside D_n's memory: each subnetwork as a network of its own, over the very same weights.

In: a nested network. Out: one network per stage whose parameters are views of it, so that a task's forward and backward
cost only its own subnetwork, its gradients come out just as large as what it owns, and an update of the whole network is
an update of all. Needs channels sorted by birth (then what a stage owns is a leading block of every weight).
"""

import torch
from torch import Tensor, nn

from nestling.errors import NestlingError
from nestling.nets.layers import as_index
from nestling.nets.net import NestedNet
from nestling.nets.ops.select import Select
from nestling.nets.plan import Node, Plan


def can_live_within(plan: Plan) -> bool:
    """Whether every stage's part of every weight is a block, which a view can show."""
    blocks = all(isinstance(as_index(rows), slice) for s in plan.answering for rows in plan.kept(s).values() if rows)
    norms = [node for node in plan.nodes if node.op.layered and not node.op.weighted]
    counted = all(len(plan.kept(keeper(plan, node))[node.name]) == node.channels for node in norms)
    return blocks and counted and not any(node.op.grouped or node.op.given for node in plan.nodes)


def keeper(plan: Plan, node: Node) -> int:
    """The last stage that uses a norm: it has all of its channels, and it alone updates their running statistics."""
    return max(s for s in plan.answering if plan.kept(s)[node.name])


def leads(plan: Plan, stage: int, last: int) -> bool:
    """Whether each image that both stages have is, at the earlier one, the first channels of what it is at the last."""
    mine, theirs = plan.kept(stage), plan.kept(last)
    first = all(theirs[name][: len(rows)] == rows for name, rows in mine.items() if rows and theirs[name])
    small, large = plan.restrict(stage), plan.restrict(last)
    pairs = [(node.op, large.by_name[node.name].op) for node in small.nodes if node.name in large.by_name]
    cut = [(mine.source, its.source) for mine, its in pairs if isinstance(mine, Select) and isinstance(its, Select)]
    return first and all(its[: len(mine)] == mine for mine, its in cut)


def within(net: NestedNet, stage: int) -> NestedNet:
    """D_stage over the memory of `net`. Make it after the network has moved to its device and layout."""
    if not can_live_within(net.plan):
        raise NestlingError(
            f"{net.plan.name}: what stage {stage} owns is not a block of every weight (grouped layers, or channels not "
            "sorted by birth), so it cannot share memory; use subnet(), which copies."
        )
    plan = net.plan.restrict(stage)
    kept = net.plan.kept(stage)
    small = NestedNet(plan).to(device=next(net.parameters()).device)
    for node in plan.nodes:
        if not node.op.layered or node.name not in net.plan.by_name:
            continue
        mine, theirs, whole = small.layer(node.name), net.layer(node.name), net.plan.by_name[node.name]
        rows, columns = as_index(kept[node.name]), as_index(kept[whole.reads[0]])
        for name, parameter in theirs.named_parameters(recurse=False):
            setattr(mine, name, nn.Parameter(parameter.detach()[node.op.box(name, rows, columns)]))
        if not node.op.weighted:
            share_statistics(mine, theirs, rows, owner=stage == keeper(net.plan, whole))
    return small.train(net.training)


def share_statistics(mine: nn.Module, theirs: nn.Module, rows: slice | Tensor, owner: bool) -> None:
    """All stages see the same statistics; only one of them keeps count."""
    for name, buffer in theirs.named_buffers(recurse=False):
        if isinstance(buffer, Tensor) and buffer.dim():
            setattr(mine, name, buffer[rows])
    if not owner:
        mine.track_running_stats = False  # type: ignore[assignment]


def boxes(net: NestedNet, stage: int) -> dict[str, tuple[slice, ...]]:
    """Where each parameter of `within(net, stage)` lies in the network's own parameter of the same name."""
    kept = net.plan.kept(stage)
    found: dict[str, tuple[slice, ...]] = {}
    for node in net.plan.nodes:
        if node.op.layered and kept[node.name]:
            rows, columns = as_index(kept[node.name]), as_index(kept[node.reads[0]])
            for name, _ in net.layer(node.name).named_parameters(recurse=False):
                found[f"{node.name}.{name}"] = node.op.box(name, rows, columns)
    return found


def positions(net: NestedNet, stage: int) -> Tensor:
    """Where the entries of `within(net, stage)`, laid end to end, stand among all parameters laid end to end.

    Entries go in the order they have in memory, which for channels-last weights is not the order of their dimensions.
    """
    places = boxes(net, stage)
    found, start = [], 0
    for name, parameter in net.named_parameters():
        memory = memory_order(parameter)
        if name in places:
            index = torch.arange(start, start + parameter.numel()).view([parameter.shape[d] for d in memory])
            index = index.permute([memory.index(d) for d in range(len(memory))])
            found.append(index[places[name]].permute(memory).reshape(-1))
        start += parameter.numel()
    return torch.cat(found)


def memory_order(parameter: Tensor) -> list[int]:
    """The dimensions of a tensor from the slowest to the fastest in memory."""
    if parameter.is_contiguous():
        return list(range(parameter.dim()))
    strides = parameter.stride()
    return sorted(range(parameter.dim()), key=lambda d: -strides[d])
