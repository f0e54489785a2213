"""A training pass by kernels of our own, on a GPU: `Fused(net)` where it `suits`."""

from nestling.kernels.aside import PREFERRED
from nestling.kernels.forward import Fused, Kept, suits

__all__ = ["PREFERRED", "Fused", "Kept", "suits"]
