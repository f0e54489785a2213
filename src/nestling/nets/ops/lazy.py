"""torch, imported when something is first computed: planning does without it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F

__all__ = ["F", "torch"]


def __getattr__(name: str) -> Any:
    """Asked once for each of the two; from then on they stand in this module like any import."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch

    globals().update(torch=torch, F=torch.nn.functional)
    return globals()[name]
