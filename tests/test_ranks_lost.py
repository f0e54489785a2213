"""torchrun: a rank that is killed, another number of ranks afterwards, and how ranks share an epoch; tried on real processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import finding
from safetensors.torch import load_file
from test_train import untimed, wait_for_log, weights

from nestling.files import CHECKPOINT
from nestling.recipes import named
from nestling.recipes.recipe import override
from nestling.runs.folder import RunDir
from nestling.train import train
from nestling.train.loop import epoch_generator

SETTINGS = ("train.epochs=6", "train.batch=64", "data.limit=512", "train.diagnostics=false")
FLAGS = [f"--set={each}" for each in SETTINGS]


def launched(ranks: int, *words: str, restarts: int = 0) -> "subprocess.Popen[bytes]":
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*torchrun, f"--max-restarts={restarts}", "-m", "nestling", "train", *words, "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)


def pid_of(rank: int, launcher: int) -> int:
    """The process of a rank, a child of torchrun's."""
    for pid in map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()):
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return pid
    raise AssertionError(f"rank {rank} is not there")


def finished(process: "subprocess.Popen[bytes]") -> None:
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err.decode()[-3000:]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    finished(launched(2, "digits-width", *FLAGS, "--out", str(path)))
    return path


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds ranks by /proc")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_started_again_and_the_weights_are_right(tmp_path: Path, undisturbed: Path, rank: int) -> None:
    """`torchrun --max-restarts`: all ranks go on from the checkpoint, with the command that began them."""
    run = tmp_path / "run"
    process = launched(2, "digits-width", *FLAGS, "--out", str(run), restarts=2)
    wait_for_log(run / "log.jsonl", 2, process)
    os.kill(pid_of(rank, process.pid), signal.SIGKILL)
    finished(process)
    assert "resumed" in RunDir(run).read_json("provenance.json"), "it was not killed in time"
    one, other = weights(run), weights(undisturbed)
    assert all(torch.equal(one[key], other[key]) for key in other) and untimed(run) == untimed(undisturbed)


@pytest.mark.slow
def test_without_a_restart_a_folder_with_a_run_is_still_refused(tmp_path: Path, undisturbed: Path) -> None:
    process = launched(2, "digits-width", *FLAGS, "--out", str(undisturbed))
    _, err = process.communicate(timeout=240)
    assert process.returncode != 0 and b"already holds a run" in err


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_another_number_of_ranks(tmp_path: Path, undisturbed: Path) -> None:
    """From two ranks to one and to four: parameters and momentum are there, and the rest of the epochs is trained."""
    for ranks in (1, 4):
        run = tmp_path / f"run{ranks}"
        finished(launched(2, "digits-width", *FLAGS, "--out", str(run), "--minutes", "0.0001"))
        done = RunDir(run).load_checkpoint()[1]["epoch"]
        assert 1 <= done < 6
        if ranks == 1:
            train(RunDir(run).read_recipe(), str(run), resume=True, quiet=True)
        else:
            finished(launched(ranks, "--resume", str(run)))
        assert [line["epoch"] for line in RunDir(run).read_log()] == [1, 2, 3, 4, 5, 6]
        assert untimed(run)[:done] == untimed(undisturbed)[:done] and RunDir(run).has(CHECKPOINT)


@pytest.mark.slow
def test_with_micro_batches_another_number_of_ranks_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Two ranks, then four, then one: weights, statistics and log are those of one process that was never stopped."""
    alone, run = tmp_path / "alone", tmp_path / "run"
    settings = (*SETTINGS, "train.micro_batches=4")
    train(override(named("digits-width"), settings), str(alone), quiet=True)
    short = ["--minutes", "0.0001"]  # one epoch
    finished(launched(2, "digits-width", *(f"--set={each}" for each in settings), "--out", str(run), *short))
    finished(launched(4, "--resume", str(run), *short))
    assert RunDir(run).load_checkpoint()[1]["epoch"] == 2
    train(RunDir(run).read_recipe(), str(run), resume=True, quiet=True)
    one, other = weights(run), weights(alone)
    assert all(torch.equal(one[key], other[key]) for key in other) and untimed(run) == untimed(alone)


SHARES = """
import os, sys, torch
from safetensors.torch import save_file
from nestling.data import load
from nestling.recipes.recipe import DataRecipe
from nestling.train.loop import epoch_generator
from nestling.train.run import join_ranks
from nestling.train.stepping import share
join_ranks()
split = load(DataRecipe("digits", limit=512), torch.device("cpu")).train
mine = [share(x, y) for x, y in split.batches(64, epoch_generator(0, 3), drop_last=True)]
rank = torch.distributed.get_rank()
found = {"x": torch.stack([x for x, _ in mine]).contiguous(), "y": torch.stack([y for _, y in mine]).contiguous()}
save_file(found, f"{sys.argv[1]}/{rank}.safetensors")
torch.distributed.barrier()
os._exit(0)  # gloo's threads may abort an interpreter that tears them down: see nestling.__main__
"""


@pytest.mark.slow
def test_the_shares_of_four_ranks_together_are_exactly_the_epoch_of_one_process(tmp_path: Path) -> None:
    """Every image once, augmented as it would have been, in the same step."""
    from nestling.data import load
    from nestling.recipes.recipe import DataRecipe

    (tmp_path / "shares.py").write_text(SHARES)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    command = [*torchrun, str(tmp_path / "shares.py"), str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=240, env=finding(tmp_path, OMP_NUM_THREADS="1"))
    parts = [load_file(tmp_path / f"{rank}.safetensors") for rank in range(4)]
    split = load(DataRecipe("digits", limit=512), torch.device("cpu")).train
    whole = list(split.batches(64, epoch_generator(0, 3), drop_last=True))
    for name, index in (("x", 0), ("y", 1)):
        joined = torch.stack([part[name] for part in parts], dim=2).flatten(1, 2)  # rank r has r, r + 4, ...
        assert torch.equal(joined, torch.stack([batch[index] for batch in whole]))
