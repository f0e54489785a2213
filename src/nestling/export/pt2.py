"""Stages as torch.export programs (.pt2), and the engine that runs them again.

In: a `Frozen` program. Out: the bytes of a saved ExportedProgram with a free batch, for whoever goes on with torch
(AOTInductor, ExecuTorch). torch stores the example inputs with it, so they are two images only.
"""

import io
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nestling.errors import NestlingError
from nestling.export.freeze import Frozen
from nestling.export.torchstage import TorchStage
from nestling.runtime.engine import Floats, Stop
from nestling.runtime.manifest import Manifest, read_graph


def write_stage(frozen: Frozen, shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """One stage as the bytes of a .pt2 file."""
    state = tuple(torch.zeros(2, *shapes[name]) for name in frozen.takes)
    free = (tuple({0: torch.export.Dim("batch")} for _ in state),)
    try:
        with torch.no_grad():
            program = torch.export.export(TorchStage(frozen), state, dynamic_shapes=free)
    except Exception as error:  # whatever torch.export meets in somebody else's module
        raise NestlingError(f"torch.export cannot trace stage {frozen.stage}: {error}") from error
    written = io.BytesIO()
    torch.export.save(program, written)
    return written.getvalue()


class Pt2Engine:
    """Runs saved programs on the CPU; it is here to check them."""

    name, most = "torch.export", 0

    def __init__(self, programs: Sequence[Any], manifest: Manifest) -> None:
        self.programs = [program.module() for program in programs]
        self.files = manifest.stages
        self.row_bytes = sum(4 * prod(shape) for shape in manifest.shapes.values())

    @property
    def stages(self) -> int:
        return len(self.files)

    def start(self, x: Floats) -> dict[str, Tensor]:
        return {"input": torch.from_numpy(x)}

    def step(self, stage: int, state: dict[str, Tensor], stop: Stop) -> tuple[Floats, dict[str, Tensor]]:
        stop.check()
        file = self.files[stage - 1]
        with torch.no_grad():
            logits, *given = self.programs[stage - 1](*(state[name] for name in file.takes))
        return logits.numpy(), {**state, **dict(zip(file.gives, given, strict=True))}

    def take(self, state: dict[str, Tensor], rows: Sequence[int]) -> dict[str, Tensor]:
        return {name: value[list(rows)] for name, value in state.items()}

    def close(self) -> None:
        self.programs.clear()


def open_engine(folder: Path, manifest: Manifest) -> Pt2Engine:
    """Read stages back that were just written. torch's format may hold pickled parts: open only files of your own."""
    return Pt2Engine([torch.export.load(io.BytesIO(read_graph(folder, s))) for s in manifest.stages], manifest)
