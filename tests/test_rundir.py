"""Run folders: what is written comes back; kills, full disks, damaged and foreign files do no harm."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from nestling.errors import NestlingError
from nestling.files import CHECKPOINT, LOG, PROVENANCE, WEIGHTS
from nestling.recipes import named
from nestling.recipes.recipe import Recipe, TrainRecipe
from nestling.runs.folder import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path / "run")
    run.write_recipe(Recipe("small", train=TrainRecipe(epochs=3)))
    return run


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Equal in names, types, shapes and bits."""
    return left.keys() == right.keys() and all(
        left[key].dtype == right[key].dtype and torch.equal(left[key], right[key]) for key in left
    )


TENSORS = {
    "weight": torch.arange(24.0).reshape(2, 3, 2, 2).to(memory_format=torch.channels_last),
    "half": torch.linspace(-1, 1, 5, dtype=torch.bfloat16),
    "step": torch.tensor(7),
    "mask": torch.tensor([True, False]),
    "empty": torch.empty(0, 3),
    "turned": torch.arange(6).reshape(2, 3).t(),
}


# What is written comes back


def test_a_checkpoint_comes_back_with_its_bits_and_meta(run: RunDir) -> None:
    meta = {"epoch": 3, "best": [0.1, None], "name": "ü"}
    run.save_checkpoint(TENSORS, meta)
    tensors, found = run.load_checkpoint()
    assert same(tensors, TENSORS)
    assert found == meta


def test_tensors_that_share_memory_are_saved(run: RunDir) -> None:
    base = torch.arange(10.0)
    run.save_tensors("outputs.safetensors", {"all": base, "part": base[2:5]})
    tensors, meta = run.load_tensors("outputs.safetensors")
    assert same(tensors, {"all": base, "part": base[2:5]})
    assert meta == {}


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists))
def test_any_json_survives_as_meta(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    run = RunDir(tmp_path_factory.mktemp("meta"))
    run.save_checkpoint({}, {"value": value})
    assert run.load_checkpoint() == ({}, {"value": value})


def test_recipe_and_weights_come_back(run: RunDir) -> None:
    assert RunDir.open(run.path).read_recipe() == Recipe("small", train=TrainRecipe(epochs=3))
    net, other = (
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)),
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)),
    )
    run.save_weights(net)
    run.load_weights(other)
    assert same(net.state_dict(), other.state_dict())


def test_json_is_standard_json_even_with_nan(run: RunDir) -> None:
    run.write_json("results.json", {"loss": float("nan"), "where": Path("a/b"), "pair": (1, 2)})
    assert run.read_json("results.json") == {"loss": None, "where": "a/b", "pair": [1, 2]}


def test_provenance_says_what_made_the_run_and_keeps_the_first_start(run: RunDir) -> None:
    run.write_provenance("nestling train x", clock=lambda: 0.0)
    first = run.read_json(PROVENANCE)
    assert first["command"] == "nestling train x"
    assert first["started"] == "1970-01-01T00:00:00Z"
    assert first["versions"]["torch"] == torch.__version__
    assert set(first["versions"]) >= {"nestling", "python", "numpy"}
    assert first["device"]
    assert first["commit"] is None or (len(first["commit"]) == 40 and isinstance(first["dirty"], bool))
    run.write_provenance("nestling train x --resume y", resumed=True, clock=lambda: 60.0)
    both = run.read_json(PROVENANCE)
    assert {**both, "resumed": None} == {**first, "resumed": None}
    assert [each["started"] for each in both["resumed"]] == ["1970-01-01T00:01:00Z"]


# Folders


def test_a_folder_with_finished_work_is_not_overwritten(run: RunDir) -> None:
    run.append_log({"epoch": 1})
    assert RunDir.create(run.path).read_log() == []  # killed before its first checkpoint: starts afresh
    run.save_checkpoint(TENSORS, {})
    with pytest.raises(NestlingError, match=r"already holds a run \(checkpoint.safetensors is there\); resume it"):
        RunDir.create(run.path)


def test_missing_and_wrong_folders_are_named(run: RunDir, tmp_path: Path) -> None:
    with pytest.raises(NestlingError, match=r"there is no run folder .*rum; did you mean run\?"):
        RunDir.open(tmp_path / "rum")
    with pytest.raises(NestlingError, match=r"is not a run folder: it has no recipe.json"):
        RunDir.open(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(NestlingError, match="cannot make the run folder"):
        RunDir.create(tmp_path / "file" / "run")
    with pytest.raises(NestlingError, match=r"there is no .*checkpoint.safetensors"):
        run.load_checkpoint()
    with pytest.raises(NestlingError, match=r"there is no .*results.json"):
        run.read_json("results.json")


def test_a_spoilt_recipe_names_the_file(run: RunDir) -> None:
    (run.path / "recipe.json").write_text('{"name": "x"}')
    with pytest.raises(NestlingError, match=r"recipe.json: the recipe lacks the field\(s\) data"):
        run.read_recipe()
    (run.path / "recipe.json").write_text("{")
    with pytest.raises(NestlingError, match=r"recipe.json is not JSON"):
        run.read_recipe()


# The log


def test_a_torn_last_line_is_dropped_and_written_over(run: RunDir) -> None:
    for epoch in (1, 2):
        run.append_log({"epoch": epoch})
    with open(run.path / LOG, "ab") as file:
        file.write(b'{"epoch": 3, "tra')
    assert [line["epoch"] for line in run.read_log()] == [1, 2]
    run.append_log({"epoch": 3})
    assert (run.path / LOG).read_text() == '{"epoch": 1}\n{"epoch": 2}\n{"epoch": 3}\n'


def test_the_log_is_cut_back_to_the_checkpoint(run: RunDir) -> None:
    run.truncate_log(0)
    assert run.read_log() == []
    for epoch in range(1, 6):
        run.append_log({"epoch": epoch, "loss": [epoch / 7]})
    before = (run.path / LOG).read_bytes().splitlines(keepends=True)
    run.truncate_log(3)
    assert (run.path / LOG).read_bytes() == b"".join(before[:3])


def test_damage_inside_the_log_is_named(run: RunDir) -> None:
    (run.path / LOG).write_text('{"epoch": 1}\n{"epo\n{"epoch": 3}\n')
    with pytest.raises(NestlingError, match=r"log.jsonl, line 2 is not JSON"):
        run.read_log()


# Kill -9: the process is real and so is the signal


def kill_while(work: Callable[[RunDir], None], run: RunDir, after: Callable[[], bool], delay: float) -> None:
    """Run work in a process of its own; once after() holds, wait a little and kill it."""
    process = multiprocessing.get_context("fork").Process(target=work, args=(run,))
    process.start()
    try:
        deadline = time.monotonic() + 30
        while not after() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert after(), "the process wrote nothing"
        time.sleep(delay)
        assert process.is_alive()
    finally:
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
    assert process.exitcode == -signal.SIGKILL


def save_for_ever(run: RunDir) -> None:
    step = run.load_checkpoint()[1]["step"] if run.has(CHECKPOINT) else 0
    while True:
        step += 1
        run.save_checkpoint({"value": torch.full((300_000,), float(step))}, {"step": step})


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_kill_in_the_middle_of_a_checkpoint_leaves_one_that_loads(run: RunDir) -> None:
    halfway = run.path / f".{CHECKPOINT}.tmp"
    torn, before = 0, 0
    for attempt in range(60):
        kill_while(save_for_ever, run, after=lambda: run.has(CHECKPOINT), delay=0.02 + 0.0007 * attempt)
        tensors, meta = run.load_checkpoint()
        assert meta["step"] >= before  # finished work is not lost
        assert torch.equal(tensors["value"], torch.full((300_000,), float(meta["step"])))
        before = meta["step"]
        torn += halfway.exists()
        if torn >= 3 and attempt >= 8:
            break
    assert torn >= 1, "no kill fell into a write: the test has shown nothing"


def log_for_ever(run: RunDir) -> None:
    epoch = len(run.read_log())
    while True:
        epoch += 1
        run.append_log({"epoch": epoch, "loss": [0.5] * 200})


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_kill_while_logging_loses_at_most_the_unfinished_line(run: RunDir) -> None:
    seen = 0
    for attempt in range(8):
        kill_while(log_for_ever, run, after=lambda: run.has(LOG), delay=0.02 + 0.003 * attempt)
        epochs = [line["epoch"] for line in run.read_log()]
        assert epochs == list(range(1, len(epochs) + 1))
        assert len(epochs) >= seen
        seen = len(epochs)
    assert seen > 8


# A full disk, a small one made for the test


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs is not permitted here: full-disk tests skipped")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_named_and_spoils_nothing(small_disk: Path) -> None:
    run = RunDir.create(small_disk / "run")
    small = {"value": torch.arange(50_000.0)}
    run.save_checkpoint(small, {"step": 1})
    run.write_json("results.json", {"step": 1})
    run.append_log({"epoch": 1})
    with pytest.raises(NestlingError, match=r"the disk is full: .*checkpoint.safetensors needs .* bytes; free some"):
        run.save_checkpoint({"value": torch.arange(400_000.0)}, {"step": 2})
    assert sorted(each.name for each in run.path.iterdir()) == [CHECKPOINT, LOG, "results.json"]
    tensors, meta = run.load_checkpoint()
    assert same(tensors, small)
    assert meta == {"step": 1}

    with open(small_disk / "filler", "wb", buffering=0) as filler, pytest.raises(OSError):
        while True:
            filler.write(bytes(1024))
    with pytest.raises(NestlingError, match=r"the disk is full: .*log.jsonl"):
        run.append_log({"epoch": 2, "loss": [0.5] * 3000})
    assert run.read_log() == [{"epoch": 1}]
    with pytest.raises(NestlingError, match=r"the disk is full: .*results.json"):
        run.write_json("results.json", list(range(5000)))
    assert run.read_json("results.json") == {"step": 1}
    run.hold()  # needs no room: what is to be written then says what is full
    run.release()

    (small_disk / "filler").unlink()
    run.append_log({"epoch": 2})
    assert [line["epoch"] for line in run.read_log()] == [1, 2]


# Damaged and foreign files


def test_no_flipped_byte_goes_unnoticed(run: RunDir) -> None:
    tensors = {"a": torch.arange(6.0), "b": torch.tensor([1, 2])}
    run.save_checkpoint(tensors, {"step": 1})
    whole = (run.path / CHECKPOINT).read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    for position in range(len(whole)):
        spoilt = bytearray(whole)
        spoilt[position] ^= 1 << position % 8
        (run.path / CHECKPOINT).write_bytes(spoilt)
        try:
            found, meta = run.load_checkpoint()
        except NestlingError as error:
            assert CHECKPOINT in str(error)
        else:  # only blanks in the header may change without harm
            assert position < length
            assert same(found, tensors)
            assert meta == {"step": 1}


def test_a_truncated_file_is_refused(run: RunDir) -> None:
    run.save_checkpoint(TENSORS, {"step": 1})
    whole = (run.path / CHECKPOINT).read_bytes()
    for length in [0, 1, 7, 8, 20, len(whole) // 2, len(whole) - 1]:
        (run.path / CHECKPOINT).write_bytes(whole[:length])
        with pytest.raises(NestlingError, match=r"checkpoint.safetensors is truncated, damaged or no safetensors"):
            run.load_checkpoint()


def test_a_flipped_weight_is_refused_as_damaged(run: RunDir) -> None:
    run.save_checkpoint(TENSORS, {})
    whole = bytearray((run.path / CHECKPOINT).read_bytes())
    whole[-1] ^= 1
    (run.path / CHECKPOINT).write_bytes(whole)
    with pytest.raises(NestlingError, match="do not match its checksum"):
        run.load_checkpoint()


def test_foreign_files_are_refused(run: RunDir) -> None:
    path = run.path / CHECKPOINT
    safetensors.torch.save_file({"value": torch.ones(2)}, path)
    with pytest.raises(NestlingError, match=r"is not ours: found 'foreign'"):
        run.load_checkpoint()
    run.save_weights(nn.Linear(2, 2))
    shutil.copy(run.path / WEIGHTS, path)
    with pytest.raises(NestlingError, match=r"found 'weights.safetensors', format '1', expected 'checkpoint"):
        run.load_checkpoint()
    path.write_text(json.dumps({"step": 1}))
    with pytest.raises(NestlingError, match="no safetensors file"):
        run.load_checkpoint()


class Trap:
    """Unpickling this would make a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_pickled_checkpoint_is_refused_and_never_run(run: RunDir, tmp_path: Path) -> None:
    torch.save(Trap(tmp_path / "sprung"), run.path / CHECKPOINT)
    with pytest.raises(NestlingError, match="no safetensors file"):
        run.load_checkpoint()
    assert not (tmp_path / "sprung").exists()


def test_weights_of_another_network_are_refused(run: RunDir) -> None:
    run.save_weights(nn.Linear(2, 3))
    with pytest.raises(NestlingError, match=r"another network: 'bias' has shape \(3,\), expected \(4,\)"):
        run.load_weights(nn.Linear(2, 4))
    with pytest.raises(NestlingError, match=r"another network: 'bias' has shape \(3,\), expected none"):
        run.load_weights(nn.Linear(2, 3, bias=False))


# --- JSON from anywhere ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "1e999", "[-1e999]", "NaN", "Infinity", "9" * 9999, ""]
)
def test_json_that_cannot_be_held_is_refused(tmp_path: Path, text: str) -> None:
    run = RunDir.create(tmp_path / "run")
    (run.path / "results.json").write_text(text)
    with pytest.raises(NestlingError, match="is not JSON"):
        run.read_json("results.json")
    (run.path / "log.jsonl").write_text(text + "\n")
    if text:
        with pytest.raises(NestlingError, match="line 1 is not JSON"):
            run.read_log()
    (tmp_path / "recipe.json").write_text(text)
    with pytest.raises(NestlingError, match="not JSON"):
        named(str(tmp_path / "recipe.json"))


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    os.mkfifo(run.path / "results.json")
    os.mkfifo(run.path / "weights.safetensors")
    with pytest.raises(NestlingError, match="expected a file"):
        run.read_json("results.json")
    with pytest.raises(NestlingError, match="expected a file"):
        run.load_tensors("weights.safetensors")


WRITE = """
import sys, torch
from nestling.runs.folder import RunDir
RunDir(sys.argv[1]).save_tensors("x.safetensors", {k: torch.ones(3) for k in sys.argv[2]}, {"epoch": 3, "é": [1.5, "b"]})
"""


def test_equal_tensors_give_equal_bytes(tmp_path: Path) -> None:
    """In every process, whatever the order they come in."""
    files = []
    for index, order in enumerate(("abc", "cab", "bca", "abc")):
        (tmp_path / str(index)).mkdir()
        subprocess.run([sys.executable, "-c", WRITE, str(tmp_path / str(index)), order], check=True)
        files.append((tmp_path / str(index) / "x.safetensors").read_bytes())
    assert len(set(files)) == 1
    tensors, meta = RunDir(tmp_path / "0").load_tensors("x.safetensors")
    assert sorted(tensors) == ["a", "b", "c"] and meta == {"epoch": 3, "é": [1.5, "b"]}


# --- one process at a time -----------------------------------------------------------------------------------------

HOLD = """
import sys, time
from nestling.runs.folder import RunDir
run = RunDir(sys.argv[1])
run.hold()
print("held", flush=True)
time.sleep(60)
"""


def test_a_folder_is_held_by_one_process_and_freed_by_its_end(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with subprocess.Popen([sys.executable, "-c", HOLD, str(run.path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(NestlingError, match=f"is being trained by process {holder.pid} on .*; wait for it"):
            run.hold()
        holder.kill()
    run.hold()
    with pytest.raises(NestlingError, match=f"process {os.getpid()}, which is this one"):
        RunDir(run.path).hold()
    if not (child := os.fork()):  # does not hold it, and frees nothing
        run.release()
        os._exit(0)
    os.waitpid(child, 0)
    done = subprocess.run([sys.executable, "-c", HOLD, str(run.path)], capture_output=True, text=True, check=False)
    assert "is being trained by process" in done.stderr
    run.release()
    RunDir(run.path).hold()
    assert list(run.path.iterdir()) == [], "the lock that nobody refers to is gone, with its file"
