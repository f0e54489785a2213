"""The driver of a sweep: starts runs where there is room, starts those again that were lost, and ends when none is open.

In: names and recipes of runs, a folder, a Workplace that trains. Out: a run folder each, and one results.csv. All it knows stands
in these folders: stopped or killed anywhere, it goes on when called again. It shows nothing: `tell` is called with all runs.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Literal, Protocol

from nestling.errors import NestlingError
from nestling.files import LOG, RECIPE, RESULTS
from nestling.recipes.recipe import Recipe
from nestling.runs.folder import RunDir
from nestling.runs.lock import FolderHeld
from nestling.studies.paper.grid import sizes
from nestling.studies.paper.results import Row, collect, write_csv
from nestling.train.begin import check_recipe
from nestling.train.stop import on_signal

TRIES = 3  # how often a run may be lost in a row without an epoch in between
INTERVAL = 0.2  # seconds between two looks
ROWS = "results.csv"


@dataclass(eq=False)
class SweepRun:
    """One run of a sweep, and how far it is. `queued`: its place has no room for it yet; `elsewhere`: another process holds its
    folder."""

    name: str
    recipe: Recipe
    run: RunDir
    state: Literal["waiting", "elsewhere", "queued", "running", "finished", "failed"] = "waiting"
    where: str = ""
    epoch: int = 0
    errors: list[float] = field(default_factory=list)  # of each stage, as newest known
    lost: int = 0  # times in a row, without an epoch in between
    why: str = ""
    log_size: int = 0

    @property
    def open(self) -> bool:
        return self.state not in ("finished", "failed")

    @property
    def epochs(self) -> int:
        stages = len(sizes(self.recipe.network)) if self.recipe.strategy.name == "greedy" else 1
        return self.recipe.train.epochs * stages

    def look(self) -> None:
        """How far it is, as its log says."""
        log = self.run.path / LOG
        size = log.stat().st_size if log.is_file() else 0
        if size == self.log_size:
            return
        self.log_size = size
        try:
            lines = self.run.read_log()
        except NestlingError:  # it is for the run itself to say so
            return
        done = lines[-1]["epoch"] if lines else 0
        if done > self.epoch:
            self.lost = 0
        self.epoch = done
        self.errors = next((line["test_error"] for line in reversed(lines) if "test_error" in line), [])


@dataclass(frozen=True)
class Ending:
    """A run has ended: finished, unless it says what is wrong with it or how it was lost."""

    one: SweepRun
    wrong: str = ""
    lost: str = ""


class Workplace(Protocol):
    """Where runs are trained. Nothing here waits but `close`."""

    def room(self) -> bool: ...

    def start(self, one: SweepRun, command: str) -> str:
        """Begin a run, or go on with it; says where, "" if only `where` will tell, later."""

    def ended(self) -> list[Ending]:
        """Those that have ended since it was last asked."""

    def close(self) -> None:
        """Stop what still runs, with checkpoints."""


def sweep(
    runs: Sequence[tuple[str, Recipe]],
    out: Path,
    place: Workplace,
    command: str = "nestling.sweep",
    tell: Callable[[Sequence[SweepRun]], None] = lambda runs: None,
    sleep: Callable[[float], None] = time.sleep,
    seconds: float = inf,
    rows: str = ROWS,
) -> list[SweepRun]:
    """Train all runs; those that fail are left, with what was wrong, until they are called for again.

    After so many `seconds`, Ctrl-C (raises Stopped) or SIGTERM, all of them stop with checkpoints of whole epochs. `rows`: the
    file of results in `out`; "" = none."""
    end = time.monotonic() + seconds
    every = [SweepRun(name, recipe, RunDir(out / name)) for name, recipe in runs]
    with held(out), on_signal() as stop:
        for one in every:
            begin_or_go_on(one)
        stop.waits = True
        try:
            while any(one.open for one in every) and not stop.asked and time.monotonic() < end:
                turn(every, place, command)
                tell(every)
                sleep(INTERVAL)
        finally:
            place.close()
            if rows:
                write_rows(every, out / rows)
        done = sum(one.state == "finished" for one in every)
        if stop.asked and any(one.open for one in every):
            raise stop.stopped(f" with {done} of {len(every)} runs finished; the others go on when called again")
    return every


@contextmanager
def held(out: Path) -> Iterator[None]:
    """A sweep's folder is one driver's at a time."""
    folder = RunDir(out)
    if folder.has(RECIPE):
        raise NestlingError(f"{out} is the folder of a run; name another for the runs of a sweep")
    folder.hold()
    try:
        yield
    finally:
        folder.release()


def begin_or_go_on(one: SweepRun) -> None:
    """A folder that is there already must be of this run."""
    if one.run.has(RECIPE):
        check_recipe(one.run, one.recipe)
        one.look()
        if one.run.has(RESULTS):
            one.state = "finished"


def turn(every: Sequence[SweepRun], place: Workplace, command: str) -> None:
    """Look once after all runs, and start what there is room for."""
    for ending in place.ended():
        settle(ending)
    for one in every:
        if one.state in ("waiting", "elsewhere") and place.room():
            begin(one, place, command)
        if one.state == "queued" and one.where:
            one.state = "running"
        if one.state in ("running", "elsewhere"):
            one.look()


def begin(one: SweepRun, place: Workplace, command: str) -> None:
    """Start a run, unless another process is at it: perhaps one that a killed driver left, and that is about to stop."""
    try:
        one.run.hold()
        one.run.release()
        begin_or_go_on(one)  # it may have been finished elsewhere
        if one.state != "finished":
            one.where, one.why = place.start(one, command), ""
            one.state = "running" if one.where else "queued"
    except FolderHeld as error:
        one.state, one.why = "elsewhere", str(error)
    except NestlingError as error:
        one.state, one.why = "failed", str(error)


def settle(ending: Ending) -> None:
    """What follows from an ending: the results, another try, or none."""
    one = ending.one
    one.look()
    if ending.lost:
        one.lost += 1
        one.why = ending.lost
        one.state = "waiting" if one.lost < TRIES else "failed"
        if one.state == "failed":
            one.why = f"lost {one.lost} times without an epoch in between; the last time: {ending.lost}"
    elif ending.wrong:
        one.state, one.why = "failed", ending.wrong
    else:
        one.state = "finished"


def write_rows(every: Sequence[SweepRun], file: Path) -> list[Row]:
    """The results of all finished runs in one file."""
    rows = collect(one.run.path for one in every)
    if rows:
        write_csv(rows, file)
    return rows


def as_told(one: SweepRun) -> dict[str, Any]:
    """A run of a sweep for programs."""
    return {
        "run": str(one.run.path), "state": one.state, "where": one.where, "epoch": one.epoch, "epochs": one.epochs,
        "errors": one.errors, "why": one.why,
    }  # fmt: skip
