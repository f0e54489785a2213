"""The sketch of a network: what is known of it while it is read, in the plan's words and still without births.

In: traced operations, one by one. Out: names, sizes and arguments of what they read, nodes entered under names of their
own, and refusals that say which module is meant. Which operation becomes which node is said in pen.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor, fx, nn

from nestling.errors import NestlingError
from nestling.nets.operations import spelled
from nestling.nets.plan import Node

BATCH = 2  # of the run that finds the sizes


@dataclass
class Sketch:
    """A network's nodes without births (all 0), the layer of each that has one, and what may only follow the classifier."""

    nodes: dict[str, Node] = field(default_factory=dict)
    layers: dict[str, nn.Module] = field(default_factory=dict)
    output: str = ""
    mixing: dict[str, str] = field(default_factory=dict)  # nodes that mix channels, and how to say so


class Page:
    """A sketch while it is being made, beside the traced graph it is made from."""

    def __init__(self, module: nn.Module, graph: fx.GraphModule, net: str) -> None:
        self.module, self.graph, self.net = module, graph, net
        self.interpreter = fx.Interpreter(graph, garbage_collect_values=False)
        self.paths = {path for path, _ in module.named_modules()}
        self.sketch = Sketch()
        self.names: dict[fx.Node, str | tuple[str, ...]] = {}  # the plan's name of each traced tensor
        self.weights_of: dict[int, str] = {}  # parameter -> the node that used it first

    # --- words ----------------------------------------------------------------------------------------------------

    def place(self, node: fx.Node) -> str:
        if node.op == "call_module":
            return f"{node.target} ({type(self.module.get_submodule(str(node.target))).__name__})"
        owner = owner_of(node)
        inside = f" in {owner} ({type(self.module.get_submodule(owner)).__name__})" if owner else ""
        return f"the operation {spelled(node.target)}{inside}"

    def refuse(self, node: fx.Node, why: str) -> NoReturn:
        raise NestlingError(f"{self.net}: cannot nest {self.place(node)}: {why}.")

    def name(self, node: fx.Node) -> str:
        """A module's own path, or the path of the module around an operation with the operation's name."""
        if node.op == "call_module" and str(node.target) not in self.sketch.nodes:
            return str(node.target)
        label = str(node.target).rpartition(".")[2] if node.op == "call_module" else spelled(node.target).lstrip(".")
        owner = str(node.target).rpartition(".")[0] if node.op == "call_module" else owner_of(node)
        label = label.rpartition(".")[2].strip("_") or "op"
        stem = f"{owner}.{label}" if owner else label
        name, count = stem, 1
        while name in self.sketch.nodes or name in self.paths:
            count += 1
            name = f"{stem}_{count}"
        return name

    # --- reading and entering ------------------------------------------------------------------------------------

    def put(self, node: Node) -> str:
        self.sketch.nodes[node.name] = node
        return node.name

    def add(self, node: fx.Node, made: Node, in_place: bool = False) -> None:
        """Enter a node; one that overwrites its input is what later readers of that input see."""
        if in_place:
            old = self.read_of(node)
            self.names.update({other: made.name for other, name in self.names.items() if name == old})
        self.names[node] = self.put(made)

    def read_of(self, node: fx.Node, position: int = 0) -> str:
        """The plan's name of the tensor an operation reads first."""
        traced = [a for a in node.all_input_nodes if self.is_tensor(a)]
        name = self.names.get(traced[position]) if position < len(traced) else None
        if len(traced) > 1 and position == 0 and any(a not in self.names for a in traced):
            strange = next(a for a in traced if a not in self.names)
            self.refuse(
                node, f"it reads {strange.target}, which is neither computed from the image nor part of a layer"
            )
        if not isinstance(name, str):
            self.refuse(node, "it does not read a tensor that was computed from the image")
        return name

    def read_name(self, node: fx.Node) -> str:
        name = self.names[node]
        assert isinstance(name, str)
        return name

    def is_tensor(self, node: fx.Node) -> bool:
        return isinstance(self.interpreter.env.get(node), Tensor)

    def given(self, node: fx.Node, *words: str) -> dict[str, Any]:
        """An operation's arguments by name; sizes that were computed on the way are numbers here, tensors stay nodes."""
        known: Callable[[fx.Node], Any] = lambda a: a if self.is_tensor(a) else self.interpreter.env[a]  # noqa: E731
        arguments = fx.map_arg(node.args, known)
        return {**dict(zip(words, arguments, strict=False)), **fx.map_arg(dict(node.kwargs), known)}

    def size(self, node: fx.Node) -> tuple[int, ...]:
        return tuple(self.interpreter.env[node].shape[2:])

    def channels(self, name: str) -> int:
        return self.sketch.nodes[name].channels

    def same(self, node: fx.Node) -> str:
        """What a channel-by-channel operation reads, after making sure that it keeps batch and channels."""
        read = self.read_of(node)
        shape = tuple(self.interpreter.env[node].shape)
        if shape[:2] != (BATCH, self.channels(read)):
            self.refuse(node, f"it turns {self.channels(read)} channels into a tensor of shape (N, {shape[1:]})")
        return read


def owner_of(node: fx.Node) -> str:
    """The path of the module whose forward does an operation."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else ""
