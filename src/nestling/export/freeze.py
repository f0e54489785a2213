"""A trained network as frozen stages: straight-line programs of plain operations on sliced, folded weights.

In: a NestedNet. Out: one `Frozen` per stage: the values it takes, its operations, its answer and the values it gives to
later stages. Each stage holds only its own rows of every weight. What is done to the programs to make them fast is in
fold.py; torchstage.py runs them with torch, graph.py writes them as ONNX.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from nestling.nets.layers import NestedBatchNorm2d, NestedGroupNorm, NestedPReLU
from nestling.nets.net import NestedNet, make_cut
from nestling.nets.plan import Key, Node, Run, Step


@dataclass(frozen=True, eq=False)
class Op:
    """One operation. Every value has one writer; `reads` are names of values."""

    kind: str  # conv | linear | affine | groupnorm | prelu | map | module | zip | cat | slice | pad | zero | flatten | same
    out: str
    reads: tuple[str, ...]
    shape: tuple[int, ...]  # of the value, without the batch
    weight: Tensor | None = None
    bias: Tensor | None = None
    function: str = ""  # of map and zip
    node: Node | None = None  # of conv: kernel, stride, padding, dilation
    groups: int = 1
    start: int = 0  # of slice: channels start..stop; of pad: channels read, and zeros behind them
    stop: int = 0
    module: nn.Module | None = None
    eps: float = 0.0


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
    nodes = tuple(replace(node, births=(1,) * node.channels) for node in net.plan.nodes)
    plan = replace(net.plan, nodes=nodes, answering=(1,) * len(net.plan.heads))
    given = {node.name: net.layer(node.name) for node in plan.nodes if node.function == "module"}
    dense = NestedNet(plan, given)
    state = dict(net.state_dict())
    for node in plan.nodes:
        if node.op in ("conv", "linear"):
            state[f"{node.name}.weight"] = net.layer(node.name).live_weight()
    dense.load_state_dict(state)
    with torch.no_grad():
        writer = Writer(dense, 1)
        for step in plan.programs[0].steps:
            writer.step(step)
    heads = [piece((head, 1)) for head in plan.heads]
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
    made["input"] = (net.plan.input.channels, *net.plan.input.size)
    return {name: made[name] for stage in stages for name in (*stage.takes, *stage.gives, stage.head)}


def piece(key: Key) -> str:
    """The name of the channels of a node that are born at one stage; of the input just "input"."""
    node, birth = key
    return f"{node}@{birth}"


def own(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous()


class Writer:
    """Writes the operations of one stage, step by step; what is fetched twice is put together once."""

    def __init__(self, net: NestedNet, stage: int) -> None:
        self.net, self.stage = net, stage
        self.ops: list[Op] = []
        self.fetched: dict[tuple[Run, ...], str] = {}

    def put(self, op: Op) -> str:
        self.ops.append(op)
        return op.out

    def name(self, key: Key) -> str:
        return "input" if key[0] == self.net.plan.input.name else piece(key)

    def fetch(self, runs: tuple[Run, ...]) -> str:
        """The name of channels put together from pieces; a single whole piece is itself."""
        if runs not in self.fetched:
            parts = []
            for run in runs:
                name = self.name((run.node, run.birth))
                if not run.whole:
                    shape = (run.stop - run.start, *self.net.plan.by_name[run.node].size)
                    cut = f"{name}[{run.start}:{run.stop}]"
                    name = self.put(Op("slice", cut, (name,), shape, start=run.start, stop=run.stop))
                parts.append(name)
            shape = (sum(run.stop - run.start for run in runs), *self.net.plan.by_name[runs[0].node].size)
            # Named by the stage, too: a later one may join the same node otherwise.
            joined = f"{runs[0].node}@{runs[0].birth}-{runs[-1].birth}:{self.stage}.{len(self.fetched)}"
            self.fetched[runs] = parts[0] if len(parts) == 1 else self.put(Op("cat", joined, tuple(parts), shape))
        return self.fetched[runs]

    def step(self, step: Step) -> None:
        node = step.node
        reads = tuple(self.fetch(runs) for runs in step.fetches)
        out = self.name((node.name, node.births[step.rows[0]]))
        shape = (len(step.rows), *node.size)
        if node.op in ("conv", "linear"):
            self.put(self.weighted(step, out, reads, shape))
        elif node.op == "norm":
            self.put(self.norm(step, out, reads, shape))
        elif node.function == "module":
            self.put(Op("module", out, reads, shape, module=copy.deepcopy(self.net.layer(node.name)).cpu()))
        elif node.op in ("map", "zip", "flatten"):
            self.put(Op(node.op, out, reads, shape, function=node.function))
        elif node.op == "cat":
            self.put(Op("cat" if len(reads) > 1 else "same", out, reads, shape))
        else:
            self.select(step, out, reads[0], shape)

    def weighted(self, step: Step, out: str, reads: tuple[str, ...], shape: tuple[int, ...]) -> Op:
        layer, cut = self.net.layer(step.node.name), make_cut(self.net.plan, step)
        weight = own(cut.weight(layer.live_weight().cpu()))
        bias = None if layer.bias is None else own(layer.bias.cpu()[cut.rows])
        return Op(step.node.op, out, reads, shape, weight, bias, node=step.node, groups=cut.groups)

    def norm(self, step: Step, out: str, reads: tuple[str, ...], shape: tuple[int, ...]) -> Op:
        layer, rows = self.net.layer(step.node.name), make_cut(self.net.plan, step).rows
        count = len(step.rows)
        if isinstance(layer, NestedPReLU):
            return Op("prelu", out, reads, shape, own(layer.weight.cpu()[rows]))
        weight = layer.weight.cpu()[rows].double() if layer.affine else torch.ones(count, dtype=torch.float64)
        bias = layer.bias.cpu()[rows].double() if layer.affine else torch.zeros(count, dtype=torch.float64)
        if isinstance(layer, NestedGroupNorm):
            groups = count // (layer.num_channels // layer.num_groups)
            return Op("groupnorm", out, reads, shape, own(weight), own(bias), groups=groups, eps=layer.eps)
        assert isinstance(layer, NestedBatchNorm2d) and layer.running_mean is not None and layer.running_var is not None
        # In float64 until it is folded: what comes out then differs from batch norm by one rounding.
        mean, var = layer.running_mean.cpu()[rows].double(), layer.running_var.cpu()[rows].double()
        scale = weight / (var + layer.eps).sqrt()
        return Op("affine", out, reads, shape, scale, bias - mean * scale)

    def select(self, step: Step, out: str, read: str, shape: tuple[int, ...]) -> None:
        """Channels copied by number, -1 for zeros: slices, each with the zeros that follow it, put together."""
        wanted = [step.node.source[row] for row in step.rows]
        order = {c: i for i, c in enumerate(dict.fromkeys(c for c in wanted if c >= 0))}
        size = shape[1:]
        parts: list[str] = []
        runs = consecutive([order.get(c, -1) for c in wanted])
        for index, (first, count) in enumerate(runs):
            name = f"{out}/{index}"
            if first >= 0:
                whole = first == 0 and count == len(order)
                cut = Op("slice", name, (read,), (count, *size), start=first, stop=first + count)
                parts.append(read if whole else self.put(cut))
            elif parts:
                before = runs[index - 1][1]
                pad = Op("pad", name, (parts[-1],), (before + count, *size), start=before, stop=count)
                parts[-1] = self.put(pad)
            else:
                parts.append(self.put(Op("zero", name, (read,), (count, *size), stop=count)))
        if len(parts) > 1:
            self.put(Op("cat", out, tuple(parts), shape))
        elif parts[0] == read:
            self.put(Op("same", out, (read,), shape))
        else:
            self.ops[-1] = replace(self.ops[-1], out=out)


def consecutive(channels: list[int]) -> list[tuple[int, int]]:
    """Runs of neighbouring channels as (first, how many); zeros are runs that begin at -1."""
    runs: list[tuple[int, int]] = []
    for channel in channels:
        first, count = runs[-1] if runs else (-2, 0)
        if runs and (first == channel == -1 or (channel >= 0 and first >= 0 and first + count == channel)):
            runs[-1] = (first, count + 1)
        else:
            runs.append((channel, 1))
    return runs
