"""What autograd's graph tells before and after a backward pass: walks over its nodes, nothing is computed.

In come losses; out comes which parameters a loss reaches, and refusals of what per-task passes cannot see through:
reentrant checkpoints, compiled parts that mix tasks, losses that were scaled twice.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nestling.errors import NestlingError

if TYPE_CHECKING:
    from torch.autograd.graph import Node

COMPILED = "CompiledFunctionBackward"  # what torch.compile makes of a whole forward pass: one node
REENTRANT = "CheckpointFunctionBackward"
SINK = "_DDPSinkBackward"  # DistributedDataParallel's: hands every output through, each by itself
SCALARS = ("MulBackward0", "DivBackward0", "AddBackward0", "SubBackward0", "ToCopyBackward0", "ViewBackward0")


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
    """Raise if a loss was multiplied by the scaler's own scale: it would be scaled once more here."""
    scale = getattr(scaler, "_scale", None)
    if not isinstance(scale, Tensor):
        return
    for task, loss in enumerate(losses):
        node = loss.grad_fn
        while node is not None and node.name() in SCALARS:
            factors = (getattr(node, name, None) for name in ("_saved_self", "_saved_other"))
            if any(isinstance(f, Tensor) and f.data_ptr() == scale.data_ptr() for f in factors):
                raise NestlingError(
                    f"the loss of task {task} is scaled already, and scaler= scales it again: pass the losses as they "
                    f"are, without scaler.scale(...), or leave scaler= out"
                )
            node = node.next_functions[0][0]
