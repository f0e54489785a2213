"""Linear and convolution layers whose weight gradients need not be made for every task.

Of a layer with inputs a and output gradients d^t (one per task t) the gradients are sums of outer products, so that
<g_s, g_t> = sum over i, j of (a_i . a_j) (d_i^s . d_j^t), and the weighted sum of all tasks is one product with the weighted
d. In comes autograd's graph, which keeps a; out come such layers, where that is cheaper than rows, with their Gram matrix
and update. `i` runs over samples, and over tokens or pixels; a_i . a_j of a convolution of stride 1: patches.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils._python_dispatch import TorchDispatchMode

from nestling.gradients.patches import TAP, image_bands
from nestling.gradients.products import product
from nestling.gradients.walks import reached

MATMULS = {"AddmmBackward0": (2, "_saved_mat1"), "MmBackward0": (1, "_saved_self")}  # where the weight and a are found
CONVOLUTION = "ConvolutionBackward0"
BAND = 64  # samples whose products with those before them are made together
IMAGE = 256  # pixels of an image, all of whose products with those before them are made together
SMALL = (
    2.0**-16
)  # inputs between this and its inverse are left as they are: their fourth powers are well inside float32
COMBINED = (
    64  # products that cost as much as to move one number once, on a CPU: of a row, of output gradients, of columns
)


@dataclass(eq=False)
class WeightUse:
    """A use of one weight by one product or convolution, and the tasks whose losses depend on it."""

    param: int
    weight: Tensor
    node: Any
    tasks: tuple[int, ...]
    inputs: Tensor  # a, as the product or convolution had it
    options: tuple[Any, ...]  # stride, padding and dilation of a convolution; empty for a product
    deltas: dict[int, Tensor] = field(default_factory=dict)  # per task, gradient of what it gave

    @property
    def edge(self) -> GradientEdge:
        return GradientEdge(self.node, 0)

    def gram(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Inner products of its tasks' gradients, (tasks, tasks) of `self.tasks`, float64, with products over i in `dtype`;
        and how far rounding may have moved them, (tasks,): over products of random signs, as for a sum of many."""
        deltas = torch.cat([self._flat_delta(t).to(dtype) for t in self.tasks], 1)  # (i, tasks * out)
        by_task = deltas.view(len(deltas), len(self.tasks), -1)
        sized, scale = deltas.new_ones(len(self.tasks)), 1.0
        if dtype == torch.float32 and deltas.device.type == "cpu":  # whose squares may be too small to tell from zero
            sized = _near_one(by_task, (0, 2))
            by_task *= sized[:, None]
            scale = float(_near_one(self.inputs, ()))
            scale = 1.0 if SMALL <= scale <= 1 / SMALL else scale
        sizes = torch.linalg.vector_norm(by_task, dim=2).square_()  # (i, tasks)
        found = torch.zeros(len(self.tasks), len(self.tasks), dtype=torch.float64, device=deltas.device)
        spread = found.new_zeros(len(self.tasks))
        start = 0
        for among in self._bands(dtype, scale):  # symmetric: the lower half will do
            here, before = slice(start, start + len(among)), slice(start + len(among))
            start += len(among)
            among[:, here] /= 2
            through = product(among, deltas[before]).view(len(among), len(self.tasks), -1)
            products = by_task[here] @ through.transpose(1, 2)  # (band, tasks, tasks)
            found += products.sum(0, dtype=torch.float64)
            moved = among.square_() @ sizes[before] + torch.linalg.vector_norm(through, dim=2).square_()
            spread += (sizes[here].double() * moved).sum(0)
        back = 1 / (sized.double() * scale)  # powers of two: exact
        noise = 2 * torch.finfo(dtype).eps * spread.sqrt()
        return (found + found.T) * back[:, None] * back, noise * back**2

    def _bands(self, dtype: torch.dtype, scale: float = 1.0) -> Iterator[Tensor]:
        """a_i . a_j for a band of i after the other, and all j up to its end; a multiplied by `scale`."""
        given = self.inputs.to(dtype)
        given = given if scale == 1 else given * scale
        if by_pixels(self.options, self.deltas[self.tasks[0]].shape):
            _, padding, dilation = self.options
            yield from image_bands(given, self.weight.shape[2:], padding, dilation, BAND)
            return
        inputs = self._flat_inputs(given)
        for start in range(0, len(inputs), BAND):
            yield product(inputs[start : start + BAND], inputs[: start + BAND].T)

    def _flat_inputs(self, given: Tensor) -> Tensor:
        """a: (i, entries of a weight's row)."""
        if not self.options:
            return given
        stride, padding, dilation = self.options
        columns = F.unfold(given, self.weight.shape[2:], dilation, padding, stride)
        return columns.transpose(1, 2).flatten(0, 1)

    def _flat_delta(self, task: int) -> Tensor:
        """d of a task: (i, out)."""
        delta = self.deltas[task]
        return delta.flatten(2).transpose(1, 2).flatten(0, 1) if self.options else delta

    def update(self, weights: "Sequence[float] | Tensor") -> Tensor:
        """The gradient of the weighted losses; `weights` by task."""
        first, *rest = self.tasks
        total = self.deltas[first] * weights[first]
        for task in rest:
            total = total.add_(self.deltas[task] * weights[task])
        return self._product(total)

    def row(self, task: int) -> Tensor:
        """The gradient of one task."""
        return self._product(self.deltas[task])

    def _product(self, delta: Tensor) -> Tensor:
        if not self.options:
            return product(delta.T, self.inputs)
        rest = (False, [0, 0], 1, [False, True, False])  # not transposed, one group; the weight's gradient only
        _, found, _ = torch.ops.aten.convolution_backward(delta, self.inputs, self.weight, None, *self.options, *rest)
        made: Tensor = found
        return made


def _near_one(numbers: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The power of two that brings the largest near one; 1 where that is zero or not finite."""
    most = torch.maximum(numbers.amax(dims), -numbers.amin(dims))
    known = (most > 0) & most.isfinite()
    exponent = torch.where(known, torch.frexp(torch.where(known, most, 1.0)).exponent, 0).clamp(-126, 126)
    return torch.ldexp(torch.ones_like(most), -exponent)


def find(losses: Sequence[Tensor | None], params: Sequence[Tensor], always: bool = False) -> list[WeightUse]:
    """The layers to do without rows; with `always` whatever it costs."""
    per_task = [reached([] if loss is None else [loss]) for loss in losses]
    users: dict[Any, list[Any]] = {}
    for above in dict.fromkeys(node for nodes in per_task for node in nodes):
        for following, _ in above.next_functions:
            if following is not None:
                users.setdefault(following, []).append(above)
    places = {id(p): index for index, p in enumerate(params)}
    found = []
    for leaf, used in users.items():
        weight = getattr(leaf, "variable", None)
        node = _user(leaf, used, users) if id(weight) in places else None
        if weight is None or node is None or weight._backward_hooks:  # a hook wants to see the gradient
            continue
        tasks = tuple(task for task, nodes in enumerate(per_task) if node in nodes)
        if always or cheaper(weight, node, len(tasks)):
            inputs = _inputs(node)
            if inputs is not None and inputs.dtype == weight.dtype:
                found.append(WeightUse(places[id(weight)], weight, node, tasks, inputs, _options(node)))
    return found


def cheaper(weight: Tensor, node: Any, tasks: int) -> bool:
    """Whether products of inputs and of output gradients cost less than a weight gradient for every task but one."""
    out, into = weight.shape[0], prod(weight.shape[1:])
    gave = node._input_metadata[0].shape
    pixels = prod(gave[2:])
    rows, among, band = gave[0] * pixels, into, BAND
    if by_pixels(_options(node), gave):
        among, band = weight.shape[1] + TAP * sum(weight.shape[2:]), max(BAND, pixels)
    half = 0.6 * rows * (rows + band)  # in bands it goes a sixth slower
    moved = rows * (tasks * out + (among if weight.dim() > 2 else 0))
    return bool(half * (among + tasks * out) + COMBINED * moved < (tasks - 1) * (rows + COMBINED) * into * out)


def by_pixels(options: Sequence[Any], gave: Sequence[int]) -> bool:
    """Whether products of patches follow from those of pixels: in a convolution of stride 1, of images so small that one image's
    with all others can be held."""
    return len(options) > 0 and set(options[0]) == {1} and prod(gave[2:]) <= IMAGE


def _user(leaf: Any, used: Sequence[Any], users: Mapping[Any, Sequence[Any]]) -> Any:
    """The product or convolution that uses a leaf as its weight, if that is its only use and one that is known here."""
    above = users.get(used[0], ()) if used[0].name() == "TBackward0" else used  # a linear weight is transposed first
    if len(used) != 1 or len(above) != 1:
        return None
    node = above[0]
    if node.name() in MATMULS and used[0].name() == "TBackward0":
        scaled = node.name() == "AddmmBackward0" and (node._saved_alpha, node._saved_beta) != (1, 1)
        return node if node.next_functions[MATMULS[node.name()][0]][0] is used[0] and not scaled else None
    if node.name() == CONVOLUTION and node.next_functions[1][0] is leaf:
        known = node._saved_groups == 1 and not node._saved_transposed and leaf.variable.dim() == 4
        return node if known else None
    return None


class _Recomputed(Exception):
    """What was kept for backward would have to be computed anew, or brought from elsewhere."""


class _AtHand(TorchDispatchMode):
    """Stops at the first operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Recomputed


def _inputs(node: Any) -> Tensor | None:
    """What the node kept of its input; None where a checkpoint would run forward again for it, or where it is gone: then
    the backward pass says so."""
    try:
        with _AtHand():
            kept: Tensor | None = getattr(
                node, "_saved_input" if node.name() == CONVOLUTION else MATMULS[node.name()][1]
            )
    except (_Recomputed, RuntimeError):
        return None
    return None if kept is None else kept.detach()


def _options(node: Any) -> tuple[Any, ...]:
    return (node._saved_stride, node._saved_padding, node._saved_dilation) if node.name() == CONVOLUTION else ()
