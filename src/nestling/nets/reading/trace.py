"""Watching an ordinary torch module run: its operations in order, each with the tensors it makes.

In: a module and the shape of one image. Out: a `Trace`. torch.fx records the module while it runs on images without data, so
that Python may ask for shapes, in training and in evaluation and for two batch sizes; the four records must tell one story.
What is different between them, what is overwritten and what is kept in buffers is known afterwards. What the operations
mean is said in read.py. The module itself is not touched.
"""

import copy
import inspect
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from nestling.errors import NestlingError
from nestling.nets.reading.watcher import Watcher, attribute, place, reason, shapes, storages

Shape = tuple[int, ...]  # of one image, or of whatever has its channels first
BATCHES = (2, 3)


class Whole(nn.Module):
    """The module one level down: then a module of one layer is recorded as that layer, and defaults stay defaults."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return self.module(x)


@dataclass
class Record:
    """What one run did: the operations that made the answer from the image, in order."""

    nodes: list[fx.Node]
    values: dict[fx.Node, Any]
    writes: dict[fx.Node, list[fx.Node]]
    answer: Any
    image: fx.Node
    dropped: set[str]  # paths of modules of which nothing reaches the answer
    made: list[str]  # tensors that the module makes of nothing, in their order

    @cached_property
    def made_shapes(self) -> list[tuple[int, ...]]:
        found = {str(node.target): shapes(value)[0] for node, value in self.values.items() if node.op == "get_attr"}
        return [found[name] for name in self.made]

    def shares_memory(self, one: fx.Node, other: fx.Node) -> bool:
        return bool(storages(self.values[one]) & storages(self.values[other]))


@dataclass
class Trace:
    """A module's operations, as in training with the first batch size; `twins` are the same in the other three runs."""

    module: nn.Module
    record: Record
    others: tuple[Record, Record, Record]  # evaluation, then both with the other batch size
    twins: dict[fx.Node, tuple[fx.Node, fx.Node, fx.Node]] = field(default_factory=dict)
    shape: Shape = ()
    training: bool = True
    net: str = ""

    def held(self, path: str) -> Tensor:
        """A parameter or buffer of the module, or a tensor that it makes of nothing while running."""
        if path not in self.record.made:
            return attribute(self.module, path)
        return self.made[self.record.made.index(path)]

    def grows(self, path: str) -> bool:
        """Whether a tensor that the module makes of nothing has one part for each image of the batch."""
        mine, larger = self.record.made, self.others[1].made
        if path not in mine or len(mine) != len(larger):
            return False
        one, other = (record.made_shapes[mine.index(path)] for record in (self.record, self.others[1]))
        return one[:1] == BATCHES[:1] and other[:1] == BATCHES[1:] and one[1:] == other[1:]

    @cached_property
    def made(self) -> list[Tensor]:
        """The tensors that the module makes of nothing, by running it once more, with data: in evaluation as in training."""
        runs: list[list[Tensor]] = []
        for mode in dict.fromkeys((self.training, False)):
            whole = Whole(copy.deepcopy(self.module)).train(mode)
            first = next(self.module.parameters(), torch.zeros(0))
            image = torch.zeros(BATCHES[0], *self.shape, dtype=self.record.values[self.record.image].dtype).to(
                first.device
            )
            tracer = Watcher(self.net, image)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(len(runs))
                tracer.trace(whole)
            runs.append([attribute(whole, name).detach() for name in tracer.made])
        alike = all(len(run) == len(self.record.made) for run in runs)
        if not alike or not all(torch.equal(one, other) for one, other in zip(runs[0], runs[-1], strict=True)):
            raise NestlingError(
                f"{self.net}: cannot nest it: it makes tensors of numbers while running that are not the same in every run; keep "
                "them as buffers"
            )
        return runs[0]

    def is_batch(self, node: fx.Node) -> bool:
        """Whether an operation gives one thing for each image, images first."""
        mine, larger = shapes(self.record.values[node]), shapes(self.others[1].values[self.twins[node][1]])
        same = larger == [(BATCHES[1], *shape[1:]) for shape in mine]
        return same and all(shape[:1] == BATCHES[:1] for shape in mine)


def trace(module: nn.Module, shape: Shape, net: str, training: bool = True) -> Trace:
    """The operations of a module on images of `shape`, in training and evaluation or in evaluation only."""
    hollow = hollowed(module, net)
    kinds = [p.dtype for p in module.parameters() if p.is_floating_point()]
    records = []
    for batch in BATCHES:
        image = torch.empty(batch, *shape, device="meta", dtype=kinds[0] if kinds else torch.float32)
        evaluated = watched(hollow.eval(), image, net, module)
        records += [watched(hollow.train(), image, net, module) if training else evaluated, evaluated]
    train, *others = records
    if isinstance(train.answer, tuple) and isinstance(others[0].answer, fx.Node):
        records = [without_auxiliary(record) for record in records]
        train, *others = records
    found = Trace(module, train, (others[0], others[1], others[2]), {}, shape, training, net)
    align(found, net)
    return found


def hollowed(module: nn.Module, net: str) -> nn.Module:
    """A copy of the module whose tensors have no data."""
    try:
        hollow = copy.deepcopy(module, without_data(module))
    except Exception as error:
        raise NestlingError(
            f"{net}: cannot nest it: it cannot be copied ({type(error).__name__}: {error}). Keep tensors as parameters "
            "or buffers."
        ) from None
    return Whole(hollow)


def without_data(module: nn.Module) -> dict[int, Any]:
    """For deepcopy: the module's tensors and what stands for them in a copy without data."""
    return {
        id(t): nn.Parameter(t.to("meta"), t.requires_grad) if isinstance(t, nn.Parameter) else t.to("meta")
        for t in (*module.parameters(), *module.buffers())
    }


def watched(hollow: nn.Module, image: Tensor, net: str, module: nn.Module) -> Record:
    """One run of the module, with the paths that its layers have in it."""
    tracer, mode = Watcher(net, image), "training" if hollow.training else "evaluation"
    try:
        with torch.device("meta"):
            graph = tracer.trace(hollow)
    except NestlingError:
        raise
    except Exception as error:  # tracing runs the module's own code, which may raise anything
        needed = [p for p in inspect.signature(module.forward).parameters.values() if required(p)]
        why = (
            f"it takes {len(needed)} inputs; a nested network takes one image"
            if len(needed) > 1
            else f"in {mode} mode, {reason(error, image)}"
        )
        raise NestlingError(f"{net}: cannot nest it: {why}.") from None
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            node.target = "" if node.target == "module" else node.target.removeprefix("module.")
        stack = node.meta.get("nn_module_stack") or {}
        node.meta["path"] = str(list(stack.values())[-1][0]).partition(".")[2] if stack else ""
    check_state(tracer, graph, net, module)
    nodes, unneeded, answer = needed_nodes(tracer, graph)
    dropped = {node.meta["path"] for node in unneeded} - {node.meta["path"] for node in nodes} - {""}
    if isinstance(answer, fx.Node) and isinstance(answer.target, type):  # a named tuple of answers
        answer = tuple(answer.args)
    return Record(nodes, tracer.values, tracer.writes, answer, next(iter(graph.nodes)), dropped, tracer.made)


def required(parameter: inspect.Parameter) -> bool:
    plain = parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return plain and parameter.default is inspect.Parameter.empty


def check_state(tracer: Watcher, graph: fx.Graph, net: str, module: nn.Module) -> None:
    """Refuse whatever remembers something of what it saw, except batch norm."""
    for node in graph.nodes:
        for written in tracer.writes.get(node, ()):
            kept = written.op == "get_attr" and not str(written.target).endswith("num_batches_tracked")
            if kept and node.target is not F.batch_norm:
                raise NestlingError(
                    f"{net}: cannot nest {place(module, node)}: it changes {written.target} while running. Of what a module "
                    "remembers only the statistics of batch norm are nested."
                )


def needed_nodes(tracer: Watcher, graph: fx.Graph) -> tuple[list[fx.Node], list[fx.Node], Any]:
    """The operations between the image and the answer, those included that only overwrite something on the way; those
    that reach no answer; and the answer."""
    *nodes, output = graph.nodes
    depends: set[fx.Node] = {nodes[0]}
    for node in nodes[1:]:
        if any(n in depends for n in node.all_input_nodes):
            depends.add(node)
    live = set(output.all_input_nodes)
    memory: set[int] = set()
    for node in reversed(nodes):
        written = set().union(*(storages(tracer.values[n]) for n in tracer.writes.get(node, ())))
        if node in live or written & memory:
            live |= {node, *node.all_input_nodes}
            memory |= storages(tracer.values[node])
            memory |= set().union(*(storages(tracer.values[n]) for n in node.all_input_nodes))
    computed = [node for node in nodes[1:] if node in depends]
    return [n for n in computed if n in live], [n for n in computed if n not in live], output.args[0]


def without_auxiliary(record: Record) -> Record:
    """A run that gives further answers in training: only the first, and what it needs."""
    if not isinstance(record.answer, tuple):
        return record
    answer = record.answer[0]
    nodes, live = [], {answer}
    for node in reversed(record.nodes):
        if node in live or any(record.shares_memory(node, other) for other in live if record.writes.get(node)):
            live |= {node, *node.all_input_nodes}
            nodes.append(node)
    gone = {node.meta["path"] for node in record.nodes} - {node.meta["path"] for node in nodes} - {""}
    return replace(record, nodes=nodes[::-1], answer=answer, dropped=record.dropped | gone)


def align(found: Trace, net: str) -> None:
    """Match the operations of the four runs; they must be the same."""
    records = (found.record, *found.others)
    steps = [[(n.op, str(n.target), n.meta["path"]) for n in record.nodes] for record in records]
    for index, other in enumerate(steps[1:], start=1):
        if steps[0] == other:
            continue
        at = next((i for i, (a, b) in enumerate(zip(steps[0], other, strict=False)) if a != b), min(map(len, steps)))
        longer = records[0].nodes if len(steps[0]) > at else records[index].nodes
        where = longer[at].meta["path"]
        owner = f"{where} ({type(found.module.get_submodule(where)).__name__})" if where else "it"
        why = (
            "it does other operations in training than in evaluation (random paths or scales). Only dropout and batch norm may "
            "differ between the two: turn it off there, or use nestling.exits, which needs evaluation only."
            if index == 1
            else f"it does other operations for {BATCHES[1]} images than for {BATCHES[0]}."
        )
        raise NestlingError(f"{net}: cannot nest {owner}: {why}")
    found.twins = {
        node: (a, b, c)
        for node, a, b, c in zip(found.record.nodes, *(record.nodes for record in found.others), strict=True)
    }
