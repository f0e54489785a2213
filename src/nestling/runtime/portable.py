"""Exported stages answered by a deadline, with numpy and onnxruntime only: torch is never imported.

In: a folder that `nestling export` wrote. `Portable(folder).answer(x, deadline=0.005)` is what nestling.Runtime does, by the same
worker and clock; x is an array, uint8 as in files or float32 normalised. It trains, measures and exports nothing.
"""

from pathlib import Path

from nestling.errors import NestlingError
from nestling.export.manifest import Manifest, read_known, read_manifest
from nestling.runtime.caller import MEMORY, Anytime
from nestling.runtime.confidence import Outcomes, read_outcomes
from nestling.runtime.engine import warm_up
from nestling.runtime.engines.onnx import OnnxEngine, StageGraph
from nestling.runtime.inputs import check_threads
from nestling.runtime.pace import Pace

__all__ = ["Portable", "open_engine"]


class Portable(Anytime):
    """Answers by a deadline from exported stages. Thread-safe; close it, or use it as a context manager."""

    def __init__(self, folder: str | Path, threads: int = 1, memory: int = MEMORY) -> None:
        """threads=0 uses all cores; one thread keeps its pace better on a busy machine."""
        self.folder, self.manifest = folder, read_manifest(folder)
        engine = open_engine(folder, self.manifest, threads)
        spec = self.manifest.spec
        super().__init__(engine, spec, Pace(warm_up(engine, spec.shape)), memory)
        self._warm()

    def _held_out(self) -> Outcomes:
        return read_outcomes(self.folder)


def open_engine(folder: str | Path, manifest: Manifest, threads: int = 1) -> OnnxEngine:
    """The engine of exported stages, after every graph has been checked against the manifest."""
    check_threads(threads)
    if manifest.form != "onnx":
        raise NestlingError(f"{folder} holds stages in the form {manifest.form!r}; export them with --format onnx")
    graphs = [StageGraph(read_known(folder, stage), stage.takes, stage.gives) for stage in manifest.stages]
    return OnnxEngine(graphs, manifest.shapes, manifest.spec.answer, threads)
