"""What a GPU can do, as far as kernels ask: which instructions it has, and how many processors."""

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Chip:
    name: str  # as the driver says it, such as NVIDIA H200
    capability: tuple[int, int]
    processors: int  # streaming multiprocessors

    @property
    def has_mma(self) -> bool:
        """`mma.sync` of bf16 and `cp.async`: Ampere and later."""
        return self.capability >= (8, 0)

    @property
    def has_wgmma(self) -> bool:
        """Products of matrices in shared memory by four warps: Hopper alone. Later generations have other instructions."""
        return self.capability[0] == 9

    @property
    def architecture(self) -> str:
        """The compiler's name for it; with an `a` it may use what no later chip has, such as wgmma."""
        major, minor = self.capability
        return f"sm_{major}{minor}{'a' if self.has_wgmma else ''}"


CPU = Chip("CPU", (0, 0), 16)  # an interpreter's: no instructions of a GPU, and any number of processors will do


@cache
def of(device: torch.device) -> Chip:
    if device.type != "cuda":
        return CPU
    found = torch.cuda.get_device_properties(device)
    return Chip(found.name, (found.major, found.minor), found.multi_processor_count)
