"""How long one training step takes, network by network: the plain un-nested net, SGD, OSGD; eager, graph, full engine.

    python benchmarks/step.py --device cuda --beside 6 --torchjd --json results/step-h200.json

All figures of one run come from one process on one device, interleaved with the measured ceilings (copy bandwidth and bf16
matrix rate), so ratios can be compared. "x floor" is against the floor of one un-nested step with fused norms, "x conv"
against that of its convolutions alone (floor.py says what each counts). --beside 6 also times six trainings side by side: six of
each strategy, then the strategies in turn, as in a grid. --torchjd adds a second table: the same nest
written as a straightforward module (striped.py). --profile 10 also shows the ten longest kernels of each step. Random
images: time does not depend on what is in them.
"""

import argparse
import gc
import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from floor import floors
from striped import Striped, stripes_step

from nestling.data.split import MemorySplit
from nestling.nets import build, plan
from nestling.recipes.recipe import NetworkRecipe, Recipe, StrategyRecipe, TrainRecipe
from nestling.runs.provenance import provenance, without_folders
from nestling.train import stepping, tasks
from nestling.train.capabilities import more_queues
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


KINDS = ["eager", "graph", "compiled", "full"]


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


def images(device: torch.device, n: int = 50_000) -> MemorySplit:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (n,), generator=generator)
    half = torch.full((3,), 0.5)
    return MemorySplit(pixels.to(device), labels.to(device), half.to(device), half.to(device) / 2, pad=4, flip=True)


@contextmanager
def unfused(wanted: bool) -> Iterator[None]:
    """While it lasts, compiled steps are made by torch.compile alone, without kernels of our own."""
    suits = tasks.suits
    try:
        if wanted:
            tasks.suits = lambda net, batch: False
        yield
    finally:
        tasks.suits = suits


class Driver:
    """One training set up, to be advanced a few steps at a time. Kinds: eager; graph, one whole step captured; compiled,
    that through torch.compile; full, with our own kernels as well, which is what `nestling train` does on a GPU."""

    def __init__(self, recipe: Recipe, split: MemorySplit, device: torch.device, kind: str) -> None:
        torch.manual_seed(0)
        started = time.perf_counter()
        net = build(recipe.network).to(device)
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        with unfused(kind == "compiled"):
            step = Step(net.train(), make_optimizer(net, recipe, device), recipe, compiled=kind in ("compiled", "full"))
            self.driver = stepping.start("eager" if kind == "eager" else "graph", step, split, recipe.train.batch)
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


def measure(drivers: list[Any], device: torch.device, steps: int, repeats: int = 5) -> list[float]:
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


def together(drivers: list[Driver], device: torch.device, steps: int, repeats: int = 3) -> float:
    """Milliseconds per step and training when all of them take turns on the device; the median of `repeats`."""
    found = []
    for _ in range(repeats):
        synchronise(device)
        start = time.perf_counter()
        for _ in range(steps):
            for driver in drivers:
                driver.advance(1)
        synchronise(device)
        found.append(1000 * (time.perf_counter() - start) / steps / len(drivers))
    return sorted(found)[len(found) // 2]


class Straightforward:
    """The nest as a module of stripes, driven step by step from Python over the same images."""

    def __init__(
        self, name: str, batch: int, precision: str, split: MemorySplit, device: torch.device, way: str, aggregator: str
    ) -> None:
        torch.manual_seed(0)
        net = Striped(plan(NetworkRecipe(name=name))).to(device).train()
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        train = TrainRecipe()
        chosen = None if way == "sgd" else make_aggregator(aggregator)
        # TorchJD's gradients lie in memory otherwise than channels-last weights, which the fused optimizer refuses.
        optimizer = torch.optim.SGD(
            net.parameters(), train.lr, train.momentum, nesterov=True, weight_decay=train.weight_decay,
            fused=device.type == "cuda" and chosen is None,
        )  # fmt: skip
        self.step = stripes_step(net, optimizer, chosen, precision, None if way == "vectorised" else 1)
        self.turn = (self.step(*pair) for seed in count() for pair in self._epoch(split, batch, seed))

    def _epoch(self, split: MemorySplit, batch: int, seed: int) -> Any:
        return split.batches(batch, torch.Generator().manual_seed(seed), drop_last=True)

    def advance(self, steps: int) -> None:
        for _ in range(steps):
            next(self.turn)


def make_aggregator(name: str) -> Any:
    """osgd and mean need torchjd and torch alone; upgrad also needs quadprog and qpsolvers."""
    from torchjd import aggregation

    from nestling.gradients.combiners.torchjd import OSGDAggregator

    return {"osgd": OSGDAggregator, "mean": aggregation.Mean, "upgrad": aggregation.UPGrad}[name]()


def profiled(driver: Any, device: torch.device, steps: int, longest: int) -> dict[str, Any]:
    """What one step consists of: kernels (copies and fills among them) on CUDA, operators by their own time on a CPU.

    Times are sums over all streams: kernels that run beside one another count in full, so they may be more than the step.
    """
    cuda = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        driver.advance(steps)
        synchronise(device)
    found = [
        (event.key, event.count / steps, (event.self_device_time_total if cuda else event.self_cpu_time_total) / steps)
        for event in profile.key_averages()
        if event.device_type.name == device.type.upper() and not event.is_user_annotation
    ]
    total = sum(us for _, _, us in found)
    rows = [
        {"name": name, "calls": round(calls, 2), "us": round(us, 2), "share": round(us / total, 4)}
        for name, calls, us in sorted(found, key=lambda each: -each[2])[:longest]
    ]
    calls = round(sum(calls for _, calls, _ in found), 2)
    return {"of": "kernels" if cuda else "operators", "calls": calls, "us": round(total, 1), "longest": rows}


def print_profile(profile: dict[str, Any]) -> None:
    print(f"    a step: {profile['calls']:g} {profile['of']}, {profile['us']:.0f} us in all; the longest:")
    print(f"    {'calls':>8} {'us':>9} {'share':>6}  name")
    for row in profile["longest"]:
        print(f"    {row['calls']:8g} {row['us']:9.1f} {row['share']:6.1%}  {row['name'][:100]}")
    sys.stdout.flush()


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


def first_table(args: argparse.Namespace, split: MemorySplit, device: torch.device, speed: tuple[float, float]) -> Any:
    """Our engines; yields rows and prints them as they come."""
    engines = args.engines if device.type == "cuda" else ["eager"]
    beside = f"{args.beside} beside: ms  x alone" if args.beside else ""
    print(
        f"{'network':20} {'batch':>5} {'strategy':9} {'engine':7} {'ms/step':>8} {'img/s':>9} {'x floor':>8} {'x conv':>7} "
        f"{'start s':>8}  {beside}"
    )
    for name in args.networks:
        for batch in args.batches:
            floor = {form: 1000 * each for form, each in floors(plan(NetworkRecipe(name=name)), batch, *speed).items()}
            found: dict[tuple[str, str], float] = {}
            for strategy in args.strategies:
                for kind in engines:
                    recipe = recipe_for(name, strategy, batch, args.precision)
                    beside_n = args.beside if kind == engines[-1] else 0
                    row = one_row(recipe, split, device, kind, args.steps, beside_n, args.profile)
                    row |= {"network": name, "batch": batch, "strategy": strategy, "engine": kind}
                    row |= {f"floor_{form}_ms": round(ms, 4) for form, ms in floor.items()}
                    ms = found[strategy, kind] = row["ms"]
                    more = f"  {row['beside_ms']:14.3f} {row['beside_ratio']:8.2f}" if "beside_ms" in row else ""
                    print(
                        f"{name:20} {batch:5} {strategy:9} {kind:7} {ms:8.3f} {batch / ms * 1000:9.0f} "
                        f"{ms / floor['fused']:8.2f} {ms / floor['conv']:7.2f} {row['startup_s']:8.1f}{more}",
                        flush=True,
                    )
                    if "profile" in row:
                        print_profile(row["profile"])
                    yield row
            for kind in engines:
                if ("sgd", kind) in found and ("osgd", kind) in found:
                    ratio = found["osgd", kind] / found["sgd", kind]
                    print(f"{name:20} {batch:5} osgd/sgd  {kind:7} {ratio:8.3f}", flush=True)
            alone = {
                strategy: ms for (strategy, kind), ms in found.items() if kind == engines[-1] and strategy != "plain"
            }
            if args.beside and len(alone) > 1:
                yield mixed_row(name, batch, alone, args, split, device, engines[-1])


def mixed_row(
    name: str, batch: int, alone: dict[str, float], args: argparse.Namespace, split: MemorySplit,
    device: torch.device, kind: str,
) -> dict[str, Any]:  # fmt: skip
    """A grid as it is trained: the strategies in turn, side by side, against the mean of each of them alone."""
    chosen = [list(alone)[i % len(alone)] for i in range(args.beside)]
    drivers = [Driver(recipe_for(name, strategy, batch, args.precision), split, device, kind) for strategy in chosen]
    ms, mean = together(drivers, device, args.steps), sum(alone[strategy] for strategy in chosen) / len(chosen)
    row = {
        "network": name, "batch": batch, "strategy": " ".join(chosen), "engine": kind, "ms": round(mean, 4),
        "beside": args.beside, "beside_ms": round(ms, 4), "beside_ratio": round(ms / mean, 4),
    }  # fmt: skip
    print(
        f"{name:20} {batch:5} {'+'.join(alone)} in turn, {args.beside} beside: {ms:.3f} ms each, {ms / mean:.2f} of alone"
    )
    return row


def one_row(
    recipe: Recipe,
    split: MemorySplit,
    device: torch.device,
    kind: str,
    steps: int,
    beside: int = 0,
    longest: int = 0,
) -> dict[str, Any]:
    """Milliseconds of one training alone and, where asked for, of several side by side; then what a step consists of."""
    driver = Driver(recipe, split, device, kind)
    (ms,) = measure([driver], device, steps)
    row: dict[str, Any] = {
        "ms": round(ms, 4), "images_per_second": round(recipe.train.batch / ms * 1000),
        "startup_s": round(driver.startup, 1),
    }  # fmt: skip
    if beside:
        others = [driver]
        for seed in range(1, beside):
            others.append(Driver(replace(recipe, train=replace(recipe.train, seed=seed)), split, device, kind))
        row["beside"], row["beside_ms"] = beside, round(together(others, device, steps), 4)
        row["beside_ratio"] = round(row["beside_ms"] / ms, 4)
        row["second_startup_s"] = round(others[-1].startup, 1)
    if longest:  # after the timing, which it would disturb
        row["profile"] = profiled(driver, device, steps, longest)
    return row


def second_table(args: argparse.Namespace, split: MemorySplit, device: torch.device, ours: list[dict[str, Any]]) -> Any:
    """The straightforward module: plain SGD, TorchJD with one backward per loss, TorchJD vectorised; then ours again."""
    kind = args.engines[-1] if device.type == "cuda" else "eager"
    print(
        f"\n{'network':20} {'batch':>5} {'straightforward, TorchJD ' + args.aggregator:36} {'ms/step':>8} {'ours':>8} {'x':>6}"
    )
    for name in args.networks:
        for batch in args.batches:
            known = {
                r["strategy"]: r["ms"] for r in ours if (r["network"], r["batch"], r["engine"]) == (name, batch, kind)
            }
            for strategy in ("sgd", "osgd"):
                if strategy not in known:
                    recipe = recipe_for(name, strategy, batch, args.precision)
                    known[strategy] = one_row(recipe, split, device, kind, args.steps)["ms"]
            for way in ("sgd", "backward each", "vectorised"):
                row: dict[str, Any] = {
                    "network": name,
                    "batch": batch,
                    "straightforward": way,
                    "aggregator": args.aggregator,
                }
                row |= {"ours": "sgd" if way == "sgd" else "osgd", "ours_engine": kind}
                row["ours_ms"] = known[row["ours"]]
                try:
                    made = Straightforward(name, batch, args.precision, split, device, way, args.aggregator)
                    made.advance(3)
                    (row["ms"],) = measure([made], device, max(1, args.steps // 5), 3)
                    row["ratio"] = round(row["ms"] / row["ours_ms"], 3)
                    text = f"{row['ms']:8.3f} {row['ours_ms']:8.3f} {row['ratio']:6.2f}"
                except RuntimeError as error:  # vectorising has no rule for some operations in mixed precision
                    row["error"] = str(error).splitlines()[0]
                    text = f"does not run: {row['error']}"
                print(f"{name:20} {batch:5} {way:36} {text}", flush=True)
                yield row


def main() -> None:
    more_queues()  # as every training does
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--networks", nargs="+", default=CIFAR_NETWORKS)
    parser.add_argument("--strategies", nargs="*", default=["plain", "sgd", "osgd"])
    parser.add_argument("--engines", nargs="+", default=["eager", "graph", "full"], choices=KINDS)
    parser.add_argument("--batches", nargs="+", type=int, default=[128])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--beside", type=int, default=0, help="also time this many trainings side by side")
    parser.add_argument("--torchjd", action="store_true", help="second table: a straightforward module with TorchJD")
    parser.add_argument(
        "--aggregator", choices=["osgd", "mean", "upgrad"], default="osgd", help="TorchJD's; upgrad needs quadprog"
    )
    parser.add_argument(
        "--profile",
        type=int,
        default=0,
        metavar="N",
        help="also the N longest kernels of a step (operators on a CPU) and how many there are; rows that follow may be "
        "slower for it, so take times from a run without",
    )
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--images", type=int, default=50_000, help="how many random training images")
    parser.add_argument("--json", default="", help="write all rows to this file")
    args = parser.parse_args()
    if args.torchjd and importlib.util.find_spec("torchjd") is None:
        parser.error(
            "--torchjd needs torchjd: pip install 'nestling[compare]', or put it on PYTHONPATH (it is pure Python)"
        )
    device = torch.device(args.device)
    torch.backends.cudnn.benchmark = True
    bandwidth, rate = ceilings(device)
    print(f"copy {bandwidth / 1e12:.2f} TB/s, bf16 product {rate / 1e12:.0f} TFLOP/s", file=sys.stderr)
    split = images(device, args.images)
    rows: list[dict[str, Any]] = []
    stripes: list[dict[str, Any]] = []
    document = {
        "benchmark": "step", "command": without_folders(" ".join(sys.argv)),
        "copy_bytes_per_s": bandwidth, "bf16_flop_per_s": rate,
        "provenance": provenance(" ".join(sys.argv), args.device, time.time), "rows": rows, "torchjd": stripes,
    }  # fmt: skip

    def keep(into: list[dict[str, Any]], found: Any) -> None:
        for row in found:
            into.append(row)
            if args.json:  # after every row: a run that is stopped has not been for nothing
                Path(args.json).write_text(json.dumps(document, indent=1) + "\n")
            if device.type == "cuda":
                gc.collect()  # drivers and their generators refer to each other
                torch.cuda.empty_cache()

    keep(rows, first_table(args, split, device, (bandwidth, rate)))
    if args.torchjd:
        keep(stripes, second_table(args, split, device, rows))


if __name__ == "__main__":
    main()
