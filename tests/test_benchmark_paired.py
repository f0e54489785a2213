"""benchmarks/paired.py against numbers computed by hand."""

import json
import subprocess
import sys
from pathlib import Path

import torch

from nestling.recipes.recipe import NetworkRecipe, Recipe
from nestling.runs.folder import RunDir

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "paired.py"


def made(path: Path, answers: list[list[int]], labels: list[int], alone: int = 0) -> str:
    run = RunDir.create(path)
    run.write_recipe(Recipe(name="r", network=NetworkRecipe(alone=alone)))
    logits = torch.nn.functional.one_hot(torch.tensor(answers), 3).float()
    run.append_log({"epoch": 1, "train_loss": [0.5 / (i + 1) for i in range(len(answers))]})
    run.save_tensors("outputs.safetensors", {"logits": logits, "labels": torch.tensor(labels)})
    return str(path)


def test_differences_are_those_of_the_same_images(tmp_path: Path) -> None:
    labels = [0, 1, 2, 0]
    first = made(tmp_path / "a", [[1, 0, 2, 0], [0, 1, 2, 0]], labels)  # 2 wrong, then none
    second = made(tmp_path / "b", [[1, 1, 2, 0], [0, 1, 2, 1]], labels)  # 1 wrong, then another
    alone = made(tmp_path / "c", [[1, 0, 0, 0]], labels, alone=2)  # 3 wrong; stands beside stage 2
    command = [sys.executable, str(SCRIPT), first, second, alone, "--json"]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    found = {
        (Path(r["a"]).name, Path(r["b"]).name, r["stage"]): (r["difference"], r["standard_error"]) for r in told["rows"]
    }
    # one of four differs: 100, 0, 0, 0 has mean 25 and standard deviation 50, so 25 for the mean
    assert found[("a", "b", 1)] == (25.0, 25.0) and found[("a", "b", 2)] == (-25.0, 25.0)
    assert found[("a", "c", 2)] == (-75.0, 25.0)
    assert set(found) == {("a", "b", 1), ("a", "b", 2), ("a", "c", 2), ("b", "c", 2)}
    moved = {
        (Path(r["run"]).name, r["stage"]): (r["train_loss"], r.get("mended"), r.get("broken")) for r in told["stages"]
    }
    assert moved[("a", 1)] == (0.5, None, None) and moved[("a", 2)] == (0.25, 2, 0) and moved[("b", 2)] == (0.25, 1, 1)
    assert moved[("c", 2)] == (0.5, None, None)
    other = made(tmp_path / "d", [[0, 1, 2, 0]], [0, 1, 2, 1])
    refused = subprocess.run([sys.executable, str(SCRIPT), first, other], capture_output=True, text=True)
    assert refused.returncode == 1 and "not tested on the same images" in refused.stderr
