"""What somebody's module calls by another name, under ours: relu, halving pools, the mean over all pixels.

In: a sketch. Out: the same sketch, in which such modules are operations of the plan. Only these are known to the kernels of
kernels/, and only without modules of somebody else's can every stage train in a part of the same memory (nets/within.py).
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nestling.nets.ops import Flatten, Map, Mean, Module, Operation
from nestling.nets.ops.calls import Call
from nestling.nets.ops.forms import TWINS
from nestling.nets.plan import Node
from nestling.nets.reading.sketch import Sketch


def ours(sketch: Sketch) -> Sketch:
    nodes, layers = dict(sketch.nodes), dict(sketch.layers)
    readers = Counter(read for node in nodes.values() for read in node.reads)
    for name, node in sketch.nodes.items():
        if name in layers and isinstance(node.op, Module):
            op = operation(spelled_out(layers[name]), node, [nodes[read] for read in node.reads])
            if op is not None:
                nodes[name] = replace(node, op=op)
                del layers[name]
        elif is_pooled(node, nodes, layers) and readers[node.reads[0]] == 1:
            pool = nodes.pop(node.reads[0])
            del layers[pool.name]
            nodes[name] = replace(node, op=Mean(), reads=pool.reads)
    return replace(sketch, nodes=nodes, layers=layers)


def operation(layer: nn.Module, node: Node, reads: list[Node]) -> Operation | None:
    """The plan's own operation for a module, if there is one. Subclasses may do anything, so only the very types count."""
    if type(layer) is nn.ReLU:
        return Map("relu", axis=node.op.axis)
    if node.op.axis != 1 or len(reads) != 1 or len(reads[0].size) != 2:
        return None
    if type(layer) is nn.AvgPool2d and layer.divisor_override is None:
        halves = (pair(layer.kernel_size), pair(layer.stride), pair(layer.padding)) == ((2, 2), (2, 2), (0, 0))
        return Map("pool2up" if layer.ceil_mode else "pool2") if halves else None
    if type(layer) is nn.MaxPool2d and not layer.ceil_mode and not layer.return_indices:
        sizes = [pair(each) for each in (layer.kernel_size, layer.stride, layer.padding, layer.dilation)]
        return Map("maxpool3") if sizes == [(3, 3), (2, 2), (1, 1), (1, 1)] else None
    return Mean() if isinstance(layer, Call) and is_mean(layer) else None


def is_mean(made: Call) -> bool:
    """Whether a call is the mean over both dimensions of an image's pixels, which then are gone."""
    found = dict(zip(("dim", "keepdim"), made.arguments[1:], strict=False)) | made.options
    dims = found.pop("dim", None)
    if made.function not in (torch.mean, Tensor.mean) or made.place != 0 or len(made.arguments) > 3:
        return False
    whole = isinstance(dims, tuple | list) and sorted(dim % 4 for dim in dims) == [2, 3]
    return whole and not found.pop("keepdim", False) and not found


def is_pooled(node: Node, nodes: dict[str, Node], layers: dict[str, nn.Module]) -> bool:
    """Whether a node makes vectors of images that were averaged to one pixel before."""
    if not isinstance(node.op, Flatten) or node.op.axis != 1 or node.reads[0] not in layers:
        return False
    layer = spelled_out(layers[node.reads[0]])
    return (
        type(layer) is nn.AdaptiveAvgPool2d and pair(layer.output_size) == (1, 1) and nodes[node.reads[0]].op.axis == 1
    )


def spelled_out(layer: nn.Module) -> nn.Module:
    """The module of which a call of a function is the twin, if there is one."""
    if not isinstance(layer, Call) or layer.place != 0 or layer.function not in TWINS:
        return layer
    try:
        return TWINS[layer.function](*layer.arguments[1:], **layer.options)
    except TypeError:  # an option of the function that the module does not have
        return layer


def pair(size: Any) -> tuple[Any, ...]:
    return tuple(size) if isinstance(size, tuple | list) else (size, size)
