"""A trained network as frozen stages: straight-line programs of plain operations on sliced, folded weights.

In: a NestedNet. Out: one `Frozen` per stage: the values it takes, its operations, its answer and the values it gives to
later stages. Each stage holds only its own rows of every weight. What is done to the programs to make them fast is in
fold.py; torchstage.py runs them with torch, graph.py writes them as ONNX.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from nestling.export.joined import joined
from nestling.nets.modes import unhooked
from nestling.nets.net import NestedNet, make_cut
from nestling.nets.ops.cat import Cat
from nestling.nets.ops.frozen import Op
from nestling.nets.ops.select import Slice
from nestling.nets.plan import ChannelRun, NodeWork, PieceKey


@dataclass(frozen=True, eq=False)
class Frozen:
    """The program of one stage. The first takes ("input",); each takes what it reads of what earlier ones gave."""

    stage: int
    ops: tuple[Op, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    head: str


def freeze(net: NestedNet) -> tuple[Frozen, ...]:
    """The stages of a network in evaluation mode, with their own copies of their weights, in float32 on the CPU."""
    unhooked(net, net.plan.name)
    stages = []
    with torch.no_grad():
        for program in net.plan.programs:
            writer = Writer(net, program.stage)
            for step in program.steps:
                writer.step(step)
            head = piece((program.head, program.stage))
            stages.append(Frozen(program.stage, tuple(writer.ops), (), (), head))
    return wire(tuple(stages))


def freeze_whole(net: NestedNet) -> Frozen:
    """All stages at once, as training runs them: one dense operation per layer, and every stage's answer at its end.

    `head` is the first stage's answer, `gives` are those of the others.
    """
    dense = joined(net, (net.plan.stages,))
    with torch.no_grad():
        writer = Writer(dense, 1)
        for step in dense.plan.programs[0].steps:
            writer.step(step)
    heads = [piece((head, 1)) for head in dense.plan.heads]
    [whole] = wire((Frozen(1, tuple(writer.ops), (), (), heads[0]),), needed=heads[1:])
    return replace(whole, gives=tuple(heads[1:]))


def wire(stages: tuple[Frozen, ...], needed: Iterable[str] = ()) -> tuple[Frozen, ...]:
    """The same programs with what nobody reads left out, and what they take and give worked out."""
    needed = set(needed)  # by later stages
    wired: list[Frozen] = []
    for stage in reversed(stages):
        live = {stage.head, *needed}
        kept: list[Op] = []
        for op in reversed(stage.ops):
            if op.out in live:
                kept.append(op)
                live.update(op.reads)
        kept.reverse()
        made = {op.out for op in kept}
        gives = tuple(op.out for op in kept if op.out in needed)
        takes = tuple(dict.fromkeys(read for op in kept for read in op.reads if read not in made))
        needed = (needed - made) | set(takes)
        wired.append(replace(stage, ops=tuple(kept), takes=takes, gives=gives))
    return tuple(reversed(wired))


def shapes(net: NestedNet, stages: tuple[Frozen, ...]) -> dict[str, tuple[int, ...]]:
    """The shape, without the batch, of every value that passes between stages, and of the input."""
    made = {op.out: op.shape for stage in stages for op in stage.ops}
    made["input"] = net.plan.input.shape(net.plan.input.channels)
    return {name: made[name] for stage in stages for name in (*stage.takes, *stage.gives, stage.head)}


def piece(key: PieceKey) -> str:
    """The name of the channels of a node that are born at one stage; of the input just "input"."""
    node, birth = key
    return f"{node}@{birth}"


class Writer:
    """Writes the operations of one stage, step by step; what is fetched twice is put together once."""

    def __init__(self, net: NestedNet, stage: int) -> None:
        self.net, self.stage = net, stage
        self.ops: list[Op] = []
        self.fetched: dict[tuple[ChannelRun, ...], str] = {}

    def put(self, op: Op) -> str:
        self.ops.append(op)
        return op.out

    def name(self, key: PieceKey) -> str:
        return "input" if key[0] == self.net.plan.input.name else piece(key)

    def fetch(self, runs: tuple[ChannelRun, ...]) -> str:
        """The name of channels put together from pieces; a single whole piece is itself."""
        if runs not in self.fetched:
            parts, node = [], self.net.plan.by_name[runs[0].node]
            for run in runs:
                name = self.name((run.node, run.birth))
                if not run.whole:
                    cut, does = f"{name}[{run.start}:{run.stop}]", Slice(run.start, run.stop, axis=run.axis)
                    name = self.put(Op(does, cut, (name,), node.shape(run.stop - run.start)))
                parts.append(name)
            # Named by the stage, too: a later one may join the same node otherwise.
            joined = f"{runs[0].node}@{runs[0].birth}-{runs[-1].birth}:{self.stage}.{len(self.fetched)}"
            shape = node.shape(sum(run.stop - run.start for run in runs))
            join = Op(Cat(axis=node.op.axis), joined, tuple(parts), shape)
            self.fetched[runs] = parts[0] if len(parts) == 1 else self.put(join)
        return self.fetched[runs]

    def step(self, step: NodeWork) -> None:
        node = step.node
        reads = tuple(self.fetch(runs) for runs in step.fetches)
        layer = self.net.layer(node.name) if node.op.layered else None
        out = self.name((node.name, node.births[step.rows[0]]))
        self.ops += step.op.freeze(layer, make_cut(self.net.plan, step), out, reads, node.shape(len(step.rows)))
