"""What each rank does in test_distributed.py: `torchrun --nproc-per-node 2 distributed_ranks.py CASES FOLDER`.

Trains a small nest on this rank's half of every batch and saves the weights; or shows that a wrapper is refused.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from nestling.errors import NestlingError
from nestling.gradients import Accumulator, backward
from nestling.gradients.combiners import COMBINERS


class Nest(nn.Module):
    """Three exits without batch statistics; `odd` is used on ranks with odd numbers only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stages = nn.ModuleList(nn.Linear(8 if s == 0 else 16, 16) for s in range(3))
        self.heads = nn.ModuleList(nn.Linear(16, 4) for _ in range(3))
        self.odd = nn.Parameter(torch.zeros(4))

    def losses(self, x: Tensor, y: Tensor, odd: float = 0.0) -> list[Tensor]:
        found = []
        for stage, head in zip(self.stages, self.heads, strict=True):
            x = stage(x).tanh()
            out = head(x)
            if odd:
                out = out + odd * self.odd
            found.append(F.cross_entropy(out, y))
        return found


def train(case: str, rank: int, ranks: int) -> dict[str, Tensor]:
    """Six steps on this rank's share of 16 examples. Equal for one rank and for two, but for rounding."""
    method, _, option = case.partition("+")
    net = Nest()
    combine = COMBINERS[method]()
    if option == "tensor":
        combine.scope = "tensor"
    torch.manual_seed(100 + rank)  # what chance decides must not differ between ranks
    rows = Accumulator(net, combine, refresh=3 if option == "refresh" else 1, diagnose=option == "rows")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    g = torch.Generator().manual_seed(1)
    for step in range(6):
        if option == "freeze":
            net.stages[0].requires_grad_(step % 3 == 1)
        x, y = torch.randn(16, 8, generator=g), torch.randint(4, (16,), generator=g)
        x, y = x.view(2, 8, 8), y.view(2, 8)  # half a batch for each of two ranks
        mine = x[rank::ranks].flatten(0, 1), y[rank::ranks].flatten()
        optimizer.zero_grad()
        if option == "accumulate":
            for part in (slice(0, None, 2), slice(1, None, 2)):
                rows.add([loss / 2 for loss in net.losses(mine[0][part], mine[1][part])])
            rows.fill()
        elif option == "uneven":
            # One process on both halves sees the mean of what the ranks see, half of it with the odd parameter.
            halves = [net.losses(x[h], y[h], odd=float(h)) for h in ((rank,) if ranks == 2 else (0, 1))]
            rows.backward([sum(parts, start=torch.zeros(())) / len(halves) for parts in zip(*halves, strict=True)])
        elif option == "absent":
            # The second rank's half of the batch has nothing for the second task; one process sees half of its loss.
            losses: list[Tensor | None] = [*net.losses(*mine)]
            losses[1] = net.losses(x[0], y[0])[1] / (3 - ranks) if rank == 0 else None
            rows.backward(losses)
        else:
            rows.backward(net.losses(*mine))
        optimizer.step()
    return {name: p.detach() for name, p in net.named_parameters()}


def refuse() -> None:
    """A wrapped model is refused, however its parameters are handed over."""
    net = Nest()
    wrapped = nn.parallel.DistributedDataParallel(net)
    x, y = torch.randn(4, 8), torch.randint(4, (4,))
    tries: list[Callable[[], object]] = [
        lambda: backward(net.losses(x, y), wrapped, COMBINERS["osgd"]()),
        lambda: backward(net.losses(x, y), net, COMBINERS["osgd"]()),
        lambda: backward(net.losses(x, y), list(wrapped.parameters()), COMBINERS["sgd"]()),
        lambda: Accumulator(list(net.named_parameters()), COMBINERS["osgd"]()),
    ]
    for attempt in tries:
        try:
            attempt()
        except NestlingError as error:
            assert "DistributedDataParallel" in str(error) and "bare" in str(error)
        else:
            raise AssertionError("a wrapped model was taken")


def disagree() -> None:
    """A parameter first used after the ranks agreed on what to send is refused, not lost."""
    for method in ("osgd", "sgd"):
        net = Nest()
        rows = Accumulator(net, COMBINERS[method]())
        x, y = torch.randn(4, 8), torch.randint(4, (4,))
        rows.backward(net.losses(x, y))
        try:
            rows.backward(net.losses(x, y, odd=1.0))
        except NestlingError as error:
            assert "odd got a gradient" in str(error), error
        else:
            raise AssertionError("a late parameter was taken")


def not_finite() -> None:
    """A loss or a gradient that is not finite on one rank is refused on all, and nobody waits for anybody."""
    cases: list[tuple[str, bool, float, str]] = [
        ("sgd-sum", False, float("nan"), "loss of task 1 (counted from 0)"),
        ("sgd-sum", True, float("nan"), "gradient of task 1"),
        ("osgd", False, float("inf"), "gradient of task 1"),
        ("sgd", False, 0.0, "although every loss is finite"),  # the root of zero
    ]
    for method, diagnose, factor, words in cases:
        net = Nest()
        x, y = torch.randn(4, 8), torch.randint(4, (4,))
        losses = net.losses(x, y, odd=1e-6)
        if dist.get_rank() == 1:
            losses[1] = losses[1] + net.odd.sqrt().sum() if factor == 0.0 else losses[1] * factor
        try:
            backward(losses, net, COMBINERS[method](), diagnose=diagnose)
        except NestlingError as error:
            assert words in str(error), (method, error)
        else:
            raise AssertionError(f"{method} took a loss times {factor}")
        assert all(p.grad is None for p in net.parameters())


def strangers() -> None:
    """Losses of another model, with owners found and given."""
    net, other = Nest(), Nest()
    x, y = torch.randn(4, 8), torch.randint(4, (4,))
    given = {name: torch.tensor(7) for name, _ in other.named_parameters()}
    for owners in (None, given):
        try:
            backward(net.losses(x, y), other, COMBINERS["osgd"](), owners=owners)
        except NestlingError as error:
            assert "no loss depends on any" in str(error), error
        else:
            raise AssertionError("losses of another model were taken")


def sharded() -> None:
    """FSDP2 in every arrangement is refused: its parameters may be whole when backward comes."""
    for root_only in (True, False):
        for method in ("osgd", "sgd"):
            net = Nest()
            options: dict[str, Any] = {} if root_only else {"reshard_after_forward": False}
            for layer in [] if root_only else [*net.stages, *net.heads]:
                fully_shard(layer, **options)
            fully_shard(net, **options)
            register_fsdp_forward_method(net, "losses")
            losses = net.losses(torch.randn(4, 8), torch.randint(4, (4,)))
            for params in (net, list(net.parameters())):
                try:
                    backward(losses, params, COMBINERS[method]())
                except NestlingError as error:
                    assert "FSDP" in str(error), error
                else:
                    raise AssertionError("a sharded model was taken")


REFUSALS: dict[str, Callable[[], None]] = {
    "wrapped": refuse,
    "late": disagree,
    "not finite": not_finite,
    "strangers": strangers,
    "sharded": sharded,
}


def main(cases: list[str], folder: str) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for case in cases:
        if case in REFUSALS:
            REFUSALS[case]()
            Path(folder, f"{case}-{rank}-of-{ranks}").touch()
        else:
            save_file(train(case, rank, ranks), f"{folder}/{case}-{rank}-of-{ranks}.safetensors")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that tears them down: see nestling.__main__


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1].split(","), sys.argv[2])
