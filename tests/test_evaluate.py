"""What is said of a network's answers: errors, calibration, repairs and breaks, by hand; and that a run says it again."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from nestling.commands.cli import main
from nestling.commands.evaluate import command
from nestling.errors import NestlingError
from nestling.nets import plan
from nestling.recipes import named
from nestling.recipes.recipe import NetworkRecipe, override
from nestling.runs.evaluate import BINS, calibration, errors, gallery, judge, top5
from nestling.runs.folder import RunDir
from nestling.runtime.runtime import Runtime
from nestling.train import train

OLD = Path(__file__).parent / "old" / "finished"


def certain(answers: list[list[int]], classes: int = 10) -> torch.Tensor:
    """Logits that are nearly sure of the given answers, (stages, N, classes)."""
    return 20.0 * torch.nn.functional.one_hot(torch.tensor(answers), classes).float()


def test_errors_and_transitions_by_hand() -> None:
    labels = torch.tensor([0, 1, 2, 3])
    logits = certain([[0, 0, 0, 3], [0, 1, 0, 0], [0, 1, 2, 0]])
    assert errors(logits, labels).tolist() == [0.5, 0.5, 0.25]
    found = judge(logits, labels, plan(NetworkRecipe(name="width-digits")))
    assert [stage["error"] for stage in found["stages"]] == [0.5, 0.5, 0.25]
    assert [stage["size"] for stage in found["stages"]] == ["w1", "w2", "w4"]
    first, second = found["transitions"]
    assert (first["repaired"], first["broken"]) == (0.25, 0.25)
    assert (second["repaired"], second["broken"]) == (0.25, 0.0)


def test_top_5_errors_by_hand() -> None:
    logits = torch.arange(12.0).repeat(3, 1)  # the five likeliest classes are 7 to 11
    assert top5(logits, torch.tensor([11, 7, 6])) == {"top5": pytest.approx(1 / 3)}
    assert top5(logits[:, :10], torch.tensor([9, 7, 6])) == {}, "of ten classes five are half"


def test_calibration_by_hand() -> None:
    # four answers of 90 % confidence, three of them right: off by 0.15
    confident = torch.log(torch.tensor([0.9, 0.1])).repeat(4, 1)
    assert calibration(confident, torch.tensor([0, 0, 0, 1])) == pytest.approx(0.9 - 0.75)
    # over- and under-confidence in different bins do not cancel
    mixed = torch.cat([confident, torch.log(torch.tensor([0.6, 0.4])).repeat(4, 1)])
    labels = torch.tensor([0, 0, 0, 1, 0, 0, 0, 0])
    assert int(0.9 * BINS) != int(0.6 * BINS)
    assert calibration(mixed, labels) == pytest.approx((0.15 + 0.4) / 2)


def test_the_gallery_shows_easy_and_hard_pictures() -> None:
    labels = torch.zeros(40, dtype=torch.int64)
    always, second, last, never = [0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 1]
    answers = [[kind[stage] for kind in (always, second, last, never) for _ in range(10)] for stage in range(3)]
    chosen = gallery(certain(answers), labels, count=8)
    assert [int((chosen // 10 == kind).sum()) for kind in range(4)] == [2, 2, 2, 2]


def test_evaluating_a_run_says_again_what_training_said(tmp_path: Path) -> None:
    recipe = override(named("digits-depth"), ["train.epochs=1", "data.limit=256", "data.validation=200"])
    first = train(recipe, str(tmp_path / "run"), quiet=True)
    second = command(str(tmp_path / "run"))
    assert second.pop("run") == str(tmp_path / "run")
    for before, after in zip(first["stages"], second["stages"], strict=True):
        assert after["error"] == before["error"]
        assert after["loss"] == pytest.approx(before["loss"], rel=1e-6)  # another memory layout rounds otherwise
    assert second["transitions"] == first["transitions"]
    assert first["split"] == "validation" and first["n"] == 200


def test_what_cannot_be_stored_is_shown_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = override(named("digits-depth"), ["train.epochs=1", "data.limit=256"])
    run = tmp_path / "run"
    train(recipe, str(run), quiet=True)
    before = {path: path.read_bytes() for path in run.iterdir()}

    def read_only(*_: object) -> None:  # root may write into any folder, and tests may be run by root
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "replace", read_only)
    assert main(["evaluate", str(run)]) == 1
    out, err = capsys.readouterr()
    assert "error %" in out and err.startswith(f"nestling: measured, but not stored: cannot write {run}")
    assert {path: path.read_bytes() for path in run.iterdir()} == before


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("classes", None), ("classes", ["\ud800", "b"]), ("shape", 5), ("shape", [-1, 8, 8]), ("shape", [10**30, 8, 8]),
        ("mean", True), ("std", ["x"]), ("prior", 1e308), ("stages", None), ("stages", [[1]]), ("stages", [{}]),
        ("stages", [{"error": None}]),
    ],
)  # fmt: skip
def test_results_that_are_damaged_are_refused_in_words(key: str, value: Any, tmp_path: Path) -> None:
    run = shutil.copytree(OLD, tmp_path / "run")
    found = json.loads((run / "results.json").read_text())
    (run / "results.json").write_text(json.dumps(found | {key: value}))
    with pytest.raises(NestlingError, match=f"results.json is damaged: {key} is .*nestling evaluate .* writes it anew"):
        Runtime(run)


def test_an_unfinished_run_is_said_to_be_one(tmp_path: Path) -> None:
    RunDir.create(tmp_path / "run").write_recipe(named("digits-width"))
    with pytest.raises(NestlingError, match="did not finish"):
        command(str(tmp_path / "run"))
