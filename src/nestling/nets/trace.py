"""Reading an ordinary torch module: its layers and operations as nodes of a plan, still without births.

In: a module and the shape of one image. Out: a `Sketch`: nodes in order, the layers they came from, and the name of the
output. torch.fx traces the module and runs it on tensors without data for the sizes. Each operation is found to be of a
kind, which pen.py draws; what is not known to work channel by channel is refused, and the refusal names the module and the
reason. Nothing here knows about stages.
"""

import copy
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from nestling.errors import NestlingError
from nestling.nets.operations import (
    BINARY,
    CHANNELWISE,
    DROPOUTS,
    IN_PLACE,
    JOINS,
    METHODS,
    MIXING,
    NORMS,
    POINTWISE,
    REASONS,
    REDUCTIONS,
    RESHAPES,
    SPLITS,
)
from nestling.nets.ops import Input
from nestling.nets.pen import Pen
from nestling.nets.plan import Node
from nestling.nets.sketch import BATCH, Sketch, owner_of

Shape = tuple[int, int, int]


def read(module: nn.Module, shape: Shape, net: str) -> Sketch:
    """The sketch of a module for images of `shape`. The module itself is not touched."""
    graph = traced(module, net)
    reader = Reader(module, graph, net)
    kinds = [p.dtype for p in module.parameters() if p.is_floating_point()]
    image = torch.empty(BATCH, *shape, device="meta", dtype=kinds[0] if kinds else torch.float32)
    for node in graph.graph.nodes:
        reader.visit(node, image)
    return reader.sketch


def traced(module: nn.Module, net: str) -> fx.GraphModule:
    """The module's graph over tensors without data. It must be the same graph in training and in evaluation."""
    tensors = [*module.parameters(), *module.buffers()]
    memo: dict[int, Any] = {
        id(t): nn.Parameter(t.to("meta"), t.requires_grad) if isinstance(t, nn.Parameter) else t.to("meta")
        for t in tensors
    }
    hollow = copy.deepcopy(module, memo)
    graphs = []
    for training in (False, True):
        try:
            graph = fx.symbolic_trace(hollow.train(training))
        except Exception as error:  # tracing runs the module's own code, which may raise anything
            mode = "training" if training else "evaluation"
            raise NestlingError(
                f"{net}: cannot nest it: torch.fx cannot trace it in {mode} mode ({type(error).__name__}: {error}). "
                "Control flow that depends on tensors has to go."
            ) from None
        graphs.append(graph)
    steps = [[(n.op, str(n.target), owner_of(n)) for n in graph.graph.nodes] for graph in graphs]
    if steps[0] != steps[1]:
        *_, where = next(ours for theirs, ours in zip(*steps, strict=False) if theirs != ours)
        raise NestlingError(
            f"{net}: cannot nest {where} ({type(module.get_submodule(where)).__name__}): it does other operations in training "
            "than in evaluation (random paths or scales). Only dropout and batch norm may differ between the two."
        )
    hollow.eval()
    return graphs[1]


class Reader(Pen):
    """Runs one traced operation after another for its size, and says of what kind it is."""

    def visit(self, node: fx.Node, image: Tensor) -> None:
        """Run one operation for its size, and draw it if it depends on the image."""
        env = self.interpreter.env
        if node.op == "placeholder":
            if not self.names:
                env[node] = image
                self.names[node] = self.put(Node("input", Input(), (), (0,) * image.shape[1], tuple(image.shape[2:])))
            elif node.args:
                env[node] = node.args[0]
            else:
                self.refuse(node, "a second input; a nested network takes one image")
            return
        if node.op == "output":
            self.finish(node)
            return
        try:
            env[node] = self.interpreter.run_node(node)
        except Exception as error:
            shape = (self.sketch.nodes["input"].channels, *self.sketch.nodes["input"].size)
            self.refuse(node, f"it does not run on images of shape {shape}: {error}")
        if any(argument in self.names for argument in node.all_input_nodes):
            self.draw(node)

    def finish(self, node: fx.Node) -> None:
        answer = node.args[0]
        name = self.names.get(answer) if isinstance(answer, fx.Node) else None
        if not isinstance(name, str):
            raise NestlingError(f"{self.net}: cannot nest it: it must return one tensor, the logits; found {answer}.")
        self.sketch.output = name

    def draw(self, node: fx.Node) -> None:
        value = self.interpreter.env[node]
        if node.op == "call_module":
            self.draw_module(node, self.graph.get_submodule(str(node.target)))
        elif not has_tensors(value):
            return  # a size, a device: known while tracing, no part of the network
        elif node.target is operator.getitem and isinstance(self.names.get(node.args[0]), tuple):  # type: ignore[arg-type]
            self.names[node] = self.names[node.args[0]][node.args[1]]  # type: ignore[index]
        else:
            target = METHODS.get(node.target, node.target) if node.op == "call_method" else node.target
            self.draw_operation(node, target)

    def draw_module(self, node: fx.Node, layer: nn.Module) -> None:
        kind = type(layer)
        if kind is nn.Conv2d:
            self.conv(node, self.read_of(node), self.module.get_submodule(str(node.target)))
        elif kind is nn.Linear:
            self.linear(node, self.read_of(node), self.module.get_submodule(str(node.target)))
        elif kind in NORMS:
            self.norm(node, layer)
        elif kind in (nn.Flatten, nn.Unflatten):
            self.reshape(node)
        elif kind is nn.Identity:
            self.names[node] = self.read_of(node)
        elif kind in MIXING:
            self.map(node, copy.deepcopy(layer))
            self.sketch.mixing[self.read_name(node)] = f"{self.place(node)}: {MIXING[kind]}"
        elif kind in CHANNELWISE:
            if getattr(layer, "return_indices", False):
                self.refuse(node, "it returns indices too")
            fresh: Any = copy.deepcopy(layer)
            in_place = bool(getattr(fresh, "inplace", False))
            if in_place:
                fresh.inplace = False
            self.map(node, fresh, in_place)
        else:
            self.refuse(node, REASONS.get(kind, "it is not known to work channel by channel"))

    def draw_operation(self, node: fx.Node, target: Any) -> None:
        """`target` is the function, or the function that a method stands for."""
        base, in_place = IN_PLACE.get(target, target), target in IN_PLACE
        if base in BINARY and len([a for a in node.args[:2] if isinstance(a, fx.Node) and self.is_tensor(a)]) == 2:
            self.zip(node, BINARY[base], in_place)
        elif base in BINARY or base in POINTWISE:
            self.pointwise(node, base, in_place)
        elif base in REDUCTIONS:
            self.reduction(node, base)
        elif base in RESHAPES:
            self.reshape(node)
        elif base in JOINS:
            self.join(node)
        elif base in SPLITS:
            self.split(node)
        elif base in DROPOUTS:
            self.dropout(node, DROPOUTS[base])
        elif base in MIXING:
            self.pointwise(node, base, False)
            self.sketch.mixing[self.read_name(node)] = f"{self.place(node)}: {MIXING[base]}"
        elif base in (F.conv2d, torch.conv2d, F.linear):
            self.functional(node, base)
        elif base is F.pad:
            self.pad(node)
        elif base is torch.zeros_like:
            self.zeros(node)
        elif base is operator.getitem:
            self.getitem(node)
        else:
            self.refuse(node, REASONS.get(base, "it is not known to work channel by channel"))


def has_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, list | tuple) and any(isinstance(v, Tensor) for v in value))
