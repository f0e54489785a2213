"""torch.fx's tracer that runs every operation as it records it, on images without data; and what traced things are called.

In: a module's operations as they come. Out: a graph, the tensor that each operation makes, and what it overwrites. Whoever asks
a tensor for its shape is told; whoever asks for its numbers is refused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.autograd import Variable

from nestling.errors import NestlingError
from nestling.nets.ops.calls import DROP_PATHS, spelled

NEW = ("new_zeros", "new_ones", "new_full")  # methods that take a type and a place from a tensor, and no numbers
MADE_FULL = (
    "it puts what is computed from the image into a tensor made without it (x = zeros(...), x[...] = y), whose readers cannot be "
    "watched; join the parts with torch.stack or torch.cat"
)


class Seen(fx.Proxy):
    """A tensor while it is watched. Whoever asks for its shape is told; whoever asks for its numbers is refused."""

    tracer: "Watcher"

    @property
    def value(self) -> Any:
        return self.tracer.values[self.node]

    def __getattr__(self, k: str) -> Any:
        if k in NEW:
            return getattr(self.value, k)  # made of nothing but a shape: a constant
        if callable(getattr(self.value, k)):
            return super().__getattr__(k)  # recorded when it is called
        return self.tracer.create_proxy("call_function", getattr, (self, k), {})

    def __len__(self) -> int:
        return len(self.value)

    def __setitem__(self, index: Any, value: Any) -> None:
        """x[index] = value: from here on it is the tensor with that in its place."""
        made = self.tracer.create_proxy("call_function", put_at, (self, index, value), {})
        self.tracer.overwritten(self.node, made.node)
        self.node = made.node


class Watcher(fx.Tracer):
    """torch.fx's tracer, running every operation as it records it."""

    proxy_buffer_attributes = True

    def __init__(self, net: str, image: Tensor) -> None:
        super().__init__()
        self.net, self.image, self.running = net, image, False
        self.values: dict[fx.Node, Any] = {}
        self.writes: dict[fx.Node, list[fx.Node]] = {}  # what an operation overwrites of what it reads
        self.made: list[str] = []  # tensors of numbers that were made of nothing, in their order
        self.stale: set[fx.Node] = set()  # what shares memory with a tensor of which a part was put

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m).__name__ in DROP_PATHS or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return forward(*args, **kwargs) if self.running else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val if self.running else super().getattr(attr, attr_val, parameter_proxy_cache)

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        with plain_variables():
            return super().trace(root, concrete_args)

    def proxy(self, node: fx.Node) -> Seen:
        return Seen(node, self)

    def create_proxy(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any = None,
        proxy_factory_fn: Any = None,
    ) -> Any:
        """As torch.fx's; what is no tensor (a size, a device) is given as it is and is no part of the record. What torch.fx was
        told not to look into (torch.fx.wrap) is looked into."""
        if kind == "call_function" and is_somebodys(target):
            return target(*args, **kwargs)
        proxy = super().create_proxy(kind, target, args, kwargs, name, type_expr, proxy_factory_fn)
        value = self.run(proxy.node)
        if has_tensors(value):
            return proxy
        if self.writes[proxy.node]:
            where = place(self.root.get_submodule("module"), proxy.node)
            why = MADE_FULL if target == "__setitem__" else "it overwrites a tensor and gives none"
            raise NestlingError(f"{self.net}: cannot nest {where}: {why}.")
        self.graph.erase_node(proxy.node)
        return value

    def create_arg(self, a: Any) -> Any:
        made = super().create_arg(a)
        if isinstance(made, fx.Node) and made not in self.values:  # a parameter or buffer met in passing
            self.run(made)
        name = str(made.target) if isinstance(made, fx.Node) else ""
        if name.startswith("_tensor_constant") and name not in self.made:
            self.made.append(name)
        return made

    def overwritten(self, old: fx.Node, new: fx.Node) -> None:
        """Views of what a part was put into would show it too: whoever reads them from now on is refused."""
        memory = storages(self.values[old])
        views = {node for node, value in self.values.items() if storages(value) & memory and node is not new}
        if any(node.op in ("get_attr", "placeholder") for node in views):
            where = place(self.root.get_submodule("module"), new)
            raise NestlingError(
                f"{self.net}: cannot nest {where}: it overwrites a part (x[...] = y) of the image or of a tensor of its own, "
                "which would be another one in the next run."
            )
        self.stale |= views

    def run(self, node: fx.Node) -> Any:
        read = node.all_input_nodes
        if any(n in self.stale for n in read):
            where = place(self.root.get_submodule("module"), node)
            raise NestlingError(
                f"{self.net}: cannot nest {where}: it reads a tensor of which a part was overwritten (x[...] = y) by another "
                "name or through a view; use a form that does not overwrite."
            )
        before = [version(self.values[n]) for n in read]
        self.running = True
        try:
            with torch.no_grad():
                value = self.values[node] = self.computed(node)
        except NestlingError:
            raise
        except Exception as error:  # the module's own code may raise anything
            where = place(self.root.get_submodule("module"), node)
            raise NestlingError(f"{self.net}: cannot nest {where}: {reason(error, self.image)}.") from None
        finally:
            self.running = False
        self.writes[node] = [n for n, old in zip(read, before, strict=True) if version(self.values[n]) != old]
        return value

    def computed(self, node: fx.Node) -> Any:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self.values.__getitem__)
        if node.op == "placeholder":
            return self.image
        if node.op == "get_attr":
            return attribute(self.root, str(node.target))
        if node.target is F.batch_norm:
            return torch.empty_like(self.values[node.all_input_nodes[0]])
        if node.op == "call_function":
            return node.target(*args, **kwargs)  # type: ignore[operator]
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        layer = self.root.get_submodule(str(node.target))
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | nn.SyncBatchNorm):
            return torch.empty_like(
                self.values[node.all_input_nodes[0]]
            )  # slow without data, and SyncBatchNorm does not run alone
        return layer(*args, **kwargs)

    def to_bool(self, obj: fx.Proxy) -> bool:
        where = place(self.root.get_submodule("module"), obj.node)
        raise NestlingError(
            f"{self.net}: cannot nest it: its control flow depends on the numbers in a tensor, on what {where} gives. A nested "
            "network runs the same operations for every image; only shapes may decide."
        )

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        assert isinstance(obj, Seen)
        return (obj[i] for i in range(len(obj)))  # type: ignore[index]


@contextmanager
def plain_variables() -> Iterator[None]:
    """Variable(x) of old code, which torch keeps as another word for x, is x while x is watched."""
    kept = Variable.__new__
    Variable.__new__ = lambda cls, data, *rest, **more: (  # type: ignore[method-assign, assignment]
        data if isinstance(data, Seen) else kept(cls, data, *rest, **more)
    )
    try:
        yield
    finally:
        del Variable.__new__  # torch's own is that of its parent


def put_at(x: Tensor, index: Any, value: Tensor | float) -> Tensor:
    """A tensor with another value in some of its places."""
    made = x.clone()
    made[index] = value
    return made


def reason(error: Exception, image: Tensor) -> str:
    """Why a module could not be run on images without data."""
    words = str(error).rstrip(".")
    if "meta tensor" in words:
        return "it takes numbers out of a tensor while running (.item(), float(), numpy), which may differ from image to image"
    if Seen.__name__ in words:  # torch's own checks for tensors name the type that they met instead
        return (
            "it hands tensors to code that cannot be watched, such as an autograd.Function of its own or a kernel in "
            f"C++ ({type(error).__name__}). Write that part in operations of torch"
        )
    if "meta" in words and "device" in words:
        return (
            f"it uses a tensor of its own that does not go with it to another device ({type(error).__name__}: {words}): make it "
            "a buffer, by register_buffer, or where the image is (device=x.device)"
        )
    return f"it does not run on images of shape {tuple(image.shape[1:])} ({type(error).__name__}: {words})"


def place(module: nn.Module, node: fx.Node) -> str:
    """What an operation is called in a refusal: a module by its path, a function by the module around it."""
    path = str(node.target).removeprefix("module.") if node.op == "call_module" else path_of(node)
    inside = f"{path} ({type(module.get_submodule(path)).__name__})" if path else ""
    if node.op == "call_module":
        return inside
    return f"the operation {spelled(node.target)}{' in ' if inside else ''}{inside}"


def is_somebodys(function: Any) -> bool:
    """Whether a function is written in Python, and not by torch."""
    theirs = isinstance(function, FunctionType) and function.__module__.partition(".")[0] != "torch"
    return theirs and function is not put_at


def path_of(node: fx.Node) -> str:
    """The path of the module whose forward does an operation."""
    if "path" in node.meta:
        return str(node.meta["path"])
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]).partition(".")[2] if stack else ""


def attribute(module: nn.Module, path: str) -> Any:
    holder, _, last = path.rpartition(".")
    return getattr(module.get_submodule(holder), last)


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in tensors_of(v)] if isinstance(value, list | tuple) else []


def has_tensors(value: Any) -> bool:
    return bool(tensors_of(value))


def shapes(value: Any) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors_of(value)]


def version(value: Any) -> list[int]:
    return [tensor._version for tensor in tensors_of(value)]


def storages(value: Any) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors_of(value)}
