"""Faults, counted: workers and drivers of a sweep are killed, checkpoints damaged, disks filled; all ends as if undisturbed.

    python benchmarks/faults.py --faults 12    # prints a line of JSON; fails where a fault cost more than it should

Each fault is either survived, with the bits of undisturbed runs at the end, or answered by a clear error that loses nothing.
tests/test_ranks_lost.py kills ranks of torchrun, benchmarks/two_nodes.py nodes of Ray.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from nestling.errors import NestlingError
from nestling.files import CHECKPOINT, RECIPE
from nestling.recipes import named
from nestling.recipes.recipe import override
from nestling.runs.folder import RunDir
from nestling.studies.sweep.axes import grid_runs
from nestling.train import train

SETTINGS = ("train.epochs=8", "train.batch=64", "data.limit=256", "train.diagnostics=false", "train.evaluate_every=8")
GRID = ("strategy.name=sgd,osgd", "train.seed=0,1")
RUNS = grid_runs(override(named("digits-width"), SETTINGS), GRID)


def driver(out: Path) -> "subprocess.Popen[bytes]":
    options = [*(f"--grid={each}" for each in GRID), *(f"--set={each}" for each in SETTINGS)]
    command = [sys.executable, "-m", "nestling", "sweep", "digits-width", *options, "--out", str(out)]
    return subprocess.Popen([*command, "--beside", "2", "--quiet"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def workers(out: Path) -> list[tuple[Path, int]]:
    """Runs in progress with a checkpoint, and the processes that train them."""
    found = []
    for lock in out.glob("*/.lock"):
        try:
            holder = re.match(r"process (\d+)", lock.read_text())
        except FileNotFoundError:
            continue
        if holder and (lock.parent / CHECKPOINT).exists():
            found.append((lock.parent, int(holder[1])))
    return found


def kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return


def kills(out: Path, many: int, chance: random.Random, counted: Counter[str]) -> None:
    """Kill workers, and now and then the driver, until so many were; then let the sweep end."""
    process, last = driver(out), {path.name: 0 for path in out.glob("*")}
    while True:
        if process.poll() is not None:
            if all(RunDir(out / name).has("results.json") for name, _ in RUNS):
                return
            process = driver(out)  # it was killed, or gave a run up that was killed too often
        time.sleep(chance.uniform(0.05, 0.3))
        for path, worker in workers(out) if sum(counted.values()) < many else ():
            epochs = len(RunDir(path).read_log())
            if epochs > last.get(path.name, 0):  # else a run might never get on
                last[path.name] = epochs + chance.randrange(2)
                victim = process.pid if chance.random() < 0.2 else worker
                kill(victim)
                counted["driver killed" if victim == process.pid else "worker killed"] += 1
                if victim == process.pid:
                    process.wait()
                    break


def answered(work: "subprocess.Popen[bytes]", text: str) -> None:
    _, err = work.communicate(timeout=300)
    assert work.returncode == 1 and text in err.decode(), (work.returncode, err.decode()[-500:])


def resume(run: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "nestling", "train", "--resume", str(run), "--quiet"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def half_trained(path: Path) -> Path:
    """A run with a checkpoint, and most of its epochs to go."""
    train(RUNS[0][1], str(path), quiet=True, seconds=0)
    return path


def damaged(folder: Path, counted: Counter[str]) -> None:
    """A byte flipped, a half cut off, nothing left: refused by name, and a copy put back goes on."""
    run = half_trained(folder / "damaged")
    kept = (run / CHECKPOINT).read_bytes()
    middle = len(kept) // 2
    for spoilt in (kept[:middle] + bytes([kept[middle] ^ 1]) + kept[middle + 1 :], kept[:middle], b""):
        (run / CHECKPOINT).write_bytes(spoilt)
        answered(resume(run), "checkpoint.safetensors is")
        counted["checkpoint damaged"] += 1
    (run / CHECKPOINT).write_bytes(kept)


def two_at_once(folder: Path, counted: Counter[str]) -> None:
    run = RunDir(half_trained(folder / "held"))
    run.hold()
    answered(resume(run.path), "is being trained by process")
    counted["two processes on one folder"] += 1
    run.release()


def disk(folder: Path, counted: Counter[str]) -> None:
    """A full disk, and one that can only be read; needs the right to mount. Afterwards the run goes on."""
    small = folder / "disk"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(small)], capture_output=True).returncode:
        return
    try:
        run = half_trained(small / "run")
        with open(small / "filler", "wb", buffering=0) as filler:
            try:
                while True:
                    filler.write(bytes(4096))
            except OSError:
                pass
        answered(resume(run), "the disk is full")
        counted["disk full"] += 1
        (small / "filler").unlink()
        subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
        answered(resume(run), "Read-only file system")
        counted["folder read-only"] += 1
        subprocess.run(["mount", "-o", "remount,rw", str(small)], check=True)
        assert resume(run).wait(300) == 0
        shutil.copytree(run, folder / "after-disk")
    finally:
        subprocess.run(["umount", str(small)], check=True)


def same(one: Path, other: Path) -> bool:
    (ours, _), (theirs, _) = (RunDir(path).load_tensors("weights.safetensors") for path in (one, other))
    return all(torch.equal(ours[key], theirs[key]) for key in theirs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    folder, counted, began = Path(tempfile.mkdtemp(prefix="faults-")), Counter[str](), time.monotonic()
    damaged(folder, counted)
    two_at_once(folder, counted)
    disk(folder, counted)
    kills(folder / "sweep", given.faults, random.Random(given.seed), counted)
    for name in ("damaged", "held"):
        assert resume(folder / name).wait(300) == 0
    pairs = [("damaged", RUNS[0]), ("held", RUNS[0]), *((f"sweep/{run[0]}", run) for run in RUNS)]
    if (folder / "after-disk" / RECIPE).exists():
        pairs.append(("after-disk", RUNS[0]))
    for name, recipe in RUNS:
        train(recipe, str(folder / "undisturbed" / name), quiet=True)
    equal = {name: same(folder / name, folder / "undisturbed" / run[0]) for name, run in pairs}
    seconds = round(time.monotonic() - began)
    print(json.dumps({"faults": sum(counted.values()), **counted, "bitwise": equal, "seconds": seconds}))
    if not all(equal.values()):
        raise NestlingError(f"a run ended otherwise than undisturbed: {equal}; its folder is in {folder}")


if __name__ == "__main__":
    main()
