"""Several ranks with synchronised norms train as one process with the global batch does: exactly, but for rounding."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from synced_ranks import CASES, begun

from nestling.nets import build
from nestling.nets.synced import synchronise
from nestling.recipes import named
from nestling.recipes.strategies import STRATEGIES
from nestling.train.losses import stage_loss

HERE = Path(__file__).parent
BENCHMARK = HERE.parent / "benchmarks" / "ranks.py"


def launched(command: list[str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=600, env=environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_alone_a_synchronised_network_is_bitwise_what_it_was() -> None:
    seed = torch.Generator().manual_seed(0)
    net = build(named("digits-width").network, classes=10, shape=(1, 8, 8), generator=seed)
    other = copy.deepcopy(net)
    synchronise(other)
    x = torch.randn(4, 1, 8, 8, generator=seed)
    for found, wanted in ((other(x), net(x)), (other.answers(x), net.answers(x)), (other.buffers(), net.buffers())):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_losses_of_float64_are_not_rounded_and_those_of_bfloat16_are_float32() -> None:
    train, y = named("digits-width").train, torch.tensor([1, 0])
    logits = torch.randn(2, 3, dtype=torch.float64)
    assert torch.equal(stage_loss(logits, y, train), torch.nn.functional.cross_entropy(logits, y))
    assert stage_loss(logits.bfloat16(), y, train).dtype == torch.float32


@pytest.fixture(scope="module")
def by_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synced")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launched([*torchrun, str(HERE / "synced_ranks.py"), str(folder)])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_norms_see_the_batches_of_all_ranks(case: str, by_two_ranks: Path) -> None:
    assert all((by_two_ranks / f"{case}-{rank}").exists() for rank in (0, 1))


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_goes_on_in_one_process_as_if_it_had_always_been_one(
    by_two_ranks: Path, tmp_path: Path
) -> None:
    resumed, alone = begun(by_two_ranks / "run"), begun(tmp_path / "alone")
    resumed.restore()
    assert resumed.done == 1 and alone.done == 0
    for training in (resumed, alone):
        assert len(list(training.epochs())) == 7 * (2 if training is alone else 1)
    found, wanted = resumed.state(), alone.state()
    assert set(found) == set(wanted) and any(name.startswith("momentum_buffer") for name in found)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], atol=1e-10, rtol=0)


@pytest.mark.slow
def test_micro_batches_end_with_the_same_bits_on_any_number_of_ranks(tmp_path: Path) -> None:
    """In float32, statistics included: ReLUs have no rounding to turn into other gradients. Every strategy where NESTLING_RANKS
    is set."""
    methods = list(STRATEGIES) if os.environ.get("NESTLING_RANKS") else ["sgd", "osgd", "greedy"]
    options = ["--networks", "digits-width", "--types", "float32", "--micro", "4", "--methods", *methods]
    launched([str(BENCHMARK), "equal", *options, "--json", str(tmp_path / "found.json")])
    rows = json.loads((tmp_path / "found.json").read_text())["equal"]
    assert [(row["method"], row["ranks"]) for row in rows] == [
        (method, ranks) for method in methods for ranks in (2, 4)
    ]
    for row in rows:
        assert row["weights"] == row["statistics"] == 0 and row["ranks bitwise equal"], row


@pytest.mark.slow
def test_strategies_end_as_in_one_process_and_ranks_end_bitwise_equal(tmp_path: Path) -> None:
    """In float64, where rounding does not hide a defect; every strategy where NESTLING_RANKS says how many ranks.
    benchmarks/ranks.py has float32, other networks and methods too."""
    asked = os.environ.get("NESTLING_RANKS")
    ranks, methods = int(asked or 2), list(STRATEGIES) if asked else ["osgd", "damped", "greedy"]
    options = ["--networks", "digits-width", "--types", "float64", "--ranks", str(ranks), "--methods", *methods]
    launched([str(BENCHMARK), "equal", *options, "--json", str(tmp_path / "found.json")])
    rows = json.loads((tmp_path / "found.json").read_text())["equal"]
    assert [(row["method"], row["ranks"]) for row in rows] == [(method, ranks) for method in methods]
    for row in rows:
        assert row["weights"] < 1e-10 and row["statistics"] < 1e-10 and row["ranks bitwise equal"], row
        assert row["weights"] > 0, row  # else a thing was compared with itself
