"""The backward passes: of one task, or of all losses under weights, into rows.

In come losses and parameters; out come gradients, in the parameters' order. Torch accumulates into `.grad`, so that what
is taken from there is nobody else's; the caller's own gradients are put aside meanwhile.
"""

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from nestling.gradients.checks import explained, refuse_sparse
from nestling.gradients.products import faster_inside
from nestling.gradients.trained import Trained
from nestling.gradients.walks import holds_compiled, refuse_reentrant

GradientRow = list[Tensor | None]


@contextmanager
def put_aside(params: Sequence[Tensor]) -> Iterator[None]:
    """Whatever happens inside, `.grad` is as it was."""
    before = [p.grad for p in params]
    try:
        yield
    finally:
        for p, grad in zip(params, before, strict=True):
            p.grad = grad


def let_go(losses: Sequence[Tensor]) -> None:
    """Detach the losses: whoever keeps them would keep the buffers of all tasks but the last."""
    for loss in losses:
        if not loss.is_leaf and not loss._is_view():
            loss.detach_()


def of_weighted(
    losses: Sequence[Tensor], seeds: Sequence[Tensor], retain: bool, now: Trained, row: GradientRow
) -> None:
    """One backward of the losses from these seeds, added to the row."""
    try:
        if now.route is not None:
            found = now.route.gradients(losses, seeds, retain, now.params)
            row[:] = [added(kept, grad) for kept, grad in zip(row, found, strict=True)]
            return
        with put_aside(now.params):
            for p, grad in zip(now.params, row, strict=True):
                p.grad = grad
            try:
                torch.autograd.backward(list(losses), list(seeds), retain_graph=retain, inputs=now.params)
            finally:
                row[:] = [p.grad for p in now.params]
    except RuntimeError as error:
        refuse_reentrant(losses)
        raise explained(error, 0) from error


def added(kept: Tensor | None, grad: Tensor | None) -> Tensor | None:
    return grad if kept is None else kept if grad is None else kept.add_(grad)


def of_task(
    loss: Tensor,
    seed: Tensor | None,
    retain: bool,
    task: int,
    now: Trained,
    row: GradientRow,
    without: Collection[int] = (),
    edges: Sequence[GradientEdge] = (),
) -> bool | None:
    """One task's backward, added to its row. Says whether any parameter was reached; None where none was asked for.

    `without`: parameters to leave out; `edges`: where the pass has to come, whatever else it needs.
    """
    boxes = now.layout.boxes[task] if now.layout is not None else None
    # What ranks agreed on is checked, so everything is asked for; given owners are taken at their word.
    asked = set(range(len(now.params))).difference(without)
    wanted = [i for i in sorted(asked) if boxes is None or now.found or boxes[i] is not None]
    if not wanted and not edges:
        return None
    # What torch does not add up itself: a part of a gradient, or one that never comes into `.grad`.
    apart = [now.route is not None or (boxes is not None and boxes[i] != now.wholes[i]) for i in wanted]
    try:
        grads = _passed(loss, seed, retain, now, row, wanted, apart, edges)
    except RuntimeError as error:
        raise explained(error, task) from error
    if now.found and boxes is not None:
        # Zeros of what the task does not own: of a compiled part, or of outputs that were stacked.
        late = {i for i, grad in zip(wanted, grads, strict=True) if boxes[i] is None and grad is not None}
        known = {i for i in late if now.device.type != "cpu" and (task, i) in now.unused}
        pairs = zip(wanted, grads, strict=True)
        grads = [None if i in known or (i in late and g is not None and not g.any()) else g for i, g in pairs]
    for i, grad, alone in zip(wanted, grads, apart, strict=True):
        row[i] = _kept(i, task, grad, row[i] if alone else None, now)
    return any(grad is not None for grad in grads)


def _passed(
    loss: Tensor,
    seed: Tensor | None,
    retain: bool,
    now: Trained,
    row: GradientRow,
    wanted: list[int],
    apart: list[bool],
    edges: Sequence[GradientEdge],
) -> list[Tensor | None]:
    """The gradients of the wanted parameters; on top of the row where it is not `apart`."""
    params = [now.params[i] for i in wanted]
    if now.route is not None:
        return now.route.gradients([loss], None if seed is None else [seed], retain, params)
    for i, alone in zip(wanted, apart, strict=True):
        kept = row[i]
        now.params[i].grad = None if kept is None or alone else kept.permute(now.specs[i].inverse)
    inputs: list[Any] = [*params, *edges]
    with faster_inside(now.params, lambda: "torch._dynamo" in sys.modules and holds_compiled(loss)):
        torch.autograd.backward(loss, seed, retain_graph=retain, inputs=inputs)
    return [p.grad for p in params]


def _kept(index: int, task: int, grad: Tensor | None, before: Tensor | None, now: Trained) -> Tensor | None:
    """A parameter's gradient in memory order, contiguous, cut to what the task owns, and added to what was there before."""
    spec = now.specs[index]
    box = now.layout.boxes[task][index] if now.layout is not None else None
    if grad is None:
        return before if before is not None or box is None else now.zeros(index, box)
    if box is None and now.found:
        raise now.disagreement(index)
    refuse_sparse(grad, now.named[index][0])
    now.missed.discard(index)
    if not spec.plain:
        grad = grad.permute(spec.memory)
    if box is not None and box != now.wholes[index]:
        grad = grad[tuple(slice(start, stop) for start, stop in box)]
    return grad.contiguous() if before is None else before.add_(grad)
