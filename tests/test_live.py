"""A nest beside networks to choose from: who is chosen, how answers are counted, and what the command shows."""

import io
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from test_export import stirred
from torch import nn

import nestling
from nestling.commands import profile, report
from nestling.errors import NestlingError
from nestling.nets import build
from nestling.recipes.recipe import NetworkRecipe
from nestling.runtime import chooser as chooser_file
from nestling.runtime.chooser import Chooser
from nestling.studies import live as live_file
from nestling.studies.live import (
    LiveQuestion,
    ask_in_turn,
    live,
    one_by_one,
    other_processes,
    read_trace,
    summary,
    unaware,
)

SPEC = nestling.Spec("digits", (1, 8, 8), tuple("abcdefghij"), ("w1", "w2", "w4"), errors=(0.3, 0.2, 0.1))


@pytest.fixture(scope="module")
def chosen() -> Iterator[Chooser]:
    nets = [stirred(build(NetworkRecipe(name="width-digits", alone=stage)))[0] for stage in (1, 2, 3)]
    with Chooser(nets, device="cpu", spec=SPEC) as found:
        yield found


def take(chooser: Chooser, *seconds: float) -> None:
    for times, usual in zip(chooser.times, seconds, strict=True):
        times.clear()
        times.extend([usual] * 60)


def test_the_largest_net_that_usually_fits_is_chosen_and_the_smallest_if_none_does(chosen: Chooser) -> None:
    take(chosen, 0.001, 0.003, 0.009)
    assert [chosen.choose(limit) for limit in (0.0005, 0.001, 0.004, 0.02)] == [1, 1, 2, 3]
    chosen.times[1].extend([0.003] * 53 + [0.5] * 7)  # more than one run in ten took long
    assert chosen.choose(0.004) == 1
    chosen.times[1].extend([0.003] * 55 + [0.5] * 5)
    assert chosen.choose(0.004) == 2


def test_a_chooser_answers_what_its_networks_answer() -> None:
    nets = [stirred(build(NetworkRecipe(name="width-digits", alone=stage)))[0] for stage in (1, 2, 3)]
    x = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(0))
    with Chooser(nets, device="cpu", spec=SPEC) as chooser, torch.no_grad():
        logits = [net(x[None])[-1].softmax(1).numpy()[0] for net in nets]
        last = chooser.answer(x)
        assert (last.stage, last.size, last.final) == (3, "w4", True) and last.refine() is last
        np.testing.assert_allclose(last.probabilities, logits[2], atol=1e-5)
        assert last.output is not None
        np.testing.assert_allclose(last.output, nets[2](x[None])[-1][0], atol=1e-4)
        take(chooser, 0.001, 9.0, 9.0)
        first = chooser.answer(x.numpy(), deadline=0.5)
        assert (first.stage, first.final) == (1, False) and first.name == SPEC.classes[first.label]
        np.testing.assert_allclose(first.probabilities, logits[0], atol=1e-5)
        assert first.refine(deadline=0.5).stage == 2  # none fits, but there is an answer
        assert first.refine().stage == 3
    with pytest.raises(NestlingError, match="closed"):
        chooser.answer(x)


def test_of_a_nest_its_last_stage_is_chosen_and_networks_must_agree() -> None:
    nest = stirred(build(NetworkRecipe(name="width-digits")))[0]
    with Chooser([nest], device="cpu") as chooser:
        assert chooser.spec.sizes == ("w4",)
        x = torch.zeros(1, 8, 8)
        with torch.no_grad():
            np.testing.assert_allclose(chooser.answer(x).probabilities, nest(x[None])[-1].softmax(1)[0], atol=1e-5)
    with pytest.raises(NestlingError, match="expected networks to choose from"):
        Chooser([])
    other = build(NetworkRecipe(name="width-digits"), classes=7).eval()
    with pytest.raises(NestlingError, match="another classes"):
        Chooser([nest, other], device="cpu")
    with pytest.raises(NestlingError, match="of 2 networks"):
        Chooser([nest], device="cpu", spec=replace(SPEC, sizes=("a", "b"), errors=()))


def test_networks_that_answer_otherwise_than_the_spec_says_are_refused() -> None:
    """The first picture told of it, with an IndexError."""
    nest = stirred(build(NetworkRecipe(name="width-digits")))[0]
    with pytest.raises(NestlingError, match="is of 3 classes; found answers of shapes"):
        Chooser([nest], device="cpu", spec=replace(SPEC, classes=("a", "b", "c"), sizes=("w4",), errors=()))
    layers = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1))
    masks = nestling.nest(layers.eval(), shape=(1, 8, 8))
    with pytest.raises(NestlingError, match="takes networks that answer with these classes"):
        Chooser([masks.eval()], device="cpu")


def test_networks_of_runs_bring_their_errors() -> None:
    specs = [replace(SPEC, sizes=("x",), errors=(error,)) for error in (0.3, 0.2)]
    assert chooser_file.together(specs).errors == (0.3, 0.2)
    assert chooser_file.together([specs[0], replace(specs[1], errors=())]).errors == ()


def test_who_does_not_know_the_deadline_has_nothing_when_it_comes_too_early(
    chosen: Chooser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chosen, "run", lambda number, image: time.sleep(0.02))
    image: Any = None
    asked = unaware(chosen, image, lambda: 2)(0.005)
    assert (asked.stage, asked.late) == (0, 0.0)
    asked = unaware(chosen, image, lambda: 2)(0.5)
    assert asked.stage == 2 and asked.late < 0
    assert [one_by_one(chosen, image)(limit).stage for limit in (0.001, 0.5)] == [0, 3]


def test_an_answer_that_comes_late_or_not_at_all_is_worth_nothing() -> None:
    asked = [
        LiveQuestion(0.002, 1, -0.001),
        LiveQuestion(0.002, 2, 0.0004),
        LiveQuestion(0.004, 2, 0.001),
        LiveQuestion(0.004, 0, 0),
    ]
    found = summary(asked, (0.2, 0.1), (0.001, 0.003, 0.006, 0.009))
    assert found["late"] == 0.25 and found["nothing"] == 0.25 and found["stages"] == [0.25, 0.25, 0.5]
    assert found["error"] == pytest.approx((0.2 + 0.1 + 0.1 + 0.9) / 4)
    assert found["strict"] == pytest.approx((0.2 + 0.1 + 0.9 + 0.9) / 4)
    assert [part["strict"] for part in found["by_deadline"]] == pytest.approx([0.15, 0.9])
    assert [part["stages"] for part in found["by_deadline"]] == [[0.0, 0.5, 0.5], [0.5, 0.0, 0.5]]


@pytest.mark.parametrize("deadlines", ["known", "unknown"])
def test_the_command_shows_both_sides_live(deadlines: Any, capfd: pytest.CaptureFixture[str]) -> None:
    found = profile.command("width-resnet42-cifar10", live=True, load="busy", deadlines=deadlines, questions=3)
    assert "3 questions each" in capfd.readouterr().err
    names = ["nest", "chooser", "always 1", "always 2", "always 3", "bare timer"]
    assert sorted(found["own_errors"]) == sorted(
        [*names, *(["nest, soon"] if deadlines == "known" else ["nest, loop", "one by one"])]
    )
    assert found["rival_errors"] == [0.0899, 0.0625, 0.0499] and found["errors"] == [0.0794, 0.0662, 0.0596]
    for kind in ("own_errors", "equal_errors"):
        assert all(row["n"] == 3 and 0.04 < row["strict"] <= 0.9 for row in found[kind].values())
    console = Console(file=io.StringIO(), width=200)
    console.print(profile.show(found))
    text = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]  # wherever lines end
    assert f"deadlines {deadlines}" in text and "chooser" in text and "w1, w2, w4" in text
    narrow = Console(file=io.StringIO(), width=80)
    narrow.print(profile.show(found))
    assert "…" not in narrow.file.getvalue(), "no column is cut short in a terminal of 80"  # type: ignore[attr-defined]


def test_other_runs_are_the_rivals_that_are_named() -> None:
    found = live("width-resnet42-cifar10", ["width-resnet42-cifar10", "depth-sparse98-cifar10"], questions=2)
    assert found["rivals"] == ["width-resnet42-cifar10", "depth-sparse98-cifar10"]
    assert len(found["rival_errors"]) == 2 and "chooser" in found["own_errors"]
    assert found["equal_errors"] == {}  # two networks have not the errors of three stages


def test_deadlines_are_those_of_a_trace_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "met.txt").write_text("3\n0.5\n40\n")
    limits = read_trace(tmp_path / "met.txt")
    assert limits == [0.003, 0.0005, 0.04]
    given: list[float] = []

    def ask(limit: float) -> LiveQuestion:
        given.append(limit)
        return LiveQuestion(limit, 1, 0.0)

    asked = ask_in_turn({"one": ask, "other": ask}, 5, limits, 0)
    assert given == [0.003, 0.0005, 0.04, 0.003, 0.0005] * 2 and len(asked["one"]) == 5
    found = profile.command("width-resnet42-cifar10", live=True, questions=3, trace=str(tmp_path / "met.txt"))
    assert found["span_ms"] == [0.5, 40.0] and found["own_errors"]["nest"]["n"] == 3


@pytest.mark.parametrize("content", [b"", b"3\n-1\n", b"nan", b"1e999", b"3 ms", b"\xff", b"0"])
def test_a_trace_that_holds_no_deadlines_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "trace").write_bytes(content)
    with pytest.raises(NestlingError, match="expected"):
        read_trace(tmp_path / "trace")
    with pytest.raises(NestlingError, match="cannot read"):
        read_trace(tmp_path)
    with pytest.raises(NestlingError, match="--trace is for --live"):
        profile.command("width-resnet42-cifar10", trace=str(tmp_path / "trace"))


def test_what_cannot_be_asked_live_is_refused() -> None:
    with pytest.raises(NestlingError, match="found load 'heavy', expected one of quiet, busy, bursts"):
        live("width-resnet42-cifar10", load="heavy")
    with pytest.raises(NestlingError, match="found deadlines 'none'"):
        live("width-resnet42-cifar10", deadlines="none")
    with pytest.raises(NestlingError, match="at least 1"):
        live("width-resnet42-cifar10", questions=0)
    with pytest.raises(NestlingError, match="add that"):
        profile.command("width-resnet42-cifar10", against=("a",))


def test_other_processes_end_with_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    popen = live_file.subprocess.Popen

    def begin(words: list[str]) -> Any:
        begun.append(popen(words))
        return begun[-1]

    monkeypatch.setattr(live_file.subprocess, "Popen", begin)
    with other_processes("bursts"):
        assert len(begun) == 2 and all(each.poll() is None for each in begun)
    assert all(each.poll() is not None for each in begun)


@pytest.mark.parametrize("load", ["busy", "bursts"])
def test_other_processes_do_not_outlive_a_process_that_was_killed(load: str) -> None:
    program = f"""
import os, signal
from nestling.studies import live
popen = live.subprocess.Popen
def begin(words):
    made = popen(words)
    print(made.pid, flush=True)
    return made
live.subprocess.Popen = begin
with live.other_processes("{load}"):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2
    end = time.monotonic() + 30
    while any(running(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(running(pid) for pid in pids)


def running(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b'{"own_errors": {}, "equal_errors": {}, "load": "quiet"}', b"\xff"]
)
def test_a_report_takes_live_comparisons_and_nothing_else(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "live.json").write_bytes(content)
    with pytest.raises(NestlingError, match="is no live comparison; make one: nestling profile NAME --live --json"):
        report.command((), str(tmp_path / "report.html"), (str(tmp_path / "live.json"),))
    with pytest.raises(NestlingError, match="cannot read"):
        report.command((), str(tmp_path / "report.html"), (str(tmp_path / "none.json"),))
