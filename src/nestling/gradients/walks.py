"""What autograd's graph tells before and after a backward pass: walks over its nodes, nothing is computed.

In come losses; out comes which parameters a loss reaches, and refusals of what per-task passes cannot see through:
reentrant checkpoints, compiled parts that mix tasks, losses that were scaled twice.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nestling.errors import NestlingError

if TYPE_CHECKING:
    from torch.autograd.graph import Node

COMPILED = "CompiledFunctionBackward"  # what torch.compile makes of a whole forward pass: one node
REENTRANT = "CheckpointFunctionBackward"
SINK = "_DDPSinkBackward"  # DistributedDataParallel's: hands every output through, each by itself
SELECTING = ("Select", "Slice", "Split", "Unbind", "Index", "Gather", "CopySlices", "AsStrided", COMPILED)
SCALARS = ("Mul", "Div", "Add", "Sub", "ToCopy", "View", "Stack", "Cat", "Select", "Unbind", "Mean", "Sum", "Squeeze")
# What may stand between a loss and the scale it was multiplied by; by how the names of nodes begin.


def reached(losses: Iterable[Tensor], stops: "Collection[Node | None]" = ()) -> "dict[Node, set[int]]":
    """Every node that the losses depend on, with the numbers of its outputs through which they do. Goes no further than
    to the nodes in `stops`."""
    seen: dict[Node, set[int]] = {}
    todo = [(loss.grad_fn, loss.output_nr) for loss in losses]
    while todo:
        node, output = todo.pop()
        if node is None or node in stops:
            continue
        if node in seen and output in seen[node]:
            continue
        new = seen.setdefault(node, set()) == set()
        seen[node].add(output)
        if node.name() == SINK and output < len(node.next_functions):
            todo.append(node.next_functions[output])
        elif new:
            todo.extend(node.next_functions)
    return seen


def doubtful(loss: Tensor) -> set[int]:
    """The leaves, by id, that a loss reaches only through nodes that select: what they leave out gets zeros, not nothing, so
    that a loss made from one of several stacked outputs seems to depend on all of them."""
    sure: set[Node] = set()
    beyond: list[Node | None] = []
    todo = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in sure:
            continue
        sure.add(node)
        following = [above for above, _ in node.next_functions]
        (beyond if node.name().startswith(SELECTING) else todo).extend(following)
    seen = set(sure)
    while beyond:
        node = beyond.pop()
        if node is not None and node not in seen:
            seen.add(node)
            beyond.extend(above for above, _ in node.next_functions)
    return {id(getattr(node, "variable", None)) for node in seen - sure}


def owners_of(losses: Sequence[Tensor], parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Owners, per parameter, read off the graph of an eager forward pass: for `owners=` where a net is compiled whole."""
    leaves = [{id(getattr(node, "variable", None)) for node in reached([loss])} for loss in losses]
    return {
        name: torch.tensor(sum(1 << task for task, found in enumerate(leaves) if id(p) in found))
        for name, p in parameters
    }


def owners_from(shared: Iterable[Tensor], tasks: Sequence[Iterable[Tensor]]) -> dict[Tensor, Tensor]:
    """Owners as you say them: parameters that all tasks share, and those of each task alone; for `owners=`."""
    every = torch.tensor((1 << len(tasks)) - 1)
    own = {p: torch.tensor(1 << task) for task, params in enumerate(tasks) for p in params}
    return {**own, **dict.fromkeys(shared, every)}


def mixed(losses: Sequence[Tensor]) -> bool:
    """Whether a compiled part answers several tasks by different outputs: its backward gives zeros, not None, to
    parameters that a task does not use, so that the graph no longer tells who owns what."""
    first: dict[Node, set[int]] = {}
    for loss in losses:
        for node, outputs in reached([loss]).items():
            if node.name() == COMPILED and first.setdefault(node, outputs) != outputs:
                return True
    return False


def holds_compiled(loss: Tensor) -> bool:
    """Whether a part of what the loss depends on was compiled."""
    return any(node.name() == COMPILED for node in reached([loss]))


def refuse_reentrant(losses: Sequence[Tensor]) -> None:
    """Raise if the graph holds reentrant checkpoints: they hide their parameters from per-task gradients."""
    if any(node.name() == REENTRANT for node in reached(losses)):
        raise NestlingError(
            "found reentrant activation checkpointing, which hides its parameters from per-task gradients: use "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
        )


def refuse_scaled(losses: Sequence[Tensor], scaler: object) -> None:
    """Raise if a loss was multiplied by the scaler's own scale, or by a number that equals it: it would be scaled once more
    here. Reads the scale back, as a scaler's own step does."""
    scale = getattr(scaler, "_scale", None)
    if not isinstance(scale, Tensor) or scale.is_meta or float(scale) == 1.0:
        return
    for task, loss in enumerate(losses):
        if any(float(factor) == float(scale) for factor in _factors(loss)):
            raise NestlingError(
                f"the loss of task {task} is scaled already, and scaler= scales it again: pass the losses as they "
                f"are, without scaler.scale(...), or leave scaler= out"
            )


def _factors(loss: Tensor) -> Iterator[Tensor]:
    """The numbers that a loss was multiplied by at its end."""
    todo, seen = [loss.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen or not node.name().startswith(SCALARS):
            continue
        seen.add(node)
        todo.extend(following for following, _ in node.next_functions)
        for name in ("_saved_self", "_saved_other"):
            factor = getattr(node, name, None) if node.name() == "MulBackward0" else None
            if isinstance(factor, Tensor) and factor.numel() == 1 and not factor.requires_grad:
                yield factor
