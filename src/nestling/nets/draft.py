"""Making a plan: `enter` takes any operation, which says itself when its channels are born and how large they are.

In: an input shape and the calls of an architecture (resnet.py, sparse.py, ...). Out: a checked Plan. Births flow by one
rule: what is computed channel by channel is born with the latest of what it reads (and `settle` moves it later still, to
the first answer that needs it).
It makes no tensors and knows no particular network.
"""

from collections.abc import Sequence
from dataclasses import replace

from nestling.errors import NestlingError
from nestling.nets.births import Births
from nestling.nets.ops import BatchNorm, Conv, Input, Linear, Map, Mean, Operation, Select, Zip
from nestling.nets.plan import Node, Plan
from nestling.nets.settle import settle


class Draft:
    """A plan while it is being made. Methods take and return node names."""

    def __init__(self, name: str, shape: tuple[int, ...], axis: int = 1) -> None:
        """`shape` is that of one image, without the batch; `axis` is where its channels stand, counted with the batch."""
        self.name = name
        self.nodes: dict[str, Node] = {}
        self.put(Node("input", Input(axis=axis), (), (1,) * shape[axis - 1], (*shape[: axis - 1], *shape[axis:])))

    def put(self, node: Node) -> str:
        if node.name in self.nodes:
            raise NestlingError(f"{self.name}: two layers are called {node.name!r}; names must differ.")
        if any(side < 1 for side in node.size):
            raise NestlingError(
                f"{self.name}: {node.name} would leave an image of {node.size}; the input is too small for this network."
            )
        self.nodes[node.name] = node
        return node.name

    def enter(self, name: str, op: Operation, reads: Sequence[str], births: Births | None = None) -> str:
        """A node of any operation, which says births (unless they are chosen here) and size itself."""
        read = [self.nodes[x] for x in reads]
        plain = Node(name, op, tuple(reads), births or (0,) * op.channels(read), op.size(read))
        return self.put(plain if births else replace(plain, births=op.births(plain, read)))

    def births(self, x: str) -> Births:
        return self.nodes[x].births

    def conv(self, name: str, x: str, births: Births, kernel: int = 3, stride: int = 1, padding: int = -1) -> str:
        """A convolution without bias; "same" padding unless told otherwise."""
        pad = kernel // 2 if padding < 0 else padding
        return self.enter(name, Conv((kernel, kernel), (stride, stride), (pad, pad)), [x], births)

    def norm(self, name: str, x: str) -> str:
        """Batch norm: per channel, so exact under nesting."""
        return self.enter(name, BatchNorm(), [x])

    def map(self, name: str, x: str, function: str) -> str:
        """A function of each channel by itself."""
        return self.enter(name, Map(function), [x])

    def relu(self, x: str) -> str:
        return self.map(f"{x}.relu", x, "relu")

    def halve(self, x: str, up: bool = False) -> str:
        """Average pool of 2x2. Of an odd side the last pixel is dropped or, if `up`, averaged by itself."""
        odd = any(side % 2 for side in self.nodes[x].size)
        return self.map(f"{x}.half", x, "pool2up" if up and odd else "pool2")

    def add(self, name: str, xs: list[str]) -> str:
        """Sum of equal shapes; the sum of one thing is that thing."""
        return xs[0] if len(xs) == 1 else self.enter(name, Zip("add"), xs)

    def select(self, name: str, x: str, source: tuple[int, ...], births: Births) -> str:
        """Copy channels: `source` names an input channel for each output channel, -1 for a channel of zeros."""
        return self.enter(name, Select(source), [x], births)

    def widen(self, name: str, x: str, births: Births, stripes: tuple[int, ...], wanted: tuple[int, ...]) -> str:
        """Zero-pad channels inside each stripe, so that stripes stay aligned between groups of different width.

        `stripes` says which stripe each channel of x belongs to, `wanted` which stripe each output channel belongs to.
        """
        if len(stripes) == len(wanted):
            return x
        source = []
        for stripe in sorted(set(wanted)):
            have = [c for c, s in enumerate(stripes) if s == stripe]
            room = sum(s == stripe for s in wanted)
            source += have + [-1] * (room - len(have))
        return self.select(name, x, tuple(source), births)

    def head(self, stage: int, x: str, classes: int) -> str:
        """Global average of a normalised activation, then a linear layer on the channels born by `stage`."""
        pooled = f"{x}.mean" if self.nodes[x].size else x
        if pooled not in self.nodes:
            self.enter(pooled, Mean(), [x])
        births = self.births(pooled)
        live = tuple(c for c, b in enumerate(births) if b <= stage)
        if len(live) < len(births):
            pooled = self.select(f"head{stage}.take", pooled, live, tuple(births[c] for c in live))
        return self.enter(f"head{stage}.linear", Linear(bias=True), [pooled], (stage,) * classes)

    def finish(self, heads: list[str], sizes: tuple[str, ...]) -> Plan:
        return settle(Plan(self.name, tuple(self.nodes.values()), tuple(heads), sizes))
