"""Reading an ordinary torch module: its layers and operations as nodes of a plan, still without births.

In: a module and the shape of one image. Out: a `Sketch`: nodes in order, the layers they came from, and the name of the
output. trace.py says which operations there are; here each is found to be of a kind, which pen.py enters. What is not known
to work channel by channel is refused, and the refusal names the module and the reason. Nothing here knows about stages.
"""

import copy
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from nestling.errors import NestlingError
from nestling.nets.modes import hooked
from nestling.nets.ops import Input
from nestling.nets.ops.calls import DROP_PATHS, Call, DropPath
from nestling.nets.plan import Node
from nestling.nets.reading.ours import ours
from nestling.nets.reading.pen import Pen
from nestling.nets.reading.shells import SHELLS
from nestling.nets.reading.short import short
from nestling.nets.reading.sketch import Sketch
from nestling.nets.reading.trace import BATCHES, Shape, Trace, trace
from nestling.nets.reading.vocabulary import (
    BINARY,
    CHANNELWISE,
    COMPARISONS,
    DROPOUTS,
    EXTREMES,
    JOINS,
    LAYERS,
    METHODS,
    MIXES,
    MIXING,
    ON_WEIGHTS,
    POINTWISE,
    REASONS,
    REDUCTIONS,
    RESHAPES,
    SOFTMAXES,
    SPLITS,
    SYNONYMS,
)
from nestling.nets.reading.watcher import place, shapes, tensors_of

PICKS: dict[Any, str] = {  # operations that Picking has a method for
    operator.getitem: "getitem", torch.index_select: "index_select", torch.narrow: "narrow", torch.flip: "flip",
    "repeat": "repeat", torch.repeat_interleave: "repeat_interleave", torch.movedim: "movedim", torch.where: "where",
}  # fmt: skip
UNKNOWN = "it is not known to work channel by channel; spell it in operations that do, or use nestling.exits"


WRAPPERS = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
}


def read(module: nn.Module, shape: Shape, net: str) -> Sketch:
    """The sketch of a module for images of `shape`. The module itself is not touched."""
    check_shapes_known(module, net)
    check_hooks(module, net)
    reader = Reader(trace(module, shape, net), net)
    reader.read(shape)
    return reader.sketch


def read_whole(module: nn.Module, shape: Shape, net: str) -> "Reader":
    """The same for births in depth, in evaluation: what cannot be read channel by channel is taken as it was recorded."""
    check_shapes_known(module, net)
    check_hooks(module, net)
    reader = Reader(trace(module, shape, net, training=False), net, whole=True)
    reader.read(shape)
    return reader


def check_shapes_known(module: nn.Module, net: str) -> None:
    for path, layer in module.named_modules():
        if inside := WRAPPERS.get(type(layer).__name__):
            raise NestlingError(
                f"{net}: cannot nest {path or 'it'}: it is wrapped in {type(layer).__name__}; nest what is inside, its "
                f".{inside}, and wrap the nest"
            )
        if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
            raise NestlingError(
                f"{net}: cannot nest {path} ({type(layer).__name__}): a lazy layer whose shape is not known yet. Run the module "
                "on one image first."
            )
    if any(t.is_meta for t in (*module.parameters(), *module.buffers())) and torch.get_default_device().type != "meta":
        raise NestlingError(
            f"{net}: cannot nest it: its weights are on the device meta, and have no numbers. Give it some first: "
            'module.to_empty(device="cpu"), then module.load_state_dict(state). (For its plan alone: with torch.device("meta"), '
            "order=False)"
        )


def check_hooks(module: nn.Module, net: str) -> None:
    """Hooks run beside the operations, where a nest would not see them."""
    if found := hooked(module):
        raise NestlingError(
            f"{net}: cannot nest {found[0]}: it has a hook, {found[1]}, which a nest would not run. "
            "Remove it first (weight norm, spectral norm and pruning of the old kind by their own remove functions)."
        )
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise NestlingError(
                f"{net}: cannot nest it: the parameter {name} has a hook on its gradient, which a nest would not run. Remove it, "
                "and put it on the nested network's parameter afterwards."
            )


class Reader(Pen):
    """Says of one operation after another of what kind it is."""

    def __init__(self, trace: Trace, net: str, whole: bool = False) -> None:
        super().__init__(trace, net)
        self.whole = whole  # births in depth

    def read(self, shape: Shape) -> None:
        record = self.trace.record
        self.tensor_of["input"] = record.values[record.image]
        self.names[record.image] = self.put(Node("input", Input(), (), (0,) * shape[0], tuple(shape[1:])))
        for node in record.nodes:
            self.enter_whole(node) if self.whole else self.enter_node(node)
            if node in self.names and not self.whole:
                self.check_batch(node)
            if node in self.names:
                self.first_names[node] = self.names[node]
            self.overwrite(node)
        answer = record.answer
        name = self.names.get(answer) if isinstance(answer, fx.Node) else None
        if not isinstance(name, str):
            raise NestlingError(f"{self.net}: cannot nest it: it must return one tensor, the logits; found {answer}.")
        self.sketch.output = name
        self.sketch = self.sketch if self.whole else ours(short(self.sketch))

    def check_batch(self, node: fx.Node) -> None:
        """What a plan has as it is must have the images first, each by itself."""
        kind = next((t.dtype for t in tensors_of(self.values[node]) if not t.is_floating_point()), None)
        if kind is not None and node not in self.masks:
            self.refuse(node, f"it makes numbers of the type {kind}; nest one type of number")
        if not self.trace.is_batch(node):
            larger = self.trace.others[1].values[self.trace.twins[node][1]]
            self.refuse(
                node,
                f"of {BATCHES[0]} images it makes a tensor of shape {shapes(self.values[node])[0]}, of {BATCHES[1]} one of "
                f"{shapes(larger)[0]}; expected the images first, each by itself",
            )

    def enter_whole(self, node: fx.Node) -> None:
        """Channel by channel if that is known to be right, else as it was recorded."""
        sketch, before = self.sketch, (dict(self.sketch.nodes), dict(self.sketch.layers), dict(self.weights_of))
        try:
            if node.target == "contiguous":  # how a tensor lies in memory decides how it is computed, to the last bit
                self.map(node, Call(Tensor.contiguous, 0, (None,), {}))
            else:
                self.enter_node(node)
        except NestlingError:
            sketch.nodes, sketch.layers, self.weights_of = before
            self.names.pop(node, None)
            self.opaque(node)
        name = self.names.get(node)
        if isinstance(name, str):
            self.tensor_of[name] = self.values[node]
        elif isinstance(name, tuple):
            self.tensor_of.update(zip(name, self.values[node], strict=True))

    def enter_node(self, node: fx.Node) -> None:
        if node in self.written:
            self.names |= {node: self.written[node]} if self.written[node] else {}
        elif node.op == "call_module":
            self.enter_module(node, self.module.get_submodule(str(node.target)))
        elif node.target is operator.getitem and isinstance(self.names.get(node.args[0]), tuple):  # type: ignore[arg-type]
            self.names[node] = self.names[node.args[0]][node.args[1]]  # type: ignore[index]
        elif node.args and node.args[0] in self.extremes:
            if (node.target, *node.args[1:]) not in ((operator.getitem, 0), (getattr, "values")):
                self.refuse(node, "it asks where the largest stand, not only how large they are")
            self.extreme(node, node.args[0])  # type: ignore[arg-type]
        elif node.target is operator.getitem and node.args[0] in self.parts:
            self.part(node, node.args[0], node.args[1])  # type: ignore[arg-type]
        else:
            target = METHODS.get(node.target, node.target) if node.op == "call_method" else node.target
            self.enter_operation(node, target)

    def enter_module(self, node: fx.Node, layer: nn.Module) -> None:
        kind = type(layer)
        if type(layer).__name__ in DROP_PATHS:
            self.map(node, DropPath.of(layer))
        elif kind in LAYERS and node.all_input_nodes[0] in self.layouts:
            self.layer_everywhere(node, node.all_input_nodes[0], layer, LAYERS[kind])
        elif kind in LAYERS:
            self.layer(node, self.read_of(node), layer, LAYERS[kind])
        elif kind is nn.MultiheadAttention:
            self.multihead(node, layer)  # type: ignore[arg-type]
        elif kind in (nn.Flatten, nn.Unflatten):
            self.reshape(node)
        elif kind is nn.Unfold:
            self.unfold(node, layer)  # type: ignore[arg-type]
        elif kind is nn.GLU:
            self.glu(node, layer.dim)  # type: ignore[arg-type]
        elif kind is nn.ChannelShuffle:
            self.shuffle(node, layer.groups)  # type: ignore[arg-type]
        elif kind is nn.Identity:
            self.reshape(node)
        elif kind is nn.Softmax and self.softmax(node, layer.dim if isinstance(layer.dim, int) else 0):
            pass
        elif kind in MIXING and not self.whole:
            if node.all_input_nodes[0] in self.layouts:
                self.refuse(node, MIXING[kind])
            self.map(node, copy.deepcopy(layer))
            self.sketch.mixing[self.read_name(node)] = f"{place(self.module, node)}: {MIXING[kind]}"
        elif kind in CHANNELWISE:
            if getattr(layer, "return_indices", False):
                self.refuse(node, "it returns indices too")
            fresh: Any = copy.deepcopy(layer)
            if getattr(fresh, "inplace", False):
                fresh.inplace = False
            self.map(node, fresh)
        else:
            self.refuse(node, REASONS.get(kind, UNKNOWN))

    def enter_operation(self, node: fx.Node, target: Any) -> None:
        """`target` is the function, or the function that a method stands for."""
        base = SYNONYMS.get(target, target)
        self.check_constants(
            node,
            batch=base not in RESHAPES and base != "expand",
            mode=base not in DROPOUTS and base not in (F.batch_norm, F.scaled_dot_product_attention),
        )
        if base in BINARY and len([a for a in node.args[:2] if isinstance(a, fx.Node) and self.is_tensor(a)]) == 2:
            computed = all(a in self.names or a in self.layouts for a in node.all_input_nodes)
            self.zip(node, BINARY[base]) if computed else self.scale(node, BINARY[base])
        elif base in EXTREMES:
            self.larger(node, base)
        elif base in COMPARISONS and not self.whole:
            self.compared(node, base)
        elif base in BINARY or base in POINTWISE:
            self.pointwise(node, base)
        elif base in REDUCTIONS:
            self.reduction(node, base)
        elif base in RESHAPES:
            self.reshape(node)
        elif base in (torch.transpose, torch.permute) and not self.whole:
            self.reorder(node, base)
        elif base is torch.unbind:
            self.unbind(node)
        elif base in (torch.matmul, operator.matmul, torch.bmm):
            self.matmul(node, *node.args[:2])
        elif base is torch.einsum:
            self.einsum(node)
        elif base is F.scaled_dot_product_attention:
            self.fused(node)
        elif base is F.channel_shuffle:
            self.shuffle(node, self.given(node, "input", "groups")["groups"])
        elif base in JOINS:
            self.join(node)
        elif base is torch.stack:
            self.stack(node)
        elif base in SPLITS:
            self.split(node)
        elif base in DROPOUTS:
            self.dropout(node, DROPOUTS[base], base)
        elif (base in SOFTMAXES and self.softmax(node, self.given(node, "input", "dim").get("dim", 0))) or (
            base is F.normalize and self.normalize(node)
        ):
            pass
        elif base in MIXING and not self.whole:
            if node.all_input_nodes[0] in self.layouts:
                self.refuse(node, MIXING[base])
            self.pointwise(node, base)
            self.sketch.mixing[self.read_name(node)] = f"{place(self.module, node)}: {MIXING[base]}"
        elif base in ON_WEIGHTS:
            self.functional(node, ON_WEIGHTS[base])
        elif base is F.glu:
            self.glu(node, self.given(node, "input", "dim").get("dim", -1))
        elif base in ("expand", "expand_as"):
            self.expand(node)
        elif base in SHELLS:
            self.norm(node, *SHELLS[base])
        elif base is F.pad:
            self.pad(node)
        elif base is torch.roll:
            self.roll(node)
        elif base is torch.repeat_interleave and self.given(node, "input", "repeats", "dim").get("dim") == 0:
            self.repeat_images(node)
        elif base is torch.addcmul:
            self.addcmul(node)
        elif base is torch.zeros_like:
            self.zeros(node)
        elif base in PICKS:
            getattr(self, PICKS[base])(node)
        else:
            self.refuse(node, REASONS.get(base, UNKNOWN))

    def larger(self, node: fx.Node, base: Any) -> None:
        """The larger of two tensors, or the largest along a dimension, which comes with its places."""
        if self.is_tensor(node) and len(node.all_input_nodes) == 2:
            self.zip(node, BINARY[EXTREMES[base]])
        elif self.is_tensor(node) or self.whole:
            self.refuse(node, MIXES)
        else:
            self.extremes[node] = base
