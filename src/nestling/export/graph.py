"""Frozen stages as ONNX graphs, written operation by operation.

In: a `Frozen` program and the shapes of the values between stages. Out: the bytes of one ONNX model whose inputs are what
the stage takes and whose outputs are "logits" and what it gives; the batch is free. Written directly, not traced: that
takes milliseconds, and every operation is one that ONNX Runtime fuses well. A stage with a module that has no ONNX form
here (somebody's own activation) is traced by torch's exporter instead. Nothing is run.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from nestling.errors import NestlingError
from nestling.export.freeze import Frozen
from nestling.export.opset import declare_oldest
from nestling.export.spelled import Spelled
from nestling.nets.ops.forms import as_onnx
from nestling.nets.ops.frozen import Op

OPSET, IR = 20, 10
BATCH = "batch"
EXPORTER = "torch.onnx._internal.exporter._registration"
Shapes = Mapping[str, tuple[int, ...]]


class Graph:
    """An ONNX graph while it is being written: nodes and constants."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}

    def add(self, kind: str, reads: Sequence[str], out: str, attributes: Mapping[str, Any] | None = None) -> str:
        known = {
            k: numpy_helper.from_array(v.numpy()) if isinstance(v, Tensor) else v for k, v in (attributes or {}).items()
        }
        self.nodes.append(helper.make_node(kind, list(reads), [out], name=out, **known))
        return out

    def constant(self, name: str, value: Tensor | NDArray[Any]) -> str:
        array = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
        self.constants[name] = numpy_helper.from_array(np.ascontiguousarray(array), name)
        return name

    def ints(self, name: str, *values: int) -> str:
        return self.constant(name, np.array(values, np.int64))

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
        op.does.write(graph, op)
    graph.add("Identity", [frozen.head], "logits")
    inputs = [info(name, shapes[name]) for name in frozen.takes]
    outputs = [info("logits", shapes[frozen.head]), *(info(name, shapes[name]) for name in frozen.gives)]
    made = helper.make_graph(graph.nodes, f"stage{frozen.stage}", inputs, outputs, list(graph.constants.values()))
    opset = [helper.make_opsetid("", OPSET)]
    model = helper.make_model(made, producer_name="nestling", opset_imports=opset, ir_version=IR)
    return checked(model)


def checked(model: onnx.ModelProto) -> bytes:
    """A model that says what it needs and no more, and is valid; equal models give equal bytes."""
    declare_oldest(model)
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
                Spelled(frozen),
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
    return checked(program.model_proto)
