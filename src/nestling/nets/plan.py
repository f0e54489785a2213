"""The plan of a nested network: a graph of layers in which every channel has a birth. No tensors here.

In: nodes, made by the functions of draft.py. Out, all derived from births in this one place: connection masks,
parameter and MAC counts of each stage, which task owns which entry, and the program of each stage (which rows it
computes, what it fetches from earlier stages, what state it passes on). It does not know how layers are computed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from nestling.errors import NestlingError
from nestling.nets.births import Births
from nestling.nets.ops.operation import Operation
from nestling.nets.ops.select import Select


@dataclass(frozen=True)
class Node:
    """One layer's output: what computes it, who it reads and when each of its channels is born."""

    name: str
    op: Operation
    reads: tuple[str, ...]
    births: Births
    size: tuple[int, ...]  # of one channel, () for vectors
    shares: str = ""  # the node whose weights it uses, where one layer serves several places

    @property
    def channels(self) -> int:
        return len(self.births)

    def shape(self, channels: int) -> tuple[int, ...]:
        """Of so many of its channels, without the batch."""
        before = self.op.axis - 1
        return (*self.size[:before], channels, *self.size[before:])


@dataclass(frozen=True)
class ChannelRun:
    """Consecutive channels of one stored piece: positions start..stop of the channels of `node` born at `birth`."""

    node: str
    birth: int
    start: int
    stop: int
    whole: bool  # the run is the entire piece
    axis: int  # where the channels stand


PieceKey = tuple[str, int]  # a piece of activations: the channels of a node that are born at one stage


@dataclass(frozen=True)
class NodeWork:
    """One node's work in one stage: compute `rows` from the fetched channels of each read."""

    node: Node
    op: Operation  # the node's, narrowed to these rows
    rows: tuple[int, ...]  # output channels born at this stage
    wanted: tuple[tuple[int, ...], ...]  # of each read, the channels they are computed from
    fetches: tuple[tuple[ChannelRun, ...], ...]  # where these lie, for each read that something is wanted of


@dataclass(frozen=True)
class Program:
    """Everything stage s does: its steps, the state it takes and the state it leaves."""

    stage: int
    steps: tuple[NodeWork, ...]
    takes: tuple[PieceKey, ...]
    leaves: tuple[PieceKey, ...]
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

    def reads_of(self, node: Node) -> tuple[Node, ...]:
        return self._reads[node.name]

    @cached_property
    def _reads(self) -> Mapping[str, tuple[Node, ...]]:
        return {node.name: tuple(self.by_name[read] for read in node.reads) for node in self.nodes}

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

    # --- what follows from the operations -------------------------------------------------------------------------

    def parents(self, node: Node, row: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The channels that one output channel is computed from, read by read."""
        return tuple(zip(node.reads, node.op.parents(node, self.reads_of(node), row), strict=True))

    @cached_property
    def owners(self) -> Mapping[str, tuple[int, ...]]:
        """For every channel of every node, the tasks whose loss depends on it: bit t for the t-th head."""
        bits: dict[str, list[int]] = {node.name: [0] * node.channels for node in self.nodes}
        for task, head in enumerate(self.heads):
            for row in range(self.by_name[head].channels):
                bits[head][row] |= 1 << task
        for node in reversed(self.nodes):
            node.op.spread(node, self.reads_of(node), bits[node.name], [bits[read] for read in node.reads])
        return {name: tuple(row_bits) for name, row_bits in bits.items()}

    @cached_property
    def _weights(self) -> Mapping[str, tuple[int, ...]]:
        return {node.name: node.op.weights(node, self.reads_of(node)) for node in self.nodes}

    @cached_property
    def _params(self) -> Mapping[str, tuple[int, ...]]:
        return {node.name: node.op.params(node, self.reads_of(node)) for node in self.nodes}

    @cached_property
    def _macs(self) -> Mapping[str, tuple[int, ...]]:
        return {node.name: node.op.macs(node, self.reads_of(node)) for node in self.nodes}

    # --- counts -------------------------------------------------------------------------------------------------

    def row_weights(self, node: Node, row: int) -> int:
        """How many weights connect one output channel to what it reads; masked ones do not count."""
        return self._weights[node.name][row]

    def row_params(self, node: Node, row: int) -> int:
        """Parameters of one output channel; masked entries do not count, shared ones count where they belong."""
        return 0 if node.shares else self._params[node.name][row]

    def row_macs(self, node: Node, row: int) -> int:
        """Multiply-accumulates of one output channel of a convolution or linear layer; other ops count none."""
        return self._macs[node.name][row]

    def new_params(self, stage: int) -> int:
        return sum(self.row_params(n, r) for n in self.nodes for r, b in enumerate(n.births) if b == stage)

    def new_macs(self, stage: int) -> int:
        return sum(self.row_macs(n, r) for n in self.nodes for r, b in enumerate(n.births) if b == stage)

    def params(self, stage: int) -> int:
        """Parameters of the anytime network up to `stage`, the heads of earlier stages included."""
        return sum(self.new_params(s) for s in self._until(stage))

    def macs(self, stage: int) -> int:
        """MACs spent when the answer of `stage` is out, those of the earlier answers included."""
        return sum(self.new_macs(s) for s in self._until(stage))

    def _until(self, stage: int) -> range:
        """The stages up to this one, which count from 1; tasks, places among the heads, count from 0."""
        if not 1 <= stage <= self.stages:
            raise NestlingError(f"{self.name} has no stage {stage}; its stages are 1 to {self.stages}")
        return range(1, stage + 1)

    def task_params(self, task: int) -> int:
        """d_s: how many parameter entries the loss of one task depends on."""
        if not 0 <= task < len(self.heads):
            raise NestlingError(f"{self.name} has no task {task}; its tasks are 0 to {len(self.heads) - 1}")
        return sum(
            self.row_params(n, r)
            for n in self.nodes
            for r, owned in enumerate(self.owners[n.name])
            if owned >> task & 1
        )

    def dense(self) -> tuple[int, int]:
        """(parameters, MACs) of the same layers with every connection kept: the un-nested network."""
        plain = replace(self, nodes=tuple(replace(node, births=(1,) * node.channels) for node in self.nodes))
        return plain.new_params(1), plain.new_macs(1)

    def connections(self, stage: int) -> tuple[int, int]:
        """How many weights the rule keeps among the channels that exist by `stage`, and how many there could be."""
        kept = dense = 0
        for node in self.nodes:
            together = replace(node, births=(stage,) * node.channels)
            could_be = node.op.weights(together, self.reads_of(node))
            for row in self.born_by(node, stage):
                kept += self.row_weights(node, row)
                dense += could_be[row]
        return kept, dense

    # --- stage by stage -----------------------------------------------------------------------------------------

    def fetch(self, node: Node, channels: tuple[int, ...]) -> tuple[ChannelRun, ...]:
        """Where the given channels of a node lie among its pieces, as few runs as possible."""
        place, totals = self._places[node.name]
        runs: list[tuple[int, int, int]] = []  # birth, start, stop
        for channel in channels:
            birth, position = node.births[channel], place[channel]
            if runs and runs[-1][0] == birth and runs[-1][2] == position:
                runs[-1] = (birth, runs[-1][1], position + 1)
            else:
                runs.append((birth, position, position + 1))
        return tuple(ChannelRun(node.name, b, i, j, (i, j) == (0, totals[b]), node.op.axis) for b, i, j in runs)

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

    def _step(self, node: Node, stage: int) -> NodeWork | None:
        rows, reads = self.born_at(node, stage), self.reads_of(node)
        if not rows or not reads:
            return None
        wanted = node.op.wants(node, reads, rows, stage)
        fetches = tuple(self.fetch(read, mine) for read, mine in zip(reads, wanted, strict=True) if mine)
        return NodeWork(node, node.op.narrow(node, rows, wanted), rows, wanted, fetches)

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """The program of every answering stage. State is explicit: what a stage leaves is what later ones take."""
        first = 1
        steps_of: list[tuple[NodeWork, ...]] = []
        for stage in self.answering:
            steps = [self._step(n, s) for n in self.nodes for s in range(first, stage + 1)]
            steps_of.append(tuple(step for step in steps if step))
            first = stage + 1
        made: set[PieceKey] = {(self.input.name, 1)}
        programs = []
        takes: tuple[PieceKey, ...] = ((self.input.name, 1),)
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
    """The plan with only some channels of every node. Nodes left without channels go; the input stays whole."""
    kept = {**kept, plan.input.name: tuple(range(plan.input.channels))}
    nodes: list[Node] = []
    for node in plan.nodes:
        rows = kept[node.name]
        if not rows:
            continue
        reads = tuple(read for read in node.reads if kept[read])
        op = node.op.narrow(node, rows, [kept[read] for read in reads])
        if not node.op.picks:
            asked = (narrowed(plan, node, read, kept, nodes) for read in reads)
            reads = tuple(read for read in asked if read)
        births = tuple(node.births[row] for row in rows)
        nodes.append(replace(node, op=op, reads=reads, births=births))
    return replace(plan, nodes=tuple(nodes))


def narrowed(plan: Plan, node: Node, read: str, kept: Mapping[str, tuple[int, ...]], nodes: list[Node]) -> str:
    """What a channel-by-channel or grouped node reads, cut down to the channels it asks for where others keep more; "" where
    it asks for none, as of one of several tensors that are put behind each other."""
    source = plan.by_name[read]
    if len(kept[node.name]) == node.channels and len(kept[read]) == source.channels:
        return read  # nothing is cut here
    reads, index = plan.reads_of(node), node.reads.index(read)
    wanted = tuple(sorted({c for row in kept[node.name] for c in node.op.parents(node, reads, row)[index]}))
    if wanted == kept[read] or not wanted:
        return read if wanted else ""
    place = {channel: i for i, channel in enumerate(kept[read])}
    births = tuple(source.births[c] for c in wanted)
    name = f"{node.name}.take_{read.replace('.', '_')}"
    while name in plan.by_name or any(name == other.name for other in nodes):
        name += "_"
    op = Select(tuple(place[c] for c in wanted), axis=source.op.axis)
    nodes.append(Node(name, op, (read,), births, source.size))
    return name
