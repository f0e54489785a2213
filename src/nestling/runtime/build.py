"""From a network to an engine: frozen, folded, and in the form that is fastest on the device.

In: a NestedNet and a device. Out: an engine for the anytime worker. On a CPU that is ONNX Runtime where it is installed,
on a GPU a CUDA graph per stage; eager torch is there to compare with and for what the others cannot do.
"""

import importlib.util

import torch

from nestling.errors import NestlingError, nearest
from nestling.export.fold import fold, merge, split
from nestling.export.freeze import Frozen, freeze, shapes
from nestling.nets import NestedNet
from nestling.runtime.engine import Engine
from nestling.runtime.engines.eager import EagerEngine
from nestling.runtime.inputs import check_threads

ENGINES = ("auto", "onnx", "eager", "graph")


def build_engine(net: NestedNet, device: str = "cpu", engine: str = "auto", threads: int = 1) -> Engine:
    """The engine of a network. `threads` is for CPUs: 1 keeps its pace on a busy machine, 0 uses all cores."""
    if engine not in ENGINES:
        raise NestlingError(f"unknown engine {engine!r}; did you mean {nearest(engine, ENGINES)}?")
    check_threads(threads)
    kind = torch.device(device).type
    if engine == "auto":
        engine = "graph" if kind == "cuda" else "onnx" if importlib.util.find_spec("onnxruntime") else "eager"
    stages = merge(fold(freeze(net)))
    if engine == "eager":
        return EagerEngine(stages, shapes(net, stages), device, threads)
    if engine == "graph":
        if kind != "cuda":
            raise NestlingError(f"engine 'graph' needs a CUDA device, found {device!r}; use 'onnx' or 'eager'")
        from nestling.runtime.engines.cuda import GraphEngine

        return GraphEngine(net, stages, shapes(net, stages), device)
    if kind != "cpu":
        raise NestlingError(f"engine 'onnx' runs on the CPU, found device {device!r}; use 'graph' or 'eager'")
    return onnx_engine(net, stages, threads)


def onnx_engine(net: NestedNet, stages: tuple[Frozen, ...], threads: int) -> Engine:
    """Frozen stages as ONNX graphs in memory, run by ONNX Runtime."""
    try:
        from nestling.export.graph import write_stage
        from nestling.runtime.engines.native import native_graphs
        from nestling.runtime.engines.onnx import OnnxEngine, Pool, StageGraph
    except ImportError as error:
        raise NestlingError(f"{error}; run: pip install 'nestling[export]', or use the eager engine") from error
    stages = split(stages)
    known = shapes(net, stages)
    classes = known[stages[0].head][0]
    found = native_graphs(stages, known, Pool.share(threads))
    if found is None:
        return OnnxEngine(
            [StageGraph(write_stage(s, known), s.takes, s.gives) for s in stages], known, classes, threads
        )
    return OnnxEngine(*found, classes, threads)
