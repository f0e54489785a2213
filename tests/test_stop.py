"""Ctrl-C and SIGTERM: a training leaves a checkpoint of its last whole epoch, says how to go on, and goes on as if nothing
had been; tried on real processes."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import finding
from test_train import digits, untimed, wait_for_log, weights
from test_train_device import go_ahead

from nestling.recipes.recipe import Recipe
from nestling.runs.folder import RunDir
from nestling.train import Training, train
from nestling.train.stop import USUAL, Stopped, StopRequest, on_signal

SETTINGS = ("train.epochs=8", "train.batch=32", "train.checkpoint_every=100")


@pytest.fixture(autouse=True)
def usual_signals() -> Iterator[None]:
    """Whatever other tests of this process have left: a signal that nobody hears would end the process, and all tests with it."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("only a main thread hears signals")
    before = {number: signal.getsignal(number) for number in USUAL}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        if handler is not None:
            signal.signal(number, handler)


BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that was never stopped."""
    path = tmp_path_factory.mktemp("never") / "run"
    train(digits(*SETTINGS), str(path), quiet=True)
    return path


def same(first: Path, second: Path) -> bool:
    one, other = weights(first), weights(second)
    return all(torch.equal(one[key], other[key]) for key in one) and untimed(first) == untimed(second)


@BOTH
def test_a_stopped_command_says_how_to_go_on_and_loses_no_whole_epoch(
    tmp_path: Path, whole: Path, number: signal.Signals
) -> None:
    """Though the recipe would write its first checkpoint at the end."""
    run = tmp_path / "run"
    flags = [f"--set={key}={value}" for key, value in differences(digits(*SETTINGS))]
    command = [sys.executable, "-m", "nestling", "train", "digits-width", *flags, "--out", str(run), "--quiet"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_log(run / "log.jsonl", 2, process)  # type: ignore[arg-type]
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (128 + number, "")
    said = re.fullmatch(rf"nestling: stopped by {number.name} after epoch (\d) of 8; go on with (.*)\n", err)
    assert said is not None and said[2] == RunDir(run).going_on(), err
    epoch = int(said[1])
    assert RunDir(run).load_checkpoint()[1]["epoch"] == epoch == len(RunDir(run).read_log()) >= 2
    train(digits(*SETTINGS), str(run), resume=True, quiet=True)
    assert same(whole, run)


def differences(recipe: Recipe) -> list[tuple[str, str]]:
    """`digits(...)` as a command line."""
    train, data = recipe.train, recipe.data
    return [
        ("train.epochs", str(train.epochs)), ("train.batch", str(train.batch)), ("data.limit", str(data.limit)),
        ("train.checkpoint_every", str(train.checkpoint_every)), ("train.diagnostics", str(train.diagnostics).lower()),
    ]  # fmt: skip


BESIDE = """
import sys
from test_stop import SETTINGS
from test_train import digits
from nestling.train import train_side_by_side
from nestling.train.stop import Stopped
recipes = [digits(*SETTINGS), digits(*SETTINGS, "train.seed=1")]
try:
    train_side_by_side(list(zip(recipes, sys.argv[1:])))
except Stopped as stop:
    print(stop)
    sys.exit(stop.code)
"""


def test_runs_side_by_side_stop_together(tmp_path: Path, whole: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a", "b")]
    environment = finding(Path(__file__).parent)
    command = [sys.executable, "-c", BESIDE, *paths]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    wait_for_log(tmp_path / "b" / "log.jsonl", 2, process)  # type: ignore[arg-type]
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert out == "stopped by SIGTERM with 0 of 2 runs finished; the others go on when called again\n"
    for path in paths:
        run = RunDir(path)
        assert run.load_checkpoint()[1]["epoch"] == len(run.read_log()) >= 2
    train(digits(*SETTINGS), paths[0], resume=True, quiet=True)
    assert same(whole, Path(paths[0]))


def test_what_was_on_its_way_home_is_written_before_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the numbers of an epoch come while the next one runs."""
    go_ahead(monkeypatch, late=1000)
    recipe, run, stop = digits(*SETTINGS, "train.compile=false"), RunDir.create(tmp_path / "run"), StopRequest()
    run.write_recipe(recipe)
    training = Training(recipe, run, stop=stop)
    seen = []
    for place in training.epochs():
        seen.append(place)
        if place == (2, 1):
            assert len(run.read_log()) == 1, "the second epoch is on its way"
            stop.number = signal.SIGTERM
    assert seen[-1] == (2, 1), "it stops after the step"
    assert len(run.read_log()) == run.load_checkpoint()[1]["epoch"] == training.done == 2


def test_a_stop_in_the_first_epoch_leaves_a_run_that_begins_again(tmp_path: Path) -> None:
    recipe, run, stop = digits("train.epochs=1"), RunDir.create(tmp_path / "run"), StopRequest()
    run.write_recipe(recipe)
    stop.number = signal.SIGTERM
    assert list(Training(recipe, run, stop=stop).epochs()) == [(0, 0)]
    assert train(recipe, str(tmp_path / "run"), resume=True, quiet=True)["stages"]


@BOTH
def test_before_the_first_step_a_signal_does_not_wait(number: signal.Signals) -> None:
    usual = signal.getsignal(number)
    with pytest.raises(Stopped, match=f"stopped by {number.name}") as raised, on_signal():
        signal.raise_signal(number)
    assert raised.value.code == 128 + number
    assert signal.getsignal(number) is usual, "and afterwards everything is as before"


def test_a_second_ctrl_c_does_not_wait_but_a_second_sigterm_does() -> None:
    with on_signal() as stop:
        stop.waits = True
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop.asked
        with pytest.raises(Stopped, match="SIGINT"):
            signal.raise_signal(signal.SIGINT)


TWICE = """
import atexit, signal, sys
from nestling.__main__ import entry
import nestling.commands.train as run

class Gone:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def named(name):
    {what}

run.named = named
sys.argv[1:] = ["train", "digits-width", "--out", sys.argv[1]]
entry()
"""
PLACES = {
    "while Python ends": "atexit.register(signal.raise_signal, signal.SIGINT); signal.raise_signal(signal.SIGINT)",
    "half-way through an import": "try: signal.raise_signal(signal.SIGINT)\n    except KeyboardInterrupt: sys.no_such_thing",
    "where nothing can be raised": "Gone(); signal.raise_signal(signal.SIGINT)",
    "while the first is seen to": "try: signal.raise_signal(signal.SIGINT)\n    finally: signal.raise_signal(signal.SIGINT)",
}


@pytest.mark.parametrize("place", PLACES)
def test_ctrl_c_twice_ends_without_a_traceback(tmp_path: Path, place: str) -> None:
    words = [sys.executable, "-c", TWICE.format(what=PLACES[place]), str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 130 and done.stderr in ("nestling: interrupted\n", ""), done.stderr
    assert not (tmp_path / "run").exists()


def test_who_listens_already_goes_on_listening() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with on_signal() as stop:
            signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM] and not stop.asked
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_train_without_listening() -> None:
    found: list[bool] = []

    def work() -> None:
        with on_signal() as stop:
            found.append(stop.asked)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False]


def test_a_forked_worker_leaves_ctrl_c_to_its_parent_and_ends_on_sigterm() -> None:
    with on_signal() as stop:
        worker = os.fork()
        if not worker:
            try:
                signal.raise_signal(signal.SIGINT)  # would raise, if it were not for the parent to decide
                signal.raise_signal(signal.SIGTERM)
            finally:
                os._exit(7)
        _, status = os.waitpid(worker, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
        assert not stop.asked
