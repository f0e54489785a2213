"""The mean of a task's gradient over all ranks, started early and waited for late.

In comes one row (a list of tensors); it is laid flat, reduced with plain `torch.distributed` while the next
task's backward runs, and handed back as views of the flat buffer. Ranks reduce rows first and project after:
the other order is wrong.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from nestling.errors import NestlingError


def group_of(
    reduce: "bool | dist.ProcessGroup", usual: "dist.ProcessGroup | None" = None
) -> "dist.ProcessGroup | None":
    """The group to average over: the usual one, which is all ranks by default, or the one given; None for a lone process."""
    if not isinstance(reduce, bool) and not (dist.is_available() and isinstance(reduce, dist.ProcessGroup)):
        raise NestlingError(f"reduce is {reduce!r}: expected True, False or a torch.distributed process group")
    if reduce is False or not dist.is_available() or not dist.is_initialized():
        return None
    group = (usual or dist.group.WORLD) if reduce is True else reduce
    return group if group is not None and dist.get_world_size(group) > 1 else None


class Reduction:
    """A row on its way: `wait` puts the averaged tensors back in their places. `wide`: summed in float64, undivided."""

    def __init__(self, row: list[Tensor | None], group: dist.ProcessGroup, wide: bool = False) -> None:
        self.row = row
        self.sent: list[tuple[list[int], list[torch.Size], Tensor, dist.Work]] = []
        kinds: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(row):
            if tensor is not None:
                kinds.setdefault(torch.float64 if wide else tensor.dtype, []).append(index)
        for kind, places in kinds.items():
            tensors = [tensor for tensor in (row[i] for i in places) if tensor is not None]
            flat = torch.cat([tensor.reshape(-1).to(kind) for tensor in tensors])
            if not wide:
                flat.div_(dist.get_world_size(group))  # before the sum, as DistributedDataParallel does: no overflow
            work = dist.all_reduce(flat, group=group, async_op=True)
            assert work is not None
            self.sent.append((places, [tensor.shape for tensor in tensors], flat, work))
            for i in places:  # the row lives in the flat buffer from here on
                row[i] = None

    def wait(self) -> None:
        for places, shapes, flat, work in self.sent:
            work.wait()
            parts = flat.split([shape.numel() for shape in shapes])
            for i, shape, part in zip(places, shapes, parts, strict=True):
                self.row[i] = part.view(shape)


def agree(masks: Sequence[int], tasks: int, device: torch.device, group: dist.ProcessGroup) -> list[int]:
    """Owner masks joined over all ranks: a parameter may be used on one rank and not on another."""
    bits = torch.tensor([[mask >> t & 1 for t in range(tasks)] for mask in masks], dtype=torch.int32)
    bits = bits.to(device)
    dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=group)
    return [sum(bit << t for t, bit in enumerate(row)) for row in bits.tolist()]
