"""A piece of a module as it was recorded: one operation, with whatever in it does not depend on the image.

In: a traced operation. Out: a module of the tensors it reads, which holds copies of the parameters, buffers and layers it
uses. Numbers that follow the batch size are worked out anew for every batch. Which pieces a network is made of is pen.py's
business.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from nestling.nets.reading.trace import BATCHES, Trace, without_data


@dataclass(frozen=True)
class Read:
    """The tensor computed from the image that stands at one place."""

    place: int


@dataclass(frozen=True)
class Made:
    """What an earlier step of the same piece gave."""

    step: int


@dataclass(frozen=True)
class Held:
    """A parameter or buffer of the piece."""

    name: str


@dataclass(frozen=True)
class PerImage:
    """So many for each image of the batch."""

    each: int


@dataclass(frozen=True)
class Copy:
    """Of what would be overwritten: others may read it later."""

    of: Any


class Unknown(Exception):
    """Why something cannot be recorded as a piece."""


class Recorded(nn.Module):
    """Steps of (operation, target, arguments), the last of which gives the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[str, Any, Any, Any]] = []
        self.borrowed: dict[
            str, tuple[list[Recorded], str]
        ] = {}  # parameters and layers that another piece holds (in a list: no child)

    def borrow(self, name: str, lender: "Recorded", theirs: str) -> None:
        """Use another piece's parameter or layer instead of holding it: it has one place, and one gradient of all its uses."""
        delattr(self, name)
        self.borrowed[name] = ([lender], theirs)

    def held(self, name: str) -> Any:
        """A tensor or a layer, its own or borrowed."""
        [lender], theirs = self.borrowed.get(name, ([self], name))
        return getattr(lender, theirs)

    def forward(self, *reads: Tensor) -> Tensor:
        made: list[Any] = []

        def known(value: Any) -> Any:
            if isinstance(value, Read):
                return reads[value.place]
            if isinstance(value, Made):
                return made[value.step]
            if isinstance(value, Held):
                return self.held(value.name)
            if isinstance(value, Copy):
                return known(value.of).clone()
            if isinstance(value, PerImage):
                return value.each * reads[0].shape[0]
            if isinstance(value, torch.device):
                return reads[0].device if reads else self.place
            if isinstance(value, slice):
                return slice(known(value.start), known(value.stop), known(value.step))
            if isinstance(value, list | tuple):
                return type(value)(map(known, value))
            return {k: known(v) for k, v in value.items()} if isinstance(value, dict) else value

        for op, target, args, kwargs in self.steps:
            given, named = known(args), known(kwargs)
            if op == "call_function":
                made.append(target(*given, **named))
            elif op == "call_method":
                made.append(getattr(given[0], target)(*given[1:], **named))
            else:
                made.append(self.held(target)(*given, **named))
        out: Tensor = made[-1]
        return out

    @property
    def place(self) -> torch.device:
        """Where its tensors are."""
        lenders = (lender for [lender], _ in self.borrowed.values())
        held = (tensor for each in (self, *lenders) for tensor in (*each.parameters(), *each.buffers()))
        first = next(held, None)
        return torch.device("cpu") if first is None else first.device

    def extra_repr(self) -> str:
        return ", ".join(str(getattr(target, "__name__", target)) for _, target, _, _ in self.steps)


class Recorder:
    """Makes one piece out of one operation, its twin with another batch size beside it."""

    def __init__(self, trace: Trace, names: dict[fx.Node, Any], memo: dict[int, Any], copies: bool = True) -> None:
        self.trace, self.names, self.memo, self.copies = trace, names, memo, copies
        self.piece, self.reads = Recorded(), list[str]()
        self.done: dict[fx.Node, Made] = {}

    def record(self, node: fx.Node) -> tuple[Recorded, tuple[str, ...]]:
        self.step(node, self.trace.twins[node][1])
        return self.piece, tuple(self.reads)

    def step(self, node: fx.Node, larger: fx.Node) -> Made:
        if node in self.done:
            return self.done[node]
        written = self.trace.record.writes.get(node, ())
        args, kwargs = self.known((node.args, dict(node.kwargs)), (larger.args, dict(larger.kwargs)), written)
        target = self.hold_layer(str(node.target)) if node.op == "call_module" else node.target
        if target == "view" and not any(isinstance(arg, torch.dtype) for arg in node.args):
            target = "reshape"  # the same numbers, however they lie in memory
        self.piece.steps.append((node.op, target, args, kwargs))
        self.done[node] = Made(len(self.piece.steps) - 1)
        return self.done[node]

    def tensor(self, node: fx.Node, larger: fx.Node) -> Read | Held | Made:
        name = self.names.get(node)
        if isinstance(name, str):
            self.reads += [name] if name not in self.reads else []
            return Read(self.reads.index(name))
        if node.op != "get_attr":
            return self.step(node, larger)
        held = self.hold(str(node.target))
        seen = self.trace.record.values.get(node)
        if isinstance(seen, Tensor) and seen.shape != getattr(self.piece, held.name).shape:
            raise Unknown(
                f"it replaces its own tensor {node.target} while running; run the module on an image of this size first"
            )
        return self.spread(held, node) if self.copies and self.trace.grows(str(node.target)) else held

    def spread(self, held: Held, node: fx.Node) -> Made:
        """Numbers made for each image of the batch: one image's, which are all alike, over as many as there are."""
        numbers = getattr(self.piece, held.name)
        if not torch.equal(numbers[:1].expand_as(numbers), numbers):
            raise Unknown("it makes numbers while running that are not the same for each image of a batch")
        self.piece.steps.append(("call_method", "narrow", (held, 0, 0, 1), {}))
        first = Made(len(self.piece.steps) - 1)
        self.piece.steps.append(("call_method", "expand", (first, PerImage(1), *[-1] * (numbers.dim() - 1)), {}))
        return Made(len(self.piece.steps) - 1)

    def known(self, value: Any, larger: Any, written: Sequence[fx.Node] = ()) -> Any:
        """An argument as the piece finds it when it runs."""
        if isinstance(value, fx.Node):
            found = self.tensor(value, larger)
            return Copy(found) if value in written else found
        if isinstance(value, slice):
            return slice(
                *(self.known(getattr(value, k), getattr(larger, k), written) for k in ("start", "stop", "step"))
            )
        if isinstance(value, list | tuple):
            made = [self.known(a, b, written) for a, b in zip(value, larger, strict=True)]
            return tuple(made) if isinstance(value, tuple) else made
        if isinstance(value, dict):
            return {k: self.known(v, larger[k], written) for k, v in value.items()}
        if value == larger or value is larger:
            return value
        each = value // BATCHES[0] if type(value) is int else 0
        if not each or (value, larger) != (each * BATCHES[0], each * BATCHES[1]):
            raise Unknown(f"it computes with the batch size: {value} of {BATCHES[0]} images, {larger} of {BATCHES[1]}")
        return PerImage(each)

    def hold(self, path: str) -> Held:
        try:
            tensor = self.trace.held(path)
        except AttributeError:
            raise Unknown("it makes a tensor of numbers while running; keep it as a buffer") from None
        name = path.replace(".", "_")
        if not hasattr(self.piece, name):
            held = copy.deepcopy(tensor, self.memo) if self.copies else tensor
            if isinstance(held, nn.Parameter):
                self.piece.register_parameter(name, held)
            else:
                self.piece.register_buffer(name, held.contiguous())  # one that was spread cannot be loaded into
        return Held(name)

    def hold_layer(self, path: str) -> str:
        name = f"layer_{path.replace('.', '_')}"
        if not hasattr(self.piece, name):
            layer = self.trace.module.get_submodule(path)
            self.piece.add_module(name, copy.deepcopy(layer, self.memo) if self.copies else layer)
        return name


def work(piece: Recorded, reads: list[Tensor]) -> int:
    """Multiply-accumulates of a piece for one image, by torch's own counter, without data. Numbers that follow from no image (a
    table of positions that a small network makes, say) are computed once, however many images there are."""
    lenders = [lender for [lender], _ in piece.borrowed.values()]
    hollow = copy.deepcopy(piece, {key: t for each in (piece, *lenders) for key, t in without_data(each).items()})
    every = counted(hollow, reads)
    if not reads:
        return every
    hollow.steps = [step if free else NOTHING for step, free in zip(piece.steps, of_no_image(piece), strict=True)]
    once = counted(hollow, reads)
    return once + (every - once) // BATCHES[0]


def counted(piece: Recorded, reads: list[Tensor]) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        piece.forward(*reads)
    return int(counter.get_total_flops()) // 2


NOTHING: tuple[str, Any, Any, Any] = ("call_function", tuple, (), {})


def of_no_image(piece: Recorded) -> list[bool]:
    """Which steps depend on no image, nor on how many there are."""
    free: list[bool] = []

    def alone(value: Any) -> bool:
        if isinstance(value, Read | PerImage):
            return False
        if isinstance(value, Made):
            return free[value.step]
        if isinstance(value, Copy):
            return alone(value.of)
        if isinstance(value, slice):
            return all(map(alone, (value.start, value.stop, value.step)))
        if isinstance(value, dict):
            return all(map(alone, value.values()))
        return all(map(alone, value)) if isinstance(value, list | tuple) else True

    for _, _, args, kwargs in piece.steps:
        free.append(alone(args) and alone(kwargs))
    return free
