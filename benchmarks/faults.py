"""Faults, counted: whatever trains is killed, checkpoints are damaged, disks filled; all ends as if undisturbed.

    python benchmarks/faults.py --json results/faults-cpu.json    # fifty; fails where one cost more than it should

Each fault is either survived, with the bits of undisturbed runs at the end, or answered by a clear error that loses nothing.
Killed (kill -9) are ranks of torchrun, writers amid a file, workers and drivers of sweeps, here and on a Ray cluster (which needs
Ray). A full disk needs the right to mount one. benchmarks/two_nodes.py kills a node.
"""

import argparse
import json
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nestling.errors import NestlingError
from nestling.files import CHECKPOINT, RECIPE, RESULTS, WEIGHTS
from nestling.recipes import named
from nestling.recipes.recipe import override
from nestling.runs.folder import RunDir
from nestling.runs.provenance import source_commit, without_folders
from nestling.studies.sweep.axes import grid_runs
from nestling.train import train

SETTINGS = ("train.epochs=8", "train.batch=64", "data.limit=256", "train.diagnostics=false", "train.evaluate_every=8")
GRID = ("strategy.name=sgd,osgd", "train.seed=0,1")
RUNS = grid_runs(override(named("digits-width"), SETTINGS), GRID)
ONE = next(run for run in RUNS if run[1].strategy.name == "osgd")  # what suffers alone
NESTLING = [sys.executable, "-m", "nestling"]
Process = subprocess.Popen[bytes]


def begun(command: list[str], **environment: str) -> Process:
    told = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=told)


def training(run: Path) -> list[str]:
    """What goes on with a run, or begins it."""
    if (run / RECIPE).exists():
        return ["train", "--resume", str(run), "--quiet"]
    first = [f"--set={each}" for each in (*SETTINGS, f"strategy.name={ONE[1].strategy.name}")]
    return ["train", "digits-width", *first, "--out", str(run), "--quiet"]


def resume(run: Path) -> Process:
    return begun([*NESTLING, *training(run)])


def half_trained(path: Path) -> Path:
    """A run with a checkpoint, and most of its epochs to go."""
    train(ONE[1], str(path), quiet=True, seconds=0)
    return path


def ended(work: Process) -> None:
    _, err = work.communicate(timeout=900)
    assert work.returncode == 0, (work.returncode, err.decode()[-2000:])


def answered(work: Process, text: str) -> None:
    _, err = work.communicate(timeout=900)
    assert work.returncode == 1 and text in err.decode(), (work.returncode, err.decode()[-500:])


def kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return


def children(process: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except FileNotFoundError:
        return []


# --- sweeps -----------------------------------------------------------------------------------------------------------


def sweep(out: Path, *more: str, **environment: str) -> Process:
    options = [*(f"--grid={each}" for each in GRID), *(f"--set={each}" for each in SETTINGS)]
    return begun([*NESTLING, "sweep", "digits-width", *options, "--out", str(out), *more, "--quiet"], **environment)


def local_workers(out: Path) -> list[tuple[Path, int]]:
    """Runs in progress, and the processes that train them."""
    found = []
    for lock in out.glob("*/.lock"):
        try:
            holder = re.match(r"process (\d+)", lock.read_text())
        except FileNotFoundError:
            continue
        if holder:
            found.append((lock.parent, int(holder[1])))
    return found


def kills(
    out: Path,
    begin: Callable[[], Process],
    workers: Callable[[Path], list[tuple[Path, int]]],
    many: int,
    chance: random.Random,
    counted: Counter[str],
    where: str = "",
) -> None:
    """Kill workers, and now and then the driver, until so many were; then let the sweep end."""
    process, last, done = begin(), dict.fromkeys((name for name, _ in RUNS), 0), 0
    while True:
        if process.poll() is not None:
            if all(RunDir(out / name).has(RESULTS) for name, _ in RUNS):
                return
            process = begin()  # it was killed, or gave a run up that was killed too often
        time.sleep(chance.uniform(0.05, 0.3))
        for path, worker in workers(out) if done < many else ():
            if not (path / CHECKPOINT).exists() or done == many:
                continue
            epochs = len(RunDir(path).read_log())
            if epochs > last[path.name]:  # else a run might never get on
                last[path.name] = epochs + chance.randrange(2)
                victim = process.pid if chance.random() < 0.2 else worker
                kill(victim)
                done += 1
                counted[f"{where}driver killed" if victim == process.pid else f"{where}worker killed"] += 1
                if victim == process.pid:
                    process.wait()
                    break


def local_kills(out: Path, many: int, chance: random.Random, counted: Counter[str]) -> None:
    kills(out, lambda: sweep(out, "--beside", "2"), local_workers, many, chance, counted)


def ray_kills(out: Path, many: int, chance: random.Random, counted: Counter[str]) -> None:
    """The same on a Ray cluster of one node, whose raylet has the workers."""
    os.environ["RAY_TMPDIR"] = str(out.parent)  # the addresses of other clusters are not ours
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    raylets = [int(each.process.pid) for each in cluster.head_node.all_processes["raylet"]]

    def workers(out: Path) -> list[tuple[Path, int]]:
        found = []
        for pid in (child for raylet in raylets for child in children(raylet)):
            try:
                title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
            except FileNotFoundError:
                continue
            found += [(out / name, pid) for name, _ in RUNS if title == f"ray::{name}"]
        return found

    def begin() -> Process:
        return sweep(out, "--on", "ray", RAY_ADDRESS=cluster.address)

    try:
        kills(out, begin, workers, many, chance, counted, "Ray ")
    finally:
        cluster.shutdown()


# --- one training -----------------------------------------------------------------------------------------------------


def ranks(run: Path, many: int, chance: random.Random, counted: Counter[str]) -> None:
    """Two ranks of torchrun, of which now one and now the other is killed."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    process = begun([*torchrun, f"--max-restarts={many}", *NESTLING[1:], *training(run)])
    epochs = done = 0
    while process.poll() is None and done < many:
        time.sleep(0.1)
        now = len(RunDir(run).read_log()) if (run / CHECKPOINT).exists() else 0
        there = children(process.pid)
        if now > epochs and len(there) == 2:
            kill(chance.choice(there))
            epochs, done = now, done + 1
            counted["rank killed"] += 1
    ended(process)


# Kills its own process while it writes a file: half of it there, all of it there, or just put in its place.
WRITER = """
import os, signal, sys
name, when, left = sys.argv[1], sys.argv[2], int(sys.argv[3])
fsync, replace = os.fsync, os.replace
def reached(now):
    global left
    left -= now == when
    return now == when and left == 0
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def synced(file):
    if os.readlink(f"/proc/self/fd/{file}").endswith(f"/.{name}.tmp"):
        if reached("half"):
            os.ftruncate(file, os.fstat(file).st_size // 2)
            die()
        if reached("whole"):
            die()
    fsync(file)
def replaced(one, other):
    replace(one, other)
    if os.path.basename(other) == name and reached("moved"):
        die()
os.fsync, os.replace, sys.argv[1:] = synced, replaced, sys.argv[4:]
from nestling.__main__ import entry
entry()
"""
WRITES = [
    (RECIPE, "half", 1),
    (CHECKPOINT, "half", 2),
    (CHECKPOINT, "whole", 2),
    (CHECKPOINT, "moved", 2),
    (CHECKPOINT, "half", 2),
    (WEIGHTS, "half", 1),
    (RESULTS, "whole", 1),
    (RESULTS, "moved", 1),
]


def writers(run: Path, counted: Counter[str]) -> None:
    for name, when, which in WRITES:
        work = begun([sys.executable, "-c", WRITER, name, when, str(which), *training(run)])
        _, err = work.communicate(timeout=900)
        assert work.returncode == -signal.SIGKILL, (name, when, work.returncode, err.decode()[-500:])
        counted["writer killed"] += 1
    assert (run / RESULTS).exists()


def damaged(run: Path, counted: Counter[str]) -> None:
    """A byte flipped, a half cut off, nothing left: refused by name, and a copy put back goes on."""
    kept = (half_trained(run) / CHECKPOINT).read_bytes()
    middle = len(kept) // 2
    for spoilt in (kept[:middle] + bytes([kept[middle] ^ 1]) + kept[middle + 1 :], kept[:middle], b""):
        (run / CHECKPOINT).write_bytes(spoilt)
        answered(resume(run), f"{CHECKPOINT} is")
        counted["checkpoint damaged"] += 1
    (run / CHECKPOINT).write_bytes(kept)
    ended(resume(run))


def two_at_once(path: Path, counted: Counter[str]) -> None:
    run = RunDir(half_trained(path))
    run.hold()
    answered(resume(run.path), "is being trained by process")
    counted["two processes on one folder"] += 1
    run.release()
    ended(resume(run.path))


def disk(run: Path, counted: Counter[str]) -> None:
    """A full disk, and one that can only be read. Afterwards the run goes on."""
    small = run.parent / "disk"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(small)], check=True)
    try:
        here = half_trained(small / "run")
        with open(small / "filler", "wb", buffering=0) as filler:
            try:
                while True:
                    filler.write(bytes(4096))
            except OSError:
                pass
        answered(resume(here), "the disk is full")
        counted["disk full"] += 1
        (small / "filler").unlink()
        subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
        answered(resume(here), "Read-only file system")
        counted["folder read-only"] += 1
        subprocess.run(["mount", "-o", "remount,rw", str(small)], check=True)
        ended(resume(here))
        shutil.copytree(here, run)
    finally:
        subprocess.run(["umount", str(small)], check=True)


# --- all of them ------------------------------------------------------------------------------------------------------


def same(one: Path, other: Path) -> bool:
    (ours, _), (theirs, _) = (RunDir(path).load_tensors(WEIGHTS) for path in (one, other))
    equal = all(torch.equal(ours[key], theirs[key]) for key in theirs)
    return equal and RunDir(one).read_json(RESULTS) == RunDir(other).read_json(RESULTS)


def alone(folder: Path) -> list[tuple[Path, Path]]:
    """A run that suffered, and what it should equal."""
    train(ONE[1], str(folder / "undisturbed"), quiet=True)
    return [(folder / "run", folder / "undisturbed")]


def swept(folder: Path) -> list[tuple[Path, Path]]:
    for name, recipe in RUNS:
        train(recipe, str(folder / "undisturbed" / name), quiet=True)
    return [(runs / name, folder / "undisturbed" / name) for runs in sorted(folder.glob("runs-*")) for name, _ in RUNS]


def by_ranks(folder: Path) -> list[tuple[Path, Path]]:
    ranks(folder / "undisturbed", 0, random.Random(), Counter())
    return [(folder / "run", folder / "undisturbed")]


def suffer(kind: str, folder: Path, many: int, chance: random.Random, counted: Counter[str]) -> list[tuple[Path, Path]]:
    """One kind of faults; the runs that suffered them, each with the undisturbed one that it should equal."""
    run = folder / "run"
    if kind in ALONE:
        ALONE[kind](run, counted)
        return alone(folder)
    if kind == "ranks":
        ranks(run, many, chance, counted)
        return by_ranks(folder)
    while left := many - sum(counted.values()):  # a sweep may end before so many were killed; then another one suffers
        runs = folder / f"runs-{left}"
        if kind == "ray":
            ray_kills(runs, left, chance, counted)
        else:
            local_kills(runs, left, chance, counted)
    return swept(folder)


ALONE = {"damaged": damaged, "held": two_at_once, "writers": writers, "disk": disk}
KILLS = {"ranks": 6, "ray": 10, "sweep": 20}  # with those above fifty


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=[*ALONE, *KILLS], default=[*ALONE, *KILLS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write what was found there, beside other kinds")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for kind in given.kinds:
        folder, counted, began = Path(tempfile.mkdtemp(prefix=f"faults-{kind}-")), Counter[str](), time.monotonic()
        pairs = suffer(kind, folder, KILLS.get(kind, 0), random.Random(given.seed), counted)
        equal = sum(same(*pair) for pair in pairs)
        found: dict[str, Any] = {
            "kind": kind,
            "faults": dict(counted),
            "runs": len(pairs),
            "bitwise as undisturbed": equal,
            "seconds": round(time.monotonic() - began),
        }
        print(json.dumps(found), flush=True)
        if given.json:
            keep(Path(given.json), found)
        if equal < len(pairs):
            raise NestlingError(f"{len(pairs) - equal} runs ended otherwise than undisturbed; they are in {folder}")
        shutil.rmtree(folder)


def keep(path: Path, found: dict[str, Any]) -> None:
    kept = {row["kind"]: row for row in (json.loads(path.read_text())["rows"] if path.exists() else [])}
    told = {
        "command": without_folders(" ".join(["python", *sys.argv])),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    told["commit"] = str(source_commit()[0])
    rows = list({**kept, found["kind"]: found | told}.values())
    total = sum(sum(row["faults"].values()) for row in rows)
    path.write_text(json.dumps({"faults": total, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
