"""The grid and the comparison with the paper: cells by hand, means by hand, and a grid that is killed twice on the way."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nestling.errors import NestlingError
from nestling.paper import command
from nestling.paper.grid import cells
from nestling.paper.results import collect, compare, published, strategy_name
from nestling.recipe import override
from nestling.recipes import named

QUICK = ("train.epochs=2", "data.limit=256", "train.batch=64", "train.diagnostics=false")


def test_the_papers_numbers_are_all_there() -> None:
    numbers = published()
    assert numbers["width-resnet42", "osgd", 3] == (7.3, 0.3)
    assert numbers["depth-sparse98", "greedy", 1] == (9.6, 0.2)
    assert len(numbers) == 139


def test_cells_by_hand() -> None:
    chosen = dict(cells("table1", ("width-resnet42",), ("osgd", "alone"), seeds=2))
    assert list(chosen) == [
        "width-resnet42-osgd-seed0", "width-resnet42-alone1-seed0", "width-resnet42-alone2-seed0",
        "width-resnet42-alone3-seed0", "width-resnet42-osgd-seed1", "width-resnet42-alone1-seed1",
        "width-resnet42-alone2-seed1", "width-resnet42-alone3-seed1",
    ]  # fmt: skip
    assert chosen["width-resnet42-alone2-seed1"].network.alone == 2
    assert chosen["width-resnet42-osgd-seed1"].train.seed == 1
    assert chosen["width-resnet42-osgd-seed0"].train.epochs == 200
    # six CIFAR networks, six strategies each, and their 23 independent nets
    both = [name for table in ("table1", "table2") for name, _ in cells(table, (), (), seeds=1)]
    assert len(both) == len(set(both)) == 6 * 6 + (4 + 3 + 5 + 3 + 4 + 4)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("table9", (), ()), "did you mean table1"),
        (("table1", ("even-resnet42",), ()), "table1 has no network 'even-resnet42'"),
        (("table1", (), ("osdg",)), "did you mean osgd"),
    ],
)
def test_what_is_not_in_the_paper_is_refused(
    arguments: tuple[str, tuple[str, ...], tuple[str, ...]], message: str
) -> None:
    with pytest.raises(NestlingError, match=message):
        list(cells(*arguments, seeds=1))


def test_means_and_spread_by_hand() -> None:
    row = {"network": "width-resnet42", "strategy": "osgd", "epochs": 200, "stage": 3, "size": "w4"}
    found = compare([{**row, "error": 7.0}, {**row, "error": 8.0}, {**row, "error": 7.5}])
    assert found == [{**row, "error": 7.5, "std": 0.5, "n": 3, "paper": 7.3, "beyond": False}]
    assert compare([{**row, "error": 6.15}])[0]["beyond"], "1.15 points off where the paper's std is 0.3"


def test_a_row_says_what_was_changed() -> None:
    base = named("digits-width")
    assert strategy_name(base) == "osgd"
    changed = override(base, ["strategy.scope=block", "strategy.order=3,2,1", "train.distill=0.5"])
    assert strategy_name(changed) == "osgd scope block order 3,2,1 distill 0.5"
    assert strategy_name(override(base, ["network.alone=2"])) == "alone"


def test_nothing_trained_is_said(tmp_path: Path) -> None:
    with pytest.raises(NestlingError, match="no run of table1 is finished"):
        command("table1", dry=True, out=str(tmp_path))


def test_a_grid_killed_twice_ends_like_one_never_killed(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    words = [sys.executable, "-m", "nestling", "paper", "digits", "--network", "width-digits", "--strategy", "sgd"]
    words += ["--strategy", "osgd", "--seeds", "2", *(word for each in QUICK for word in ("--set", each))]
    subprocess.run([*words, "--out", str(whole)], check=True, capture_output=True)
    for lines in (1, 5):  # in the first run, and in the third
        process = subprocess.Popen([*words, "--out", str(killed)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < until and logged(killed) < lines:
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    done = subprocess.run([*words, "--out", str(killed), "--json"], check=True, capture_output=True, text=True)
    assert len(json.loads(done.stdout)["rows"]) == 6
    assert without_origin(whole) == without_origin(killed)


def logged(folder: Path) -> int:
    return sum(path.read_text().count("\n") for path in folder.glob("*/log.jsonl"))


def without_origin(folder: Path) -> list[dict[str, object]]:
    rows = collect(sorted(folder.iterdir()))
    assert len(rows) == 4 * 3
    return [{key: value for key, value in row.items() if key != "command"} for row in rows]
