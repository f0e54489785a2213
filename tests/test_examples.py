"""The examples run, and learn."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
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
def test_lightning_with_manual_optimisation() -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("lightning")
    found = re.findall(r"(\w+) (\d+\.\d+)", run("lightning_module", "6"))
    losses = {name: float(value) for name, value in found if name in ("digit", "lean")}
    assert losses["digit"] < 0.5 and losses["lean"] < 0.05
