"""The examples run, and learn."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: str, ranks: int = 1) -> str:
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *several, str(EXAMPLES / f"{name}.py"), *arguments]
    for _ in range(3):
        ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
        # a thread of gloo's that lets go of a tensor when the interpreter has gone (pytorch pull request 179291)
        if ranks == 1 or "terminate called without an active exception" not in ran.stderr:
            break
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_two_tasks_in_a_plain_loop() -> None:
    pytest.importorskip("sklearn")
    lines = run("two_task", "201").splitlines()
    first, *_, last = [[float(n) for n in re.findall(r"[-+]?\d+\.\d+", line)] for line in lines]
    assert last[0] < 0.3 * first[0] and last[1] < 0.5 * first[1]
    assert all(0 <= numbers[3] <= 1 for numbers in (first, last))


@pytest.mark.slow
def test_migration_from_pcgrad_gives_the_same_training() -> None:
    """With two tasks PCGrad knows no order, so both loops do the same up to rounding."""
    pytest.importorskip("sklearn")
    pytest.importorskip("pytorch_optimizer")
    theirs, ours = ([float(n) for n in line.split()[1:]] for line in run("from_pcgrad", "60").splitlines())
    assert ours == pytest.approx(theirs, rel=0.02)


@pytest.mark.slow
def test_fsdp2_under_torchrun() -> None:
    """It learns; at the first step cosine and share are those of one process with the whole batch."""
    pytest.importorskip("sklearn")
    shard, alone = (run(name, "101", ranks=ranks).splitlines() for name, ranks in (("fsdp2", 2), ("two_task", 1)))
    assert shard[0].split("cosine")[1] == alone[0].split("cosine")[1]
    digit = [float(re.findall(r"digit (\S+)", line)[0]) for line in shard]
    assert digit[-1] < 0.4 * digit[0]


NEEDED = "not installed: pip install -e '.[examples]'"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "ddp", "fully_shard"])
def test_lightning_with_manual_optimisation(strategy: str) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("lightning", reason=NEEDED)
    found = re.findall(r"(\w+) (\d+\.\d+)", run("lightning_module", "6", strategy))
    losses = {name: float(value) for name, value in found if name in ("digit", "lean")}
    assert losses["digit"] < 0.7 and losses["lean"] < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name, package", [("accelerate_loop", "accelerate"), ("huggingface_trainer", "transformers")])
def test_other_peoples_loops(name: str, package: str, ranks: int) -> None:
    """They learn, and where the model was wrapped for two ranks, both end with the same weights."""
    pytest.importorskip("sklearn")
    pytest.importorskip(package, reason=NEEDED)
    told = run(name, "6" if package == "accelerate" else "90", ranks=ranks)
    assert float(re.findall(r"digit (\d+\.\d+)", told)[-1]) < 1.2
    weights = re.findall(r"weights (\S+?)(?=rank|\s|$)", told)
    assert len(weights) == ranks and len(set(weights)) == 1
