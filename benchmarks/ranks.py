"""Bytes and seconds per step of 1, 2 and 4 ranks on this machine, for docs/scale.md.

    python benchmarks/ranks.py    # a table, then a line of JSON

One process per rank, one thread each, gloo; a width nest on the digits, global batch 128. Bytes are those handed to all_reduce
by one rank in a step, which a ring then sends 2 (N - 1) / N times. More ranks than cores only show what is sent.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from nestling.recipes import named
from nestling.recipes.recipe import override
from nestling.runs.folder import RunDir
from nestling.train import Training
from nestling.train.run import join_ranks

STRATEGIES = ("sgd", "osgd", "normsgd")
SETTINGS = ("train.batch=128", "train.epochs=3", "data.limit=1408", "train.diagnostics=false")


def measure(strategy: str) -> dict[str, float]:
    """Medians over the steps of three epochs, but the first of each."""
    sent = [0]
    plain = dist.all_reduce

    def counted(tensor: torch.Tensor, *more: object, **named: object) -> object:
        sent[0] += tensor.numel() * tensor.element_size()
        return plain(tensor, *more, **named)  # type: ignore[arg-type]

    dist.all_reduce = counted
    training = Training(
        override(named("digits-width"), [*SETTINGS, f"strategy.name={strategy}"]), RunDir(tempfile.mkdtemp())
    )
    seconds, bytes_sent, last = [], [], time.perf_counter()
    for _, index in training.epochs():
        now = time.perf_counter()
        if index:
            seconds.append(now - last)
            bytes_sent.append(sent[0])
        sent[0], last = 0, now
    dist.all_reduce = plain
    parameters = sum(p.numel() for p in training.net.parameters())
    tasks = len(training.net.plan.heads)
    return {
        "P": parameters,
        "tasks": tasks,
        "bytes": statistics.median(bytes_sent),
        "ms": 1e3 * statistics.median(seconds),
    }


def rank() -> None:
    torch.set_num_threads(1)
    join_ranks()
    found = {strategy: measure(strategy) for strategy in STRATEGIES}
    if os.environ["RANK"] == "0":
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def main() -> None:
    rows = {}
    for ranks in (1, 2, 4):
        with tempfile.TemporaryDirectory() as folder:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            command = [*torchrun, __file__, f"{folder}/found.json"]
            subprocess.run(command, check=True, env=environment, capture_output=True)
            rows[ranks] = json.loads(Path(folder, "found.json").read_text())
    print(f"{'ranks':>5} {'strategy':>10} {'P':>8} {'tasks':>5} {'bytes / step':>12} {'ms / step':>10}")
    for ranks, by_strategy in rows.items():
        for strategy, found in by_strategy.items():
            numbers = f"{found['P']:>8} {found['tasks']:>5} {found['bytes']:>12.0f} {found['ms']:>10.2f}"
            print(f"{ranks:>5} {strategy:>10} {numbers}")
    print(json.dumps(rows))


if __name__ == "__main__":
    rank() if "RANK" in os.environ else main()
