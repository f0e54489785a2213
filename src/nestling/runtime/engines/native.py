"""Stages in the form that this machine's ONNX Runtime likes best: optimised together, then cut apart.

In: frozen stages and the shapes of what passes between them. Out: one graph per stage, already optimised, and the shapes of
what passes now. ONNX Runtime keeps images in a blocked layout of its own and turns them round wherever a graph begins or
ends; cut after that, stages hand on blocks as they are. Good for this process only: export/graph.py writes what goes to
files. Runs the network once, on zeros.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from nestling.export.freeze import Frozen
from nestling.export.graph import IR, OPSET, Graph, Shapes, info, must_trace
from nestling.runtime.engines.onnx import StageGraph, session_options


def native_graphs(
    stages: Sequence[Frozen], shapes: Shapes, threads: int
) -> tuple[list[StageGraph], dict[str, tuple[int, ...]]] | None:
    """Each stage's graph and the shapes of what passes between them; None if a layer has no ONNX form of ours."""
    if any(must_trace(stage) for stage in stages):
        return None
    whole = optimise(write_whole(stages, shapes), threads)
    parts = cut(whole, len(stages))
    passed = {"input": tuple(shapes["input"])} | measure(
        whole, [n for part in parts for n in part.gives], shapes, threads
    )
    classes = shapes[stages[0].head]
    return [assemble(whole, part, passed, classes) for part in parts], passed


def write_whole(stages: Sequence[Frozen], shapes: Shapes) -> onnx.ModelProto:
    """All stages as one graph, whose outputs are their answers."""
    graph = Graph()
    ends = []
    for number, stage in enumerate(stages, start=1):
        for op in stage.ops:
            op.does.write(graph, op)
        ends.append(info(graph.add("Identity", [stage.head], answer(number)), shapes[stage.head]))
    made = helper.make_graph(
        graph.nodes, "whole", [info("input", shapes["input"])], ends, list(graph.constants.values())
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR)


def answer(stage: int) -> str:
    return f"logits:{stage}"


def optimise(model: onnx.ModelProto, threads: int) -> onnx.ModelProto:
    """The graph as ONNX Runtime would run it; it hands that out as a file only."""
    with tempfile.TemporaryDirectory() as folder:
        options = session_options(threads)
        options.optimized_model_filepath = str(Path(folder) / "optimised.onnx")
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return onnx.load(options.optimized_model_filepath)


class StageNodes:
    """The nodes of one stage, and the values it takes and gives."""

    def __init__(self, number: int, nodes: list[onnx.NodeProto]) -> None:
        self.number, self.nodes = number, nodes
        self.takes: tuple[str, ...] = ()
        self.gives: tuple[str, ...] = ()


def cut(model: onnx.ModelProto, stages: int) -> list[StageNodes]:
    """A stage is what its answer needs and no earlier answer did."""
    maker = {name: index for index, node in enumerate(model.graph.node) for name in node.output}
    constants = {tensor.name for tensor in model.graph.initializer}
    taken: set[int] = set()
    parts = []
    for number in range(1, stages + 1):
        mine: set[int] = set()
        todo = [answer(number)]
        while todo:
            index = maker.get(todo.pop())
            if index is not None and index not in taken | mine:
                mine.add(index)
                todo += model.graph.node[index].input
        part = StageNodes(number, [model.graph.node[index] for index in sorted(mine)])
        made = {name for node in part.nodes for name in node.output}
        reads = dict.fromkeys(name for node in part.nodes for name in node.input if name)
        part.takes = tuple(name for name in reads if name not in made and name not in constants)
        taken |= mine
        parts.append(part)
    for part in parts:
        later = {name for other in parts[part.number :] for name in other.takes}
        part.gives = tuple(name for node in part.nodes for name in node.output if name in later)
    return parts


def measure(model: onnx.ModelProto, names: list[str], shapes: Shapes, threads: int) -> dict[str, tuple[int, ...]]:
    """The shapes, without the batch, of values inside an optimised graph: it does not say them itself."""
    if not names:
        return {}
    opened = onnx.ModelProto()
    opened.CopyFrom(model)
    known = {each.name for each in opened.graph.output}
    opened.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names if name not in known
    )
    session = onnxruntime.InferenceSession(
        opened.SerializeToString(), session_options(threads, optimised=True), providers=["CPUExecutionProvider"]
    )
    arrays = session.run(names, {"input": np.zeros((1, *shapes["input"]), np.float32)})
    return {name: tuple(array.shape[1:]) for name, array in zip(names, arrays, strict=True)}


def assemble(model: onnx.ModelProto, part: StageNodes, shapes: Shapes, classes: tuple[int, ...]) -> StageGraph:
    """One stage as a model of its own."""
    nodes = [*part.nodes, helper.make_node("Identity", [answer(part.number)], ["logits"])]
    used = {name for node in part.nodes for name in node.input}
    constants = [tensor for tensor in model.graph.initializer if tensor.name in used]
    inputs = [info(name, shapes[name]) for name in part.takes]
    outputs = [info("logits", classes), *(info(name, shapes[name]) for name in part.gives)]
    graph = helper.make_graph(nodes, f"stage{part.number}", inputs, outputs, constants)
    made = helper.make_model(graph, opset_imports=list(model.opset_import), ir_version=model.ir_version)
    return StageGraph(bytes(made.SerializeToString()), part.takes, part.gives, optimised=True)
