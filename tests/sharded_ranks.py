"""What each rank does in test_sharded.py: `torchrun --nproc-per-node N sharded_ranks.py FOLDER [CASE ...]`.

Each case takes models sharded by FSDP2 and compares them with the same model, whole, on the batch of all ranks together. What
it finds is written to FOLDER/CASE-RANK: nothing where all is well.
"""

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from test_gradients import NETS, batch, gradients, losses_of, make
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from nestling.errors import NestlingError
from nestling.gradients import Accumulator, backward
from nestling.gradients.combiners import COMBINERS, OSGD, NormOSGD, NormSGD, PCGrad, SumSGD
from nestling.gradients.combiners.weighted import Weighted

ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "root": {},
    "root, resharded": {"reshard_after_forward": True},
    "blocks": {"blocks": True},
    "blocks, kept": {"blocks": True, "reshard_after_forward": False},
    "hybrid": {"blocks": True, "hybrid": True},
}
METHODS: dict[str, Callable[[], Weighted]] = {
    "sgd-sum": SumSGD,
    "osgd": OSGD,
    "osgd, shared": lambda: OSGD(scope="shared"),
    "osgd, block": lambda: OSGD(scope="block", order=None),
    "osgd, tensor": lambda: OSGD(scope="tensor"),
    "normsgd": NormSGD,
    "osgd-norm": NormOSGD,
    "pcgrad": lambda: PCGrad(shuffle=False),
}


def sharded(net: nn.Module, blocks: bool = False, hybrid: bool = False, **options: Any) -> nn.Module:
    if hybrid:
        options["mesh"] = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copy", "shard"))
    for layer in [child for child in net.modules() if blocks and isinstance(child, (nn.Linear, nn.Conv2d))]:
        fully_shard(layer, **options)
    fully_shard(net, **options)
    return net


def mine(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def full(net: nn.Module) -> dict[str, Tensor | None]:
    """Whole gradients of a sharded model, whose parameters may be whole or not at this moment."""
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return {
        name: None if p.grad is None else p.grad.full_tensor()  # type: ignore[attr-defined]
        for name, p in net.named_parameters()
    }


def same(found: dict[str, Tensor | None], wanted: dict[str, Tensor | None], what: object, atol: float = 1e-5) -> None:
    for name, want in wanted.items():
        have = found[name]
        if want is None or have is None:
            assert (have is None or not have.any()) and (want is None or not want.any()), (what, name)
        else:
            torch.testing.assert_close(have, want, atol=atol, rtol=1e-5, msg=lambda text: f"{what} {name}: {text}")  # noqa: B023


def arrangements() -> Iterator[tuple[str, dict[str, Any]]]:
    """All with two ranks; with four, the root and one that needs four."""
    four = dist.get_world_size() == 4
    for name, options in ARRANGEMENTS.items():
        if (name in ("root", "hybrid")) if four else name != "hybrid":
            yield name, options


def combinations() -> Iterator[tuple[str, str, dict[str, Any], str]]:
    """Every net in every arrangement by two methods, and two nets by every method."""
    for kind, (arrangement, options) in product(sorted(NETS), arrangements()):
        if kind == "sliced" and options.get("blocks"):  # reads a weight outside of the layer's forward
            continue
        every = kind in ("sliced", "tree") and arrangement == "root" and dist.get_world_size() == 2
        for method in METHODS if every else ("osgd", "normsgd"):
            yield kind, arrangement, options, method


def equal() -> None:
    """The same update as that of the whole model, twice, and added to what `.grad` holds."""
    x, y = batch(8)
    for kind, arrangement, options, method in combinations():
        whole, net = make(kind), sharded(make(kind), **options)
        ours, theirs = Accumulator(net, METHODS[method]()), Accumulator(whole, METHODS[method](), reduce=False)
        for _ in range(2):
            report = ours.backward(losses_of(net, mine(x), mine(y)))
            wanted = theirs.backward(losses_of(whole, x, y))
        same(full(net), gradients(whole), (kind, arrangement, method))
        assert report.weights is not None and wanted.weights is not None
        torch.testing.assert_close(report.weights, wanted.weights, atol=1e-5, rtol=1e-4)
        others = [torch.empty_like(report.weights) for _ in range(dist.get_world_size())]
        dist.all_gather(others, report.weights)
        assert all(torch.equal(other, others[0]) for other in others), "ranks differ"
        assert all(isinstance(p.grad, DTensor) for p in net.parameters() if p.grad is not None)


def steps() -> None:
    """Training with an optimizer: micro-batches, freezing, refreshing; lists of parameters, by whoever asks."""
    for arrangement, options in arrangements():
        for way in ("accumulated", "frozen", "refreshed", "listed"):
            whole, net = make("nested"), sharded(make("nested"), **options)
            optimizers = [torch.optim.Adam(m.parameters(), lr=0.01, foreach=False) for m in (whole, net)]
            extra: dict[str, Any] = {"refresh": 2} if way == "refreshed" else {}
            given: Any = list(net.named_parameters()) if way == "listed" else net
            ours, theirs = Accumulator(given, OSGD(), **extra), Accumulator(whole, OSGD(), reduce=False, **extra)
            for step in range(3):
                x, y = batch(8, seed=step)
                for optimizer in optimizers:
                    optimizer.zero_grad()
                for module in (whole, net) if way == "frozen" else ():
                    module.get_submodule("stages.1").requires_grad_(step != 1)
                if way == "listed":  # gathered, when they are handed over
                    backward(losses_of(net, mine(x), mine(y)), list(net.parameters()), OSGD())
                    theirs.backward(losses_of(whole, x, y))
                elif way == "accumulated":
                    for half in (slice(0, 4), slice(4, 8)):
                        ours.add([loss / 2 for loss in losses_of(net, mine(x[half]), mine(y[half]))])
                        theirs.add([loss / 2 for loss in losses_of(whole, x[half], y[half])])
                    ours.fill(), theirs.fill()
                else:
                    ours.backward(losses_of(net, mine(x), mine(y)))
                    theirs.backward(losses_of(whole, x, y))
                for optimizer in optimizers:
                    optimizer.step()
            same(
                {n: p.full_tensor() for n, p in net.named_parameters()},  # type: ignore[attr-defined]
                {n: p.detach() for n, p in whole.named_parameters()},
                (arrangement, way),
                atol=2e-5,
            )


def mixed_precision() -> None:
    """Each task's gradient is what plain FSDP gives for it alone, and OSGD of those is ours."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    x, y = batch(8)
    for arrangement, options in arrangements():
        net = sharded(make("tree"), mp_policy=policy, **options)
        rows = []
        for task in range(4):
            losses_of(net, mine(x), mine(y))[task].backward()
            rows.append(full(net))
            net.zero_grad()
        backward(losses_of(net, mine(x), mine(y)), net, OSGD())
        whole = make("tree")
        parts = [[row[name] for name, _ in whole.named_parameters()] for row in rows]
        losses = [
            sum(
                ((g * p).sum() for g, p in zip(part, whole.parameters(), strict=True) if g is not None),
                start=torch.zeros(()),
            )
            for part in parts
        ]
        backward(losses, whole, OSGD(), reduce=False)
        same(full(net), gradients(whole), arrangement, atol=1e-6)


class Sent(TorchDispatchMode):
    """Bytes of each kind of exchange: of what is gathered, of what is scattered, of what is added up."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("c10d::"):
            first = args[1] if "reduce_scatter" in name else args[0]  # the whole: what comes in, or what goes out
            whole = first if isinstance(first, Tensor) else first[0]
            self.sent[name[6:]] = self.sent.get(name[6:], 0) + whole.numel() * whole.element_size()
        return func(*args, **(kwargs or {}))


class Shared(nn.Module):
    """A trunk that all tasks use, and heads."""

    def __init__(self, tasks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 12), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(12, 4) for _ in range(tasks))

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.trunk(x)
        return [head(x) for head in self.heads]


def bytes_sent() -> None:
    """Every rank stores its share of a row. A step exchanges, per task, the gradients of what it reaches once (scattered),
    weights once more where they were let go (gathered), and the Gram matrix."""
    ranks, tasks = dist.get_world_size(), 3
    x = torch.randn(4, 10)
    head = sum(-(-p.shape[0] // ranks) * ranks * p[0].numel() for p in Shared().heads[0].parameters())
    trunk = sum(-(-p.shape[0] // ranks) * ranks * p[0].numel() for p in Shared().trunk.parameters())
    for kept in (True, False):  # of the root's weights after forward
        net = sharded(Shared(), reshard_after_forward=not kept)
        rows = Accumulator(net, OSGD())
        rows.backward([out.pow(2).mean() for out in net(x)])  # the first step finds out who owns what
        losses = [out.pow(2).mean() for out in net(x)]
        with Sent() as counted:
            rows.add(losses, final=True)
            held = [sum(part.numel() for part in row if part is not None) for row in rows.step.stored]
            rows.fill()
        assert held == [(trunk + head) // ranks] * tasks, held
        every = 4 * (trunk + tasks * head)  # a root is gathered as a whole
        wanted = {
            "_reduce_scatter_base_": 4 * tasks * (trunk + head),
            "_allgather_base_": every * (tasks - kept),
            "allreduce_": 8 * tasks**2,
        }
        assert counted.sent == wanted, (counted.sent, wanted)


def not_finite() -> None:
    """On one rank, refused on all; `.grad` is left alone."""
    cases = [
        ("sgd-sum", False, "loss of task 1"),
        ("sgd-sum", True, "gradient of task 1"),
        ("osgd", False, "of task 1"),
    ]
    for (arrangement, options), (method, diagnose, words) in product(arrangements(), cases):
        net = sharded(make("tree"), **options)
        losses = losses_of(net, *map(mine, batch(8)))
        if dist.get_rank() == dist.get_world_size() - 1:
            losses[1] = losses[1] * float("nan")
        refused(lambda: backward(losses, net, COMBINERS[method](), diagnose=diagnose), words)  # noqa: B023
        assert not any(full(net).values()), arrangement
    net = sharded(nn.Sequential(nn.Linear(8, 8)))
    with torch.no_grad():
        net.get_parameter("0.bias").zero_()
    out = net(torch.zeros(4, 8))
    refused(lambda: backward([out.abs().sqrt().sum(), out.sum()], net, SumSGD()), "although every loss is finite")


class Stacked(nn.Module):
    """One weight for all heads."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis
        self.trunk = nn.Linear(6, 8)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.trunk(x).tanh()
        if self.axis:
            return [x @ self.weight[:, :4], x @ self.weight[:, 4:]]
        return [x[:, :4] @ self.weight[:4], x[:, 4:] @ self.weight[4:]]


def refused(act: Callable[[], object], words: str) -> None:
    try:
        act()
    except NestlingError as error:
        assert words in str(error), (words, str(error))
    else:
        raise AssertionError(f"not refused: {words}")


def refusals() -> None:
    x = torch.randn(4, 6)
    for axis in (0, 1):
        net = sharded(Stacked(axis))
        losses = [out.pow(2).sum() for out in net(x)]
        refused(lambda: backward(losses, net, NormSGD()), "weight never meet")  # noqa: B023
    net = Shared()
    for layer in net.trunk:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    losses = [out.sum() for out in net(torch.randn(2, 10))]
    refused(lambda: backward(losses, net, OSGD()), "is whole on every rank")
    net = sharded(Shared())
    refused(lambda: Accumulator(net, OSGD(), reduce=False), "leave it out")
    absent = [None, *(out.sum() for out in net(torch.randn(2, 10))[1:])]
    refused(lambda: backward(absent, net, OSGD()), "whose ranks must run every backward pass together")
    net.set_requires_gradient_sync(False)  # type: ignore[operator]
    losses = [out.sum() for out in net(torch.randn(2, 10))]
    refused(lambda: backward(losses, net, OSGD()), "set_requires_gradient_sync")
    net.set_requires_gradient_sync(True)  # type: ignore[operator]
    if isinstance(net, FSDPModule) and hasattr(net, "set_reduce_scatter_unused_params"):
        net.set_reduce_scatter_unused_params(True)
        losses = [out.sum() for out in net(torch.randn(2, 10))]
        refused(lambda: backward(losses, net, NormSGD()), "owners=")
    older = FullyShardedDataParallel(Shared(), device_id=torch.device("cpu"), use_orig_params=True)
    losses = [out.sum() for out in older(torch.randn(2, 10))]
    refused(lambda: backward(losses, older, OSGD()), "fully_shard")


def dense() -> None:
    """TorchJD's aggregators: those that the Gram matrix is enough for, and no others."""
    try:
        from torchjd.aggregation import MGDA, TrimmedMean
    except ImportError:
        return
    from nestling.gradients.combiners.torchjd import FromTorchJD

    x, y = batch(8)
    net, whole = sharded(make("tree")), make("tree")
    backward(losses_of(net, mine(x), mine(y)), net, FromTorchJD(MGDA()))
    backward(losses_of(whole, x, y), whole, FromTorchJD(MGDA()), reduce=False)
    same(full(net), gradients(whole), "mgda")
    losses = losses_of(net, mine(x), mine(y))
    refused(lambda: backward(losses, net, FromTorchJD(TrimmedMean(trim_number=1))), "needs whole rows")


CASES: dict[str, Callable[[], None]] = {
    "equal": equal,
    "steps": steps,
    "mixed precision": mixed_precision,
    "bytes": bytes_sent,
    "not finite": not_finite,
    "refusals": refusals,
    "dense": dense,
}


def main(folder: str, *only: str) -> None:
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name in only or CASES:
        found = ""
        try:
            CASES[name]()
        except Exception:
            found = traceback.format_exc()
        Path(folder, f"{name}-{dist.get_rank()}").write_text(found)
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that tears them down


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
