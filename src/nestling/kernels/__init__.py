"""A training pass by kernels of our own, on a GPU: `Fused(net)` where it `suits`."""

from nestling.kernels.fused import Fused, Kept, suits
from nestling.kernels.side_stream import HIGH_PRIORITY

__all__ = ["HIGH_PRIORITY", "Fused", "Kept", "suits"]
