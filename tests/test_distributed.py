"""Two ranks train as one process does: rows are averaged before they are combined."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distributed_ranks import REFUSALS, train
from safetensors.torch import load_file

from nestling.gradients.combiners import RIVALS

HERE = Path(__file__).parent
CASES = [
    "sgd",
    "sgd+absent",
    "sgd+freeze",
    "sgd+uneven",
    "sgd-sum+rows",
    "normsgd",
    "normsgd+compiled",
    "osgd",
    "osgd+tensor",
    "osgd+absent",
    "osgd+accumulate",
    "osgd+freeze",
    "osgd+refresh",
    "osgd+uneven",
    "osgd-norm",
    "pcgrad",
    "damped",
    *RIVALS,
    *(f"{method}+{wrap}" for method in ("osgd", "normsgd", "sgd") for wrap in ("ddp", "unused", "static", "view")),
    *(
        f"osgd+{wrap}+{option}"
        for wrap in ("ddp", "unused")
        for option in ("accumulate", "freeze", "refresh", "uneven")
    ),
]


def on_two_ranks(script: str, *arguments: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(HERE / script), *arguments]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases by two ranks, in one launch."""
    folder = tmp_path_factory.mktemp("ranks")
    on_two_ranks("distributed_ranks.py", ",".join([*CASES, *REFUSALS]), str(folder))
    return folder


@pytest.mark.slow
def test_every_method_in_every_wrapper(tmp_path: Path) -> None:
    """Over the registries: equal to one process, ranks alike to the bit, a NaN on one rank refused on both."""
    on_two_ranks("every_ranks.py", str(tmp_path))
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["", ""]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_ranks_end_equal_and_equal_to_one_process(trained: Path, case: str) -> None:
    first = load_file(trained / f"{case}-0-of-2.safetensors")
    second = load_file(trained / f"{case}-1-of-2.safetensors")
    for name in first:
        assert torch.equal(first[name], second[name]), f"ranks differ in {name}"
    if case == "pcgrad":  # drawn by chance: another process draws otherwise
        return
    alone = train(case, 0, 1)
    for name in first:
        torch.testing.assert_close(first[name], alone[name], atol=1e-6, rtol=0, msg=None)
    assert (first["odd"] != 0).any() == case.endswith("uneven")


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(REFUSALS))
def test_what_ranks_cannot_do_is_refused_in_words(trained: Path, case: str) -> None:
    """And what they can do however a wrapped model is handed over; a parameter first used late."""
    assert all((trained / f"{case}-{rank}-of-2").exists() for rank in (0, 1))
