"""From a network to an engine: frozen, folded, and in the form that is fastest on the device.

In: a NestedNet and a device. Out: an engine for the anytime worker. On a CPU that is ONNX Runtime where it is installed,
on a GPU a CUDA graph per stage; eager torch is there to compare with and for what the others cannot do.
"""

import importlib.util

import torch

from nestling.anytime.engine import Engine
from nestling.errors import NestlingError, nearest
from nestling.export.fold import fold, merge, split
from nestling.export.freeze import freeze, shapes
from nestling.nets import NestedNet
from nestling.runtime.eager import EagerEngine

ENGINES = ("auto", "onnx", "eager", "graph")


def build_engine(net: NestedNet, device: str = "cpu", engine: str = "auto", threads: int = 1) -> Engine:
    """The engine of a network. `threads` is for CPUs: 1 keeps its pace on a busy machine, 0 uses all cores."""
    if engine not in ENGINES:
        raise NestlingError(f"unknown engine {engine!r}; did you mean {nearest(engine, ENGINES)}?")
    kind = torch.device(device).type
    if engine == "auto":
        engine = "graph" if kind == "cuda" else "onnx" if importlib.util.find_spec("onnxruntime") else "eager"
    stages = merge(fold(freeze(net)))
    if engine == "eager":
        return EagerEngine(stages, shapes(net, stages), device, threads)
    if engine == "graph":
        if kind != "cuda":
            raise NestlingError(f"engine 'graph' needs a CUDA device, found {device!r}; use 'onnx' or 'eager'")
        from nestling.runtime.graphs import GraphEngine

        return GraphEngine(net, stages, shapes(net, stages), device)
    if kind != "cpu":
        raise NestlingError(f"engine 'onnx' runs on the CPU, found device {device!r}; use 'graph' or 'eager'")
    return onnx_engine(net, threads)


def onnx_engine(net: NestedNet, threads: int = 1) -> Engine:
    """The stages as ONNX graphs in memory, run by ONNX Runtime."""
    try:
        from nestling.anytime.onnx import OnnxEngine, StageGraph
        from nestling.export.graph import write_stage
    except ImportError as error:
        raise NestlingError(f"{error}; run: pip install 'nestling[export]', or use the eager engine") from error
    stages = split(merge(fold(freeze(net))))
    known = shapes(net, stages)
    graphs = [StageGraph(write_stage(stage, known), stage.takes, stage.gives) for stage in stages]
    return OnnxEngine(graphs, known, known[stages[0].head][0], threads)
