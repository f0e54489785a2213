"""Stages as torch.export programs (.pt2).

In: a `Frozen` program. Out: the bytes of a saved ExportedProgram with a free batch, for whoever goes on with torch
(AOTInductor, ExecuTorch). torch stores the example inputs with it, so they are two images only.
"""

import io
from collections.abc import Mapping

import torch

from nestling.errors import NestlingError
from nestling.export.freeze import Frozen
from nestling.export.torchstage import TorchStage


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
