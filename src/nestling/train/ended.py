"""The end of an epoch, which the device may not have reached yet: moments in its work, and numbers on their way from it.

In: tensors on the device, in the order of its work. Out: the same in host memory, once `wait` has returned. Nothing else
here waits, so that the device goes on with the next epoch, and other runs beside it, while numbers are read and written.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Moment:
    """A point in a device's work, put there when made: in the current stream on CUDA, now on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.time = time.perf_counter()
        self.event: Any = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    def reached(self) -> bool:
        return self.event is None or bool(self.event.query())

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def since(self, earlier: "Moment") -> float:
        """Seconds of the device's work between two moments that were reached."""
        if self.event is None:
            return self.time - earlier.time
        return float(earlier.event.elapsed_time(self.event)) / 1000


def leaving(tensor: Tensor) -> Tensor:
    """A tensor on its way to host memory, pinned, so that nothing waits; the tensor itself where it is there already."""
    return tensor.detach().to("cpu", non_blocking=True)


def leaving_together(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Many tensors on their way, packed into one of each type: one copy and one piece of pinned memory, not hundreds."""
    home: dict[str, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors.values()):
        alike = {name: tensor for name, tensor in tensors.items() if tensor.dtype == dtype}
        packed = leaving(torch.cat([tensor.detach().reshape(-1) for tensor in alike.values()]))
        parts = packed.split([tensor.numel() for tensor in alike.values()])
        home |= {name: part.view(alike[name].shape) for name, part in zip(alike, parts, strict=True)}
    return {name: home[name] for name in tensors}


@dataclass(frozen=True, eq=False)
class Ended:
    """One epoch whose steps are queued. Its tensors may be read after `home.wait()`."""

    epoch: int  # from 0
    rate: float  # of its last step
    began: Moment
    trained: Moment  # the last step is done
    home: Moment  # everything below lies in host memory
    losses: Tensor  # (steps, stages)
    test: Tensor | None  # (2, stages): error and loss on the test split, where they were asked for
    state: dict[str, Tensor]  # for a checkpoint; empty on ranks that write none

    @property
    def seconds(self) -> float:
        return self.trained.since(self.began)
