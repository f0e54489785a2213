"""ImageNet from end to end on a small folder-per-class set: trained, evaluated, resumed and tabled from the command line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from nestling.recipes import named
from nestling.runs.folder import RunDir

CLASSES, TRAIN, VAL = 12, 16, 4  # classes, and pictures of each
SMALL = (
    "data.size=32",
    "data.workers=1",
    "train.epochs=2",
    "train.batch=32",
    "train.precision=float32",
    "train.lr=0.05",
)
NETS = {
    "imagenet-width": ("network.widths=32,64", "network.blocks=1,1"),
    "imagenet-depth": ("network.widths=8,16", "network.blocks=4,4"),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photograph-like JPEG files: a class is a shape and its colour, before a shaded background under noise."""
    folder = tmp_path_factory.mktemp("pictures")
    chance = np.random.RandomState(0)
    for part, n in (("train", TRAIN), ("val", VAL)):
        for label in range(CLASSES):
            here = folder / part / f"n{label:08d}"
            here.mkdir(parents=True)
            for i in range(n):
                picture(label, chance).save(here / f"{here.name}_{i}.JPEG", quality=85)
    return folder


def picture(label: int, chance: np.random.RandomState) -> Image.Image:
    width, height = (int(chance.randint(70, 120)) for _ in range(2))
    slopes = chance.uniform(-0.6, 0.6, (2, 3))
    shade = 128 + np.arange(width)[None, :, None] * slopes[0] + np.arange(height)[:, None, None] * slopes[1]
    noisy = shade + chance.normal(0, 8, (height, width, 3))
    image = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
    draw, side = ImageDraw.Draw(image), min(width, height) * float(chance.uniform(0.5, 0.8))
    x, y = (float(chance.uniform(0, room - side)) for room in (width, height))
    colour = tuple(int(40 + 200 * ((label >> bit) & 1)) for bit in range(3))
    shape = draw.ellipse if label < 8 else draw.rectangle
    shape((x, y, x + side, y + side), fill=colour)
    return image


def nestling(*words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "nestling", *words, "--json"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def settings(recipe: str, root: Path, *more: str) -> list[str]:
    return [word for each in (f"data.root={root}", *SMALL, *NETS[recipe], *more) for word in ("--set", each)]


@pytest.mark.parametrize("recipe", NETS)
def test_trained_evaluated_and_resumed_from_the_command_line(recipe: str, root: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    words = settings(recipe, root)
    trained = nestling("train", recipe, *words, "--out", str(whole), "--quiet")
    assert trained["n"] == CLASSES * VAL and len(trained["classes"]) == CLASSES and len(trained["stages"]) == 3
    assert all(0 <= stage["top5"] <= stage["error"] <= 1 for stage in trained["stages"])
    losses = [line["train_loss"] for line in RunDir(whole).read_log()]
    assert losses[1][-1] < losses[0][-1], "it learns"

    stopped = nestling("train", recipe, *words, "--out", str(parts), "--quiet", "--minutes", "0.0001")
    assert "stages" not in stopped and len(RunDir(parts).read_log()) == 1
    resumed = nestling("train", recipe, *words, "--resume", str(parts), "--quiet")
    first, second = (RunDir(path).load_tensors("weights.safetensors")[0] for path in (whole, parts))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert [stage["error"] for stage in resumed["stages"]] == [stage["error"] for stage in trained["stages"]]

    again = nestling("evaluate", str(whole))
    assert [(s["error"], s["top5"]) for s in again["stages"]] == [(s["error"], s["top5"]) for s in trained["stages"]]


def test_a_row_of_table_3_with_top_5_errors(root: Path, tmp_path: Path) -> None:
    words = ["--network", "width-resnet50", "--strategy", "sgd", *settings("imagenet-width", root, "train.epochs=1")]
    where = ["--out", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    found = nestling("paper", "table3", *words, *where)
    assert [row["paper"] for row in found["rows"]] == [36.7, 31.5, 29.2]
    assert [row["paper"] for row in found["top5"]] == [14.7, 11.7, 10.2]
    [run] = (tmp_path / "runs").iterdir()
    stages = json.loads((run / "results.json").read_text())["stages"]
    assert [row["error"] for row in found["top5"]] == [round(100 * stage["top5"], 3) for stage in stages]


@pytest.mark.parametrize("recipe", NETS)
def test_the_recipes_are_the_papers(recipe: str) -> None:
    """90 epochs from 0.1 to 0.0001, batch 256."""
    train = named(recipe).train
    assert (train.epochs, train.batch, train.lr) == (90, 256, 0.1)
    assert train.lr * train.gamma ** len(train.milestones) == pytest.approx(1e-4)
    assert named(recipe).data.size == 224


def test_the_benchmark_runs(tmp_path: Path) -> None:
    script = Path(__file__).parent.parent / "benchmarks" / "imagenet.py"
    words = ["--batch", "2", "--size", "32", "--images", "8", "--workers", "1", "--steps", "1", "--json"]
    done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["step"]) == 4 and all(each["hours_of_90_epochs"] > 0 for each in found["step"])
    rate = min(found["loader"][0]["images_per_second"], found["step"][0]["images_per_second"])
    assert found["step"][0]["hours_of_90_epochs"] == pytest.approx(90 * (1281167 + 50000 / 3) / rate / 3600, rel=1e-2)


@pytest.mark.cuda
def test_trained_on_a_gpu(root: Path, tmp_path: Path) -> None:
    words = settings("imagenet-width", root, "train.device=cuda", "train.precision=bfloat16", "train.epochs=1")
    found = nestling("train", "imagenet-width", *words, "--out", str(tmp_path / "run"), "--quiet")
    assert len(found["stages"]) == 3
