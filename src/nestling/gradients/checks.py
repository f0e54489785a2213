"""Refusing wrong use in words: what was found, what was expected, what to do.

In come parameters and losses as a user gives them; out come trainable parameters with names, or a NestlingError.
Knows the failures of torch that per-task backward passes meet.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from nestling.errors import NestlingError
from nestling.gradients.owners import MOST_TASKS
from nestling.gradients.reduce import refuse_wrapped

Named = list[tuple[str, Tensor]]
Params = nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]]


def named(params: Params) -> Named:
    """Parameters with names, each once."""
    if isinstance(params, nn.parallel.DistributedDataParallel):
        refuse_wrapped(list(params.parameters()))
    if isinstance(params, torch.optim.Optimizer):
        raise NestlingError("params is an optimizer: expected the model, or its parameters, such as model.parameters()")
    listed = list(params.named_parameters()) if isinstance(params, nn.Module) else list(params)
    found: Named = []
    for index, entry in enumerate(listed):
        name, tensor = entry if isinstance(entry, tuple) else (f"parameter {index}", entry)
        if not isinstance(tensor, Tensor):
            raise NestlingError(
                f"params holds a {type(tensor).__name__} at place {index}: expected tensors, "
                f"(name, tensor) pairs or a module, such as model.parameters()"
            )
        found.append((name, tensor))
    return list({id(p): (name, p) for name, p in found}.values())


def trainable(parameters: Named) -> Named:
    """Those that need a gradient, checked."""
    found = [(name, p) for name, p in parameters if p.requires_grad]
    if not found:
        raise NestlingError(
            f"none of the {len(parameters)} parameters needs a gradient: expected at least one with "
            f"requires_grad=True; unfreeze some, or pass the right model's parameters"
        )
    for name, p in found:
        if hasattr(p, "placements"):  # a DTensor
            raise NestlingError(
                f"{name} is sharded over ranks (DTensor, as FSDP makes them): expected whole parameters on every rank, "
                f"whose gradients nestling averages itself"
            )
        if not p.is_leaf:
            raise NestlingError(
                f"{name} is the result of an operation, not a leaf: expected parameters, whose "
                f".grad an optimizer reads; pass the tensors it was made from"
            )
    if len({p.device for _, p in found}) > 1:
        places = ", ".join(sorted({str(p.device) for _, p in found}))
        raise NestlingError(
            f"the parameters lie on several devices ({places}): expected one; call backward once "
            f"per device, or move the model"
        )
    return found


def check_combine(combine: object) -> None:
    """Raise unless this is a combiner: the class without its parentheses, or a name, are easily given instead."""
    if isinstance(combine, type) or not hasattr(combine, "fixed"):
        found = f"the class {combine.__name__}" if isinstance(combine, type) else repr(combine)
        raise NestlingError(
            f"combine is {found}: expected a combiner, such as nestling.OSGD() or FromTorchJD(aggregator)"
        )


def check_losses(losses: Iterable[Tensor]) -> list[Tensor]:
    """The losses as a list; raise unless they are one or more scalars that hang on a graph."""
    if isinstance(losses, Tensor):
        raise NestlingError(
            f"losses is one tensor of shape {tuple(losses.shape)}: expected a list with one scalar "
            f"per task; a stacked vector of losses can be passed as list(losses)"
        )
    if isinstance(losses, Mapping):
        raise NestlingError(
            "losses is a mapping: expected a list with one scalar per task, whose places order and importance speak of; "
            "pass list(losses.values())"
        )
    if isinstance(losses, nn.Module) or not isinstance(losses, Iterable):
        raise NestlingError(
            f"losses is a {type(losses).__name__}: expected a list with one scalar per task; the losses come first, "
            f"backward(losses, model, combine)"
        )
    losses = list(losses)
    if any(isinstance(loss, nn.Parameter) for loss in losses):
        raise NestlingError(
            "losses holds parameters: expected one scalar per task; the losses come first, "
            "backward(losses, model, combine)"
        )
    if not 1 <= len(losses) <= MOST_TASKS:
        raise NestlingError(f"found {len(losses)} losses: expected 1 to {MOST_TASKS}, one per task")
    for task, loss in enumerate(losses):
        if not isinstance(loss, Tensor):
            raise NestlingError(
                f"the loss of task {task} is a {type(loss).__name__}: expected a scalar tensor "
                f"straight from the graph (no .item())"
            )
        if loss.numel() != 1:
            raise NestlingError(
                f"the loss of task {task} has shape {tuple(loss.shape)}: expected a scalar; take its mean or sum first"
            )
        if not loss.requires_grad:
            raise NestlingError(
                f"the loss of task {task} has no graph: expected one that depends on the "
                f"parameters; was it made under no_grad, detached, or from a model in which "
                f"everything is frozen?"
            )
    return losses


def refuse_nonfinite(losses: Sequence[Tensor]) -> None:
    bad = [
        str(task)
        for task, good in enumerate(torch.stack([loss.detach() for loss in losses]).isfinite().tolist())
        if not good
    ]
    if bad:
        raise NestlingError(
            f"the loss of task {', '.join(bad)} (counted from 0) is NaN or infinite; the others are finite. `.grad` "
            f"was left alone: look at that task's data and output, or lower the learning rate"
        )


def explained(error: RuntimeError, task: int) -> Exception:
    """Say what to do about the failures of torch that per-task backward meets."""
    text = str(error)
    if "donated buffer" in text:
        return NestlingError(
            f"task {task}: a compiled part gave its buffers away after one backward, but every task needs them. "
            f"Set torch._functorch.config.donated_buffer = False before compiling, and compile per stage"
        )
    if "second time" in text:
        return NestlingError(
            f"task {task}: its graph was already freed. Expected losses of one fresh forward pass: do not call "
            f".backward() on them before, and do not use a loss twice"
        )
    return error


def refuse_reentrant(losses: Sequence[Tensor]) -> None:
    """Raise if the graph holds reentrant checkpoints: they hide their parameters from per-task gradients."""
    seen: set[object] = set()
    todo = [loss.grad_fn for loss in losses]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            raise NestlingError(
                "found reentrant activation checkpointing, which hides its parameters from per-task gradients: use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        todo.extend(following for following, _ in node.next_functions)


def refuse_hooks(parameters: Named) -> None:
    """Raise if a parameter acts on its gradient as soon as it is accumulated: here that is one task's alone."""
    for name, p in parameters:
        if getattr(p, "_post_accumulate_grad_hooks", None):
            raise NestlingError(
                f"{name} has a post-accumulate-grad hook, which would see the gradient of one task before all are "
                f"combined: remove the hook and step the optimizer after backward"
            )


def refuse_sparse(grad: Tensor, name: str) -> None:
    if grad.layout != torch.strided:
        raise NestlingError(f"{name} has a sparse gradient: expected a dense one; make the embedding sparse=False")
