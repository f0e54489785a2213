"""Runs of a sweep on a Ray cluster: each a task with its share of a GPU, on whichever node has room.

In: runs. Out: how each ended. Nodes need no shared storage: a task gets the run's folder as it is here, trains in a folder of its
node, and what has changed comes home after every epoch. So a lost node costs the epochs since the last checkpoint, and a lost
driver, too: here is all there is. Nodes need nestling of the same version, and the data.
"""

import dataclasses
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from nestling import __version__
from nestling.errors import NestlingError
from nestling.files import CHECKPOINT, RECIPE, RESULTS, write_atomically
from nestling.recipes.recipe import from_dict
from nestling.runs.folder import RunDir
from nestling.runs.ray import connect, engine
from nestling.studies.sweep.driver import Ending, SweepRun
from nestling.studies.sweep.processes import PER_GPU
from nestling.train.begin import prepare

LAST = (CHECKPOINT, RESULTS)  # come home after the files that they speak of
Files = dict[str, bytes]


# --- on a node --------------------------------------------------------------------------------------------------------


def train_away(task: dict[str, Any], files: Files) -> Iterator[dict[str, Any]]:
    """Train a run on this node, yielding files that have changed after every epoch; {"error": ...} where it is refused."""
    yield {"where": f"{socket.gethostname()}, process {os.getpid()}"}
    with tempfile.TemporaryDirectory(prefix="nestling-") as folder:
        path = Path(folder) / "run"
        try:
            if task["version"] != __version__:
                raise NestlingError(f"nestling is {task['version']} here and {__version__} on {socket.gethostname()}")
            torch.set_num_threads(task["threads"])
            bring(files, path)
            yield from trained_files(task, path)
        except NestlingError as error:
            yield {"error": str(error).replace(str(path), task["path"])}


def trained_files(task: dict[str, Any], path: Path) -> Iterator[dict[str, Any]]:
    seen: dict[str, tuple[int, int]] = {}
    changed(path, seen)  # what came from home need not go back
    training = prepare(from_dict(task["recipe"]), str(path), RunDir(path).has(RECIPE), task["command"])
    if training is not None:
        done = training.done
        for _ in training.epochs():
            if training.done > done:
                done = training.done
                yield {"files": changed(path, seen)}
        training.finish()
        training.run.release()
    yield {"files": changed(path, seen)}


def changed(path: Path, seen: dict[str, tuple[int, int]]) -> Files:
    """The files of a folder that are new or other than when last seen."""
    found: Files = {}
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path).as_posix()
        if file.is_file() and not file.name.startswith("."):  # locks, and files half written
            about = file.stat()
            mark = (about.st_mtime_ns, about.st_size)
            if seen.get(name) != mark:
                seen[name] = mark
                found[name] = file.read_bytes()
    return found


def bring(files: Files, path: Path) -> None:
    """Write files into a folder, each whole, in an order in which a kill in between loses nothing."""
    for name in sorted(files, key=lambda name: LAST.index(name) if name in LAST else -1):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path / name, files[name])


# --- at home ----------------------------------------------------------------------------------------------------------


class Cluster:
    """A Workplace: the Ray cluster of RAY_ADDRESS, or the one that runs here; else one is started for the time being."""

    def __init__(self, beside: int = 0) -> None:
        if beside < 0:
            raise NestlingError(f"--beside is {beside}: expected how many runs to train at the same time, 1 or more")
        self.ray, self.beside = engine(), beside
        self.ours = connect(self.ray)
        self.gpus = self.ray.cluster_resources().get("GPU", 0) > 0
        self.at_work: dict[Any, SweepRun] = {}
        self.task = self.ray.remote(train_away)

    def room(self) -> bool:
        """Ray itself keeps waiting what it has no room for; with `beside` and no GPU, no more than that are handed to it."""
        at_once = self.beside if self.beside and not self.gpus else 2 * self.slots() + 1
        return len(self.at_work) < at_once

    def slots(self) -> int:
        """How many runs there is room for now: nodes come and go."""
        there = self.ray.cluster_resources()
        return int(there.get("GPU", 0) * (self.beside or PER_GPU) if self.gpus else there.get("CPU", 1))

    def start(self, one: SweepRun, command: str) -> str:
        one.run.hold()  # what comes home is written here, by this process
        share = {"num_gpus": 1 / (self.beside or PER_GPU)} if self.gpus and one.recipe.train.device != "cpu" else {}
        told: dict[str, Any] = {"recipe": dataclasses.asdict(one.recipe), "path": str(one.run.path), "command": command}
        told |= {"threads": torch.get_num_threads(), "version": __version__}
        away = self.task.options(num_cpus=1, max_retries=0, num_returns="streaming", name=one.name, **share)
        self.at_work[away.remote(told, changed(one.run.path, {}))] = one
        return ""  # it says so itself, once a node has room for it

    def ended(self) -> list[Ending]:
        endings = []
        for stream, one in list(self.at_work.items()):
            ending = self.read(stream, one)
            if ending is not None:
                del self.at_work[stream]
                one.run.release()
                endings.append(ending)
        return endings

    def read(self, stream: Any, one: SweepRun) -> Ending | None:
        """All that has come from a task since it was last asked."""
        while self.ray.wait([stream], timeout=0)[0]:
            try:
                news = self.ray.get(next(stream))
            except StopIteration:
                return Ending(one) if one.run.has(RESULTS) else Ending(one, lost=f"{one.where} ended without results")
            except self.ray.exceptions.RayError as error:
                return Ending(one, lost=f"{one.where or 'its task'}: {str(error).strip().splitlines()[0]}")
            one.where = news.get("where", one.where)
            if "error" in news:
                return Ending(one, wrong=news["error"])
            try:
                bring(news.get("files", {}), one.run.path)
            except NestlingError as error:  # the disk is full: what is here already stays as it is
                self.ray.cancel(stream, force=True)
                return Ending(one, wrong=str(error))
        return None

    def close(self) -> None:
        for stream, one in self.at_work.items():
            self.ray.cancel(stream, force=True)
            one.run.release()
        self.at_work.clear()
        if self.ours:
            self.ray.shutdown()
