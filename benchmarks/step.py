"""How long one training step takes, network by network: the plain un-nested net, SGD, OSGD; eager, graph, full engine.

    python benchmarks/step.py --device cuda --json results/step-h200.json

All figures of one run come from one process on one device, interleaved with the measured ceilings (copy bandwidth and
bf16 matrix rate), so ratios can be compared. "floor" is the larger of bytes over bandwidth and operations over rate for
one un-nested step: every convolution reads its input and writes its output once forward and reads both again twice
backward, in bf16; operations are 3 x 2 x MACs x batch. Random images: time does not depend on what is in them.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from nestling.data.split import MemorySplit
from nestling.nets import build, plan
from nestling.provenance import provenance
from nestling.recipe import NetworkRecipe, Recipe, StrategyRecipe, TrainRecipe
from nestling.train import engine
from nestling.train.loop import make_optimizer
from nestling.train.step import Step

CIFAR_NETWORKS = [
    "width-resnet42",
    "depth-sparse98",
    "even-resnet42",
    "alternate-sparse98",
    "together-sparse98",
    "cascade-sparse98",
]


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def ceilings(device: torch.device) -> tuple[float, float]:
    """(bytes per second of a large copy, read plus written; bf16 multiply-adds x 2 per second of a large product)."""
    size, side = (2**29, 8192) if device.type == "cuda" else (2**24, 1024)
    a = torch.randn(size, device=device)
    b = torch.empty_like(a)
    m = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    copy = timed(lambda: b.copy_(a), device, 5)
    product = timed(lambda: m @ m, device, 5)
    return 2 * a.numel() * 4 / copy, 2 * side**3 / product


def timed(work: Any, device: torch.device, repeats: int) -> float:
    """Median seconds of one call."""
    work()
    found = []
    for _ in range(repeats):
        synchronise(device)
        start = time.perf_counter()
        work()
        synchronise(device)
        found.append(time.perf_counter() - start)
    return sorted(found)[len(found) // 2]


def floor_seconds(name: str, batch: int, bandwidth: float, rate: float) -> float:
    drawn = plan(NetworkRecipe(name=name))
    moved = sum(
        3
        * 2
        * batch
        * (drawn.by_name[n.reads[0]].channels * prod(drawn.by_name[n.reads[0]].size) + n.channels * prod(n.size))
        for n in drawn.nodes
        if n.op == "conv"
    )
    return max(moved / bandwidth, 3 * 2 * drawn.dense()[1] * batch / rate)


def images(device: torch.device, n: int = 50_000) -> MemorySplit:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (n,), generator=generator)
    half = torch.full((3,), 0.5)
    return MemorySplit(pixels.to(device), labels.to(device), half.to(device), half.to(device) / 2, pad=4, flip=True)


class Driver:
    """One training set up, to be advanced a few steps at a time."""

    def __init__(self, recipe: Recipe, split: MemorySplit, device: torch.device, kind: str) -> None:
        torch.manual_seed(0)
        started = time.perf_counter()
        net = build(recipe.network).to(device)
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        step = Step(net.train(), make_optimizer(net, recipe, device), recipe, compiled=kind == "full")
        self.driver = engine.start("eager" if kind == "eager" else "graph", step, split, recipe.train.batch)
        self.turn = self._turns()
        next(self.turn)
        synchronise(device)
        self.startup = time.perf_counter() - started

    def _turns(self) -> Any:
        epoch = 0
        while True:
            generator = torch.Generator().manual_seed(epoch)
            yield from self.driver.epoch(generator, [0.01] * self.driver.steps)
            epoch += 1

    def advance(self, steps: int) -> None:
        for _ in range(steps):
            next(self.turn)


def measure(drivers: list[Driver], device: torch.device, steps: int, repeats: int = 5) -> list[float]:
    """Milliseconds per step of each driver, alone, in turns; the median of `repeats`."""
    found: list[list[float]] = [[] for _ in drivers]
    for _ in range(repeats):
        for index, driver in enumerate(drivers):
            synchronise(device)
            start = time.perf_counter()
            driver.advance(steps)
            synchronise(device)
            found[index].append(1000 * (time.perf_counter() - start) / steps)
    return [sorted(each)[len(each) // 2] for each in found]


def together(drivers: list[Driver], device: torch.device, steps: int) -> float:
    """Milliseconds per step and training when all of them take turns on the device."""
    synchronise(device)
    start = time.perf_counter()
    for _ in range(steps):
        for driver in drivers:
            driver.advance(1)
    synchronise(device)
    return 1000 * (time.perf_counter() - start) / steps / len(drivers)


def recipe_for(name: str, strategy: str, batch: int, precision: Any) -> Recipe:
    stages = len(plan(NetworkRecipe(name=name)).heads)
    network = NetworkRecipe(name=name, alone=stages) if strategy == "plain" else NetworkRecipe(name=name)
    kind: Any = "sgd" if strategy == "plain" else strategy
    return Recipe(
        name=f"{name}-{strategy}",
        network=network,
        strategy=StrategyRecipe(name=kind),
        train=TrainRecipe(batch=batch, precision=precision),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--networks", nargs="+", default=CIFAR_NETWORKS)
    parser.add_argument("--strategies", nargs="+", default=["plain", "sgd", "osgd"])
    parser.add_argument("--engines", nargs="+", default=["eager", "graph", "full"])
    parser.add_argument("--batches", nargs="+", type=int, default=[128])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--beside", type=int, default=0, help="also time this many trainings side by side")
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--json", default="", help="write all rows to this file")
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.backends.cudnn.benchmark = True
    engines = args.engines if device.type == "cuda" else ["eager"]
    bandwidth, rate = ceilings(device)
    print(f"copy {bandwidth / 1e12:.2f} TB/s, bf16 product {rate / 1e12:.0f} TFLOP/s", file=sys.stderr)
    split = images(device)
    rows: list[dict[str, Any]] = []
    print(
        f"{'network':20} {'batch':>5} {'strategy':9} {'engine':7} {'ms/step':>8} {'img/s':>9} {'x floor':>8} {'start s':>8}"
    )
    for name in args.networks:
        for batch in args.batches:
            floor = 1000 * floor_seconds(name, batch, bandwidth, rate)
            for strategy in args.strategies:
                for kind in engines:
                    recipe = recipe_for(name, strategy, batch, args.precision)
                    driver = Driver(recipe, split, device, kind)
                    (ms,) = measure([driver], device, args.steps)
                    row = {
                        "network": name, "batch": batch, "strategy": strategy, "engine": kind, "ms": round(ms, 4),
                        "images_per_second": round(batch / ms * 1000), "floor_ms": round(floor, 4),
                        "startup_s": round(driver.startup, 1),
                    }  # fmt: skip
                    if args.beside and kind == engines[-1]:
                        others = [driver] + [
                            Driver(replace(recipe, train=replace(recipe.train, seed=s)), split, device, kind)
                            for s in range(1, args.beside)
                        ]
                        row["beside"] = args.beside
                        row["beside_ms"] = round(together(others, device, args.steps), 4)
                        row["second_startup_s"] = round(others[-1].startup, 1)
                        del others
                    rows.append(row)
                    print(
                        f"{name:20} {batch:5} {strategy:9} {kind:7} {ms:8.3f} {batch / ms * 1000:9.0f} {ms / floor:8.2f} "
                        f"{driver.startup:8.1f}  {row.get('beside_ms', '')} {row.get('second_startup_s', '')}",
                        flush=True,
                    )
                    del driver
                    if device.type == "cuda":
                        torch.cuda.empty_cache()
    document = {
        "benchmark": "step", "command": " ".join(sys.argv), "copy_bytes_per_s": bandwidth, "bf16_flop_per_s": rate,
        "provenance": provenance(" ".join(sys.argv), args.device, time.time), "rows": rows,
    }  # fmt: skip
    if args.json:
        Path(args.json).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
