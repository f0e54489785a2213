"""Exporting a network's stages: each its own graph, with state in and out.

freeze.py cuts a network into frozen programs, fold.py makes them fast, torchstage.py runs them with torch; graph.py and
modules.py write ONNX, pt2.py torch.export; write.py makes and verifies a folder of them, quantise.py one in 8 bits;
run.py is `nestling export RUN`.
"""

from typing import Any

__all__ = ["command", "export_net", "show"]

ROOMS = {"command": "run", "show": "run", "export_net": "write"}


def __getattr__(name: str) -> Any:
    """Lazily: the runtime needs frozen programs, and need not wait for what writes files."""
    import importlib

    if name not in ROOMS:
        raise AttributeError(f"module 'nestling.export' has no attribute {name!r}")
    return getattr(importlib.import_module(f"nestling.export.{ROOMS[name]}"), name)
