"""What a network's outputs are for, as its targets tell (classes of inputs, of pixels, or numbers), and how wrong they are.

In: outputs and targets, and the recipe's own loss and error, where it names some. Out: a loss, and the error of every sample
as a fraction: wrong or not, the share of wrong pixels, the share of the targets' variance that is left, or what the user's own
function says. Knows no network and no file.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.data import MemorySplit, Split
from nestling.data.own import TensorSplit
from nestling.errors import NestlingError, say_once
from nestling.recipes.code import handed
from nestling.recipes.recipe import TrainRecipe

CLASSES, PIXELS, NUMBERS = "classes", "pixels", "numbers"
HOW = (
    "with a network of your own nestling train my_file.py:build --{0} {{0}}, or in Python nestling.fit(..., {0}=...); recipes "
    "of ours take none"
)
NO_CLASS = -(2**62)  # torch passes over targets of -100 unless told of another number: of inputs every class counts


def goal_of(split: Split, train: TrainRecipe) -> str:
    """What the targets of a split ask for. Whole numbers are classes, unless the recipe has an error of its own."""
    return goal_of_targets(
        split.labels if isinstance(split, MemorySplit | TensorSplit) else next(iter(split.batches(1)))[1], train
    )


def goal_of_targets(y: Tensor, train: TrainRecipe) -> str:
    if train.error or y.is_floating_point():
        return NUMBERS
    return CLASSES if y.dim() == 1 else PIXELS


def task_loss(train: TrainRecipe, numbers: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """The user's own loss; else cross-entropy where targets are classes, of an image or of each pixel, and the squared error
    where they are numbers."""
    if train.loss:
        own = handed(train.loss, "its loss", HOW.format("loss"))
        if isinstance(own, type):
            raise NestlingError(f"the loss {train.loss} is a class; hand over one of it, such as {own.__name__}()")
        return lambda found, y: scalar(own(found, y), train.loss)
    if numbers:
        return squared_error
    return lambda logits, labels: cross_entropy(logits, labels, train.smoothing)


def scalar(loss: Any, name: str) -> Tensor:
    """What a loss of the user's own gave, if one can learn from it."""
    if not isinstance(loss, Tensor) or loss.dim():
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise NestlingError(f"the loss {name} gives {found}; expected a scalar tensor, the mean over the batch")
    return loss


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    expected = (len(logits), *logits.shape[2:])
    if not labels.is_floating_point() and labels.shape != expected:
        raise NestlingError(
            f"the targets are whole numbers of shape {tuple(labels.shape)}, the network's output has {tuple(logits.shape)}; "
            f"expected classes of shape {expected}, or numbers to hit: targets.float()"
        )
    if labels.is_floating_point():
        return F.cross_entropy(logits, labels, label_smoothing=smoothing)
    try:
        if labels.dim() == 1:
            return F.cross_entropy(logits, labels, ignore_index=NO_CLASS, label_smoothing=smoothing)
        counted = (labels >= 0).sum()  # of pixels those below 0 do not count; there may be none in a batch
        total = F.cross_entropy(
            logits, labels.clamp(min=-1), ignore_index=-1, label_smoothing=smoothing, reduction="sum"
        )
        return total / counted.clamp(min=1)
    except IndexError as error:  # on a CPU; on a GPU the process would be lost
        raise beyond(labels, logits.shape[1]) from error


def check_targets(split: Split, goal: str, answers: int) -> None:
    """Refuse classes that the network does not know, where all targets are at hand."""
    if goal != NUMBERS and isinstance(split, MemorySplit | TensorSplit):
        check_classes(split.labels, goal, answers)


def check_goals(y: Tensor, goal: str, train: TrainRecipe) -> None:
    """Refuse training targets that ask for something else than those of the test, unless the loss is the user's own."""
    found = goal_of_targets(y, train)
    if (found == NUMBERS) != (goal == NUMBERS) and not train.loss:
        one, other = ("numbers to hit", "classes") if found == NUMBERS else ("classes", "numbers to hit")
        raise NestlingError(
            f"the training targets are {one}, the test targets {other}; hand over both in one form, or a loss of your own (loss=)"
        )


def check_classes(labels: Tensor, goal: str, answers: int) -> None:
    if int(labels.max()) >= answers or (goal == CLASSES and int(labels.min()) < 0):
        raise beyond(labels, answers)


def beyond(labels: Tensor, answers: int) -> NestlingError:
    """Refuses classes from an unknown one: the largest, or a negative one."""
    most, least = int(labels.max()), int(labels.min())
    apart = "; let pixels that do not count be -1" if labels.dim() > 1 else ""
    return NestlingError(
        f"a target is class {most if most >= answers else least}, but the network answers with {answers} classes (0 to "
        f"{answers - 1}){apart}; build it for all of them, or say by loss and error what else its outputs are for"
    )


def squared_error(found: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(found, alike(found, y))


def alike(found: Tensor, y: Tensor) -> Tensor:
    """The targets, if there is one for each number of the output."""
    if found.shape != y.shape:
        raise NestlingError(
            f"the network's output has shape {tuple(found.shape)}, the targets {tuple(y.shape)}; expected one for each, or "
            "whole numbers as targets that are classes"
        )
    return y


@dataclass(frozen=True, eq=False)
class Examined:
    """What every stage was worth on a split, all on its device."""

    goal: str
    errors: Tensor  # (stages,)
    losses: Tensor  # (stages,)
    tensors: dict[
        str, Tensor
    ]  # logits (stages, N, classes) and labels; of other goals the error of every sample, (stages, N)
    iou: Tensor | None = None  # (stages,) of pixels: intersection over union, the mean over classes


def examined_classes(logits: Tensor, labels: Tensor, train: TrainRecipe) -> Examined:
    losses = torch.stack([task_loss(train, labels.is_floating_point())(stage, labels) for stage in logits])
    wrong = (logits.argmax(2) != labels).float().mean(1)
    return Examined(CLASSES, wrong, losses, {"logits": logits, "labels": labels})


def examined_otherwise(found: Iterator[tuple[tuple[Tensor, ...], Tensor]], goal: str, train: TrainRecipe) -> Examined:
    """Of (outputs of all stages, targets), batch by batch: dense outputs of a whole test set would not fit."""
    losses: list[Tensor] = []
    wrong: list[Tensor] = []
    counts: list[int] = []
    confusion: Tensor | None = None
    kept: list[tuple[Tensor, Tensor]] = []
    for outputs, y in found:
        stacked = torch.stack([output.float() for output in outputs])
        losses.append(torch.stack([task_loss(train, y.is_floating_point())(output, y) for output in stacked]))
        dense = goal == PIXELS and not train.loss  # whose loss is a mean over pixels
        counts.append(int((y >= 0).sum()) if dense else len(y))
        if train.error:
            kept.append((stacked.cpu(), y.cpu()))
        elif goal == CLASSES:
            wrong.append((stacked.argmax(2) != y).float())
        elif goal == PIXELS:
            said = said_pixels(stacked, y)
            check_classes(y, goal, stacked.shape[2])
            inside = (y >= 0).flatten(1)
            right = (said == y).flatten(2) | ~inside
            wrong.append((~right).float().sum(2) / inside.float().sum(1))  # not a number where no pixel counts
            table = confusions(said, y, stacked.shape[2])
            confusion = table if confusion is None else confusion + table
        else:
            wrong.append(torch.stack([(output - alike(output, y)).square().flatten(1).mean(1) for output in stacked]))
            kept.append((stacked[:0].cpu(), y.double().cpu()))
    if confusion is not None and not confusion.any():
        raise NestlingError("no pixel of the test targets counts: all are below 0; hand over targets that have classes")
    share = torch.tensor(counts, device=losses[0].device) / sum(counts)
    loss = (torch.stack(losses) * share[:, None]).sum(0)
    if train.error:
        each = own_errors(torch.cat([out for out, _ in kept], 1), torch.cat([y for _, y in kept]), train).to(
            loss.device
        )
    else:
        each = torch.cat(wrong, 1)
        if goal == NUMBERS:
            y = torch.cat([y for _, y in kept])
            if train.loss and bool(((y == 0) | (y == 1)).all()):
                say_once(
                    "all test targets are 0 or 1 and the loss is your own: the errors are the share of the targets' variance "
                    "that the outputs leave, as of numbers to hit. Where outputs are scores that is no measure; say by error= "
                    "how wrong each sample is"
                )
            each = each / variance(y)
        elif goal == PIXELS:  # who has no pixel that counts is neither right nor wrong
            each = torch.where(each.isnan(), each.nanmean(1, keepdim=True), each)
    return Examined(goal, each.mean(1), loss, {"errors": each}, None if confusion is None else mean_iou(confusion))


def variance(y: Tensor) -> float:
    """Of targets around their means, each number's own: what an answer that is always the same would leave."""
    found = float(y.var(0, correction=0).mean())
    if not found > 0:
        raise NestlingError(
            f"the {len(y)} test targets are all the same or no finite numbers (their variance is {found:g}), so that no share "
            "of it is left; hand over others, or an error of your own (error=)"
        )
    return found


def own_errors(outputs: Tensor, y: Tensor, train: TrainRecipe) -> Tensor:
    """(stages, N): the user's error of every sample, asked once for all samples of a stage."""
    function = handed(train.error, "its error", HOW.format("error"))
    found = torch.stack([torch.as_tensor(function(output, y)).float() for output in outputs])
    if found.shape != outputs.shape[:2] or not bool(((found >= 0) & (found <= 1)).all()):
        raise NestlingError(
            f"{train.error} gives errors of shape {tuple(found.shape[1:])} up to {float(found.abs().max()):.3g}; "
            f"expected one for each of the {outputs.shape[1]} samples, from 0 (right) to 1 (wrong)"
        )
    return found


def said_pixels(stacked: Tensor, y: Tensor) -> Tensor:
    """(stages, N, ...): the class of every pixel."""
    said = stacked.argmax(2)
    if said.shape[1:] != y.shape:
        raise NestlingError(
            f"the network says classes of shape {tuple(said.shape[1:])}, the targets have {tuple(y.shape)}; expected a class for "
            "every pixel"
        )
    return said


def confusions(said: Tensor, y: Tensor, classes: int) -> Tensor:
    """(stages, classes, classes): how often pixels of a class (rows) were said to be of one (columns). Negative: not counted."""
    counted = y >= 0
    tables = [
        torch.bincount(y[counted] * classes + stage[counted], minlength=classes * classes).view(classes, classes)
        for stage in said
    ]
    return torch.stack(tables).double()


def mean_iou(confusion: Tensor) -> Tensor:
    """Intersection over union, the mean over the classes that occur or were said."""
    met = confusion.diagonal(dim1=1, dim2=2)
    union = confusion.sum(1) + confusion.sum(2) - met
    there = union > 0
    return ((met / union.clamp(min=1)) * there).sum(1) / there.sum(1).clamp(min=1)
