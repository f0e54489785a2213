"""A step with one gradient per task of a ResNet-50 and of a transformer of 100 M, on a GPU, eager and compiled, beside TorchJD.

    python benchmarks/large_trunks.py --json results/trunks-h200.json        both models, batch 64; under four minutes
    python benchmarks/large_trunks.py --device cpu --tiny --rounds 1         the same at a size for a try

Compiled is the trunk, by torch.compile. Every round runs all methods once, in an order drawn anew; a figure is the median over
rounds of the ratio to the summed loss of the same round. `error`: how far the update is from the literal loop over gradients of
one loss at a time. Memory is the peak of what torch allocated in a step above what was there before. What a method cannot do is
told in its row. After --seconds nothing is begun, 30 seconds later what still runs is broken off; the file is written after every
method and round, so that a run that is stopped has not been for nothing.
"""

import argparse
import json
import os
import random
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from gradients import METHODS, OURS, Step, condition, table
from torch import Tensor, nn
from trunks import Attention, Pooled, Shared

STEPS = 3  # in a row, as a training loop queues them
GRACE = 30  # seconds after which what was begun in time is broken off
WRONG = 0.1  # an update this far from the literal loop's is another one, whatever TF32 products round
SUMMED = "summed loss"
FLOOR = "floor: every task back, one weight gradient"
HOOKED = "torchjd, autogram"  # hangs hooks on its net, which other methods would trip over
ASKED = (SUMMED, OURS, "torchjd, chunk 1", FLOOR, "torchjd, vmap", HOOKED)
CANNOT = {  # told without a try, which would take a minute to compile
    ("compiled", FLOOR): "a compiled trunk is one node, whose backward makes every weight's gradient",
    ("compiled", HOOKED): "hooks inside a compiled trunk are not called: the Gram matrix lacks the trunk",
}


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


def literal(net: nn.Module, losses: Any) -> Tensor:
    """OSGD as it is written down, over gradients of one loss at a time; a vector of all parameters."""
    params = list(net.parameters())
    left: list[Tensor] = []
    for loss in losses():
        grads = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
        row = torch.cat(
            [(torch.zeros_like(p) if g is None else g).flatten().double() for p, g in zip(params, grads, strict=True)]
        )
        for other in left:
            row -= (row @ other) / (other @ other) * other
        left.append(row)
    return torch.stack(left).sum(0)


def error(net: nn.Module, wanted: Tensor | None) -> float:
    """How far `.grad` is from it, over its size."""
    if wanted is None:
        return float("nan")
    zero = torch.zeros((), device=wanted.device)
    found = torch.cat([(zero.expand_as(p) if p.grad is None else p.grad).flatten().double() for p in net.parameters()])
    return float((found - wanted).norm() / wanted.norm())


def told(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}".splitlines()[0][:160]


class Bench:
    """One model in one way: its methods, made ready one by one, then run in rounds."""

    def __init__(self, model: str, way: str, options: argparse.Namespace, end: float) -> None:
        self.model, self.way, self.options, self.end = model, way, options, end
        self.cuda = options.device == "cuda"
        self.fresh = partial(problem, model, options.batch, options.device, options.tiny, way == "compiled")
        self.steps: dict[str, Step] = {}
        self.memory: dict[str, float] = {}
        self.errors: dict[str, float] = {}
        self.failed: dict[str, str] = {}
        self.seconds: dict[str, list[float]] = {}
        self.tried: list[str] = []
        self.size = 0

    def prepare(self, write: Callable[[], None]) -> None:
        shared = self.fresh()
        self.size = sum(p.numel() for p in shared[0].parameters())
        wanted: Tensor | None = None
        for name in ASKED:
            try:
                if (self.way, name) in CANNOT:
                    raise NotImplementedError(CANNOT[self.way, name])
                if time.monotonic() > self.end:
                    raise TimeoutError("no time left")
                wanted = literal(*shared) if name == OURS else wanted  # once compiled, by the summed loss
                self._warm(name, *(self.fresh() if name == HOOKED else shared), wanted)
            except Exception as problem:  # a rival that is not installed, or cannot do this model: the rest is worth it
                self.failed[name] = told(problem)
            self.tried.append(name)
            shared[0].zero_grad()
            if self.cuda:
                torch.cuda.empty_cache()
            print(f"{self.model}, {self.way}: {name} {self.failed.get(name, '')}", file=sys.stderr, flush=True)
            write()

    def _warm(self, name: str, net: nn.Module, losses: Any, wanted: Tensor | None) -> None:
        step = METHODS[name](net, losses)
        for _ in range(2):
            step()
        if name not in (SUMMED, FLOOR):
            self.errors[name] = error(net, wanted)
            if self.errors[name] > WRONG:
                raise ValueError(f"its update is {self.errors[name]:.2g} away from the literal loop's")
        net.zero_grad()
        if self.cuda:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        step()
        waited(self.options.device)
        if self.cuda:
            self.memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
        self.steps[name] = step

    def run(self, write: Callable[[], None]) -> None:
        draw = random.Random(self.options.seed)
        for done in range(self.options.rounds if SUMMED in self.steps else 0):
            if done and time.monotonic() > self.end:
                break
            taken: dict[str, float] = {}
            for name in draw.sample(list(self.steps), len(self.steps)):
                try:
                    taken[name] = self._timed(self.steps[name])
                except Exception as problem:
                    self.failed[name] = told(problem)
                    del self.steps[name]
            for name, spent in taken.items():
                self.seconds.setdefault(name, []).append(spent)
            write()

    def _timed(self, step: Step) -> float:
        start = waited(self.options.device)
        for _ in range(STEPS):
            step()
        return (waited(self.options.device) - start) / STEPS

    def rows(self) -> list[dict[str, object]]:
        return [self._row(name) for name in self.tried]

    def _row(self, name: str) -> dict[str, object]:
        own = self.seconds.get(name, [])
        ratios = sorted(a / b for a, b in zip(own, self.seconds.get(SUMMED, []), strict=False))
        wrong = self.errors.get(name)
        return {
            "model": self.model,
            "way": self.way,
            "method": name,
            "ratio": round(statistics.median(ratios), 3) if ratios else "",
            "low": round(ratios[0], 3) if ratios else "",
            "high": round(ratios[-1], 3) if ratios else "",
            "ms": round(1000 * statistics.median(own), 2) if own else "",
            "mib": round(self.memory[name], 1) if name in self.memory else "",
            "rounds": len(own),
            "parameters": self.size,
            "batch": self.options.batch,
            "error": "" if wrong is None else f"{wrong:.1e}",
            "failed": self.failed.get(name, ""),
        }


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
    benches: list[Bench] = []

    def write() -> None:
        rows = [row for bench in benches for row in bench.rows()]
        if options.json:
            options.json.write_text(json.dumps({"condition": heading, "rows": rows}, indent=1) + "\n")

    def break_off() -> None:  # amid a compilation, say, which swallows exceptions
        print(f"broken off, {GRACE} s after the time was over; the file has what was finished", file=sys.stderr)
        print(heading, table([row for bench in benches for row in bench.rows()]), sep="\n\n", flush=True)
        os._exit(1)

    watch = threading.Timer(options.seconds + GRACE, break_off)
    watch.daemon = True
    watch.start()
    for way in options.way or ("eager", "compiled"):
        for model in options.model or MODELS:
            if time.monotonic() > end:
                print(f"left out: {model}, {way} (no time left)", file=sys.stderr, flush=True)
                continue
            benches.append(Bench(model, way, options, end))
            benches[-1].prepare(write)
            benches[-1].run(write)
            benches[-1].steps.clear()  # and with them the net
            if options.device == "cuda":
                torch.cuda.empty_cache()
    watch.cancel()
    print(heading, table([row for bench in benches for row in bench.rows()]), sep="\n\n")


if __name__ == "__main__":
    main()
