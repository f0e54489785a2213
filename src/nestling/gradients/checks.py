"""Refusing wrong use in words: what was found, what was expected, what to do.

In come parameters and losses as a user gives them; out come trainable parameters with names, or a NestlingError.
Knows the failures of torch that per-task backward passes meet.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from nestling.errors import NestlingError, join
from nestling.gradients.sharded import sharded_ones
from nestling.gradients.wrapped import unwrapped

Named = list[tuple[str, Tensor]]
Params = nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]]


def named(params: Params) -> Named:
    """Parameters with names, each once."""
    if isinstance(params, torch.optim.Optimizer):
        raise NestlingError("params is an optimizer: expected the model, or its parameters, such as model.parameters()")
    if isinstance(params, Tensor):
        raise NestlingError(
            f"params is one tensor of shape {tuple(params.shape)}: expected a list, such as [parameter], or the model"
        )
    if not isinstance(params, Iterable) and not isinstance(params, nn.Module):
        raise NestlingError(f"params is a {type(params).__name__}: expected the model, or its parameters")
    listed = list(unwrapped(params).named_parameters()) if isinstance(params, nn.Module) else list(params)
    found: Named = []
    for index, entry in enumerate(listed):
        name, tensor = entry if isinstance(entry, tuple) else (f"parameter {index}", entry)
        if not isinstance(tensor, Tensor):
            raise NestlingError(
                f"params holds a {type(tensor).__name__} at place {index}: expected tensors, "
                f"(name, tensor) pairs or a module, such as model.parameters()"
            )
        found.append((name, tensor))
    shards = sharded_ones([p for _, p in found], params if isinstance(params, nn.Module) else None)
    found = [(name, shards.get(id(p), p)) for name, p in found]
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
        if p.is_complex():
            raise NestlingError(
                f"{name} is complex ({p.dtype}): expected real parameters; keep its two parts as a real one and use "
                f"torch.view_as_complex(parameter) in forward"
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
    needed = ("__call__", "fixed", "set_epoch", "set_tasks", "owners_matter")
    if isinstance(combine, type) or not all(hasattr(combine, name) for name in needed):
        found = f"the class {combine.__name__}" if isinstance(combine, type) else repr(combine)
        raise NestlingError(
            f"combine is {found}: expected a combiner, such as nestling.OSGD() or FromTorchJD(aggregator); one of "
            f"your own inherits from nestling.gradients.Combiner"
        )


def check_refresh(refresh: object) -> None:
    if not isinstance(refresh, int) or isinstance(refresh, bool) or refresh < 1:
        raise NestlingError(f"refresh is {refresh!r}: expected a whole number of steps, 1 or more")


MODES = ("auto", "rows", "layers")


def check_mode(mode: object) -> None:
    if mode not in MODES:
        raise NestlingError(f"mode is {mode!r}: expected {join(list(MODES))}")


def check_owners(owners: object) -> None:
    if owners is None:
        return
    if not isinstance(owners, Mapping) or any(not isinstance(mask, Tensor) for mask in owners.values()):
        found = f"a {type(owners).__name__}" if not isinstance(owners, Mapping) else "a mapping to something else"
        raise NestlingError(
            f"owners is {found}: expected a mapping from each parameter, or its name, to an int64 tensor (bit t: task t uses "
            f"the entry), such as nestling.gradients.owners_from(shared, [head_0, head_1])"
        )


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise NestlingError(f"{name} is {value!r}: expected True or False")


def check_scaler(scaler: object) -> None:
    if scaler is not None and not callable(getattr(scaler, "scale", None)):
        raise NestlingError(f"scaler is {scaler!r}: expected a torch.amp.GradScaler, or None")


Losses = Iterable[Tensor | None] | Mapping[str, Tensor | None]  # None: the task is absent from this batch


def arranged(losses: Losses, names: Sequence[str] | None) -> tuple[list[Tensor | None], Sequence[str] | None]:
    """The losses as a checked list, and the names of the tasks: those of the first mapping, whose order holds from then on."""
    if not isinstance(losses, Mapping):
        return check_losses(losses), names
    names = tuple(losses) if names is None else names
    unknown = [name for name in losses if name not in names]
    if unknown:
        raise NestlingError(
            f"losses has a task {unknown[0]!r} that was not there before: expected {join(list(map(str, names)))}; name every "
            f"task at the first step, absent ones as None"
        )
    return check_losses([losses.get(name) for name in names]), names


def check_losses(losses: Iterable[Tensor | None]) -> list[Tensor | None]:
    """The losses as a list; raise unless they are one or more scalars, or None."""
    if isinstance(losses, Tensor):
        raise NestlingError(
            f"losses is one tensor of shape {tuple(losses.shape)}: expected a list with one scalar "
            f"per task; a stacked vector of losses can be passed as list(losses)"
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
    if not losses:
        raise NestlingError("found 0 losses: expected one per task, and at least one")
    if all(loss is None for loss in losses):
        raise NestlingError("every loss is None: expected at least one task that is there")
    for task, loss in enumerate(losses):
        if loss is None:
            continue
        if not isinstance(loss, Tensor):
            raise NestlingError(
                f"the loss of task {task} is a {type(loss).__name__}: expected a scalar tensor "
                f"straight from the graph (no .item())"
            )
        if loss.is_complex():
            raise NestlingError(f"the loss of task {task} is complex: expected a real number; take its real part")
        if loss.numel() != 1:
            raise NestlingError(
                f"the loss of task {task} has shape {tuple(loss.shape)}: expected a scalar; take its mean or sum first"
            )
    return losses


def with_graphs(losses: list[Tensor | None], idle: Callable[[], Collection[int]]) -> list[Tensor | None]:
    """The losses, None for those of the tasks that are `idle` (nothing of theirs trains) and have no graph; other losses
    without one are refused."""
    lone = [task for task, loss in enumerate(losses) if loss is not None and not loss.requires_grad]
    for task in lone:
        if task not in idle():
            raise NestlingError(
                f"the loss of task {task} has no graph: expected one that depends on the "
                f"parameters; was it made under no_grad, detached, given to backward before, "
                f"or from a model in which everything is frozen?"
            )
    return check_losses([None if task in lone else loss for task, loss in enumerate(losses)]) if lone else losses


def nonfinite(losses: Sequence[Tensor | None]) -> list[int]:
    """The tasks whose loss is NaN or infinite. Waits for the device."""
    there = [(task, loss) for task, loss in enumerate(losses) if loss is not None]
    finite = torch.stack([loss.detach().reshape(()).double() for _, loss in there]).isfinite().tolist()
    return [task for (task, _), good in zip(there, finite, strict=True) if not good]


def nonfinite_losses(wrong: Sequence[int], tasks: int) -> NestlingError:
    return NestlingError(
        f"the loss of task {numbers(wrong)} (counted from 0) is NaN or infinite; {others(wrong, tasks)}. `.grad` was "
        f"left alone: look at the data and output of what is not finite, or lower the learning rate"
    )


def nonfinite_places(row: Sequence[Tensor | None]) -> list[int]:
    """The parameters whose gradient is not finite. Waits for the device."""
    found = [(i, grad) for i, grad in enumerate(row) if grad is not None]
    sums = torch.stack([grad.sum().double() for _, grad in found]).isfinite().tolist()
    doubtful = [(i, grad) for (i, grad), good in zip(found, sums, strict=True) if not good]
    return [i for i, grad in doubtful if not grad.isfinite().all().tolist()]  # a sum may overflow by itself


def nonfinite_gradient(name: str) -> NestlingError:
    return NestlingError(
        f"the gradient of {name} holds NaN or infinity although every loss is finite. `.grad` was left alone: "
        f"look for a division by zero or a root of zero in forward, or pass diagnose=True to see which task it is"
    )


def numbers(tasks: Sequence[int]) -> str:
    return ", ".join(map(str, tasks))


def others(wrong: Sequence[int], tasks: int) -> str:
    """What to say of the tasks that are not wrong."""
    return "no task's is finite" if len(wrong) == tasks else "the others are finite"


def unreached(parameters: Named) -> NestlingError:
    return NestlingError(
        f"no loss depends on any of the {len(parameters)} parameters (the first is {parameters[0][0]}): expected those "
        f"of the model that made the losses; were they replaced since, as by load_state_dict(assign=True)?"
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
