"""From a network to an engine: frozen, folded, and in the form that is fastest on the device.

In: a NestedNet and a device. Out: an engine for the runtime. On a CPU that is ONNX Runtime where it is installed, on a GPU a
CUDA graph per stage; eager torch is there to compare with and for what the others cannot do. ENGINES holds them all.
"""

import importlib.util
from collections.abc import Callable

import torch

from nestling.errors import NestlingError, nearest
from nestling.export.fold import fold, merge, split
from nestling.export.freeze import Frozen, freeze, shapes
from nestling.export.joined import joined, ways
from nestling.nets import NestedNet
from nestling.runtime.engine import Engine, JoiningEngine
from nestling.runtime.inputs import check_threads

Build = Callable[[NestedNet, tuple[Frozen, ...], torch.device, int], Engine]


def build_engine(net: NestedNet, device: str = "cpu", engine: str = "auto", threads: int = 1) -> Engine:
    """The engine of a network. `threads` is for CPUs: 1 keeps its pace on a busy machine, 0 uses all cores."""
    check_threads(threads)
    where = torch.device(device)
    if engine == "auto":
        onnx = importlib.util.find_spec("onnxruntime") is not None
        engine = "graph" if where.type == "cuda" else "onnx" if onnx else "eager"
    if engine not in ENGINES:
        raise NestlingError(f"unknown engine {engine!r}; did you mean {nearest(engine, ('auto', *ENGINES))}?")
    return ENGINES[engine](net, merge(fold(freeze(net))), where, threads)


def eager_engine(net: NestedNet, stages: tuple[Frozen, ...], device: torch.device, threads: int) -> Engine:
    from nestling.runtime.engines.eager import EagerEngine

    return EagerEngine(stages, shapes(net, stages), device, threads)


def graph_engine(net: NestedNet, stages: tuple[Frozen, ...], device: torch.device, threads: int) -> Engine:
    """A CUDA graph per stage."""
    if device.type != "cuda":
        raise NestlingError(f"engine 'graph' needs a CUDA device, found '{device}'; use 'onnx' or 'eager'")
    from nestling.runtime.engines.cuda import GraphEngine

    return GraphEngine(net, stages, shapes(net, stages), device)


def onnx_engine(net: NestedNet, stages: tuple[Frozen, ...], device: torch.device, threads: int) -> Engine:
    """Frozen stages as ONNX graphs in memory, run by ONNX Runtime."""
    check_cpu("onnx", device)
    try:
        from nestling.export.graph import write_stage
        from nestling.runtime.engines.native import native_graphs
        from nestling.runtime.engines.onnx import OnnxEngine, Pool, StageGraph
    except ImportError as error:
        raise NestlingError(f"{error}; run: pip install 'nestling[export]', or use the eager engine") from error

    def run(net: NestedNet, stages: tuple[Frozen, ...]) -> JoiningEngine:
        stages = split(stages)
        known = shapes(net, stages)
        found = native_graphs(stages, known, Pool.share(threads)) or (
            [StageGraph(write_stage(stage, known), stage.takes, stage.gives) for stage in stages],
            known,
        )
        return OnnxEngine(*found, known[stages[0].head], threads)

    return with_jumps(net, stages, run)


def openvino_engine(net: NestedNet, stages: tuple[Frozen, ...], device: torch.device, threads: int) -> Engine:
    """Frozen stages as ONNX graphs in memory, run by OpenVINO, in bf16 where the processor has it."""
    check_cpu("openvino", device)
    try:
        from nestling.export.graph import write_stage
        from nestling.runtime.engines.onnx import StageGraph
        from nestling.runtime.engines.openvino import OpenVinoEngine
    except ImportError as error:
        raise NestlingError(f"{error}; run: pip install 'nestling[export,openvino]', or use engine 'onnx'") from error

    def run(net: NestedNet, stages: tuple[Frozen, ...]) -> JoiningEngine:
        known = shapes(net, stages)
        graphs = [StageGraph(write_stage(stage, known), stage.takes, stage.gives) for stage in stages]
        return OpenVinoEngine(graphs, known, threads)

    return with_jumps(net, stages, run)


def with_jumps(
    net: NestedNet, stages: tuple[Frozen, ...], run: Callable[[NestedNet, tuple[Frozen, ...]], JoiningEngine]
) -> Engine:
    """Stages one by one, or D_s at once in the way that is soonest here."""
    from nestling.export.graph import must_trace
    from nestling.runtime.engines.jumps import JumpEngine, soonest

    first = run(net, stages)
    if len(stages) == 1 or any(map(must_trace, stages)):  # tracing takes half a minute
        return first
    beginnings, shape = [first], net.plan.input.shape(net.plan.input.channels)
    for stage in range(2, len(stages) + 1):
        nets = [joined(net, ends, stage) for ends in ways(net.plan, stage)]
        beginnings.append(soonest([run(each, merge(fold(freeze(each)))) for each in nets], shape))
    return JumpEngine(beginnings)


def check_cpu(engine: str, device: torch.device) -> None:
    if device.type != "cpu":
        raise NestlingError(f"engine '{engine}' runs on the CPU, found device '{device}'; use 'graph' or 'eager'")


ENGINES: dict[str, Build] = {
    "onnx": onnx_engine,
    "openvino": openvino_engine,
    "eager": eager_engine,
    "graph": graph_engine,
}
