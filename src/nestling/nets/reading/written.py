"""Norms over channels that a module writes out in its own operations: x * rsqrt(mean(x ** 2) + eps), or with var(x).

In: a traced mean or variance. Out: the product that ends the norm, and what the norm is; None where the operations around it
are others.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from nestling.nets.reading.vocabulary import METHODS

SQUARES = (torch.pow, operator.pow, torch.square)
SUMS = (operator.add, torch.add)
PRODUCTS = (operator.mul, torch.mul)
MOST = 1e-2  # what is added below a root; more than that is no norm


@dataclass(frozen=True)
class WrittenNorm:
    source: fx.Node
    eps: float
    variance: bool  # by the variance (of n - 1), without the mean; else by the mean square
    inside: tuple[fx.Node, ...]  # which nobody else reads
    end: fx.Node


def written_norm(over: fx.Node, values: Mapping[fx.Node, Any]) -> WrittenNorm | None:
    """The norm that a mean or variance over one dimension, which is kept, belongs to."""
    given = {**dict(zip(("input", "dim", "keepdim"), over.args, strict=False)), **over.kwargs}
    read, variance = given.get("input"), base(over) is torch.var
    plain = {*given} == {"input", "dim", "keepdim"} and given["keepdim"] is True
    if not plain or not isinstance(read, fx.Node) or not (variance or (base(over) is torch.mean and is_square(read))):
        return None
    source = read if variance else read.all_input_nodes[0]
    above = only_reader(over)
    root = only_reader(above) if above is not None and base(above) in SUMS and not above.kwargs else None
    end = only_reader(root) if root is not None and base(root) is torch.rsqrt else None
    numbers = [a for a in (above.args if above is not None else ()) if isinstance(a, float)]
    if end is None or root is None or above is None or len(numbers) != 1 or not 0 < numbers[0] <= MOST:
        return None
    if base(end) not in PRODUCTS or {*end.args} != {source, root} or end.kwargs:
        return None
    same = values[end].shape == values[source].shape
    return WrittenNorm(source, numbers[0], variance, (over, above, root), end) if same else None


def is_square(node: fx.Node) -> bool:
    function = base(node)
    if function in PRODUCTS:
        return len(node.args) == 2 and node.args[0] is node.args[1]
    return function is torch.square or (function in SQUARES and node.args[1:] in ((2,), (2.0,)))


def base(node: fx.Node) -> Any:
    """The function that an operation is, or that a method stands for."""
    return METHODS.get(node.target, node.target) if node.op == "call_method" else node.target


def only_reader(node: fx.Node) -> fx.Node | None:
    readers = list(node.users)
    return readers[0] if len(readers) == 1 else None
