"""The demo from end to end, with one epoch: runs, times by the engine that answers, a report, and a word after each piece."""

import json
from pathlib import Path

import pytest

from nestling.commands import demo
from nestling.runs.folder import RunDir
from nestling.runs.latency import load_profile


@pytest.mark.slow
def test_the_demo_trains_times_and_reports_and_does_nothing_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = demo.command(str(tmp_path), epochs=1, workers=1, repeats=3, questions=8, seeds=1)
    names = [name for name, _ in demo.runs(1)]
    assert len(names) == 12 and Path(found["report"]).read_text().count("<section") > 5
    profiles = [load_profile(RunDir(tmp_path / name)) for name in names]
    assert {(each.engine, each.threads, len(each.trace)) for each in profiles} == {("onnxruntime", 1, 3)}
    said = capsys.readouterr().err
    assert "training on the digits: 0 of 12" in said, "a word before the first is done"
    assert "training on the digits: 12 of 12" in said and "timing every stage: 12 of 12" in said, "there is no terminal"
    page = Path(found["report"]).read_text()
    asked = json.loads((tmp_path / "live.json").read_text())
    assert asked["load"] == "bursts" and asked["own_errors"]["nest"]["n"] == 8 and 'id="live"' in page
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "live.json", *tmp_path.glob("*/*.json"))}
    assert json.loads((tmp_path / names[0] / "provenance.json").read_text())["command"] == "nestling demo"
    demo.command(str(tmp_path), epochs=1, workers=1, repeats=3, questions=8, seeds=1)
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_each_seed_has_runs_of_its_own() -> None:
    found = dict(demo.runs(1, seeds=3))
    assert len(found) == 36 and {recipe.train.seed for recipe in found.values()} == {0, 1, 2}
    assert found["digits-width-osgd-seed2"].train.seed == 2 and found["digits-width-osgd"].train.seed == 0
