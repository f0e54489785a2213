"""Proof that a module was read right: its one-stage form and the module itself do the same, or what differs and where.

In: a module and its sketch. Both forms run in float64 on noise: two batch sizes, two image sizes where the module takes
them, in training and in evaluation; answers, gradients and the buffers afterwards must be the same. The module is copied
first. How a module is read is read.py's business.
"""

import copy
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from nestling.errors import NestlingError
from nestling.nets.births import grow
from nestling.nets.reading.assemble import assemble
from nestling.nets.reading.sketch import Sketch
from nestling.nets.reading.trace import BATCHES, Shape
from nestling.nets.reading.vocabulary import ON_WEIGHTS

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # of the largest entry; other number types: 0.1
PATIENCE = 2.0  # seconds without a word
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Case:
    """One comparison: how many images of which shape, in which mode, and whether gradients are compared too."""

    batch: int
    shape: Shape
    training: bool
    gradients: bool

    def __str__(self) -> str:
        mode = "In training" if self.training else "In evaluation"
        return f"{mode}, on {self.batch} images of shape {self.shape}"


def prove(
    module: nn.Module,
    sketch: Sketch,
    shape: Shape,
    read: Callable[[nn.Module, Shape, str], Sketch],
    net: str,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Raise a NestlingError where the one-stage form of a module differs from it."""
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return
    start = clock()
    with torch.enable_grad():
        twin, kinds = precise(module, shape)
        if sketch.made:  # of the precise module's parameters, so that weights which are made of them are as precise
            module, sketch = twin, read(twin, shape, net)
        here = Both(module, twin, sketch, net, kinds)
        pairs = [(here, Case(batch, shape, mode, batch == BATCHES[0])) for batch in BATCHES for mode in (True, False)]
        other = other_shape(twin, shape)
        if other is not None:
            try:
                there = Both(module, twin, read(module, other, net), net, kinds)
            except NestlingError:  # it runs there, but as something else; the nest is for images of `shape`
                pass
            else:
                pairs += [(there, Case(BATCHES[0], other, mode, mode)) for mode in (True, False)]
        for number, (both, case) in enumerate(pairs, start=1):
            if clock() - start > PATIENCE:
                LOG.warning(
                    "%s: checking that it was read right, %d of %d (proof=False skips this)", net, number, len(pairs)
                )
            both.compare(case)


def precise(module: nn.Module, shape: Shape) -> tuple[nn.Module, set[torch.dtype]]:
    """A copy of the module in float64, if it runs so; and the number types it computes in, since its code may ask for another."""
    twin = copy.deepcopy(module)
    for layer in twin.modules():
        if type(layer) is nn.SyncBatchNorm:  # in one process it is batch norm, and runs on a CPU
            layer.__class__ = Plain  # type: ignore[assignment]
    plain, twin = copy.deepcopy(twin), twin.double()
    seen = Kinds()
    try:
        with torch.no_grad(), seen:
            copy.deepcopy(twin).eval()(noise(twin, 1, shape))
    except Exception:  # the module's own code may want its own number type
        return plain, set()
    return twin, seen.kinds


class Plain(nn.BatchNorm2d):
    """Batch norm of vectors, sequences and images."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass


def other_shape(twin: nn.Module, shape: Shape) -> Shape | None:
    """Another image size that the module takes."""
    channels, *sides = shape
    large = bool(sides) and min(sides) >= 64
    fewer = [tuple(side // 2 + 1 for side in sides), tuple(side // 2 for side in sides)]
    more = [tuple(side + 1 + i for i, side in enumerate(sides)), tuple(2 * side for side in sides)]
    for side in (fewer if large else more) if sides else ():
        try:
            with torch.no_grad():
                copy.deepcopy(twin).train()(noise(twin, BATCHES[0], (channels, *side)))
        except Exception:  # whatever the module says about images of this size
            continue
        return channels, *side
    return None


def noise(twin: nn.Module, batch: int, shape: Shape) -> Tensor:
    like = next((p for p in twin.parameters() if p.is_floating_point()), torch.zeros(0))
    made = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(batch))
    return made.to(device=like.device, dtype=like.dtype)


class Both:
    """A copy of the module beside its one-stage form, and which tensor of the one is which of the other."""

    def __init__(self, module: nn.Module, twin: nn.Module, sketch: Sketch, net: str, seen: set[torch.dtype]) -> None:
        self.net, self.sketch = net, sketch
        self.module = copy.deepcopy(twin)
        for path, layer in self.module.named_modules():
            if path in sketch.dropped and isinstance(layer, _DropoutNd):
                layer.p = 0.0  # else it would draw random numbers that the others of the nest then draw
        self.made = assemble(sketch, grow(""), True, net, module.training)
        self.one = self.made.net
        kinds = {p.dtype for p in twin.parameters() if p.is_floating_point()}
        if kinds == {torch.float64}:
            self.one.double()
        self.tolerance = max((TOLERANCE.get(kind, 0.1) for kind in kinds | seen), default=1e-6)
        originals = (*module.parameters(), *module.buffers())
        copies = (*self.module.parameters(), *self.module.buffers())
        self.weights = MadeWeights()
        self.twins = {id(mine): theirs for mine, theirs in zip(originals, copies, strict=True)}

    def answer(self, x: Tensor) -> Tensor:
        return self.one(x)[0]

    def compare(self, case: Case) -> None:
        self.module.zero_grad()
        self.one.zero_grad()
        x = noise(self.module, case.batch, case.shape)
        before = {key: value.clone() for key, value in self.module.named_buffers()}
        try:
            theirs, their_image = self.run(self.module, x, case)
        except RuntimeError as error:  # of the module's own, which was only recorded so far
            mode = "training" if case.training else "evaluation"
            raise NestlingError(
                f"{self.net}: cannot nest it: in {mode}, with gradients, torch cannot run the module itself ({error})"
            ) from error
        mine, my_image = self.run(self.answer, x, case)
        self.check("the answers", mine, theirs, case)
        if case.gradients and theirs.requires_grad:
            self.check("the gradients of the image", my_image, their_image, case)
            self.check_parameters(case)
        self.check_buffers(before, case)

    def run(self, function: Callable[[Tensor], Any], x: Tensor, case: Case) -> tuple[Tensor, Tensor]:
        """The answer, after gradients were left with the parameters, and the gradient of the image."""
        for each in (self.module, self.one):
            each.train(case.training)
        torch.manual_seed(0)  # dropout draws the same
        image = x.clone().requires_grad_(case.gradients)
        with torch.set_grad_enabled(case.gradients), self.weights if function is self.module else nullcontext():
            answers = function(image)
            answer: Tensor = answers[0] if isinstance(answers, tuple) else answers  # auxiliary answers are dropped
            if case.gradients and answer.requires_grad:
                generator = torch.Generator().manual_seed(1)
                weights = torch.randn(answer.shape, generator=generator).to(answer)
                (answer * weights).sum().backward()
        return answer, torch.zeros_like(image) if image.grad is None else image.grad

    def check_parameters(self, case: Case) -> None:
        theirs = self.by_name(lambda tensor: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
        theirs |= self.made_gradients(case)
        floor = 1e-3 * max((float(value.abs().max()) for value in theirs.values() if value.numel()), default=0.0)
        kept = self.made.cut({**self.one.state_dict(), **theirs})
        for key, parameter in self.one.named_parameters():
            if key not in theirs:  # a buffer of the module's that stands as a frozen weight
                continue
            mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            expected = kept[key]
            if self.is_one_slope(key):  # one slope for all became a slope for each
                mine, expected = mine.sum(), theirs[key].flatten()[0]
            self.check(f"the gradients of {key}", mine, expected, case, floor)
        used = self.used()
        for name, parameter in self.module.named_parameters():
            unused = name.rpartition(".")[0] in self.sketch.dropped or any(name in of for _, of in self.sketch.made)
            if id(parameter) not in used and not unused and parameter.grad is not None and parameter.grad.any():
                self.fail(f"the parameter {name} of the module has a gradient but no place in the nest", case)

    def made_gradients(self, case: Case) -> dict[str, Tensor]:
        """Of weights that the module makes of its parameters, in the order in which they are used."""
        made, seen = [name for name, _ in self.sketch.made], self.weights.seen
        if len(made) != len(seen):
            self.fail(f"the module makes {len(seen)} weights while running, {len(made)} are in the nest", case)
        nodes = {origin: self.made.plan.by_name.get(name) for name, origin in self.made.origins.items()}
        found = {}
        for name, weight in zip(made, seen, strict=True):
            node = nodes.get(name)
            if node is not None and weight.grad is not None:
                found[f"{node.name}.weight"] = node.op.adopted("weight", weight.grad, node)
        return found

    def check_buffers(self, before: dict[str, Tensor], case: Case) -> None:
        theirs = self.by_name(lambda tensor: tensor.detach())
        kept = self.made.cut({**self.one.state_dict(), **theirs})
        for key, mine in self.one.state_dict().items():
            if key in theirs and not key.endswith("num_batches_tracked"):
                self.check(key, mine, kept[key], case)
        used = self.used()
        for name, buffer in self.module.named_buffers():
            counted = name.endswith("num_batches_tracked") or name.rpartition(".")[0] in self.sketch.dropped
            if id(buffer) not in used and not counted and not same(buffer, before[name]):
                self.fail(f"the module changes its buffer {name}, which has no place in the nest", case)

    def used(self) -> set[int]:
        """The module's tensors that have a place in the nest."""
        held = [tensor for name in self.sketch.layers for _, tensor in self.held(name)]
        return {id(self.twins[id(tensor)]) for tensor in held if id(tensor) in self.twins}

    def held(self, name: str) -> list[tuple[str, Tensor]]:
        """The tensors of a layer of the sketch; of somebody's own module those below it, too."""
        layer, below = self.sketch.layers[name], self.sketch.nodes[name].op.given
        return [*layer.named_parameters(recurse=below), *layer.named_buffers(recurse=below)]

    def by_name(self, what: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Something of the module's tensors, by the names of the one-stage form's."""
        found: dict[str, Tensor] = {}
        for name, origin in self.made.origins.items():
            for key, tensor in self.held(origin):
                if id(tensor) in self.twins:
                    value = what(self.twins[id(tensor)])
                    node = self.made.plan.by_name.get(name)
                    found[f"{name}.{key}"] = node.op.adopted(key, value, node) if node else value
        return found

    def is_one_slope(self, key: str) -> bool:
        name, _, tensor = key.rpartition(".")
        held = getattr(self.sketch.layers.get(self.made.origins.get(name, "")), tensor, None)
        return isinstance(held, Tensor) and held.numel() == 1

    def check(self, what: str, mine: Tensor, theirs: Tensor, case: Case, floor: float = 0.0) -> None:
        if mine.shape != theirs.shape:
            self.fail(f"{what} have the shapes {tuple(mine.shape)} and {tuple(theirs.shape)}", case)
        mine, theirs = mine.detach().double(), theirs.detach().double()
        scale = max(float(theirs.abs().max()) if theirs.numel() else 0.0, floor, 1e-12)
        if not same(mine, theirs, self.tolerance * scale):
            off = float((mine - theirs).abs().max()) / scale
            self.fail(f"{what} differ by up to {off:.2g} of the largest entry", case)

    def fail(self, what: str, case: Case) -> NoReturn:
        raise NestlingError(
            f"{self.net}: cannot nest it: it was not read right. {case}, its one-stage form and the module differ: {what}"
            f"{self.first_difference(case)}. This is a fault of nestling's; proof=False nests the module as it was read."
        )

    def first_difference(self, case: Case) -> str:
        """The first layer of a name in both whose outputs differ."""
        theirs: dict[str, Tensor] = {}
        mine: dict[str, Tensor] = {}
        nodes = {o: n for n, o in self.made.origins.items() if n in self.one.plan.by_name}
        modules = {path: layer for path, layer in self.module.named_modules() if path in nodes}
        modules = {
            path: layer for path, layer in modules.items() if not [*layer.children()]
        }  # else it does more than its node
        handles = [watch(layer, theirs, path) for path, layer in modules.items()]
        handles += [watch(self.one.layer(nodes[path]), mine, path) for path in modules]
        x, plain = noise(self.module, case.batch, case.shape), replace(case, gradients=False)
        for function in (self.module, self.answer):
            self.run(function, x, plain)
        for handle in handles:
            handle.remove()
        for path in (name for name in self.sketch.nodes if name in mine and name in theirs):
            limit = self.tolerance * float(theirs[path].abs().max() + 1e-12)
            if mine[path].shape != theirs[path].shape or not same(mine[path], theirs[path], limit):
                return f", first after {path}"
        return ""


class MadeWeights(TorchFunctionMode):
    """While a module runs: the weights that it makes of its parameters, which then keep their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def __enter__(self) -> Any:
        self.seen = []
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ON_WEIGHTS:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            if weight.grad_fn is not None:
                weight.retain_grad()
                self.seen.append(weight)
        return func(*args, **kwargs)


class Kinds(TorchFunctionMode):
    """While a module runs: the number types of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.is_floating_point():
            self.kinds.add(made.dtype)
        return made


def watch(layer: nn.Module, into: dict[str, Tensor], key: str) -> Any:
    def hook(module: nn.Module, args: Any, out: Tensor) -> None:
        into.setdefault(key, out.detach().clone())

    return layer.register_forward_hook(hook)


def same(one: Tensor, other: Tensor, limit: float = 0.0) -> bool:
    return torch.allclose(one.double(), other.double(), rtol=0.0, atol=limit, equal_nan=True)
