"""Exporting a network's stages: each its own graph, with state in and out.

freeze.py cuts a network into frozen programs, fold.py makes them fast, torchstage.py runs them with torch; graph.py and
modules.py write ONNX, pt2.py torch.export; write.py makes and verifies a folder of them, quantise.py one in 8 bits.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nestling.export.write import export_net

__all__ = ["export_net"]


def __getattr__(name: str) -> Any:
    if name == "export_net":  # lazily: the runtime needs frozen programs, and need not wait for what writes files
        from nestling.export.write import export_net

        return export_net
    raise AttributeError(f"module 'nestling.export' has no attribute {name!r}")
