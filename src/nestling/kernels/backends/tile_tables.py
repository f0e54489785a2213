"""Tiles that were measured to be fast: tiles/*.json, a file for each chip, written by benchmarks/kernels.py --tune.

In: a chip, a backend's name, a kernel and a shape. Out: the tiles, by name. A chip that has no file of its own gets those of
the chip that all shapes were first measured on.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from nestling.kernels.chip import Chip

FOLDER = Path(__file__).parent / "tiles"
FIRST = "NVIDIA H200"
TileKey = tuple[str, str, int, int, int]  # backend, kernel, channels in, channels out, side


def file_of(name: str) -> Path:
    return FOLDER / f"{name.lower().replace(' ', '-')}.json"


@cache
def table(name: str) -> dict[TileKey, dict[str, Any]]:
    """A chip's rows; none if it has no file."""
    path = file_of(name)
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.is_file() else []
    return {(row["backend"], row["kernel"], row["cin"], row["cout"], row["side"]): row for row in rows}


def measured(chip: Chip, *shape: Any) -> dict[str, int] | None:
    """The tiles that are known for a shape, on this chip or else on the first."""
    row = table(chip.name).get(shape) or table(FIRST).get(shape)
    return None if row is None else row["tiles"]


def written(name: str, provenance: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """A table as text, a row a line, so that a change shows."""
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    return f'{{"chip": {json.dumps(name)}, "provenance": {json.dumps(provenance)}, "rows": [\n{lines}\n]}}\n'
