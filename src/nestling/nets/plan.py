"""The plan of a nested network: a graph of layers in which every channel has a birth. No tensors here.

In: nodes, drawn by the functions of draft.py. Out, all derived from births in this one place: connection masks,
parameter and MAC counts of each stage, which task owns which entry, and the program of each stage (which rows it
computes, what it fetches from earlier stages, what state it passes on). It does not know how layers are computed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from nestling.errors import NestlingError
from nestling.nets.births import Births

WEIGHTED = ("conv", "linear")  # ops whose outputs read many input channels, through a weight with a mask
PER_CHANNEL = {"batch": 2, "group": 2, "prelu": 1}  # parameters per channel of each function of a norm node


@dataclass(frozen=True)
class Node:
    """One layer's output: who it reads and when each of its channels is born."""

    name: str
    op: str  # input | conv | linear | norm (whatever has parameters per channel) | map | zip | select | cat | flatten
    reads: tuple[str, ...]
    births: Births
    size: tuple[int, ...]  # spatial size of the output, () for vectors
    function: str = ""  # of norm (batch, group, prelu), map (relu, pool2, ...) and zip (add, mul, ...)
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    bias: bool = False
    source: tuple[int, ...] = ()  # of select: the input channel copied to each output channel, -1 for zeros
    eps: float = 1e-5  # of norm
    momentum: float = 0.1  # of batch norm
    affine: bool = True  # of norm: whether it has parameters
    shares: str = ""  # of conv and linear: the node whose weights it uses, where one layer serves several places

    @property
    def channels(self) -> int:
        return len(self.births)


@dataclass(frozen=True)
class Run:
    """Consecutive channels of one stored piece: positions start..stop of the channels of `node` born at `birth`."""

    node: str
    birth: int
    start: int
    stop: int
    whole: bool  # the run is the entire piece


Key = tuple[str, int]  # a piece of activations: the channels of a node that are born at one stage


@dataclass(frozen=True)
class Step:
    """One node's work in one stage: compute `rows` from the fetched channels of each read."""

    node: Node
    rows: tuple[int, ...]  # output channels born at this stage
    columns: tuple[int, ...]  # of weighted ops: the input channels read, ascending
    fetches: tuple[tuple[Run, ...], ...]  # per read, in ascending channel order


@dataclass(frozen=True)
class Program:
    """Everything stage s does: its steps, the state it takes and the state it leaves."""

    stage: int
    steps: tuple[Step, ...]
    takes: tuple[Key, ...]
    leaves: tuple[Key, ...]
    head: str


@dataclass(frozen=True)
class Plan:
    """A nested network without tensors. `heads[s-1]` is the node that answers for stage s."""

    name: str
    nodes: tuple[Node, ...]
    heads: tuple[str, ...]
    sizes: tuple[str, ...]
    answering: tuple[int, ...] = field(default=())  # the stage of each head; empty: 1..n

    def __post_init__(self) -> None:
        if not self.answering:
            object.__setattr__(self, "answering", tuple(range(1, len(self.heads) + 1)))

    @cached_property
    def by_name(self) -> Mapping[str, Node]:
        return {node.name: node for node in self.nodes}

    @property
    def stages(self) -> int:
        return self.answering[-1]

    @property
    def input(self) -> Node:
        return self.nodes[0]

    def born_at(self, node: Node, stage: int) -> tuple[int, ...]:
        return tuple(c for c, birth in enumerate(node.births) if birth == stage)

    def born_by(self, node: Node, stage: int) -> tuple[int, ...]:
        return tuple(c for c, birth in enumerate(node.births) if birth <= stage)

    # --- connections --------------------------------------------------------------------------------------------

    def group_inputs(self, node: Node, group: int) -> range:
        """The input channels that one group of a weighted node may read."""
        per_group = self.by_name[node.reads[0]].channels // node.groups
        return range(group * per_group, (group + 1) * per_group)

    def group_of(self, node: Node, row: int) -> int:
        return row // (node.channels // node.groups)

    def fan_in(self, node: Node, row: int) -> int:
        """How many input channels one output channel of a weighted node reads."""
        return self._fan_in[node.name][row]

    @cached_property
    def _fan_in(self) -> Mapping[str, tuple[int, ...]]:
        counts = {}
        for node in self.nodes:
            if node.op not in WEIGHTED:
                continue
            source = self.by_name[node.reads[0]].births
            memo: dict[tuple[int, int], int] = {}
            row_counts = []
            for row, birth in enumerate(node.births):
                key = (self.group_of(node, row), birth)
                if key not in memo:
                    memo[key] = sum(source[c] <= birth for c in self.group_inputs(node, key[0]))
                row_counts.append(memo[key])
            counts[node.name] = tuple(row_counts)
        return counts

    def parents(self, node: Node, row: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The channels that one output channel is computed from, read by read."""
        if node.op == "input":
            return ()
        if node.op in WEIGHTED:
            source = self.by_name[node.reads[0]]
            inputs = self.group_inputs(node, self.group_of(node, row))
            return ((source.name, tuple(c for c in inputs if source.births[c] <= node.births[row])),)
        if node.op == "select":
            channel = node.source[row]
            return ((node.reads[0], (channel,) if channel >= 0 else ()),)
        if node.op == "flatten":
            return ((node.reads[0], (row // prod(self.by_name[node.reads[0]].size),)),)
        if node.op == "cat":
            for read in node.reads:
                width = self.by_name[read].channels
                if row < width:
                    return ((read, (row,)),)
                row -= width
        return tuple((read, (self._broadcast(read, row),)) for read in node.reads)

    def _broadcast(self, read: str, row: int) -> int:
        return row if self.by_name[read].channels > 1 else 0

    # --- ownership ----------------------------------------------------------------------------------------------

    @cached_property
    def owners(self) -> Mapping[str, tuple[int, ...]]:
        """For every channel of every node, the tasks whose loss depends on it: bit t for the t-th head."""
        bits: dict[str, list[int]] = {node.name: [0] * node.channels for node in self.nodes}
        for task, head in enumerate(self.heads):
            for row in range(self.by_name[head].channels):
                bits[head][row] |= 1 << task
        for node in reversed(self.nodes):
            mine = bits[node.name]
            if node.op in WEIGHTED:
                self._own_through_weights(node, mine, bits[node.reads[0]])
                continue
            for row, owned in enumerate(mine):
                if owned:
                    for read, channels in self.parents(node, row):
                        for channel in channels:
                            bits[read][channel] |= owned
        return {name: tuple(row_bits) for name, row_bits in bits.items()}

    def _own_through_weights(self, node: Node, mine: list[int], theirs: list[int]) -> None:
        """A weighted row reads every earlier channel of its group: gather by (group, birth) before spreading."""
        source = self.by_name[node.reads[0]]
        gathered: dict[tuple[int, int], int] = {}
        for row, owned in enumerate(mine):
            key = (self.group_of(node, row), node.births[row])
            gathered[key] = gathered.get(key, 0) | owned
        for (group, birth), owned in gathered.items():
            for channel in self.group_inputs(node, group):
                if source.births[channel] <= birth:
                    theirs[channel] |= owned

    # --- counts -------------------------------------------------------------------------------------------------

    def row_params(self, node: Node, row: int) -> int:
        """Parameters of one output channel; masked entries do not count, shared ones count where they belong."""
        if node.shares:
            return 0
        if node.op in WEIGHTED:
            return self.fan_in(node, row) * prod(node.kernel) + node.bias
        return PER_CHANNEL[node.function] if node.op == "norm" and node.affine else 0

    def row_macs(self, node: Node, row: int) -> int:
        """Multiply-accumulates of one output channel of a convolution or linear layer; other ops count none."""
        return self.fan_in(node, row) * prod(node.kernel) * prod(node.size) if node.op in WEIGHTED else 0

    def new_params(self, stage: int) -> int:
        return sum(self.row_params(n, r) for n in self.nodes for r, b in enumerate(n.births) if b == stage)

    def new_macs(self, stage: int) -> int:
        return sum(self.row_macs(n, r) for n in self.nodes for r, b in enumerate(n.births) if b == stage)

    def params(self, stage: int) -> int:
        """Parameters of the anytime network up to `stage`, the heads of earlier stages included."""
        return sum(self.new_params(s) for s in range(1, stage + 1))

    def macs(self, stage: int) -> int:
        """MACs spent when the answer of `stage` is out, those of the earlier answers included."""
        return sum(self.new_macs(s) for s in range(1, stage + 1))

    def task_params(self, task: int) -> int:
        """d_s: how many parameter entries the loss of one task depends on."""
        return sum(
            self.row_params(n, r)
            for n in self.nodes
            for r, owned in enumerate(self.owners[n.name])
            if owned >> task & 1
        )

    def dense(self) -> tuple[int, int]:
        """(parameters, MACs) of the same layers with every connection kept: the un-nested network."""
        params = macs = 0
        for node in self.nodes:
            if node.op in WEIGHTED:
                weights = node.channels * self.by_name[node.reads[0]].channels // node.groups * prod(node.kernel)
                params += 0 if node.shares else weights + node.channels * node.bias
                macs += weights * prod(node.size)
            elif node.op == "norm":
                params += self.row_params(node, 0) * node.channels
        return params, macs

    # --- stage by stage -----------------------------------------------------------------------------------------

    def fetch(self, node: Node, channels: tuple[int, ...]) -> tuple[Run, ...]:
        """Where the given channels of a node lie among its pieces, as few runs as possible."""
        place, totals = self._places[node.name]
        runs: list[Run] = []
        for channel in channels:
            birth, position = node.births[channel], place[channel]
            last = runs[-1] if runs else None
            if last and last.birth == birth and last.stop == position:
                runs[-1] = Run(node.name, birth, last.start, position + 1, False)
            else:
                runs.append(Run(node.name, birth, position, position + 1, False))
        return tuple(Run(r.node, r.birth, r.start, r.stop, r.start == 0 and r.stop == totals[r.birth]) for r in runs)

    @cached_property
    def _places(self) -> Mapping[str, tuple[tuple[int, ...], Mapping[int, int]]]:
        """For each node: the position of every channel inside its piece, and the length of every piece."""
        places = {}
        for node in self.nodes:
            totals: dict[int, int] = {}
            place = []
            for birth in node.births:
                place.append(totals.get(birth, 0))
                totals[birth] = totals.get(birth, 0) + 1
            places[node.name] = (tuple(place), totals)
        return places

    def _step(self, node: Node, stage: int) -> Step | None:
        rows = self.born_at(node, stage)
        if not rows or node.op == "input":
            return None
        wanted: dict[str, tuple[int, ...]] = {}
        columns: tuple[int, ...] = ()
        if node.op in WEIGHTED:
            source = self.by_name[node.reads[0]]
            groups = sorted({self.group_of(node, row) for row in rows})
            columns = tuple(c for g in groups for c in self.group_inputs(node, g) if source.births[c] <= stage)
            if node.groups == 1:  # by birth, so that whole pieces are fetched however births are mixed
                columns = tuple(sorted(columns, key=lambda c: source.births[c]))
            return Step(node, rows, columns, (self.fetch(source, columns),))
        if node.op == "cat":
            for row in rows:
                for read, channels in self.parents(node, row):
                    wanted[read] = wanted.get(read, ()) + channels
            reads = [read for read in node.reads if read in wanted]
            return Step(node, rows, (), tuple(self.fetch(self.by_name[r], wanted[r]) for r in reads))
        fetches = []
        for index, read in enumerate(node.reads):
            seen: dict[int, None] = {}  # ordered and without repeats: flatten asks for a channel once per pixel
            for row in rows:
                for channel in self.parents(node, row)[index][1]:
                    seen[channel] = None
            # a piece of nothing but zeros still takes its shape from somewhere: from one channel that exists
            wanted_channels = tuple(seen) or self.born_by(self.by_name[read], stage)[:1]
            fetches.append(self.fetch(self.by_name[read], wanted_channels))
        return Step(node, rows, (), tuple(fetches))

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """The program of every answering stage. State is explicit: what a stage leaves is what later ones take."""
        first = 1
        steps_of: list[tuple[Step, ...]] = []
        for stage in self.answering:
            steps = [self._step(n, s) for n in self.nodes for s in range(first, stage + 1)]
            steps_of.append(tuple(step for step in steps if step))
            first = stage + 1
        made: set[Key] = {(self.input.name, 1)}
        programs = []
        takes: tuple[Key, ...] = ((self.input.name, 1),)
        for index, stage in enumerate(self.answering):
            made |= {(step.node.name, step.node.births[step.rows[0]]) for step in steps_of[index]}
            later = {
                (run.node, run.birth)
                for steps in steps_of[index + 1 :]
                for step in steps
                for f in step.fetches
                for run in f
            }
            needed = made & later
            leaves = tuple((n.name, b) for n in self.nodes for b in sorted(set(n.births)) if (n.name, b) in needed)
            programs.append(Program(stage, steps_of[index], takes, leaves, self.heads[index]))
            takes = leaves
        return tuple(programs)

    # --- smaller plans ------------------------------------------------------------------------------------------

    def restrict(self, stage: int) -> "Plan":
        """D_stage alone: only the channels its own answer needs; births inside are kept."""
        if stage not in self.answering:
            raise NestlingError(f"{self.name} has no stage {stage}; it answers at stages {list(self.answering)}.")
        task = self.answering.index(stage)
        smaller = keep(self, self.kept(stage))
        return replace(
            smaller,
            name=f"{self.name}/{self.sizes[task]}",
            heads=(self.heads[task],),
            sizes=(self.sizes[task],),
            answering=(stage,),
        )

    def kept(self, stage: int) -> Mapping[str, tuple[int, ...]]:
        """The channels of every node that the answer of `stage` depends on."""
        return self._kept[self.answering.index(stage)]

    @cached_property
    def _kept(self) -> tuple[Mapping[str, tuple[int, ...]], ...]:
        return tuple(
            {name: tuple(r for r, owned in enumerate(bits) if owned >> task & 1) for name, bits in self.owners.items()}
            for task in range(len(self.heads))
        )


def keep(plan: Plan, kept: Mapping[str, tuple[int, ...]]) -> Plan:
    """The plan with only some channels of every node. Nodes left without channels go."""
    nodes: list[Node] = []
    for node in plan.nodes:
        rows = kept[node.name]
        if node.op == "input":
            nodes.append(node)
            continue
        if not rows:
            continue
        reads = tuple(read for read in node.reads if kept[read] or plan.by_name[read].op == "input")
        source = node.source
        if node.op == "select":
            place = {channel: i for i, channel in enumerate(kept[reads[0]])}
            source = tuple(place[node.source[row]] if node.source[row] >= 0 else -1 for row in rows)
        elif node.op not in WEIGHTED or node.groups > 1:
            reads = tuple(narrowed(plan, node, read, kept, nodes) for read in reads)
        groups = len({plan.group_of(node, row) for row in rows}) if node.groups > 1 else 1
        births = tuple(node.births[row] for row in rows)
        nodes.append(replace(node, reads=reads, births=births, source=source, groups=groups))
    return replace(plan, nodes=tuple(nodes))


def narrowed(plan: Plan, node: Node, read: str, kept: Mapping[str, tuple[int, ...]], nodes: list[Node]) -> str:
    """What a channel-by-channel or grouped node reads, cut down to the channels it asks for where others keep more."""
    asked = dict.fromkeys(c for row in kept[node.name] for r, cs in plan.parents(node, row) if r == read for c in cs)
    wanted = tuple(sorted(asked) if node.op in WEIGHTED else asked)
    if wanted == kept[read] or plan.by_name[read].op == "input":
        return read
    place = {channel: i for i, channel in enumerate(kept[read])}
    births = tuple(plan.by_name[read].births[c] for c in wanted)
    name = f"{node.name}.take_{read.replace('.', '_')}"
    while name in plan.by_name or any(name == other.name for other in nodes):
        name += "_"
    nodes.append(Node(name, "select", (read,), births, plan.by_name[read].size, source=tuple(place[c] for c in wanted)))
    return name
