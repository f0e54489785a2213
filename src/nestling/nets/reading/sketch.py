"""The sketch of a network: what is known of it while it is read, in the plan's words and still without births.

In: traced operations, one by one. Out: names, sizes and arguments of what they read, nodes entered under names of their
own, and refusals that say which module is meant. Which operation becomes which node is said in pen.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor, fx, nn

from nestling.errors import NestlingError
from nestling.nets.ops import Select
from nestling.nets.ops.calls import spelled
from nestling.nets.plan import Node
from nestling.nets.reading.layout import Arrangement
from nestling.nets.reading.trace import BATCHES, Trace
from nestling.nets.reading.watcher import path_of, place, shapes

UNPLAIN = (
    "it works on a tensor of shape {}, whose images or channels do not stand in one dimension each; use nestling.exits"
)
MIXED = "it makes {} of {}, which puts channels into one dimension with pixels or images"
STRANGE = "it reads {}, which is neither computed from the image nor part of a layer"


@dataclass
class Sketch:
    """A network's nodes without births (all 0), the layer of each that has one, and what may only follow the classifier."""

    nodes: dict[str, Node] = field(default_factory=dict)
    layers: dict[str, nn.Module] = field(default_factory=dict)
    output: str = ""
    mixing: dict[str, str] = field(default_factory=dict)  # nodes that mix channels, and how to say so
    dropped: set[str] = field(default_factory=set)  # modules that run but reach no answer
    made: list[tuple[str, set[str]]] = field(
        default_factory=list
    )  # nodes whose weights are made of parameters: of these


class Page:
    """A sketch while it is being made, beside the operations it is made from."""

    def __init__(self, trace: Trace, net: str) -> None:
        self.module, self.trace, self.net = trace.module, trace, net
        self.values = trace.record.values
        self.place_in_order = {node: index for index, node in enumerate(trace.record.nodes)}
        self.paths = {path for path, _ in self.module.named_modules()}
        self.whole = False
        self.sketch = Sketch(dropped=trace.record.dropped)
        self.names: dict[fx.Node, str | tuple[str, ...]] = {}  # the plan's name of each traced tensor
        self.first_names: dict[fx.Node, str | tuple[str, ...]] = {}  # the same, before anything was overwritten
        self.tensor_of: dict[str, Tensor] = {}  # of what was recorded whole: an example of each tensor, without data
        self.memo: dict[int, Any] = {}  # copies of what recorded pieces hold: one of each
        self.counted: set[int] = set()  # the parameters among them that some piece has counted
        self.layouts: dict[fx.Node, Arrangement] = {}  # of tensors that a plan has in another form
        self.written: dict[fx.Node, str] = {}  # of norms that are written out, the node of each that ends; "" inside
        self.covariances: dict[str, tuple[Arrangement, Arrangement, float]] = {}  # what their nodes are made of
        self.lenders: dict[int, tuple[Any, str]] = {}  # of each parameter of a constant, the piece that holds it
        self.tokens_in: dict[fx.Node, tuple[str, slice]] = {}  # tokens of the module's own, and where they were put
        self.parts: dict[
            fx.Node, tuple[tuple[int, Any], ...]
        ] = {}  # of what is split: along which dimension, and where
        self.masks: set[fx.Node] = set()  # truths, which a plan has as ones and zeros
        self.extremes: dict[
            fx.Node, Any
        ] = {}  # the largest with their places: torch.max or torch.min along one dimension
        self.holders: dict[fx.Node, str] = {}  # the module whose weights a function uses
        self.weights_of: dict[int, str] = {}  # parameter -> the node that used it first

    # --- words ----------------------------------------------------------------------------------------------------

    def refuse(self, node: fx.Node, why: str, here: bool = False) -> NoReturn:
        """`here`: what is refused is this operation, however its tensors stand."""
        mixed = (
            None
            if here
            else next((n for n in node.all_input_nodes if n in self.layouts and self.layouts[n].is_mixed), None)
        )
        while mixed is not None:  # whatever then reads it, that is where it was mixed
            node, why = mixed, MIXED.format(self.shape(mixed), self.shape(mixed.all_input_nodes[0]))
            mixed = next((n for n in node.all_input_nodes if n in self.layouts and self.layouts[n].is_mixed), None)
        raise NestlingError(f"{self.net}: cannot nest {place(self.module, node)}: {why}.")

    def name(self, node: fx.Node) -> str:
        """A module's own path, or the path of the module around an operation with the operation's name."""
        path = str(node.target) or "layer" if node.op == "call_module" else self.holders.get(node, "")
        if path and path not in self.sketch.nodes:
            return path
        owner, _, label = path.rpartition(".") if path else (path_of(node), "", spelled(node.target).lstrip("."))
        label = label.rpartition(".")[2].strip("_") or "op"
        return self.fresh(f"{owner}.{label}" if owner else label)

    def inside(self, node: fx.Node, word: str) -> str:
        """A name for what an operation needs beside itself."""
        return f"{path_of(node)}.{word}".lstrip(".")

    def fresh(self, stem: str) -> str:
        """A name that no node and no module has."""
        name, count = stem, 1
        while name in self.sketch.nodes or name in self.paths:
            count += 1
            name = f"{stem}_{count}"
        return name

    # --- reading and entering ------------------------------------------------------------------------------------

    def put(self, node: Node) -> str:
        self.sketch.nodes[node.name] = node
        return node.name

    def add(self, node: fx.Node, made: Node) -> None:
        self.names[node] = self.put(made)

    def overwrite(self, node: fx.Node) -> None:
        """What an operation in place overwrites is what later readers see; views of a part of it are refused."""
        twin = self.trace.twins[node][0]
        runs = ((self.trace.record, node), (self.trace.others[0], twin))
        places = {n.all_input_nodes.index(w) for record, n in runs for w in record.writes.get(n, ())}
        written = {node.all_input_nodes[place] for place in places}
        old = {self.names.get(tensor) for tensor in written} - {None}
        evaluated = {other: twins[0] for other, twins in self.trace.twins.items()}
        evaluated[self.trace.record.image] = self.trace.others[0].image
        if not written & evaluated.keys():
            return
        for other in (self.trace.record.image, *self.trace.record.nodes[: self.place_in_order[node]]):
            name = self.names.get(other)
            both = (
                self.trace.record.shares_memory(node, other),
                self.trace.others[0].shares_memory(twin, evaluated[other]),
            )
            if not any(both):
                continue
            if name in old and all(both) and node in self.names:
                self.names[other] = self.names[node]
            elif self.is_read_after(other, node) and not (old and all(self.apart(name, each) for each in old)):
                self.refuse(
                    node,
                    "it overwrites in place what is read later through a view (a slice, a flattened or a dropped-out form of "
                    "the same tensor); use the form that does not overwrite",
                )

    def is_read_after(self, tensor: fx.Node, node: fx.Node) -> bool:
        here = self.place_in_order[node]
        readers = [self.place_in_order.get(user, -1) for user in tensor.users]
        return any(at > here for at in readers) or tensor in outputs(self.trace.record.answer)

    def apart(self, one: Any, other: Any) -> bool:
        """Whether two tensors are different channels of the same."""
        mine, theirs = self.sketch.nodes.get(str(one)), self.sketch.nodes.get(str(other))
        if mine is None or theirs is None or mine.reads != theirs.reads:
            return False
        if not isinstance(mine.op, Select) or not isinstance(theirs.op, Select):
            return False
        return not set(mine.op.source) & set(theirs.op.source)

    def read_of(self, node: fx.Node, position: int = 0) -> str:
        """The plan's name of the tensor an operation reads first."""
        traced = [a for a in node.all_input_nodes if self.is_tensor(a)]
        strange = next((a for a in traced if a not in self.names and a not in self.layouts), None)
        if len(traced) > 1 and position == 0 and strange is not None:
            self.refuse(node, STRANGE.format(strange.target))
        if position < len(traced) and traced[position] in self.layouts:
            self.refuse(node, UNPLAIN.format(tuple(self.values[traced[position]].shape)))
        return self.computed(node, traced[position] if position < len(traced) else None)

    def computed(self, node: fx.Node, read: Any) -> str:
        """The plan's name of a tensor that must have been computed from the image."""
        name = self.names.get(read)
        if not isinstance(name, str):
            self.refuse(node, "it does not read a tensor that was computed from the image")
        return name

    def read_name(self, node: fx.Node) -> str:
        name = self.names[node]
        assert isinstance(name, str)
        return name

    def is_tensor(self, node: fx.Node) -> bool:
        return isinstance(self.values.get(node), Tensor)

    def given(self, node: fx.Node, *words: str) -> dict[str, Any]:
        """An operation's arguments by name; tensors are nodes."""
        return {**dict(zip(words, node.args, strict=False)), **node.kwargs}

    def check_constants(self, node: fx.Node, batch: bool, mode: bool) -> None:
        """Refuse numbers that change with the batch size or with the mode, unless the operation is known for that."""
        evaluated, larger, _ = self.trace.twins[node]
        mine = constants(node)
        if batch and mine != constants(larger):
            self.refuse(
                node,
                f"it computes with the batch size: of {BATCHES[0]} images with {changed(mine, constants(larger))}, of "
                f"{BATCHES[1]} with {changed(constants(larger), mine)}. An answer may not depend on how many are asked",
            )
        if mode and mine != constants(evaluated):
            self.refuse(
                node,
                f"it computes with {changed(mine, constants(evaluated))} in training and with "
                f"{changed(constants(evaluated), mine)} in evaluation; only dropout and batch norm may differ",
            )

    def size(self, node: fx.Node, axis: int = 1) -> tuple[int, ...]:
        """Of one channel."""
        shape = tuple(self.values[node].shape)
        return (*shape[1:axis], *shape[axis + 1 :])

    def axis(self, name: str) -> int:
        """Where a node's channels stand."""
        return self.sketch.nodes[name].op.axis

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """Of what an operation gives; of several tensors, of the first."""
        return shapes(self.values[node])[0]

    def channels(self, name: str) -> int:
        return self.sketch.nodes[name].channels

    def same(self, node: fx.Node, read: str = "") -> str:
        """What a channel-by-channel operation reads, after making sure that it keeps batch and channels."""
        read = read or self.read_of(node)
        shape, axis = tuple(self.values[node].shape), self.axis(read)
        if len(shape) <= axis or (shape[0], shape[axis]) != (BATCHES[0], self.channels(read)):
            self.refuse(node, f"it turns {self.channels(read)} channels into a tensor of shape (N, {shape[1:]})")
        return read


def outputs(answer: Any) -> Iterable[Any]:
    return answer if isinstance(answer, list | tuple) else (answer,)


def constants(node: fx.Node) -> list[Any]:
    """What an operation is given besides tensors, in order."""
    found: list[Any] = []

    def collect(value: Any) -> None:
        if isinstance(value, list | tuple):
            for each in value:
                collect(each)
        elif isinstance(value, dict):
            for key in sorted(value):
                collect(value[key])
        elif isinstance(value, slice):
            collect((value.start, value.stop, value.step))
        elif not isinstance(value, fx.Node):
            found.append(value)

    collect((node.args, dict(node.kwargs)))
    return found


def changed(mine: list[Any], theirs: list[Any]) -> Any:
    return next((a for a, b in zip(mine, theirs, strict=False) if a != b), mine)
