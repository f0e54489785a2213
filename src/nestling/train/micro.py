"""Micro-batches: equal parts of a batch, computed one after another, on one rank or shared by several, with the same bits.

In: a rank's share of a batch. Out: its parts, and in the network the mean of what each leaves in the norms' statistics. Each part
sees a network as the step found it, and what all leave is added up in float64, as their gradients are: so few numbers have
one sum there, whatever their order. Random numbers, such as dropout's, follow from the number of the part.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nestling.errors import NestlingError
from nestling.gradients.reduce import group_of


class MicroBatches:
    """The parts of a step's batch, `count` in all. Part p of N ranks' is that of rank p mod N."""

    def __init__(self, net: nn.Module, count: int, seed: int) -> None:
        self.net, self.count, self.seed = net, count, seed
        group = group_of(True)
        self.rank, self.ranks = (0, 1) if group is None else (group.rank(), group.size())
        if count % self.ranks:
            raise NestlingError(
                f"train.micro_batches={count} cannot be shared equally by {self.ranks} ranks; start a number of ranks that "
                "divides it"
            )
        self.mine = count // self.ranks
        self.begin(0)

    def begin(self, epoch: int) -> None:
        self.epoch, self.step = epoch, 0

    def parts(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's parts. What is done with one must be over before the next is asked for."""
        if len(x) % self.mine:
            raise NestlingError(
                f"found a batch of {len(x) * self.ranks} images, which train.micro_batches={self.count} does not divide; let the "
                "loader drop its last, smaller batch"
            )
        state = self.net.state_dict(keep_vars=True)  # what else is a buffer does not change
        buffers = [buffer for name, buffer in self.net.named_buffers() if name in state]
        before, sums = (
            [buffer.clone() for buffer in buffers],
            [torch.zeros_like(b, dtype=torch.float64) for b in buffers],
        )
        devices = [x.device] if x.device.type == "cuda" else []
        for index in range(self.mine):
            for buffer, old in zip(buffers, before, strict=True):
                buffer.copy_(old)
            with torch.random.fork_rng(devices):
                torch.manual_seed(self.number(self.rank + index * self.ranks))
                yield x[index :: self.mine].contiguous(), y[index :: self.mine].contiguous()
            for total, buffer in zip(sums, buffers, strict=True):
                total.add_(buffer)
        for buffer, mean in zip(buffers, self.mean(sums), strict=True):
            buffer.copy_(mean)
        self.step += 1

    def mean(self, sums: list[Tensor]) -> list[Tensor]:
        """Of all parts of all ranks, from the sums of this rank's."""
        if not sums:
            return []
        flat = torch.cat([total.reshape(-1) for total in sums])
        if self.ranks > 1:
            dist.all_reduce(flat)
        found = flat.div_(self.count).split([total.numel() for total in sums])
        return [part.view(total.shape) for part, total in zip(found, sums, strict=True)]

    def number(self, part: int) -> int:
        """A seed for each part of each step."""
        return (((self.seed * 1_000_003 + self.epoch) * 1_000_003 + self.step) * 1_000_003 + part) % 2**63
