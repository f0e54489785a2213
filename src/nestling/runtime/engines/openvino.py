"""Stages in OpenVINO, in 16 bits (bf16) where the processor computes in them: about twice as fast as ONNX Runtime there.

In: one graph per stage with the names of the values it takes and gives, and their shapes. State is those values by name, in
float32. Graphs are compiled for each size of batch when it first comes. Answers differ from the network's by the rounding of
bf16 (8 bits): what that does to errors stands in docs/runtime.md. Needs the package openvino.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import openvino

from nestling.errors import NestlingError
from nestling.runtime.engine import Abandoned, Floats, Stop
from nestling.runtime.engines.onnx import StageGraph, cores

NamedArrays = Mapping[str, Floats]


class OpenVinoEngine:
    """Runs stages in OpenVINO on the CPU."""

    most = 0
    stops = True
    jumps = False
    places = 1

    def __init__(self, graphs: Sequence[StageGraph], shapes: Mapping[str, tuple[int, ...]], threads: int = 1) -> None:
        """`shapes` are those of the values between stages, without the batch. threads=0: all cores."""
        self.graphs, self.shapes = tuple(graphs), dict(shapes)
        self.core = openvino.Core()
        rounded = "BF16" in self.core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        self.name = "openvino bf16" if rounded else "openvino"
        self.options = {
            "INFERENCE_PRECISION_HINT": "bf16" if rounded else "f32",
            "INFERENCE_NUM_THREADS": threads or cores(),
            "NUM_STREAMS": "1",
        }
        self.requests: dict[tuple[int, int], Any] = {}  # by stage and batch
        later = [{name for graph in graphs[done:] for name in graph.takes} for done in range(len(graphs) + 1)]
        self.later = later
        self.row_bytes = 4 * sum(prod(shapes[name]) for name in {"input", *(n for g in graphs for n in g.gives)})

    @property
    def stages(self) -> int:
        return len(self.graphs)

    def request(self, stage: int, images: int) -> Any:
        """A compiled stage for so many images."""
        if (stage, images) not in self.requests:
            graph = self.graphs[stage - 1]
            try:
                model = self.core.read_model(graph.model)
                model.reshape({name: [images, *self.shapes[name]] for name in graph.takes})
                compiled = self.core.compile_model(model, "CPU", self.options)
            except RuntimeError as error:
                why = str(error).strip().splitlines()[-1].removeprefix("-- ")
                raise NestlingError(
                    f"OpenVINO {openvino.__version__} cannot run stage {stage} ({why}); use the engine 'onnx'"
                ) from error
            self.requests[stage, images] = compiled.create_infer_request()
        return self.requests[stage, images]

    def start(self, x: Floats) -> NamedArrays:
        return {"input": x}

    def step(self, stage: int, state: NamedArrays, stop: Stop) -> tuple[Floats, NamedArrays]:
        graph, request = self.graphs[stage - 1], self.request(stage, len(next(iter(state.values()))))
        for name in graph.takes:
            request.set_tensor(name, openvino.Tensor(np.ascontiguousarray(state[name]), shared_memory=True))
        stop.check()
        request.start_async()
        stop.call(request.cancel)
        try:
            request.wait()
        except RuntimeError as error:
            if stop.asked:
                raise Abandoned from error
            raise
        made = {name: np.array(request.get_tensor(name).data) for name in ("logits", *graph.gives)}
        values = {**state, **made}
        return made["logits"], {name: value for name, value in values.items() if name in self.later[stage]}

    def take(self, state: NamedArrays, places: Sequence[int]) -> NamedArrays:
        return {name: value[list(places)] for name, value in state.items()}

    def join(self, parts: Sequence[tuple[NamedArrays, int]]) -> NamedArrays:
        return {name: np.stack([state[name][place] for state, place in parts]) for name in parts[0][0]}

    def close(self) -> None:
        self.requests.clear()
