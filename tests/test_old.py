"""What earlier versions wrote is still read: tests/old holds run folders and an export made at commit 2c1cb26.

`nestling train digits-width --set train.epochs=2 --set network.widths=4,8 --set network.blocks=1,1`: `finished`, which then went
through `nestling profile` and `nestling export`, and `stopped`, by `--minutes 0.0001` after the first of its two epochs.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

import nestling
from nestling.commands.cli import main
from nestling.data import load
from nestling.runs.folder import RunDir
from nestling.runs.latency import load_profile
from nestling.runtime.portable import Portable

OLD = Path(__file__).parent / "old"


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD / "finished", tmp_path / "finished"))


def logits(run: Path) -> torch.Tensor:
    return RunDir.open(run).load_tensors("outputs.safetensors")[0]["logits"]


def test_an_old_run_is_opened_and_answers_as_it_did(finished: Path) -> None:
    then, data = logits(OLD / "finished"), RunDir.open(finished).read_recipe().data
    x, _ = next(load(data).test.batches(360))
    found = torch.stack(nestling.load(str(finished))(x))
    torch.testing.assert_close(found, then, rtol=1e-4, atol=1e-4)
    with nestling.Runtime(finished, device="cpu") as runtime:
        assert runtime.spec.classes == tuple("0123456789") and len(runtime.spec.errors) == 3
        last = runtime.answer(x[0].numpy())
    assert last.stage == 3 and last.label == int(then[2, 0].argmax())


def test_an_old_run_is_evaluated_profiled_exported_and_reported_again(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime")
    then = json.loads((OLD / "finished" / "results.json").read_text())
    assert main(["evaluate", str(finished), "--device", "cpu", "--json"]) == 0
    now = json.loads(capsys.readouterr().out)
    assert [row["error"] for row in now["stages"]] == pytest.approx([row["error"] for row in then["stages"]], abs=0.01)
    assert load_profile(RunDir.open(finished)).stages == 3
    words = ["profile", str(finished), "--device", "cpu", "--repeats", "2"]
    for command in (words, ["export", str(finished)], ["report", str(finished), "--out", str(finished / "page.html")]):
        assert main(command) == 0, capsys.readouterr().err


def test_an_old_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    run = Path(shutil.copytree(OLD / "stopped", tmp_path / "stopped"))
    assert main(["train", "--resume", str(run), "--quiet", "--json"]) == 0
    found = RunDir.open(run).load_tensors("weights.safetensors")[0]
    then = RunDir.open(OLD / "finished").load_tensors("weights.safetensors")[0]
    torch.testing.assert_close(
        found, then, rtol=1e-3, atol=1e-3
    )  # the same bits where torch and the processor are the same


def test_an_old_export_answers_as_it_did() -> None:
    pytest.importorskip("onnxruntime")
    then = logits(OLD / "finished")
    x, _ = next(load(RunDir.open(OLD / "finished").read_recipe().data).test.batches(8))
    with Portable(OLD / "finished" / "export-onnx") as runtime:
        answers = list(runtime.answers(x[0].numpy()))
    assert [answer.label for answer in answers] == then[:, 0].argmax(1).tolist()
