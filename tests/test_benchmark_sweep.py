"""The sweep over other people's networks: a model that dies, hangs or is stopped costs no other its row."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from sweep import COLUMNS, WAYS, apart, examine, go_on, in_turn, merged, rows_of, write


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


def dies() -> nn.Module:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def hangs() -> nn.Module:
    time.sleep(600)
    raise AssertionError


def line(model: str, params: int = 1) -> dict[str, Any]:
    return {"library": "ours", "family": model, "model": model, "params": str(params), "kind": "conv"}


def test_a_model_that_dies_or_hangs_ends_alone() -> None:
    builders = {"ours": {"dies": dies, "hangs": hangs, "fine": convnet, "too": convnet}}
    todo = [line(name) for name in builders["ours"]]
    rows = {one.each["model"]: one.row() for one in apart(todo, builders, examine, workers=2, most=20)}
    assert {rows[name][way] for name in ("fine", "too") for way in WAYS} == {"ok"}, rows
    assert rows["dies"]["why_exits"] == "ended by signal or exit -9"
    assert rows["hangs"]["why_keep"] == "not done in 20 seconds" and rows["hangs"]["keep"] == "unfinished"


def test_what_is_not_done_when_time_is_up_has_no_row() -> None:
    start = time.monotonic()
    assert not list(apart([line("hangs")] * 3, {"ours": {"hangs": hangs}}, examine, 2, until=start + 1))
    assert time.monotonic() < start + 30


def test_families_without_a_row_come_first_and_others_when_asked_for(tmp_path: Path) -> None:
    listed = [line(name, params) for name, params in (("new", 9), ("lost", 3), ("old", 1), ("now", 1), ("wrong", 4))]
    good = dict.fromkeys(WAYS, "ok")
    rows = [
        {**line("lost"), **good, "keep": "unfinished", "commit": "a"},
        {**line("wrong"), **good, "keep": "broken", "commit": "a"},
        {**line("old"), **good, "commit": "a"},
        {**line("now"), **good, "commit": "b", "torch": torch.__version__},
    ]
    write(rows, tmp_path / "rows.csv")
    rows = rows_of(tmp_path / "rows.csv")
    assert [each["model"] for each in in_turn(listed, rows, [], "b")] == ["new", "lost"]
    assert [each["model"] for each in in_turn(listed, rows, ["all"], "b")] == ["new", "lost", "wrong", "old"]
    assert [each["model"] for each in in_turn(listed, rows, ["now", "old"], "b")] == ["old", "now"]
    assert [each["model"] for each in in_turn(listed, rows, ["missing", "now"], "b")] == ["new", "now"]
    assert [each["model"] for each in in_turn(listed, rows, ["missing", "failed"], "b")] == ["new", "lost", "wrong"]


def test_a_sweep_stopped_half_way_goes_on_with_the_ways_that_are_left(tmp_path: Path) -> None:
    good = dict.fromkeys(WAYS, "ok")
    blank = dict.fromkeys(COLUMNS, "") | {"commit": "b", "torch": torch.__version__}
    half = {**blank, **line("half"), **good, "keep": "unfinished", "why_keep": "not done when time was up"}
    write([half, {**blank, **line("done"), **good}, {**half, **line("older"), "commit": "a"}], tmp_path / "rows.csv")
    rows = rows_of(tmp_path / "rows.csv")
    todo = go_on([line(name) for name in ("half", "done", "older", "new")], rows, "b")
    assert [each["model"] for each in todo] == ["half", "older", "new"]
    tried: list[dict[str, Any]] = []
    examine(convnet, lambda facts: tried.append(dict(facts)), todo[0]["known"])
    assert [len(set(WAYS) & set(facts)) for facts in tried] == [2, 3] and tried[-1]["keep"] == "ok"
    assert {row["model"]: row["keep"] for row in merged([{**half, "keep": "refused"}], rows)} == {
        "half": "refused", "done": "ok", "older": "unfinished",
    }  # fmt: skip


def test_ways_finished_before_time_is_up_are_told() -> None:
    def half(make: Any, send: Any) -> None:
        send({"exits": "ok"})
        time.sleep(600)

    [one] = apart([line("it")], {"ours": {"it": convnet}}, half, until=time.monotonic() + 2)
    assert one.row() | {"why_keep": ""} == {
        "exits": "ok", "stripes": "unfinished", "keep": "unfinished",
        "why_stripes": "not done when time was up", "why_keep": "",
    }  # fmt: skip
