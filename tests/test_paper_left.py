"""What is left of the paper's grid: nothing is forgotten, and no command trains another cell than the one that is missing."""

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nestling.commands.paper import command, show
from nestling.errors import NestlingError
from nestling.recipes import named
from nestling.recipes.recipe import override
from nestling.report.paper.tables import missing, tables
from nestling.runs.folder import RunDir
from nestling.studies.paper.constant import CONSTANTS
from nestling.studies.paper.everything import chip_minutes, everything
from nestling.studies.paper.packed import PART, pack, unpack
from nestling.studies.paper.results import compare, run_rows

QUICK = ("train.epochs=2", "data.limit=256", "train.batch=64", "train.diagnostics=false")


def text(result: dict[str, Any]) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(show(result))
    return " ".join(console.export_text().split())


def test_normalised_gradients_are_asked_for_with_their_calibrated_constant() -> None:
    """`paper table1` trains with the recipe's constant, which is not the cell once trials have chosen another."""
    lacking = missing("table1", [])
    assert lacking[2] == (
        "nestling paper table1 --network width-resnet42 --strategy sgd --strategy sgd-sum --strategy osgd --strategy alone "
        "--strategy greedy --seeds 3"
    )
    assert lacking[3] == "nestling paper all --network width-resnet42 --strategy normsgd --strategy osgd-norm --seeds 3"
    assert "nestling paper digits --network width-digits" in missing("digits", [])[0]
    assert "normsgd" in missing("digits", [])[0], "which has no trials"


def test_independent_nets_by_normalised_gradients_bring_the_trials_they_need() -> None:
    jobs = everything(("depth-sparse98",), ("alone-norm",))
    assert len(jobs) == len(CONSTANTS) and {job.recipe.strategy.name for job in jobs} == {"normsgd"}


def test_what_cannot_be_trained_here_is_not_planned_and_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nestling.commands.paper.prepared", lambda root: False)
    words: dict[str, Any] = {"strategy": ("sgd",), "out": str(tmp_path), "results": ""}
    for planning in (False, True):
        only = command("all", network=("width-resnet50",), plan=planning, **words)
        assert only["plan"] == [] and "3 runs more are missing. They need Tiny ImageNet" in text(only)
        assert "Nothing is missing" not in text(only)
    both = command("all", network=("width-resnet50", "width-resnet42"), plan=True, **words)
    assert not [line for line in both["plan"] if line["run"].startswith("tiny")] and both["unprepared"] == 3
    monkeypatch.setattr("nestling.commands.paper.prepared", lambda root: True)
    assert len(command("all", network=("width-resnet50",), plan=True, **words)["plan"]) == 3


def test_minutes_are_of_the_images_that_a_run_is_trained_on() -> None:
    whole = override(named("cifar10-width"), ["strategy.name=sgd"])
    assert chip_minutes(whole) == pytest.approx(390 * 200 * 1.15e-3 / 60)
    assert chip_minutes(override(whole, ["data.validation=5000"])) == pytest.approx(chip_minutes(whole) * 351 / 390)
    assert chip_minutes(override(whole, ["train.batch=64"])) == pytest.approx(chip_minutes(whole) * 781 / 390)
    assert chip_minutes(named("imagenet-width")) == pytest.approx(5004 * 90 * 52.1e-3 * 1.5 / 60)
    assert chip_minutes(named("digits-width")) < 0.05


def test_a_grid_that_was_stopped_says_how_much_is_left(tmp_path: Path) -> None:
    words: dict[str, Any] = {"network": ("width-digits",), "out": str(tmp_path), "results": ""}
    command("digits", strategy=("sgd",), **words, set=QUICK)
    found = command("digits", strategy=("sgd", "osgd"), seeds=2, dry=True, **words, set=QUICK)
    assert found["left"] == 3 and "3 of 4 runs are not finished; the same command goes on with them" in text(found)
    [table] = tables(found["rows"], found["top5"], found["networks"])
    assert table.title == "width-digits, with something changed", "no table without a row stands before it"
    whole = command("digits", strategy=("sgd",), dry=True, **words, set=QUICK)
    assert whole["left"] == 0 and "not finished" not in text(whole)
    assert len(compare(run_rows(RunDir(next(tmp_path.glob("width*")))))) == 3


def test_packed_runs_that_lack_their_end_are_refused(tmp_path: Path) -> None:
    """Wherever they break off, also between two entries, where tar itself sees no harm."""
    for number in range(3):
        run = RunDir.create(tmp_path / "runs" / f"run{number}")
        run.write_recipe(named("digits-width"))
        run.write_json("results.json", {"stages": []})
    [whole] = [Path(path) for path in pack(tmp_path / "runs", tmp_path / "to", 1, 1).files]
    data = whole.read_bytes()
    assert len(unpack(tmp_path / "to", tmp_path / "there")) == 3
    for end in range(tarfile.BLOCKSIZE, len(data.rstrip(b"\0")), tarfile.BLOCKSIZE):
        whole.write_bytes(data[:end])
        with pytest.raises(NestlingError, match="damaged or lacks a part"):
            unpack(tmp_path / "to", tmp_path / "elsewhere")
    entry = data.index(b"run1/recipe")
    whole.write_bytes(data[:entry] + b"x" * tarfile.BLOCKSIZE + data[entry + tarfile.BLOCKSIZE :])
    with pytest.raises(NestlingError, match="damaged or lacks a part"):
        unpack(tmp_path / "to", tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists() and PART.format(1) == whole.name
