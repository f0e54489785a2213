"""Drawing a plan: one method per kind of layer, each working out the births and sizes of what it draws.

In: an input shape and the calls of an architecture (resnet.py, sparse.py, ...). Out: a checked Plan. Births flow by one
rule: what is computed channel by channel is born with the latest of what it reads (and `settle` moves it later still, to
the first answer that needs it).
It makes no tensors and knows no particular network.
"""

from nestling.errors import NestlingError
from nestling.nets.births import Births
from nestling.nets.plan import Node, Plan
from nestling.nets.settle import settle


class Draft:
    """A plan while it is being drawn. Methods take and return node names."""

    def __init__(self, name: str, shape: tuple[int, int, int]) -> None:
        self.name = name
        self.nodes: dict[str, Node] = {}
        self.put(Node("input", "input", (), (1,) * shape[0], tuple(shape[1:])))

    def put(self, node: Node) -> str:
        if node.name in self.nodes:
            raise NestlingError(f"{self.name}: two layers are called {node.name!r}; names must differ.")
        if any(side < 1 for side in node.size):
            raise NestlingError(
                f"{self.name}: {node.name} would leave an image of {node.size}; the input is too small for this network."
            )
        self.nodes[node.name] = node
        return node.name

    def births(self, x: str) -> Births:
        return self.nodes[x].births

    def conv(self, name: str, x: str, births: Births, kernel: int = 3, stride: int = 1, padding: int = -1) -> str:
        """A convolution without bias; "same" padding unless told otherwise."""
        pad = kernel // 2 if padding < 0 else padding
        size = tuple((side + 2 * pad - kernel) // stride + 1 for side in self.nodes[x].size)
        pair = lambda v: (v, v)  # noqa: E731
        return self.put(Node(name, "conv", (x,), births, size, "", pair(kernel), pair(stride), pair(pad)))

    def norm(self, name: str, x: str) -> str:
        """Batch norm: per channel, so exact under nesting."""
        return self.put(Node(name, "norm", (x,), self.births(x), self.nodes[x].size, "batch"))

    def map(self, name: str, x: str, function: str, size: tuple[int, ...] | None = None) -> str:
        """A function of each channel by itself."""
        node = self.nodes[x]
        return self.put(Node(name, "map", (x,), node.births, node.size if size is None else size, function))

    def relu(self, x: str) -> str:
        return self.map(f"{x}.relu", x, "relu")

    def halve(self, x: str, up: bool = False) -> str:
        """Average pool of 2x2. Of an odd side the last pixel is dropped or, if `up`, averaged by itself."""
        size = self.nodes[x].size
        if up and any(side % 2 for side in size):
            return self.map(f"{x}.half", x, "pool2up", tuple((side + 1) // 2 for side in size))
        return self.map(f"{x}.half", x, "pool2", tuple(side // 2 for side in size))

    def add(self, name: str, xs: list[str]) -> str:
        """Sum of equal shapes; the sum of one thing is that thing."""
        if len(xs) == 1:
            return xs[0]
        births = tuple(max(column) for column in zip(*(self.births(x) for x in xs), strict=True))
        return self.put(Node(name, "zip", tuple(xs), births, self.nodes[xs[0]].size, "add"))

    def select(self, name: str, x: str, source: tuple[int, ...], births: Births) -> str:
        """Copy channels: `source` names an input channel for each output channel, -1 for a channel of zeros."""
        return self.put(Node(name, "select", (x,), births, self.nodes[x].size, source=source))

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
        pooled = f"{x}.mean"
        if pooled not in self.nodes:
            self.map(pooled, x, "mean", ())
        births = self.births(pooled)
        live = tuple(c for c, b in enumerate(births) if b <= stage)
        if len(live) < len(births):
            pooled = self.select(f"head{stage}.take", pooled, live, tuple(births[c] for c in live))
        return self.put(Node(f"head{stage}.linear", "linear", (pooled,), (stage,) * classes, (), bias=True))

    def finish(self, heads: list[str], sizes: tuple[str, ...]) -> Plan:
        return settle(Plan(self.name, tuple(self.nodes.values()), tuple(heads), sizes))
