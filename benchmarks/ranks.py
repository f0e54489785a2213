"""One training on 1, 2 and 4 ranks of this machine: whether they end equal, and what a step sends and takes; for docs/scale.md.

    python benchmarks/ranks.py equal --json results/ranks-cpu.json    # 21 steps, every method, float32 and float64
    python benchmarks/ranks.py equal --micro 4 --types float32 --json results/ranks-cpu.json    # our strategies, micro-batches
    python benchmarks/ranks.py speed --json results/ranks-cpu.json    # bytes and milliseconds of a step, expected and found

One process per rank, one thread each, gloo. Bytes are those a rank hands to all_reduce in a step; a ring sends 2 (N - 1) / N of
them. `equal` holds ranks with synchronised norms against one process with the whole batch; in float32, as a control, also one
process against itself with the images of every batch in reverse: sums in another order, and nothing else, differ there too.
What a step of N ranks should take is what one process takes for its share of the batch, as often as ranks share a core, and what
its messages take at the latency and rate of all_reduce among N ranks, measured beside it.
"""

import argparse
import hashlib
import inspect
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from nestling.gradients import Accumulator
from nestling.gradients.combiners import RIVALS, make_combiner
from nestling.nets.synced import averaged
from nestling.recipes import named
from nestling.recipes.recipe import override
from nestling.recipes.strategies import STRATEGIES
from nestling.runs.folder import RunDir
from nestling.runs.provenance import source_commit, without_folders
from nestling.train import Training
from nestling.train.loop import epoch_generator
from nestling.train.losses import stage_losses
from nestling.train.run import join_ranks
from nestling.train.schedule import epoch_rates
from nestling.train.step import Step
from nestling.train.stepping import set_rate, share

NETWORKS, TYPES, RANKS = ("digits-width", "digits-depth"), ("float32", "float64"), (1, 2, 4)
SMALL = ("train.batch=32", "data.limit=224", "train.device=cpu", "train.diagnostics=false")
BATCH = 128
MEASURED = ("train.epochs=3", "data.limit=1408", "train.device=cpu", "train.diagnostics=false")
SPEEDS = [  # strategy, synchronised norms, parameters sharded
    ("sgd", False, False), ("sgd", True, False), ("osgd", False, False), ("osgd", True, False), ("normsgd", False, False),
    ("sgd", False, True), ("osgd", False, True),
]  # fmt: skip


# --- equal -----------------------------------------------------------------------------------------------------------


class InFloat64(Training):
    """The same training with every number twice as wide: what is left of a difference is no rounding of float32."""

    def make_step(self, compiled: bool) -> Step:
        self.net.double()
        step = super().make_step(compiled)
        for net in (self.net, *(step.tasks.nets if step.tasks else ())):
            net.register_forward_pre_hook(lambda _, given: (given[0].double(),))
        return step


def give(training: Training, method: str) -> None:
    """Let a method of others combine this training's gradients."""
    kind: Any = RIVALS[method]
    tasks = {"tasks": len(training.net.plan.heads)} if "tasks" in inspect.signature(kind).parameters else {}
    step, combine = training.step, kind(**tasks)
    step.combine, step.rows, step.tasks = combine, Accumulator(training.net, combine, check=False), None
    learnt = list(getattr(combine, "parameters", list)()) if method != "famo" else []  # which steps its own
    if learnt:
        training.optimizer.add_param_group({"params": learnt, "weight_decay": 0.0})


def trained(network: str, method: str, dtype: str, micro: str = "0", reverse: bool = False) -> dict[str, Tensor]:
    """Weights and statistics after 21 steps: three epochs, of greedy training one for each of three stages. `network` may end in
    +smooth: without kinks, where rounding can grow. `micro`: so many micro-batches; 0: none, but synchronised norms."""
    settings = [
        f"strategy.name={method if method in STRATEGIES else 'sgd'}",
        f"train.epochs={3 - 2 * (method == 'greedy')}",
    ]
    name, _, smooth = network.partition("+")
    if smooth:  # softplus for ReLU, in this process from here on
        F.relu = F.softplus  # type: ignore[assignment]
    recipe = override(
        named(name), [*SMALL, *settings, f"train.micro_batches={micro}", f"train.sync_norms={micro == '0'}"]
    )
    with tempfile.TemporaryDirectory() as folder:
        training = (InFloat64 if dtype == "float64" else Training)(recipe, RunDir(folder))
    step, train = training.step, recipe.train
    if method in RIVALS:
        give(training, method)
    for epoch in range(training.total):
        step.begin(epoch)
        batches = training.data.train.batches(train.batch, epoch_generator(train.seed, epoch), drop_last=True)
        for (x, y), rate in zip(batches, epoch_rates(train, epoch % train.epochs, 7), strict=True):
            set_rate(step.optimizer, rate)
            mine = share(x.flip(0), y.flip(0)) if reverse else share(x, y)
            step(*mine)
            if method == "famo":
                with torch.no_grad():
                    step.combine.update(averaged(torch.stack(stage_losses(step.forward(mine[0]), mine[1], train))))  # type: ignore[union-attr]
        training.share_statistics()
    return {name: tensor.contiguous() for name, tensor in training.net.state_dict().items()}


def same_on_all_ranks(tensors: dict[str, Tensor]) -> bool:
    bits = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors.values())).hexdigest()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, bits)
    return len(set(every)) == 1


def equal_rank(folder: str, cases: list[str]) -> None:
    """What one rank does: trains every case; the first writes what all end with."""
    for case in cases:
        network, method, dtype, micro = case.split(":")
        control = dist.get_world_size() == 1 and dtype == "float32" and micro == "0"
        for reverse in (False, True) if control else (False,):
            ended = trained(network, method, dtype, micro, reverse)
            alike = same_on_all_ranks(ended)
            if dist.get_rank() == 0:
                save_file(ended, f"{folder}/{case}{':reverse' * reverse}", {"ranks bitwise equal": str(alike)})


def difference(one: Path, other: Path, statistic: bool) -> float:
    ours, theirs = load_file(one), load_file(other)
    found = [name for name in ours if ("running" in name) == statistic and ours[name].is_floating_point()]
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in found)


def equal(
    networks: list[str], methods: list[str], types: list[str], ranks: list[int], micro: int
) -> list[dict[str, Any]]:
    """The largest difference to one process, of weights and of norms' statistics, in every case."""
    cases, rows = [":".join(case) for case in product(networks, methods, types, [str(micro)])], []
    with tempfile.TemporaryDirectory() as folder:
        for many in (1, *ranks):
            Path(folder, str(many)).mkdir()
            launch(many, "equal-rank", f"{folder}/{many}", *cases)
        for case, many in product(cases, (1, *ranks)):
            alone, other = Path(folder, "1", case), Path(folder, str(many), case if many > 1 else f"{case}:reverse")
            network, method, dtype, _ = case.split(":")
            if many == 1 and (dtype != "float32" or micro):
                continue
            row: dict[str, Any] = {"network": network, "method": method, "dtype": dtype, "ranks": many}
            row |= {"micro_batches": micro} if micro else {}
            row |= {name: difference(alone, other, name == "statistics") for name in ("weights", "statistics")}
            row["ranks bitwise equal"] = "True" in told(other)
            rows.append(row | ({"control": "images in reverse"} if many == 1 else {}))
    return rows


def told(path: Path) -> str:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return str(file.metadata())


# --- speed -----------------------------------------------------------------------------------------------------------


class Sent(TorchDispatchMode):
    """The bytes that a rank hands to all_reduce and, of sharded parameters, to all_gather and reduce_scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.messages = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("c10d::"):
            first = args[1] if "reduce_scatter" in name else args[0]  # the whole: what comes in, or what goes out
            whole = first if isinstance(first, Tensor) else first[0]
            self.bytes += whole.numel() * whole.element_size()
            self.messages += 1
        return func(*args, **(kwargs or {}))


def sharded_steps(training: Training) -> Iterator[None]:
    """The same steps with parameters sharded by FSDP2, one after another."""
    train, net = training.recipe.train, fully_shard(training.net)
    rows = Accumulator(net, make_combiner(training.recipe.strategy, len(training.net.plan.heads)))
    optimizer = torch.optim.SGD(net.parameters(), train.lr, momentum=train.momentum)
    for epoch in range(train.epochs):
        for x, y in training.data.train.batches(train.batch, epoch_generator(train.seed, epoch), drop_last=True):
            optimizer.zero_grad()
            mine, labels = share(x, y)
            rows.backward(stage_losses(net(mine), labels, train))
            optimizer.step()
            yield


def measure(batch: int, strategy: str, synced: bool, sharded: bool) -> dict[str, Any]:
    """The median of 32 steps without the first, and the bytes of the fourth, which is not counted: counting takes time."""
    settings = [f"strategy.name={strategy}", f"train.sync_norms={synced}", f"train.channels_last={not sharded}"]
    settings.append(f"train.batch={batch}")
    training = Training(override(named("digits-width"), [*MEASURED, *settings]), RunDir(tempfile.mkdtemp()))
    parameters, seconds, sent = sum(p.numel() for p in training.net.parameters()), [], Sent()
    steps: Iterator[object] = sharded_steps(training) if sharded else training.epochs()
    for index in range(33):
        began = time.perf_counter()
        with sent if index == 4 else nullcontext():
            next(steps)
        seconds.append(time.perf_counter() - began)
    return {
        "strategy": strategy,
        "sync_norms": synced,
        "sharded": sharded,
        "P": parameters,
        "tasks": len(training.net.plan.heads),
        "bytes": sent.bytes,
        "messages": sent.messages,
        "ms": 1e3 * statistics.median(seconds[1:4] + seconds[5:]),
    }


def reduced(numbers: int) -> float:
    """Milliseconds of all_reduce of so many numbers, the median of 50."""
    row, seconds = torch.ones(numbers), []
    for _ in range(60):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(row)
        seconds.append(time.perf_counter() - began)
    return 1e3 * statistics.median(seconds[10:])


def speed_rank(path: str, batch: str) -> None:
    found = [measure(int(batch), *case) for case in SPEEDS if dist.get_world_size() > 1 or not case[2]]
    wire = {"message_ms": reduced(1), "MB_ms": reduced(2**18) / 4 / 2**18 * 1e6}
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps([row | wire for row in found]))


def timed(ranks: int, batch: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        launch(ranks, "speed-rank", f"{folder}/found.json", str(batch))
        return list(json.loads(Path(folder, "found.json").read_text()))


def speed(ranks: list[int]) -> Iterator[dict[str, Any]]:
    """Rows with what was found, and with what was expected from one process and from all_reduce alone."""
    cores = len(os.sched_getaffinity(0))
    for many in (1, *ranks):
        alone = {(row["strategy"], row["sync_norms"]): row["ms"] for row in timed(1, BATCH // many)}
        for row in timed(many, BATCH):
            found = {"ranks": many, **row}
            if many > 1 and not row["sharded"]:
                wire = row["messages"] * row["message_ms"] + row["bytes"] / 1e6 * row["MB_ms"]
                found["share_ms"] = alone[row["strategy"], row["sync_norms"]]
                found["expected_ms"] = found["share_ms"] * math.ceil(many / cores) + wire
            yield found


# --- both ------------------------------------------------------------------------------------------------------------


def launch(ranks: int, *words: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    ran = subprocess.run(
        [*torchrun, __file__, *words], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    if ran.returncode:
        sys.exit(f"{ranks} ranks of {words[0]} ended with {ran.returncode}: {ran.stderr[-3000:]}")


def as_rank(words: list[str]) -> None:
    torch.set_num_threads(1)
    join_ranks()
    what, place, *cases = words
    equal_rank(place, cases) if what == "equal-rank" else speed_rank(place, *cases)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort an interpreter that tears them down: see nestling.__main__


def show(row: dict[str, Any]) -> str:
    return "  ".join(f"{value:.2g}" if isinstance(value, float) else str(value) for value in row.values())


def keep(path: Path, what: str, rows: list[dict[str, Any]]) -> None:
    """Write rows into a file; those of other cases that are there stay."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    told = {
        "command": without_folders(" ".join(["python", *sys.argv])),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    told |= {"commit": str(source_commit()[0]), "load average": f"{os.getloadavg()[0]:.1f}"}
    case = ("network", "method", "dtype", "ranks", "micro_batches", "strategy", "sync_norms", "sharded")
    found = {tuple(row.get(key) for key in case): row for row in kept.get(what, [])}
    found |= {tuple(row.get(key) for key in case): row | told for row in rows}
    path.write_text(json.dumps({**kept, what: list(found.values())}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["equal", "speed"])
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parser.add_argument("--methods", nargs="+", help="by default all, with --micro ours")
    parser.add_argument("--types", nargs="+", default=list(TYPES))
    parser.add_argument("--ranks", nargs="*", type=int, default=list(RANKS[1:]))
    parser.add_argument("--micro", type=int, default=0, help="equal: with so many micro-batches, which ranks share")
    parser.add_argument("--json", metavar="FILE", help="write the rows there, beside those of the other question")
    given = parser.parse_args()
    given.methods = given.methods or [*STRATEGIES, *(() if given.micro else RIVALS)]
    rows = (
        equal(given.networks, given.methods, given.types, given.ranks, given.micro)
        if given.what == "equal"
        else list(speed(given.ranks))
    )
    print("  ".join(rows[0]), *map(show, rows), sep="\n")
    if given.json:
        keep(Path(given.json), given.what, rows)


if __name__ == "__main__":
    as_rank(sys.argv[1:]) if "RANK" in os.environ else main()
