"""A campaign: random models x combiners x scopes x modes against the literal loop in float64. A case is a number.

`python tests/campaign.py --cases 200`, `torchrun --nproc-per-node 2 tests/campaign.py --cases 60` (models wrapped in
DistributedDataParallel, sharded by FSDP2, or bare). `--first N --cases 1` repeats case N. `--float32`: in one process in float32,
products by oneDNN down to the smallest (gradients/products.py). Prints what went wrong, and a summary.
A case is right, or refused in words where that is said; nothing else.
"""

import argparse
import os
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch._functorch.config
import torch.distributed as dist
import torch.nn.functional as F
from gradient_zoo import blocks_of, literal_osgd, normalised
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from nestling.errors import NestlingError
from nestling.gradients import SCOPES, Accumulator, owners_of, products
from nestling.gradients.combiners import OSGD, SGD, NormOSGD, NormSGD, PCGrad, SumSGD
from nestling.gradients.combiners.weighted import Weighted

ALONE = ("rows", "layers", "auto", "compiled", "compiled, found", "autocast", "checkpointed", "accumulated", "joined")
TOGETHER = (
    "bare",
    "ddp",
    "ddp, unused",
    "fsdp root",
    "fsdp blocks",
    "fsdp kept",
    "ddp, accumulated",
    "fsdp accumulated",
)
METHODS = ("osgd", "osgd", "osgd-norm", "normsgd", "pcgrad", "sgd", "sgd-sum")
BATCH = 8  # divided among up to four ranks


class Model(nn.Module):
    """Layers of random kinds and widths; each head hangs on one of them, and some parameters are unused, tied or frozen."""

    def __init__(self, draw: random.Random, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.images = draw.random() < 0.5
        width, depth, tasks = draw.randint(3, 9), draw.randint(1, 5), draw.randint(2, 5)
        self.first = nn.Conv2d(2, width, 3, padding=1) if self.images else nn.Linear(5, width)
        self.layers = nn.ModuleList()
        for _ in range(depth):
            self.layers.append(self._layer(draw, width))
        self.uses = [draw.randrange(depth) if draw.random() < 0.2 else place for place in range(depth)]  # some twice
        self.places = sorted(draw.randint(0, depth) for _ in range(tasks))
        self.heads = nn.ModuleList(nn.Linear(width, draw.choice([1, 3, 4])) for _ in range(tasks))
        if draw.random() < 0.3 and len({head.out_features for head in self.heads}) == 1:
            self.heads[-1] = self.heads[0]
        self.unused = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.ones(width) + 0.1 * torch.arange(width))
        if draw.random() < 0.3:
            self.first.requires_grad_(False)

    def _layer(self, draw: random.Random, width: int) -> nn.Module:
        kinds: list[Callable[[], nn.Module]] = [lambda: nn.Linear(width, width), lambda: nn.LayerNorm(width)]
        if self.images:
            kinds = [
                lambda: nn.Conv2d(width, width, 3, padding=1, bias=draw.random() < 0.5),
                lambda: nn.Conv2d(width, width, 3, padding=1, groups=width),
                lambda: nn.GroupNorm(1, width),
            ]
        return draw.choice(kinds)()

    def forward(self, x: Tensor) -> list[Tensor]:
        found = [self._begin(x)]
        for place in self.uses:
            layer = self.layers[place]
            run: Any = checkpoint(layer, found[-1], use_reentrant=False) if self.checkpointed else layer(found[-1])
            found.append(run.tanh() + found[-1])
        pooled = [f.mean((2, 3)) if self.images else f for f in found]
        return [head(pooled[place] * self.scale) for head, place in zip(self.heads, self.places, strict=True)]

    def _begin(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(x)
        return out

    def example(self, generator: torch.Generator) -> Tensor:
        shape = (BATCH, 2, 5, 5) if self.images else (BATCH, 5)
        return torch.randn(shape, generator=generator, dtype=torch.float64)


def losses_of(outs: Sequence[Tensor], powers: Sequence[float]) -> list[Tensor]:
    """Means over the batch, of different sizes."""
    return [10**power * F.softplus(out.double() - 0.3).pow(2).mean() for out, power in zip(outs, powers, strict=True)]


def literal(rows: Tensor, owned: Tensor, widths: list[int], method: str, scope: str, order: list[int]) -> Tensor:
    """The update as it is written down, row by row."""
    n = len(rows)
    if method in ("sgd", "sgd-sum"):
        return rows.sum(0) / (n if method == "sgd" else 1)
    if method == "normsgd":
        return normalised(rows, owned)[0].sum(0) / owned.sum(0).clamp_min(1)
    if method == "osgd-norm":
        rows = normalised(rows, owned)[0]
    update = torch.zeros_like(rows[0])
    for columns in blocks_of(owned, widths, scope):
        part = rows[:, columns]
        update[columns] = _pcgrad(part) if method == "pcgrad" else literal_osgd(part, order, [1.0] * n)
    return update


def _pcgrad(rows: Tensor) -> Tensor:
    total = torch.zeros_like(rows[0])
    for i in range(len(rows)):
        g = rows[i].clone()
        for j in range(len(rows)):
            if j != i and g @ rows[j] < 0:
                g = g - (g @ rows[j]) / (rows[j] @ rows[j]) * rows[j]
        total = total + g
    return total


def combiner(method: str, scope: str, order: list[int]) -> Weighted:
    made: dict[str, Callable[[], Weighted]] = {
        "osgd": lambda: OSGD(order, scope),
        "osgd-norm": lambda: NormOSGD(order, scope),
        "normsgd": NormSGD,
        "pcgrad": lambda: PCGrad(scope, shuffle=False),
        "sgd": SGD,
        "sgd-sum": SumSGD,
    }
    return made[method]()


class Case:
    """Case number N: everything is drawn from the number."""

    def __init__(self, number: int, modes: Sequence[str]) -> None:
        draw = random.Random(number)
        torch.manual_seed(number)
        self.mode = modes[number % len(modes)]
        self.net = Model(draw, checkpointed=self.mode == "checkpointed").double()
        tasks = len(self.net.heads)
        self.method, self.scope = draw.choice(METHODS), draw.choice(SCOPES)
        self.order = draw.sample(range(tasks), tasks)
        self.powers = [draw.uniform(-2, 2) for _ in range(tasks)]
        self.x = self.net.example(torch.Generator().manual_seed(number))
        self.diagnose = draw.random() < 0.3
        self.named = [(name, p) for name, p in self.net.named_parameters() if p.requires_grad]

    def __str__(self) -> str:
        return f"{self.mode}, {self.method}, scope {self.scope}, order {self.order}, {len(self.net.layers)} layers"

    def wanted(self, losses: Sequence[Tensor]) -> dict[str, Tensor]:
        """By the literal loop, from gradients of one loss at a time."""
        params = [p for _, p in self.named]
        found = [torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True) for loss in losses]
        rows = torch.stack(
            [
                torch.cat([(torch.zeros_like(p) if g is None else g).flatten().double() for p, g in pairs])
                for pairs in (list(zip(params, grads, strict=True)) for grads in found)
            ]
        )
        owned = torch.stack(
            [
                torch.cat([torch.full((p.numel(),), g is not None) for p, g in zip(params, grads, strict=True)])
                for grads in found
            ]
        )
        widths = [p.numel() for p in params]
        update = literal(rows, owned, widths, self.method, self.scope, self.order)
        self.size = float(rows.norm())
        named = zip(self.named, update.split(widths), strict=True)
        return {name: part.view_as(p) for (name, p), part in named}

    def alone(self) -> tuple[dict[str, Tensor | None], dict[str, Tensor], float]:
        """One process, eager or not."""
        net: Any = self.net
        tolerance = 1e-8
        options: dict[str, Any] = {"mode": self.mode if self.mode in ("rows", "layers", "auto") else "auto"}
        context: Any = torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.mode == "autocast")
        if self.mode == "autocast":
            one = self.method in ("sgd", "sgd-sum") and not self.diagnose  # one backward rounds otherwise than several
            net, self.x, tolerance = net.float(), self.x.float(), 1e-2 if one else 1e-4
        if self.mode == "float32":
            net, self.x, tolerance = net.float(), self.x.float(), 1e-5
        if self.mode == "compiled":
            options["owners"] = owners_of(losses_of(net(self.x), self.powers), self.named)
        if self.mode.startswith("compiled"):
            net = torch.compile(net, backend="aot_eager")
        combine = combiner(self.method, self.scope, self.order)
        given = net if self.mode == "compiled, found" else self.net
        rows = Accumulator(given, combine, diagnose=self.diagnose, **options)
        for _ in range(2):  # the first step finds out what later ones know
            self.net.zero_grad()
            with context:
                losses = losses_of(net(self.x), self.powers)
            if self.mode == "accumulated":
                wanted = self.wanted(losses)
                for half in self.x.chunk(2):
                    rows.add([loss / 2 for loss in losses_of(net(half), self.powers)])
                rows.fill()
            else:
                wanted = self.wanted(
                    losses_of(self.net(self.x), self.powers) if self.mode.startswith("compiled") else losses
                )
                rows.backward(list(torch.stack(losses)) if self.mode == "joined" else losses)
        return {name: p.grad for name, p in self.named}, wanted, tolerance

    def together(self) -> tuple[dict[str, Tensor | None], dict[str, Tensor], float]:
        """Several ranks, each with its part of the batch."""
        wanted = self.wanted(losses_of(self.net(self.x), self.powers))
        net: Any = self.net
        if self.mode.startswith("ddp"):
            net = nn.parallel.DistributedDataParallel(net, find_unused_parameters="unused" in self.mode)
        elif self.mode.startswith("fsdp"):
            options: dict[str, Any] = {"reshard_after_forward": False} if "kept" in self.mode else {}
            for layer in [] if "root" in self.mode else list(net.layers):
                fully_shard(layer, **options)
            fully_shard(net, **options)
        rows = Accumulator(net, combiner(self.method, self.scope, self.order), diagnose=self.diagnose)
        mine = self.x.chunk(dist.get_world_size())[dist.get_rank()]
        for _ in range(2):
            net.zero_grad()
            if "accumulated" in self.mode:
                for half in mine.chunk(2):
                    parts = 2 if len(mine) > 1 else 1
                    rows.add([loss / parts for loss in losses_of(net(half), self.powers)])
                rows.fill()
            else:
                rows.backward(losses_of(net(mine), self.powers))
        for module in self.net.modules():
            if hasattr(module, "reshard"):
                module.reshard()  # type: ignore[operator]
        now = dict(self.net.named_parameters())
        grads: dict[str, Any] = {name: now[name].grad for name, _ in self.named}
        return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in grads.items()}, wanted, 1e-8

    def error(self) -> float:
        """How far the update is from the literal one, over the size of the rows; NaN where something is missing."""
        found, wanted, tolerance = self.together() if dist.is_initialized() else self.alone()
        total = 0.0
        for name, want in wanted.items():
            have = found[name]
            total += float((want if have is None else have.double() - want).pow(2).sum())
        size = max(self.size, float(sum(w.pow(2).sum() for w in wanted.values())) ** 0.5)
        return total**0.5 / (size * tolerance)


def main(first: int, cases: int, float32: bool = False) -> int:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch._functorch.config.donated_buffer = False
    ranked = "RANK" in os.environ
    if ranked:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    told: Counter[str] = Counter()
    wrong = 0
    for number in range(first, first + cases):
        torch._dynamo.reset() if not ranked else None
        case = Case(number, TOGETHER if ranked else ["float32"] if float32 else ALONE)
        try:
            error = case.error()
        except NestlingError as refusal:
            told[f"refused: {str(refusal)[:60]}"] += 1
            continue
        told[case.mode] += 1
        if not error <= 1:
            wrong += 1
            print(f"WRONG case {number}: {case}: {error:.2g} times the tolerance", flush=True)
    if not ranked or dist.get_rank() == 0:
        print(f"{cases} cases, {wrong} wrong: " + ", ".join(f"{what} {count}" for what, count in sorted(told.items())))
    if ranked:
        dist.barrier()
        sys.stdout.flush()
        os._exit(wrong > 0)  # gloo's threads may abort an interpreter that tears them down
    return int(wrong > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=210)
    parser.add_argument("--float32", action="store_true")
    asked = parser.parse_args()
    if asked.float32:
        products.LEAST = products.WEIGHTS = 0
    sys.exit(main(asked.first, asked.cases, asked.float32))
