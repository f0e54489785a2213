"""Frozen stages as ONNX graphs, written operation by operation.

In: a `Frozen` program and the shapes of the values between stages. Out: the bytes of one ONNX model whose inputs are what
the stage takes and whose outputs are "logits" and what it gives; the batch is free. Written directly, not traced: that
takes milliseconds, and every operation is one that ONNX Runtime fuses well. A stage with a module that has no ONNX form
here (somebody's own activation) is traced by torch's exporter instead. Nothing is run.
"""

import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from nestling.errors import NestlingError
from nestling.export.freeze import Frozen, Op
from nestling.export.modules import as_onnx
from nestling.export.torchstage import TorchStage

OPSET, IR = 20, 10
BATCH = "batch"
EXPORTER = "torch.onnx._internal.exporter._registration"
Shapes = Mapping[str, tuple[int, ...]]


class Graph:
    """An ONNX graph while it is being written: nodes and constants."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}

    def add(self, kind: str, reads: list[str], out: str, attributes: Mapping[str, Any] | None = None) -> str:
        self.nodes.append(helper.make_node(kind, reads, [out], name=out, **(attributes or {})))
        return out

    def constant(self, name: str, value: Tensor | NDArray[Any]) -> str:
        array = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
        self.constants[name] = numpy_helper.from_array(np.ascontiguousarray(array), name)
        return name

    def weights(self, op: Op) -> list[str]:
        """The constants of an operation, as its further inputs."""
        named = (("weight", op.weight), ("bias", op.bias))
        return [self.constant(f"{op.out}.{name}", tensor) for name, tensor in named if tensor is not None]


def write_stage(frozen: Frozen, shapes: Shapes) -> bytes:
    """One stage as the bytes of an ONNX model."""
    if must_trace(frozen):
        return trace_stage(frozen, shapes)
    graph = Graph()
    for op in frozen.ops:
        WRITERS[op.kind](graph, op)
    graph.add("Identity", [frozen.head], "logits")
    inputs = [info(name, shapes[name]) for name in frozen.takes]
    outputs = [info("logits", shapes[frozen.head]), *(info(name, shapes[name]) for name in frozen.gives)]
    made = helper.make_graph(graph.nodes, f"stage{frozen.stage}", inputs, outputs, list(graph.constants.values()))
    opset = [helper.make_opsetid("", OPSET)]
    model = helper.make_model(made, producer_name="nestling", opset_imports=opset, ir_version=IR)
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString(deterministic=True))


def must_trace(frozen: Frozen) -> bool:
    """Whether a stage holds a module that has no ONNX form here."""
    return any(op.module is not None and as_onnx(op.module) is None for op in frozen.ops)


def info(name: str, shape: tuple[int, ...]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [BATCH, *shape])


@contextmanager
def quietly(name: str) -> Iterator[None]:
    """Nothing but errors of a logger: torch's exporter tells of every operation that torchvision would add."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def trace_stage(frozen: Frozen, shapes: Shapes) -> bytes:
    """One stage through torch's own exporter: general, and some hundred times slower."""
    state = tuple(torch.zeros(2, *shapes[name]) for name in frozen.takes)  # a batch of one would be taken as a constant
    free = (tuple({0: torch.export.Dim(BATCH)} for _ in state),)
    try:
        with warnings.catch_warnings(), quietly(EXPORTER):
            warnings.simplefilter("ignore")  # the exporter's own, about its own use of torch
            program = torch.onnx.export(
                TorchStage(frozen),
                state,
                dynamo=True,
                dynamic_shapes=free,
                input_names=list(frozen.takes),
                output_names=["logits", *frozen.gives],
                opset_version=OPSET,
                verbose=False,
            )
    except Exception as error:  # whatever the exporter meets in somebody else's module
        raise NestlingError(
            f"stage {frozen.stage} has a layer that torch cannot write as ONNX: {error}. Use --format pt2, or the eager "
            "engine, or replace that layer"
        ) from error
    assert program is not None
    written = io.BytesIO()
    program.save(written)  # type: ignore[arg-type]
    return written.getvalue()


def conv(graph: Graph, op: Op) -> None:
    assert op.weight is not None and op.node is not None
    attributes = {
        "kernel_shape": list(op.weight.shape[2:]),
        "strides": list(op.node.stride),
        "pads": [*op.node.padding, *op.node.padding],
        "dilations": list(op.node.dilation),
        "group": op.groups,
    }
    graph.add("Conv", [op.reads[0], *graph.weights(op)], op.out, attributes)


def linear(graph: Graph, op: Op) -> None:
    graph.add("Gemm", [op.reads[0], *graph.weights(op)], op.out, {"transB": 1})


def affine(graph: Graph, op: Op) -> None:
    """As batch norm with mean 0 and variance 1: ONNX Runtime fuses that with the ReLU behind it, and Mul + Add not."""
    assert op.bias is not None
    zero = graph.constant(f"{op.out}.mean", np.zeros(len(op.bias), np.float32))
    one = graph.constant(f"{op.out}.variance", np.ones(len(op.bias), np.float32))
    graph.add("BatchNormalization", [op.reads[0], *graph.weights(op), zero, one], op.out, {"epsilon": 0.0})


def groupnorm(graph: Graph, op: Op) -> None:
    """As instance norm of the groups, then scale and shift: GroupNormalization is too new for many runtimes."""
    assert op.weight is not None and op.bias is not None
    apart = graph.constant(f"{op.out}.apart", np.array([0, op.groups, -1], np.int64))
    groups = graph.add("Reshape", [op.reads[0], apart], f"{op.out}.groups")
    one = graph.constant(f"{op.out}.one", np.ones(op.groups, np.float32))
    zero = graph.constant(f"{op.out}.zero", np.zeros(op.groups, np.float32))
    normed = graph.add("InstanceNormalization", [groups, one, zero], f"{op.out}.normed", {"epsilon": op.eps})
    together = graph.constant(f"{op.out}.together", np.array([0, *op.shape], np.int64))
    flat = graph.add("Reshape", [normed, together], f"{op.out}.flat")
    shape = (-1, *[1] * (len(op.shape) - 1))
    scale = graph.constant(f"{op.out}.scale", op.weight.view(shape))
    shift = graph.constant(f"{op.out}.shift", op.bias.view(shape))
    graph.add("Add", [graph.add("Mul", [flat, scale], f"{op.out}.scaled"), shift], op.out)


def prelu(graph: Graph, op: Op) -> None:
    assert op.weight is not None
    slope = graph.constant(f"{op.out}.slope", op.weight.view(-1, *[1] * (len(op.shape) - 1)))
    graph.add("PRelu", [op.reads[0], slope], op.out)


def mapped(graph: Graph, op: Op) -> None:
    read, out = op.reads[0], op.out
    if op.function == "mean":
        graph.add("Flatten", [graph.add("GlobalAveragePool", [read], f"{out}.pool")], out)
    else:
        kind, attributes = MAPS[op.function]
        graph.add(kind, [read], out, attributes)


MAPS: dict[str, tuple[str, dict[str, Any]]] = {
    "relu": ("Relu", {}),
    "pool2": ("AveragePool", {"kernel_shape": [2, 2], "strides": [2, 2]}),
    "pool2up": ("AveragePool", {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}),
    "maxpool3": ("MaxPool", {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
}


def module(graph: Graph, op: Op) -> None:
    assert op.module is not None
    steps = as_onnx(op.module) or []
    value = op.reads[0]
    for index, (kind, attributes) in enumerate(steps):
        last = index == len(steps) - 1
        value = graph.add(kind, [value], op.out if last else f"{op.out}.{index}", attributes)


def zipped(graph: Graph, op: Op) -> None:
    kind = {"add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "max": "Max", "min": "Min"}[op.function]
    total = op.reads[0]
    for index, read in enumerate(op.reads[1:], start=1):
        last = index == len(op.reads) - 1
        total = graph.add(kind, [total, read], op.out if last else f"{op.out}.{index}")


def cat(graph: Graph, op: Op) -> None:
    graph.add("Concat", list(op.reads), op.out, {"axis": 1})


def slice_(graph: Graph, op: Op) -> None:
    bounds = (("start", op.start), ("stop", op.stop), ("axis", 1))
    names = [graph.constant(f"{op.out}.{word}", np.array([value], np.int64)) for word, value in bounds]
    graph.add("Slice", [op.reads[0], *names], op.out)


def pad(graph: Graph, op: Op) -> None:
    """Zero channels behind those of an image. As a 1x1 convolution by ones and zeros, which is exact: a Pad would leave
    ONNX Runtime's blocked layout, and with it every sum and batch norm up to the next group of blocks."""
    if len(op.shape) == 3:
        identity = np.eye(op.start + op.stop, op.start, dtype=np.float32)[:, :, None, None]
        kernel = graph.constant(f"{op.out}.identity", identity)
        graph.add("Conv", [op.reads[0], kernel], op.out, {"kernel_shape": [1, 1]})
    else:
        amounts = graph.constant(f"{op.out}.amounts", np.array([0, 0, 0, op.stop], np.int64))
        graph.add("Pad", [op.reads[0], amounts], op.out)


def zero(graph: Graph, op: Op) -> None:
    first, last = (graph.constant(f"{op.out}.{i}", np.array([i], np.int64)) for i in (0, 1))
    shape = graph.add("Shape", [op.reads[0]], f"{op.out}.shape")
    batch = graph.add("Slice", [shape, first, last], f"{op.out}.batch")
    rest = graph.constant(f"{op.out}.rest", np.array(op.shape, np.int64))
    whole = graph.add("Concat", [batch, rest], f"{op.out}.whole", {"axis": 0})
    graph.add("ConstantOfShape", [whole], op.out, {"value": numpy_helper.from_array(np.zeros(1, np.float32))})


def flatten(graph: Graph, op: Op) -> None:
    graph.add("Flatten", list(op.reads), op.out)


def same(graph: Graph, op: Op) -> None:
    graph.add("Identity", list(op.reads), op.out)


WRITERS: dict[str, Callable[[Graph, Op], None]] = {
    "conv": conv,
    "linear": linear,
    "affine": affine,
    "groupnorm": groupnorm,
    "prelu": prelu,
    "map": mapped,
    "module": module,
    "zip": zipped,
    "cat": cat,
    "slice": slice_,
    "pad": pad,
    "zero": zero,
    "flatten": flatten,
    "same": same,
}
