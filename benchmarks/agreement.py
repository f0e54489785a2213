"""Whether the fast engines train as the eager one does: losses of the same steps, against the noise of eager runs.

    python benchmarks/agreement.py --json results/agreement-h200.json            # 100 steps of each
    python benchmarks/agreement.py --epochs 30                                   # and whole short runs on CIFAR-10

Every run begins with the same weights and sees the same batches. Rounding differs between kernels and grows from step to
step, so runs are compared with what eager runs differ by when only their kernels do (memory format, cuDNN's choices): an
engine agrees when its root mean square distance from the eager run, over the first ten steps and over all, is at most
--factor times the largest such distance between eager runs. The distance of a float32 run is printed for comparison.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from step import unfused
from torch import Tensor

from nestling.data.dataset import channel_statistics
from nestling.data.split import MemorySplit
from nestling.data.synthetic import make
from nestling.files import RECIPE
from nestling.nets import build, plan
from nestling.recipes import named
from nestling.recipes.recipe import NetworkRecipe, Recipe, StrategyRecipe, TrainRecipe, override
from nestling.runs.folder import RunDir
from nestling.runs.provenance import provenance
from nestling.train import stepping, train
from nestling.train.loop import epoch_generator, make_optimizer
from nestling.train.schedule import epoch_rates
from nestling.train.step import Step

EARLY = 10  # steps before rounding has grown much


@dataclass(frozen=True)
class Way:
    """One way of carrying out the same steps."""

    name: str
    engine: str = "eager"
    compiled: bool = False
    fused: bool = True  # of compiled ones: with our own kernels, where there are any
    settings: tuple[str, ...] = ()  # of the recipe
    flag: str = ""  # of cuDNN or oneDNN, to choose other kernels


REFERENCE = Way("eager")
OTHER_KERNELS = {
    "cuda": (
        Way("eager, contiguous", settings=("train.channels_last=false",)),
        Way("eager, cuDNN deterministic", flag="deterministic"),
        Way("eager, cuDNN benchmark", flag="benchmark"),
    ),
    "cpu": (Way("eager, contiguous", settings=("train.channels_last=false",)), Way("eager, no oneDNN", flag="plain")),
}
FAST = {
    "cuda": (
        Way("graph", "graph"),
        Way("graph, compiled", "graph", compiled=True, fused=False),
        Way("full engine", "graph", compiled=True),
    ),
    "cpu": (),
}
FLOAT32 = Way("eager, float32", settings=("train.precision=float32",))


@contextmanager
def kernels(way: Way) -> Iterator[None]:
    """The libraries' choices for one run, put back afterwards."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = way.flag == "benchmark", way.flag == "deterministic"
    try:
        with ExitStack() as stack:
            stack.enter_context(unfused(not way.fused))
            if way.flag == "plain":
                stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
            yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before


def images(recipe: Recipe, steps: int, device: torch.device) -> MemorySplit:
    """Patterns with noise that can be learnt, exactly as many as the steps need."""
    drawn = plan(recipe.network)
    height, width = drawn.input.size
    shape = (drawn.input.channels, height, width)
    raw = make(steps * recipe.train.batch, 1, classes=10, shape=shape, seed=0, noise=80.0)
    mean, std = (torch.tensor(each, device=device) for each in channel_statistics(raw.train))
    return MemorySplit(raw.train.to(device), raw.train_labels.to(device), mean, std, pad=2, flip=True)


def losses(recipe: Recipe, way: Way, split: MemorySplit, device: torch.device) -> Tensor:
    """(steps, stages): what every stage's loss was at every step of one epoch over the split."""
    recipe = override(recipe, way.settings)
    seed = torch.Generator().manual_seed(recipe.train.seed)
    memory = torch.channels_last if recipe.train.channels_last else torch.contiguous_format
    with kernels(way):
        net = build(recipe.network, generator=seed).to(device, memory_format=memory).train()  # type: ignore[call-overload]
        step = Step(net, make_optimizer(net, recipe, device), recipe, compiled=way.compiled)
        driver = stepping.start(way.engine, step, split, recipe.train.batch)
        rates = epoch_rates(recipe.train, 0, driver.steps)
        for _ in driver.epoch(epoch_generator(recipe.train.seed, 0), rates):
            pass
        if device.type == "cuda":
            torch.cuda.synchronize()
        return driver.losses.double().cpu()


def distance(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Root mean square difference of losses (seeds, steps, stages), over the early steps and over all."""
    square = (a - b).square()
    return float(square[:, :EARLY].mean().sqrt()), float(square.mean().sqrt())


def judge(found: dict[str, Tensor], eager: list[str], fast: list[str], factor: float) -> list[dict[str, Any]]:
    """One row per run: its distance from the reference (the first of `eager`) and, for the fast ones, the verdict."""
    pairs = [distance(found[a], found[b]) for a, b in combinations(eager, 2)]
    spread = tuple(max(pair[i] for pair in pairs) for i in range(2))
    rows: list[dict[str, Any]] = [{"way": "spread of eager runs", "early": spread[0], "all": spread[1]}]
    for name, values in found.items():
        early, whole = distance(values, found[eager[0]])
        row = {
            "way": name,
            "early": early,
            "all": whole,
            "first": values[0, 0].tolist(),
            "last": values[0, -1].tolist(),
        }
        if name in fast:
            row["agrees"] = bool(early <= factor * spread[0] and whole <= factor * spread[1])
        rows.append(row)
    return rows


def steps_table(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """All ways, all seeds."""
    fast = [way for way in FAST[device.type] if not args.engines or way.name in args.engines]
    ways = (REFERENCE, *OTHER_KERNELS[device.type], *fast, FLOAT32)
    recipe = Recipe(
        name="agreement",
        network=NetworkRecipe(name=args.network),
        strategy=StrategyRecipe(name=args.strategy),
        train=TrainRecipe(batch=args.batch, lr=args.lr, precision=args.precision),
    )
    split = images(recipe, args.steps, device)
    found: dict[str, Tensor] = {}
    for way in ways:
        seeds = [replace(recipe, train=replace(recipe.train, seed=seed)) for seed in range(args.seeds)]
        found[way.name] = torch.stack([losses(each, way, split, device) for each in seeds])
    eager = [way.name for way in (REFERENCE, *OTHER_KERNELS[device.type])]
    rows = judge(found, eager, [way.name for way in fast], args.factor)
    print(
        f"{args.network}, {args.strategy}, batch {args.batch}, {args.steps} steps, {args.seeds} seeds, {args.precision}"
    )
    print(f"{'':28} {'first 10':>10} {'all':>10}  loss of the last stage")
    for row in rows:
        verdict = {True: "agrees", False: "DIFFERS", None: ""}[row.get("agrees")]
        ends = f"{row['first'][-1]:.4f} -> {row['last'][-1]:.4f}" if "first" in row else ""
        print(f"{row['way']:28} {row['early']:10.2e} {row['all']:10.2e}  {ends:18} {verdict}", flush=True)
    return rows


def runs_table(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Whole short runs of width-resnet42 on CIFAR-10, eager and graph; they agree when all errors do to 0.5 points."""
    quick = [
        f"train.epochs={args.epochs}",
        "train.schedule=cosine",
        f"strategy.name={args.strategy}",
        "train.device=cuda",
    ]
    errors: dict[str, list[float]] = {}
    for way in ("eager", "graph"):
        path = Path(args.folder) / way
        begun = RunDir(path).has(RECIPE)
        recipe = override(named("cifar10-width"), [*quick, f"train.engine={way}"])
        errors[way] = [100 * stage["error"] for stage in train(recipe, str(path), begun, " ".join(sys.argv))["stages"]]
        print(f"{way:6} error % " + " ".join(f"{error:6.2f}" for error in errors[way]), flush=True)
    gap = max(abs(a - b) for a, b in zip(errors["eager"], errors["graph"], strict=True))
    print(f"largest difference {gap:.2f} points: {'agrees' if gap <= 0.5 else 'DIFFERS'}")
    return [{"epochs": args.epochs, "strategy": args.strategy, **errors, "gap_points": gap, "agrees": gap <= 0.5}]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--network", default="width-resnet42")
    parser.add_argument("--strategy", default="osgd")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--factor", type=float, default=2.0)
    parser.add_argument(
        "--epochs", type=int, default=0, help="instead: whole runs of so many epochs on CIFAR-10, CUDA only"
    )
    names = [way.name for way in FAST["cuda"]]
    parser.add_argument("--engines", nargs="*", default=[], choices=names, help="those to judge; all by default")
    parser.add_argument("--folder", default="runs/agreement", help="where those runs are kept; begun ones go on")
    parser.add_argument("--json", default="", help="write all rows to this file")
    args = parser.parse_args()
    rows = runs_table(args) if args.epochs else steps_table(args, torch.device(args.device))
    document = {
        "benchmark": "agreement", "arguments": {key: value for key, value in vars(args).items() if key != "json"}, "rows": rows,
        "provenance": provenance(" ".join(sys.argv), args.device, time.time),
    }  # fmt: skip
    if args.json:
        Path(args.json).write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(row.get("agrees", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
