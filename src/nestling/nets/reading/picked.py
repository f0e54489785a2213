"""Numbers chosen: channels and pixels by number, turned around or repeated; the larger ones, and one or the other by a mask.

In: an operation of torch.fx and the page it belongs on. Out: nodes and layers entered on that page, or a refusal that says
why this one cannot be nested. What is true of a tensor (x > 0) is a mask of its own ones and zeros in a plan.
"""

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from nestling.nets.ops import Module, Zip
from nestling.nets.ops.calls import Call, largest, mask, smallest
from nestling.nets.plan import Node
from nestling.nets.reading.held import constant_of
from nestling.nets.reading.placing import Placing
from nestling.nets.reading.sketch import UNPLAIN
from nestling.nets.reading.vocabulary import MIXES

FULL = slice(None)


class Picking(Placing):
    """Enters what chooses."""

    def plain(self, node: fx.Node, source: Any) -> str:
        """The plan's name of a tensor with the channels behind the batch, for what is not followed otherwise."""
        if self.whole:
            self.refuse(node, "it is taken as it was recorded")
        if source in self.layouts or self.axis(self.computed(node, source)) != 1:
            self.refuse(node, UNPLAIN.format(self.shape(source)))
        return self.computed(node, source)

    def called(self, node: fx.Node, read: str, layer: nn.Module) -> None:
        """A module over the pixels of each channel, which may leave them in another shape."""
        name = self.name(node)
        self.same(node, read)
        self.sketch.layers[name] = layer
        self.add(node, Node(name, Module(), (read,), (0,) * self.channels(read), self.size(node)))

    def before(self, name: str, read: str, module: nn.Module) -> str:
        """A module between a layer and what it reads."""
        node = self.sketch.nodes[read]
        axis, shape = node.op.axis, module(torch.empty(1, *node.shape(node.channels), device="meta")).shape
        made = Node(self.fresh(name), Module(axis=axis), (read,), node.births, (*shape[1:axis], *shape[axis + 1 :]))
        self.sketch.layers[made.name] = module
        return self.put(made)

    # --- by number ------------------------------------------------------------------------------------------------

    def getitem(self, node: fx.Node) -> None:
        """x[:, [2, 0, 1]] too, and by a buffer of numbers."""
        index = self.given(node, "input", "index")["index"]
        parts = index if isinstance(index, tuple) else (index,)
        listed = [d for d, part in enumerate(parts) if isinstance(part, list | fx.Node)]
        if len(listed) == 1 and all(part == FULL for d, part in enumerate(parts) if d not in listed):
            self.pick(node, node.args[0], listed[0], self.listed(node, parts[listed[0]]))
        else:
            super().getitem(node)

    def index_select(self, node: fx.Node) -> None:
        given = self.given(node, "input", "dim", "index")
        self.pick(node, given["input"], given["dim"], self.listed(node, given["index"]))

    def listed(self, node: fx.Node, index: Any) -> list[int]:
        """Numbers that stand in the code or in a buffer."""
        found = constant_of(self, node, index)[0] if is_constant(self, index) else torch.tensor(index)  # type: ignore[index]
        if found.dim() != 1 or found.dtype not in (torch.int64, torch.int32):
            self.refuse(node, "only slices, single places and lists of whole numbers are nested")
        return [int(number) for number in found]

    def pick(self, node: fx.Node, source: Any, dim: int, which: list[int]) -> None:
        """Channels are chosen; of pixels each channel keeps the same ones."""
        read, rank = self.plain(node, source), self.values[source].dim()
        at = dim % rank
        if at == 0:
            self.refuse(node, "it takes some images of a batch; only what keeps the batch whole is nested")
        if at == 1:
            self.names[node] = self.take(node, read, tuple(number % self.channels(read) for number in which))
        else:
            self.called(node, read, Call(operator.getitem, 0, (None, (*[FULL] * at, which)), {}))

    def narrow(self, node: fx.Node) -> None:
        given = self.given(node, "input", "dim", "start", "length")
        rank = self.values[node].dim()
        start = given["start"] % self.shape(given["input"])[given["dim"]]
        self.cut(node, given["input"], (*[FULL] * (given["dim"] % rank), slice(start, start + given["length"])))

    # --- turned around, repeated ----------------------------------------------------------------------------------

    def flip(self, node: fx.Node) -> None:
        read = self.plain(node, node.args[0])
        dims = [d % self.values[node].dim() for d in numbers(node.args[1:] or node.kwargs["dims"])]
        if 0 in dims or (1 in dims and len(dims) > 1):
            self.refuse(node, "it turns the order of images around, or of channels and pixels at once")
        if 1 in dims:
            self.names[node] = self.take(node, read, tuple(reversed(range(self.channels(read)))))
        else:
            self.called(node, read, Call(torch.flip, 0, (None, dims), {}))

    def repeat(self, node: fx.Node) -> None:
        """All channels again, or all pixels."""
        read = self.plain(node, node.args[0])
        times = numbers(node.args[1:] or node.kwargs["repeats"])
        if len(times) != len(self.shape(node.args[0])) or times[0] != 1:  # type: ignore[arg-type]
            self.refuse(node, f"it repeats images, or adds dimensions: {times}")
        if times[1] > 1:
            again = self.take(node, read, tuple(range(self.channels(read))) * times[1])
            self.names[node] = read = again
        if any(each > 1 for each in times[2:]) or times[1] == 1:
            self.called(node, read, Call(Tensor.repeat, 0, (None, 1, 1, *times[2:]), {}))

    def repeat_interleave(self, node: fx.Node) -> None:
        given = self.given(node, "input", "repeats", "dim")
        read, times, dim = self.plain(node, given["input"]), given["repeats"], given.get("dim")
        if type(times) is not int or type(dim) is not int or dim % self.values[node].dim() == 0:
            self.refuse(node, "only channels or pixels are repeated, each as often as every other")
        if dim % self.values[node].dim() == 1:
            self.names[node] = self.take(node, read, tuple(c for c in range(self.channels(read)) for _ in range(times)))
        else:
            self.called(node, read, Call(torch.repeat_interleave, 0, (None, times, dim), {}))

    def expand(self, node: fx.Node) -> None:
        """One channel as many, too."""
        source = node.all_input_nodes[0]
        before, after = self.shape(source), self.shape(node)
        alike = before[1:2] == (1,) and len(before) == len(after) and before[2:] == after[2:] and after[1] > 1
        if alike and not self.whole and isinstance(self.names.get(source), str) and not self.broadcasts(node, source):
            self.names[node] = self.take(node, self.plain(node, source), (0,) * after[1])
        else:
            super().expand(node)

    def roll(self, node: fx.Node) -> None:
        """Channels around, too."""
        given, rank = self.given(node, "input", "shifts", "dims"), self.values[node].dim()
        dims, shifts = numbers(given.get("dims") or ()), numbers(given["shifts"])
        if [d % rank for d in dims] == [1] and self.axis(self.read_of(node)) == 1:
            read = self.plain(node, node.args[0])
            self.names[node] = self.take(node, read, tuple(torch.arange(self.channels(read)).roll(shifts[0]).tolist()))
        else:
            super().roll(node)

    def movedim(self, node: fx.Node) -> None:
        given, rank = self.given(node, "input", "source", "destination"), self.values[node].dim()
        moved = torch.empty(list(range(2, rank + 2)), device="meta").movedim(given["source"], given["destination"])
        self.place(node, self.layout_of(node, given["input"]).permuted([side - 2 for side in moved.shape]))

    # --- gated, the larger, and one or the other -------------------------------------------------------------------------

    def glu(self, node: fx.Node, dim: int) -> None:
        """The first half of the channels, gated by the second."""
        read = self.read_of(node)
        axis = self.axis(read)
        if dim % self.values[node].dim() != axis:
            self.refuse(node, f"it halves dimension {dim}; only channels (here dimension {axis}) are halved")
        half = self.channels(read) // 2
        one, other = self.take(node, read, tuple(range(half))), self.take(node, read, tuple(range(half, 2 * half)))
        gate = self.before(f"{other}_gate", other, Call(torch.sigmoid, 0, (None,), {}))
        self.enter(node, Zip("mul", axis=axis), (one, gate))

    def extreme(self, node: fx.Node, whole: fx.Node) -> None:
        """The largest or smallest along one dimension, without their places."""
        given, function = self.given(whole, "input", "dim", "keepdim"), self.extremes[whole]
        source, dim, keepdim = given["input"], given.get("dim"), bool(given.get("keepdim"))
        if type(dim) is not int:
            self.refuse(whole, MIXES)
        dim %= self.values[source].dim()
        over = torch.amax if function is torch.max else torch.amin
        if source in self.layouts and self.reduced_parts(node, over, dim, keepdim, source):
            return
        read = self.plain(node, source)
        if dim < 2:
            self.refuse(whole, MIXES)
        self.called(node, read, Call(largest if function is torch.max else smallest, 0, (None, dim, keepdim), {}))

    def compared(self, node: fx.Node, function: Any) -> None:
        """Where a tensor is larger than a number, or the like."""
        source, other = node.args[:2]
        if not isinstance(source, fx.Node) or type(other) not in (int, float):
            self.refuse(node, "only a tensor is compared, with a number")
        self.called(node, self.plain(node, source), Call(mask, 0, (None, function, other), {}))
        self.masks.add(node)

    def where(self, node: fx.Node) -> None:
        """One tensor or the other, by a mask; numbers may stand for one of them."""
        given: list[Any] = [*node.args]
        if node.op == "call_method":
            given = [given[1], given[0], given[2]]
        if len(given) != 3 or given[0] not in self.masks:
            self.refuse(node, "only where(x > number, this, that) is nested")
        tensors = [each for each in given[1:] if isinstance(each, fx.Node) and self.is_known(each)]
        if not tensors:
            self.refuse(node, "it chooses between numbers; one of them must be computed from the image")
        beside = self.plain(node, tensors[0])
        reads = [self.plain(node, given[0])]
        for each in given[1:]:
            number = each
            if is_constant(self, each):
                held = constant_of(self, node, each)
                number = held[0].item() if held is not None and held[0].numel() == 1 else each
            if type(number) in (int, float):
                call = Call(torch.full_like, 0, (None, number), {})
                reads.append(self.before(self.inside(node, "number"), beside, call))
            else:
                reads.append(self.plain(node, each))
        shapes = {self.sketch.nodes[read].shape(self.channels(read)) for read in reads}
        if len(shapes) > 1:
            self.refuse(node, f"it chooses between tensors of the shapes {sorted(shapes)}")
        self.enter(node, Zip("where"), tuple(reads))


def is_constant(page: Picking, value: Any) -> bool:
    return isinstance(value, fx.Node) and not page.is_known(value)


def numbers(given: Any) -> list[int]:
    """x.flip(1, 2), x.flip((1, 2)) and x.flip(1) alike."""
    if isinstance(given, int):
        return [given]
    return [each for part in given for each in numbers(part)]
