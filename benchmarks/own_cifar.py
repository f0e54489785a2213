"""An ordinary network trained on CIFAR-10, then made anytime in three ways: error and work of every stage, and what it took.

    python benchmarks/own_cifar.py --beside 6             trains whatever is missing (one GPU), then prints the table
    python benchmarks/own_cifar.py --minutes 9            stops by then with checkpoints; call it again to go on
    python benchmarks/own_cifar.py --shipped              not trained anew: the network is the one that comes with us
    python benchmarks/own_cifar.py --table --json results/own-h200.json     only what is there
    python benchmarks/own_cifar.py --epochs 1 --limit 512 --seeds 1         the same, as a try on a CPU

The network is a ResNet of 44 layers in plain PyTorch, below: nothing in it knows nestling. `keep`: its channels are born last
and stay as they are. `stripes`: `nestling.nest` cuts it. `exits`: heads after a quarter and half of its work. Minutes are of a
run with the others beside it, so they are less by itself. ± is the standard deviation over seeds.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling import exits, keep, nest
from nestling.files import RESULTS
from nestling.nets import NestedNet
from nestling.recipes.cifar10 import width
from nestling.recipes.code import hand_over
from nestling.recipes.recipe import Recipe, override
from nestling.runs.folder import RunDir
from nestling.runs.open import resolve
from nestling.train.beside import side_by_side

NETWORK = "network"
COMMON = ("strategy.name=sgd", "train.schedule=cosine", "train.average=0.999")
TAUGHT = ("train.distill=0.9", "train.distill_temperature=4")
# how each run differs from the recipe cifar10-width; OWN is the trained network, as a module, DRAWN is `keep` of it with early
# stages that begin with weights at random instead of copies of its own; WIDER the same, with other widths; JOINT is the network
# with exits, all of it trained from scratch
EVERY = {
    NETWORK: ("network.alone=3",),
    "keep": ("OWN", "network.way=keep(stripes=(0.25, 0.375), multiple=8)", "train.epochs=100", "train.distill=0.5"),
    "keep, damped": (
        "DRAWN",
        "strategy.name=damped",
        "strategy.damping=0.25",
        "train.epochs=100",
        "train.distill=0.5",
    ),
    "keep, wider": (
        "WIDER",
        "strategy.name=damped",
        "strategy.damping=0.8",
        "train.epochs=100",
        "train.distill=0.5",
    ),
    "keep, drawn": ("DRAWN", "train.epochs=100", "train.distill=0.5"),
    "keep, taught": (
        "OWN",
        "network.way=keep(stripes=(0.25, 0.375))",
        "train.epochs=100",
        "train.teaches=last",
        *TAUGHT,
    ),
    "stripes": (
        "OWN",
        'network.way=nest("w,w")',
        "train.epochs=40",
        "train.lr=0.05",
        "strategy.importance=1,1,3",
        *TAUGHT,
    ),
    "stripes, two": (
        "OWN",
        'network.way=nest("w", stripes=(1, 3))',
        "train.epochs=40",
        "train.lr=0.05",
        "strategy.importance=1,3",
        *TAUGHT,
    ),
    "exits": ("OWN", "network.way=exits(at=(0.25, 0.5))", "train.average=0", "train.epochs=5", "train.distill=0.5"),
    "exits, joint": ("JOINT",),
    "exits, conv": (
        "OWN",
        'network.way=exits(at=(0.25, 0.5), head="conv")',
        "train.average=0",
        "train.epochs=5",
        "train.distill=0.5",
    ),
}


class Block(nn.Module):
    """A pre-activation basic block; its shortcut has no parameters."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(before), nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(width), nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.stride, self.more = stride, width - before

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.relu(self.norm1(x)))
        y = self.conv2(F.relu(self.norm2(y)))
        if self.stride > 1:
            x = F.avg_pool2d(x, 2)
        if self.more:
            x = F.pad(x, (0, 0, 0, 0, 0, self.more))
        return y + x


class ResNet(nn.Module):
    """Three groups of seven blocks, 32, 64 and 128 channels wide: 388 million multiply-accumulates."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128), blocks: int = 7, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
        before = widths[0]
        for g, channels in enumerate(widths, start=1):
            group = nn.Sequential()
            for b in range(1, blocks + 1):
                group.add_module(f"block{b}", Block(before, channels, 2 if g > 1 and b == 1 else 1))
                before = channels
            self.add_module(f"group{g}", group)
        self.groups = len(widths)
        self.norm, self.linear = nn.BatchNorm2d(before), nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for g in range(1, self.groups + 1):
            x = self.get_submodule(f"group{g}")(x)
        return self.linear(F.relu(self.norm(x)).mean((2, 3)))


def shipped() -> ResNet:
    """The last stage of the kept network that comes with us, which is such a network (seed 0, weights in half precision)."""
    net = resolve("width-resnet42-kept-cifar10").net()
    last = net.subnet(net.plan.stages).net.state_dict()
    found = ResNet()
    found.load_state_dict(renamed({key: value for key, value in last.items() if not key.startswith("early.")}))
    return found.eval()


def drawn(own: Callable[[], nn.Module], seed: int) -> NestedNet:
    """`keep` of the network, its early stages with weights at random: 8, 16 and 32 channels, then 8, 24 and 48 more."""
    net = keep(own(), stripes=(0.25, 0.375), multiple=8)
    net.reset(torch.Generator().manual_seed(seed))
    return net


def wider(own: Callable[[], nn.Module], seed: int) -> NestedNet:
    """The same, with 8, 16 and 40 channels, then 8, 24 and 48 more: as wide as 8 % and 30 % of its work allow in eights."""
    early = nest(ResNet((16, 40, 88)), "w", stripes=(9, 11), multiple=8)
    early.reset(torch.Generator().manual_seed(seed))
    return keep(own(), early=early)


def joint(seed: int) -> NestedNet:
    """Early exits as others train them (MSDNet, BranchyNet): from scratch and all together, the network with its heads."""
    net = exits(ResNet(), at=(0.06, 0.25, 0.5), head="conv").thaw()
    NestedNet.reset(net, torch.Generator().manual_seed(seed))
    return net


def trained(run: Path) -> ResNet:
    """The network with the weights of its run."""
    net = ResNet()
    net.load_state_dict(renamed(resolve(str(run)).net().state_dict()))
    return net.eval()


def renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights under the names they have here: our own networks call two of the layers otherwise."""
    found = {}
    for key, value in state.items():
        head, dot, rest = key.partition(".")
        found[rest if dot and head.startswith("head") else key] = value
    return found


def jobs(
    out: Path, seeds: int, more: tuple[str, ...], ways: tuple[str, ...], ready: bool
) -> dict[tuple[str, int], tuple[Recipe, str]]:
    """Every run: its recipe and its folder. `ready`: they begin with the network that comes with us."""
    found = {}
    for way in ways:
        for seed in range(seeds):
            network = shipped if ready else partial(trained, out / f"{NETWORK}-{seed}")
            own = f"{Path(__file__).name}:network{'' if ready else seed}"
            hand_over(network, own)
            names = {"OWN": f"network.name={own}"}
            for made in (partial(drawn, network), partial(wider, network), joint):
                name = getattr(made, "func", made).__name__
                anew = own.replace("network", name)
                hand_over(partial(made, seed), anew)
                names[name.upper()] = f"network.name={anew}"
            settings = [names.get(text, text) for text in EVERY[way]]
            settings += [f"train.teacher={own}"] if way.startswith("stripes") else []
            recipe = override(width(), [*COMMON, *settings, f"train.seed={seed}", *more])
            if way != NETWORK:
                recipe = replace(recipe, name=way)
            found[way, seed] = (recipe, str(out / f"{way.replace(', ', '-')}-{seed}"))
    return found


def train(runs: dict[tuple[str, int], tuple[Recipe, str]], beside: int, seconds: float) -> None:
    """All that are not finished; the networks first, for the others begin with them."""
    for first in (True, False):
        todo = [run for (way, _), run in runs.items() if (way == NETWORK) is first and not RunDir(run[1]).has(RESULTS)]
        ready = [
            run for run in todo if first or all(RunDir(n[1]).has(RESULTS) for (w, _), n in runs.items() if w == NETWORK)
        ]
        for outcome in side_by_side(ready, beside, "python benchmarks/own_cifar.py", seconds):
            print(outcome.path, outcome.error or "finished", flush=True)


def rows(runs: dict[tuple[str, int], tuple[Recipe, str]]) -> list[dict[str, Any]]:
    """Every finished run: its stages' errors and work, and how long it took."""
    found = []
    for (way, seed), (recipe, path) in runs.items():
        run = RunDir(path)
        if not run.has(RESULTS):
            continue
        stages = run.read_json(RESULTS)["stages"]
        minutes = sum(line.get("seconds", 0) for line in run.read_log()) / 60
        found.append(
            {
                "way": way,
                "seed": seed,
                "epochs": recipe.train.epochs,
                "minutes": round(minutes, 2),
                "sizes": [stage["size"] for stage in stages],
                "errors": [round(100 * stage["error"], 2) for stage in stages],
                "macs": [stage["macs"] for stage in stages],
                "settings": list(EVERY[way]),
            }
        )
    return found


def spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def table(found: list[dict[str, Any]]) -> str:
    """One line for each way: error and millions of multiply-accumulates until each stage."""
    lines = ["| | error of each stage, % | M MACs | epochs | minutes | n |", "|---|---|---|---|---|---|"]
    for way in dict.fromkeys(row["way"] for row in found):
        mine = [row for row in found if row["way"] == way]
        errors = " / ".join(spread(list(each)) for each in zip(*(row["errors"] for row in mine), strict=True))
        macs = " / ".join(f"{each / 1e6:.0f}" for each in mine[0]["macs"])
        minutes = statistics.mean(row["minutes"] for row in mine)
        lines.append(f"| {way} | {errors} | {macs} | {mine[0]['epochs']} | {minutes:.1f} | {len(mine)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/own")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--beside", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--ways", default=",".join(way.replace(", ", "-") for way in EVERY))
    parser.add_argument("--epochs", type=int, default=0, help="of every run, for a try")
    parser.add_argument("--limit", type=int, default=0, help="so many training images, for a try")
    parser.add_argument("--shipped", action="store_true", help="begin with the network that comes with us")
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--json", default="")
    asked = parser.parse_args()
    more = [f"train.epochs={asked.epochs}"] if asked.epochs else []
    more += [f"data.limit={asked.limit}"] if asked.limit else []
    ways = tuple(way for way in EVERY if way.replace(", ", "-") in asked.ways.split(","))
    ways = tuple(way for way in ways if not (asked.shipped and way == NETWORK))
    runs = jobs(Path(asked.out), asked.seeds, tuple(more), ways, asked.shipped)
    if not asked.table:
        train(runs, asked.beside, 60 * asked.minutes)
    found = rows(runs)
    print(table(found))
    if asked.json:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        about = {
            "device": device,
            "torch": torch.__version__,
            "command": "python benchmarks/own_cifar.py",
            "rows": found,
        }
        Path(asked.json).write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
