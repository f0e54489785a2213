"""Sweeps: every run ends, with the bits it would have had alone, whoever is killed on the way; tried on real processes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from test_train import untimed, weights

from nestling.commands import cli
from nestling.commands.sweep import progress_table
from nestling.errors import NestlingError
from nestling.files import RESULTS
from nestling.recipes import named
from nestling.recipes.recipe import Recipe, override
from nestling.runs.folder import RunDir
from nestling.runs.lock import FolderHeld
from nestling.studies.paper.results import read_csv, run_rows
from nestling.studies.sweep.axes import grid_runs
from nestling.studies.sweep.driver import Ending, SweepRun, sweep
from nestling.train import train

SETTINGS = ("train.epochs=4", "train.batch=64", "data.limit=512", "train.diagnostics=false")
GRID = ("strategy.name=sgd,osgd", "train.seed=0,1")


def base() -> Recipe:
    return override(named("digits-width"), SETTINGS)


def words(out: Path, *more: str) -> list[str]:
    options = [*(f"--set={each}" for each in SETTINGS), *(f"--grid={each}" for each in GRID)]
    return ["sweep", "digits-width", *options, "--out", str(out), "--quiet", *more]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each run of the grid trained by itself."""
    folder = tmp_path_factory.mktemp("alone")
    for name, recipe in grid_runs(base(), GRID):
        train(recipe, str(folder / name), quiet=True)
    return folder


def assert_same(out: Path, alone: Path) -> None:
    """Weights, logs and results are those of the runs by themselves, and results.csv has a row for each stage of each."""
    for name, _ in grid_runs(base(), GRID):
        one, other = weights(out / name), weights(alone / name)
        assert all(torch.equal(one[key], other[key]) for key in other), name
        assert untimed(out / name) == untimed(alone / name)
        assert RunDir(out / name).read_json(RESULTS) == RunDir(alone / name).read_json(RESULTS)
    rows = read_csv(out / "results.csv")
    expected = [row for name, _ in grid_runs(base(), GRID) for row in run_rows(RunDir(alone / name))]
    assert sorted((row["strategy"], row["seed"], row["stage"], row["error"]) for row in rows) == sorted(
        (row["strategy"], row["seed"], row["stage"], row["error"]) for row in expected
    )
    assert rows[0].keys() == expected[0].keys()


def wait_until(holds: Callable[[], bool], process: "subprocess.Popen[str]", seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert process.poll() is None and time.monotonic() < until, "it ended before"
        time.sleep(0.02)


def holder(run: Path) -> int:
    """The process that trains a run; 0 if there is none."""
    try:
        found = re.match(r"process (\d+)", (run / ".lock").read_text())
    except FileNotFoundError:
        return 0
    return int(found[1]) if found else 0


def started(out: Path, *more: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "nestling", *words(out, *more)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# --- which runs -------------------------------------------------------------------------------------------------------


def test_a_grid_is_every_combination_and_each_has_a_name() -> None:
    runs = grid_runs(base(), ["strategy.name=sgd,osgd", "strategy.order=1,2,3;3,2,1", "train.lr=0.1"])
    assert [name for name, _ in runs] == [
        f"strategy-{name}-order-{order}-lr-0.1" for name in ("sgd", "osgd") for order in ("1_2_3", "3_2_1")
    ]
    assert runs[3][1] == override(base(), ["strategy.name=osgd", "strategy.order=3,2,1", "train.lr=0.1"])
    assert grid_runs(base(), []) == [("digits-width", base())]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (["train.sed=0"], "did you mean train.seed"),
        (["train.seed"], "has no '='"),
        (["train.seed=0,x"], "train.seed is 'x'; expected a whole number"),
        (["train.seed=0", "train.seed=1"], "names train.seed twice"),
        (["train.seed=0,0"], "in the grid twice"),
        (["train.lr=0.1,0.10"], "in the grid twice"),
    ],
)
def test_a_wrong_grid_is_explained(axes: list[str], message: str) -> None:
    with pytest.raises(NestlingError, match=message):
        grid_runs(base(), axes)


def test_what_only_this_process_knows_is_refused() -> None:
    with pytest.raises(NestlingError, match=r"nestling\.fit"):
        grid_runs(override(base(), ["network.name=my_file.py:build"]), [])


# --- the driver, with a place that only pretends -----------------------------------------------------------------------


class Pretended:
    """A place where runs end as they are told to, in turn: "finished", "lost", "epoch lost" (after one more), "wrong"."""

    def __init__(self, **fates: Sequence[str]) -> None:
        self.fates = {name.replace("_", "-"): list(fate) for name, fate in fates.items()}
        self.at_work: list[SweepRun] = []
        self.started: list[str] = []

    def room(self) -> bool:
        return len(self.at_work) < 2

    def start(self, one: SweepRun, command: str) -> str:
        self.at_work.append(one)
        self.started.append(one.name)
        return "here"

    def ended(self) -> list[Ending]:
        endings = []
        for one in self.at_work:
            fate = self.fates.get(one.name, ["finished"]).pop(0)
            RunDir(one.run.path).write_recipe(one.recipe)
            if fate.startswith("epoch"):
                one.run.append_log({"epoch": len(one.run.read_log()) + 1, "test_error": [0.5]})
            endings.append(Ending(one, "it is wrong" if fate == "wrong" else "", "gone" if "lost" in fate else ""))
        self.at_work = []
        return endings

    def close(self) -> None:
        assert not self.at_work


def pretend(out: Path, place: Pretended, seeds: str = "0,1,2") -> dict[str, SweepRun]:
    return {
        one.name: one for one in sweep(grid_runs(base(), [f"train.seed={seeds}"]), out, place, sleep=lambda _: None)
    }


def test_what_is_lost_is_tried_again_and_what_fails_leaves_the_others_alone(tmp_path: Path) -> None:
    place = Pretended(seed_0=["lost", "lost", "finished"], seed_1=["wrong"])
    found = pretend(tmp_path, place)
    assert {name: one.state for name, one in found.items()} == {
        "seed-0": "finished", "seed-1": "failed", "seed-2": "finished",
    }  # fmt: skip
    assert place.started.count("seed-0") == 3 and place.started.count("seed-1") == 1
    assert found["seed-1"].why == "it is wrong"


def test_a_run_that_is_lost_again_and_again_is_given_up_unless_it_gets_on(tmp_path: Path) -> None:
    place = Pretended(seed_0=["lost"] * 9, seed_1=["epoch lost"] * 4 + ["finished"])
    found = pretend(tmp_path, place)
    assert found["seed-0"].state == "failed" and "lost 3 times" in found["seed-0"].why
    assert found["seed-1"].state == "finished" and found["seed-1"].epoch == 4
    shown = progress_table(list(found.values()))
    assert shown.row_count == 3 and str(shown.title) == "sweep: 2 finished, 1 failed"


def test_one_folder_is_one_sweep_s_and_its_runs_are_of_one_recipe(tmp_path: Path) -> None:
    other = RunDir(tmp_path / "sweep")
    other.hold()
    with pytest.raises(FolderHeld, match="process"):
        pretend(tmp_path / "sweep", Pretended())
    other.release()
    RunDir.create(tmp_path / "sweep" / "seed-0").write_recipe(named("digits-depth"))
    with pytest.raises(NestlingError, match="another recipe"):
        pretend(tmp_path / "sweep", Pretended())
    with pytest.raises(NestlingError, match="folder of a run"):
        pretend(tmp_path / "sweep" / "seed-0", Pretended())


def test_a_run_that_another_process_is_at_is_waited_for(tmp_path: Path) -> None:
    theirs = RunDir(tmp_path / "seed-0")
    theirs.hold()
    looks: list[str] = []

    def tell(runs: Sequence[SweepRun]) -> None:
        looks.append(runs[0].state)
        if len(looks) == 3:
            theirs.release()

    [found] = sweep(grid_runs(base(), ["train.seed=0"]), tmp_path, Pretended(), tell=tell, sleep=lambda _: None)
    assert looks[:3] == ["elsewhere"] * 3 and found.state == "finished"


class Queueing(Pretended):
    """It takes every run at once, but has room for one of them; the others have no place until their turn comes."""

    def room(self) -> bool:
        return True

    def start(self, one: SweepRun, command: str) -> str:
        super().start(one, command)
        return ""

    def ended(self) -> list[Ending]:
        waiting = self.at_work
        if not waiting or not waiting[0].where:
            for one in waiting[:1]:
                one.where = "a node"
            return []
        self.at_work = waiting[:1]
        endings = super().ended()
        self.at_work = waiting[1:]
        return endings


def test_a_run_that_waits_for_a_node_is_not_counted_as_running(tmp_path: Path) -> None:
    told: list[str] = []
    runs = grid_runs(base(), ["train.seed=0,1,2"])
    place = Queueing(seed_1=["lost", "finished"])  # and it waits again
    sweep(runs, tmp_path, place, tell=lambda runs: told.append(str(progress_table(runs).title)), sleep=lambda _: None)
    assert told == [
        f"sweep: {each}"
        for each in (
            "3 queued", "1 running, 2 queued", "1 finished, 2 queued", "1 finished, 1 running, 1 queued",
            "1 finished, 2 queued", "1 finished, 1 running, 1 queued", "2 finished, 1 queued", "2 finished, 1 running",
            "3 finished",
        )
    ]  # fmt: skip


# --- real processes ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_worker_is_begun_again_and_bits_are_those_of_single_runs(tmp_path: Path, alone: Path) -> None:
    process = started(tmp_path / "sweep", "--beside", "2", "--json")
    victim = tmp_path / "sweep" / "strategy-sgd-seed-1"
    wait_until(lambda: (victim / "checkpoint.safetensors").exists() and holder(victim) != 0, process)
    os.kill(holder(victim), signal.SIGKILL)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    found = json.loads(out)
    assert {each["state"] for each in found["runs"]} == {"finished"} and len(found["rows"]) == 6
    assert "resumed" in RunDir(victim).read_json("provenance.json"), "it was not killed"
    assert_same(tmp_path / "sweep", alone)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_driver_that_is_stopped_or_killed_goes_on_when_called_again(
    tmp_path: Path, alone: Path, number: signal.Signals
) -> None:
    out = tmp_path / "sweep"
    process = started(out, "--beside", "2")
    first = out / "strategy-sgd-seed-0"
    wait_until(lambda: (first / "checkpoint.safetensors").exists() and holder(first) != 0, process)
    worker = holder(first)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == (128 + number if number == signal.SIGTERM else -number)
    if number == signal.SIGTERM:
        assert re.search(r"stopped by SIGTERM with \d of 4 runs finished; the others go on when called again", err)
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)  # the driver waited for it
    assert cli.main(words(out, "--beside", "2")) == 0
    assert_same(out, alone)


@pytest.mark.slow
def test_a_run_that_fails_is_named_and_tried_again_when_called_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [f"--set={each}" for each in (*SETTINGS, "train.epochs=1")]
    command = ["sweep", "digits-width", *settings, "--grid=train.lr=0.1,1e30", "--out", str(tmp_path), "--quiet"]
    assert cli.main([*command, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [each["state"] for each in found["runs"]] == ["finished", "failed"] and "1 of 2 runs failed" in found[
        "error"
    ]
    assert "became nan" in found["failed"][str(tmp_path / "lr-1e30")]
    assert cli.main(command) == 1 and "lr-1e30" in capsys.readouterr().out
