"""A step with one gradient per task of a ResNet-50 and of a transformer of 100 M, on a GPU, eager and compiled, beside TorchJD.

    python benchmarks/large_trunks.py --json results/trunks-h200.json        both models, batch 64; under five minutes
    python benchmarks/large_trunks.py --device cpu --tiny --rounds 1         the same at a size for a try

Compiled is the trunk, by torch.compile. Every round runs all methods once, in an order drawn anew; a figure is the median over
rounds of the ratio to the summed loss of the same round. Memory is the peak of what torch allocated in a step above what was
there before. What a method cannot do is told in its row. After --seconds no method, model or round is begun; the file is written
after every model, so that a run that is stopped has not been for nothing.
"""

import argparse
import json
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from gradients import METHODS, Step, condition, table
from torch import Tensor, nn
from trunks import Attention, Pooled, Shared

STEPS = 3  # in a row, as a training loop queues them
HOOKED = "torchjd, autogram"  # hangs hooks on its net, which other methods would trip over
ASKED = ("summed loss", "nestling osgd", "torchjd, vmap", "torchjd, chunk 1", HOOKED)


class Bottleneck(nn.Module):
    """As in a ResNet-50; no running statistics, which some rivals refuse."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        shapes = ((before, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        self.convs = nn.ModuleList(nn.Conv2d(a, b, k, s, k // 2, bias=False) for a, b, k, s in shapes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b, track_running_stats=False) for _, b, _, _ in shapes)
        same = before == 4 * width
        self.short = nn.Identity() if same else nn.Conv2d(before, 4 * width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for place, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            out = norm(conv(out))
            out = out.relu() if place < 2 else out
        return (out + self.short(x)).relu()


def resnet50(tiny: bool) -> tuple[Shared, tuple[int, ...]]:
    base, counts = (8, (1, 1)) if tiny else (64, (3, 4, 6, 3))
    blocks: list[nn.Module] = [nn.Conv2d(3, base, 7, 2, 3, bias=False), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    before = base
    for stage, count in enumerate(counts):
        width = base * 2**stage
        for block in range(count):
            blocks.append(Bottleneck(before, width, 2 if stage and not block else 1))
            before = 4 * width
    return Shared(nn.Sequential(*blocks, Pooled(2, 3)), before, 4), (3, 32, 32) if tiny else (3, 224, 224)


def transformer(tiny: bool) -> tuple[Shared, tuple[int, ...]]:
    width, depth, tokens = (32, 2, 8) if tiny else (768, 14, 128)
    return Shared(nn.Sequential(*(Attention(width, 4) for _ in range(depth)), Pooled(1)), width, 3), (tokens, width)


MODELS: dict[str, Callable[[bool], tuple[Shared, tuple[int, ...]]]] = {
    "ResNet-50, 4 tasks": resnet50,
    "transformer 100 M, 3 tasks": transformer,
}


def problem(model: str, batch: int, device: str, tiny: bool, compiled: bool) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    net, shape = MODELS[model](tiny)
    net = net.to(device)
    x = torch.randn(batch, *shape, device=device)
    targets = [torch.randint(10, (batch,), device=device) for _ in net.heads]
    trunk: Any = torch.compile(net.trunk) if compiled else net.trunk

    def losses() -> list[Tensor]:
        features = trunk(x)
        return [F.cross_entropy(head(features), y) for head, y in zip(net.heads, targets, strict=True)]

    return net, losses


def waited(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def ready(
    fresh: Callable[[], tuple[nn.Module, Any]], device: str, end: float
) -> tuple[nn.Module, dict[str, Step], dict[str, float], dict[str, str]]:
    """A net for all methods but one; those that run, warmed up; their peak memory in MiB; what the others said."""
    steps: dict[str, Step] = {}
    memory: dict[str, float] = {}
    failed: dict[str, str] = {}
    shared = fresh()
    for name in ASKED:
        if len(steps) > 1 and time.monotonic() > end:
            failed[name] = "no time left"
            continue
        net, losses = fresh() if name == HOOKED else shared
        try:
            step = METHODS[name](net, losses)
            for _ in range(2):
                step()
            net.zero_grad()
            if device == "cuda":
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
            step()
            waited(device)
            memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**20 if device == "cuda" else float("nan")
            steps[name] = step
        except (
            Exception
        ) as error:  # a rival that is not installed, or cannot do this model: the rest is worth measuring
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            net.zero_grad()
        print(f"ready: {name} {failed.get(name, '')}", file=sys.stderr, flush=True)
    return shared[0], steps, memory, failed


def apart(net: nn.Module, steps: dict[str, Step]) -> str:
    """How far our update and TorchJD's are apart, over its size: both run the same method."""
    found = []
    for name in ("nestling osgd", "torchjd, chunk 1"):
        if name in steps:
            steps[name]()
            found.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
    return f"{float((found[0] - found[1]).norm() / found[1].norm()):.1e}" if len(found) == 2 else ""


def measured(model: str, way: str, options: argparse.Namespace, end: float) -> list[dict[str, object]]:
    fresh = partial(problem, model, options.batch, options.device, options.tiny, way == "compiled")
    net, steps, memory, failed = ready(fresh, options.device, end)
    between = apart(net, steps)
    draw = random.Random(options.seed)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for done in range(options.rounds):
        if done and time.monotonic() > end:
            break
        for name in draw.sample(list(steps), len(steps)):
            start = waited(options.device)
            for _ in range(STEPS):
                steps[name]()
            seconds[name].append((waited(options.device) - start) / STEPS)
    rows: list[dict[str, object]] = []
    size = sum(p.numel() for p in net.parameters())
    for name, own in seconds.items():
        ratios = sorted(a / b for a, b in zip(own, seconds["summed loss"], strict=True))
        rows.append(
            {
                "model": model,
                "way": way,
                "method": name,
                "ratio": round(statistics.median(ratios), 3),
                "low": round(ratios[0], 3),
                "high": round(ratios[-1], 3),
                "ms": round(1000 * statistics.median(own), 2),
                "mib": round(memory[name], 1) if options.device == "cuda" else "",
                "rounds": len(own),
                "parameters": size,
                "batch": options.batch,
                "from_torchjd": between,
                "failed": "",
            }
        )
    empty = dict.fromkeys(rows[0], "")
    return rows + [{**empty, "model": model, "way": way, "method": name, "failed": why} for name, why in failed.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=200, help="begin nothing new after these")
    parser.add_argument("--model", choices=list(MODELS), action="append")
    parser.add_argument("--way", choices=["eager", "compiled"], action="append")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_float32_matmul_precision("high")  # TF32, as people train
    torch._functorch.config.donated_buffer = False  # several backward passes through one compiled graph
    end = time.monotonic() + options.seconds
    heading = {**condition(options.device), "dtype": "float32, TF32 products"}
    rows: list[dict[str, object]] = []
    for way in options.way or ("eager", "compiled"):
        for model in options.model or MODELS:
            if time.monotonic() > end:
                print(f"left out: {model}, {way} (no time left)", file=sys.stderr, flush=True)
                continue
            rows += measured(model, way, options, end)
            if options.device == "cuda":
                torch.cuda.empty_cache()
            if options.json:
                options.json.write_text(json.dumps({"condition": heading, "rows": rows}, indent=1) + "\n")
    print(heading, table(rows), sep="\n\n")


if __name__ == "__main__":
    main()
