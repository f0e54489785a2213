"""The benchmark that says whether engines agree: really the same training passes, really another one is caught."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import agreement
from agreement import OTHER_KERNELS, REFERENCE, Way

from nestling.recipes.recipe import NetworkRecipe, Recipe, StrategyRecipe, TrainRecipe

CPU = torch.device("cpu")
SCRIPT = Path(__file__).parent.parent / "benchmarks" / "agreement.py"


@pytest.mark.filterwarnings("ignore:TF32")
def test_other_kernels_agree_and_another_rate_seed_or_strategy_does_not() -> None:
    recipe = Recipe(
        name="agreement",
        network=NetworkRecipe(name="width-digits"),
        strategy=StrategyRecipe(name="sgd"),
        train=TrainRecipe(batch=32, lr=0.1, precision="bfloat16"),
    )
    split = agreement.images(recipe, 16, CPU)
    contiguous, plain = OTHER_KERNELS["cpu"]
    wrong = [
        Way("rate", settings=("train.lr=0.12",)),
        Way("strategy", settings=("strategy.name=sgd-sum",)),
        Way("seed", settings=("train.seed=1",)),
        Way("decay", settings=("train.weight_decay=0.05",)),
    ]
    ways = [REFERENCE, plain, contiguous, *wrong]
    found = {way.name: agreement.losses(recipe, way, split, CPU)[None] for way in ways}
    assert found["eager"].shape == (1, 16, 3)
    again = agreement.losses(recipe, REFERENCE, split, CPU)
    assert torch.equal(again, found["eager"][0]), "one way is the same each time"
    fast = [way.name for way in (contiguous, *wrong)]
    rows = agreement.judge(found, [REFERENCE.name, plain.name], fast, factor=2.0)
    verdicts = {row["way"]: row["agrees"] for row in rows if "agrees" in row}
    assert verdicts == {contiguous.name: True, "rate": False, "strategy": False, "seed": False, "decay": False}


def test_distances_by_hand() -> None:
    a, b = torch.zeros(1, 20, 2), torch.zeros(1, 20, 2)
    b[0, 15:] = 2.0  # a quarter of all steps, none of the first ten
    assert agreement.distance(a, b) == (0.0, 1.0)


def test_it_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--network", "width-digits", "--batch", "16", "--steps", "4", "--seeds", "1"]
    command = [sys.executable, str(SCRIPT), *words, "--json", str(tmp_path / "rows.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "spread of eager runs" in done.stdout and "eager, contiguous" in done.stdout
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert rows[0]["way"] == "spread of eager runs" and rows[0]["all"] > 0
