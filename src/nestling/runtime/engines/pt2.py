"""Stages that torch.export has written (.pt2), run with torch on the CPU: to check them.

In: a folder of them and its manifest. torch's format may hold pickled parts: open only files of your own.
"""

import io
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nestling.export.manifest import Manifest, read_known
from nestling.runtime.engine import Floats, Stop


class Pt2Engine:
    """Runs saved programs on the CPU."""

    name, most, stops, jumps, places = "torch.export", 0, False, False, 1

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

    def take(self, state: dict[str, Tensor], places: Sequence[int]) -> dict[str, Tensor]:
        return {name: value[list(places)] for name, value in state.items()}

    def close(self) -> None:
        self.programs.clear()


def open_engine(folder: Path, manifest: Manifest) -> Pt2Engine:
    """Read stages back that were just written."""
    return Pt2Engine([torch.export.load(io.BytesIO(read_known(folder, s))) for s in manifest.stages], manifest)
