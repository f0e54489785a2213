"""What each rank does in test_distributed.py: `torchrun --nproc-per-node 2 distributed_ranks.py CASES FOLDER`.

Trains a small nest on this rank's half of every batch, bare or wrapped, and saves the weights; or shows what is refused.
"""

import gc
import os
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor.debug import CommDebugMode

from nestling.errors import NestlingError
from nestling.gradients import Accumulator, backward, owners_of
from nestling.gradients.combiners import COMBINERS, RIVALS
from nestling.nets.synced import averaged


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

    forward = losses


WRAPS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "view": {"gradient_as_bucket_view": True},
}


def made(method: str) -> Any:
    """A combiner of three tasks."""
    kind: Any = {**COMBINERS, **RIVALS}[method]
    return kind(3) if getattr(kind, "watches", False) else kind()


def train(case: str, rank: int, ranks: int) -> dict[str, Tensor]:
    """Six steps on this rank's share of 16 examples. Equal for one rank and for two, but for rounding."""
    method, *options = case.split("+")
    wrap = next((WRAPS[option] for option in options if option in WRAPS), None)
    option = next((option for option in options if option not in WRAPS), "")
    net = Nest()
    wrapped = net if wrap is None or ranks == 1 else nn.parallel.DistributedDataParallel(net, **wrap)
    if option == "compiled" and ranks > 1:
        torch._functorch.config.donated_buffer = False
        wrapped = torch.compile(net, backend="aot_eager")  # type: ignore[assignment]
    combine = made(method)
    if option == "tensor":
        combine.scope = "tensor"
    torch.manual_seed(100 + rank)  # what chance decides must not differ between ranks
    rows = Accumulator(wrapped, combine, refresh=3 if option == "refresh" else 1, diagnose=option == "rows")
    learnt = list(getattr(combine, "parameters", list)()) if method != "famo" else []  # which steps its own
    optimizer = torch.optim.SGD([*net.parameters(), *learnt], lr=0.3, momentum=0.9)
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
                rows.add([loss / 2 for loss in wrapped(mine[0][part], mine[1][part])])
            rows.fill()
        elif option == "uneven":
            # One process on both halves sees the mean of what the ranks see, half of it with the odd parameter.
            halves = [wrapped(x[h], y[h], odd=float(h)) for h in ((rank,) if ranks == 2 else (0, 1))]
            rows.backward([sum(parts, start=torch.zeros(())) / len(halves) for parts in zip(*halves, strict=True)])
        elif option == "absent":
            # The second rank's half of the batch has nothing for the second task; one process sees half of its loss.
            losses: list[Tensor | None] = [*wrapped(*mine)]
            losses[1] = wrapped(x[0], y[0])[1] / (3 - ranks) if rank == 0 else None
            rows.backward(losses)
        else:
            rows.backward(wrapped(*mine))
        optimizer.step()
        combine.set_epoch((step + 1) // 2)
        if method == "famo":
            combine.update(averaged(torch.stack(net.losses(*mine)).detach()))
    return {name: p.detach() for name, p in net.named_parameters()}


def handed_over() -> None:
    """A wrapped model's parameters, however they are handed over: the ranks end equal, and equal to the mean gradient; a
    plain backward after ours is averaged by the wrapper as ever, and once."""
    x, y = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank())), torch.randint(4, (4,))
    net = Nest()
    wrapped = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    ways: list[Callable[[], object]] = [
        lambda: backward(wrapped(x, y), wrapped, COMBINERS["sgd-sum"]()),
        lambda: backward(wrapped(x, y), wrapped, COMBINERS["sgd-sum"](), diagnose=True),
        lambda: backward(wrapped(x, y), net, COMBINERS["sgd-sum"]()),
        lambda: backward(wrapped(x, y), list(wrapped.parameters()), COMBINERS["sgd-sum"](), diagnose=True),
        lambda: Accumulator(list(net.named_parameters()), COMBINERS["sgd-sum"]()).backward(net.losses(x, y)),
        lambda: sum(wrapped(x, y)).backward(),
        lambda: backward(wrapped(x, y), wrapped, COMBINERS["sgd-sum"]()),
    ]
    sum(net.losses(x, y)).backward()  # type: ignore[union-attr]
    wanted = [None if p.grad is None else p.grad / dist.get_world_size() for p in net.parameters()]
    for grad in wanted:
        if grad is not None:
            dist.all_reduce(grad)
    for way in ways:
        net.zero_grad()
        way()
        for p, grad in zip(net.parameters(), wanted, strict=True):
            if grad is not None:
                torch.testing.assert_close(p.grad, grad, atol=1e-6, rtol=0)


def unnoticed() -> None:
    """A wrapper's own averaging, whose first backward of a static graph is a special one, has no part in ours; and the
    node that it puts on top of all outputs does not hide who owns what."""
    x, y = torch.randn(4, 8), torch.randint(4, (4,))
    owners = {name: int(mask) for name, mask in owners_of(Nest().losses(x, y), Nest().named_parameters()).items()}
    assert set(owners.values()) == {0}  # of another net
    sent = {}
    for kind, options in WRAPS.items():
        net = Nest()
        wrapped = nn.parallel.DistributedDataParallel(net, **options)
        losses = wrapped(x, y)
        owners = {name: int(mask) for name, mask in owners_of(losses, net.named_parameters()).items()}
        assert owners["heads.0.weight"] == 1 and owners["stages.1.bias"] == 6 and owners["odd"] == 0, owners
        with CommDebugMode() as counted:
            backward(losses, wrapped, COMBINERS["osgd"]())
        sent[kind] = counted.get_total_counts()
    assert len(set(sent.values())) == 1, sent


def more_than_averaging() -> None:
    """A wrapper that does more to gradients than to average them."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    for hidden in (False, True):
        net = Nest()
        wrapped = nn.parallel.DistributedDataParallel(net)
        wrapped.register_comm_hook(None, fp16_compress_hook)
        if hidden:
            gc.freeze()  # as some training loops do: the collector no longer tells what is alive
        try:
            backward(wrapped(torch.randn(4, 8), torch.randint(4, (4,))), wrapped, COMBINERS["osgd"]())
        except NestlingError as error:
            assert "communication hook" in str(error)
        else:
            raise AssertionError("a communication hook was passed by")
        finally:
            gc.unfreeze()


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
    for (method, diagnose, factor, words), wrap in product(cases, (False, True)):
        net = Nest()
        model = nn.parallel.DistributedDataParallel(net) if wrap else net
        x, y = torch.randn(4, 8), torch.randint(4, (4,))
        losses = model(x, y, odd=1e-6)
        if dist.get_rank() == 1:
            losses[1] = losses[1] + net.odd.sqrt().sum() if factor == 0.0 else losses[1] * factor
        try:
            backward(losses, model, COMBINERS[method](), diagnose=diagnose)
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


class Synced(nn.Module):
    """Batch norm over the batches of all ranks, as SyncBatchNorm (which wants a GPU): its backward pass exchanges, too."""

    def forward(self, x: Tensor) -> Tensor:
        ranks = dist.get_world_size()
        mean = all_reduce(x.mean(0)) / ranks
        square = all_reduce((x - mean).pow(2).mean(0)) / ranks
        return (x - mean) * (square + 1e-5).rsqrt()


def synced() -> None:
    """Statistics of all ranks' batches: equal to one process, in every wrapper. Exchanges keep their order; what makes zeros of
    missing gradients makes nobody an owner."""
    x, y = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 3])
    for method, wrap in product(("osgd", "normsgd", "sgd"), (None, *WRAPS)):
        nets = []
        for norm in (Synced(), nn.BatchNorm1d(16, affine=False)):
            net = Nest()
            for i, stage in enumerate(net.stages):
                net.stages[i] = nn.Sequential(stage, norm)
            nets.append(net)
        model: Any = nets[0] if wrap is None else nn.parallel.DistributedDataParallel(nets[0], **WRAPS[wrap])
        rows, alone = Accumulator(model, COMBINERS[method]()), Accumulator(nets[1], COMBINERS[method](), reduce=False)
        for _ in range(2):
            rows.backward(model(x[dist.get_rank()], y))
            alone.backward(nets[1](x.flatten(0, 1), y.repeat(2)))
        for (name, p), q in zip(nets[0].named_parameters(), nets[1].parameters(), strict=True):
            if q.grad is not None:
                assert p.grad is not None and torch.allclose(p.grad, q.grad, atol=1e-5), (method, wrap, name)
    net = Nest()
    net.norm = nn.SyncBatchNorm(4)
    try:
        backward([None, *net(x[0], y)[1:]], net, COMBINERS["osgd"]())
    except NestlingError as error:
        assert "has SyncBatchNorm" in str(error)
    else:
        raise AssertionError("a rank without a loss would let the others wait")


REFUSALS: dict[str, Callable[[], None]] = {
    "handed over": handed_over,
    "unnoticed": unnoticed,
    "more than averaging": more_than_averaging,
    "late": disagree,
    "not finite": not_finite,
    "strangers": strangers,
    "synced": synced,
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
