"""What the paper's ImageNet runs would cost here: images/s of the loader, of the step, and of both, and hours of 90 epochs.

    python benchmarks/imagenet.py                                        this machine's CPU, a few steps
    python benchmarks/imagenet.py --device cuda --batch 256 --workers 8 16 --steps 40
    python benchmarks/imagenet.py --root IMAGENET --json                 your own pictures; one line for programs

Without --root the loader reads JPEG files of ImageNet's usual size (500 x 375, about 110 kB), made by this program. The step is
the one that training takes (imagenet-width and imagenet-depth with sgd and osgd) on images that lie on the device already.
Loader and step overlap, so an epoch takes as long as the slower of the two.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor

from nestling.data import DataSet, load
from nestling.data.image_folder import MEAN, STD
from nestling.recipes import named
from nestling.recipes.recipe import Recipe, override
from nestling.runs.folder import RunDir
from nestling.runs.provenance import provenance
from nestling.train import Training

TRAIN, VALIDATION, EPOCHS, CLASSES = 1_281_167, 50_000, 90, 1000
RECIPES, STRATEGIES = ("imagenet-width", "imagenet-depth"), ("sgd", "osgd")


@dataclass(frozen=True, eq=False)
class Held:
    """A split that shows one batch again and again, from the device's memory: what is left is the step."""

    x: Tensor
    labels: Tensor
    steps: int

    def __len__(self) -> int:
        return len(self.x) * self.steps

    def batches(
        self, batch: int, generator: Any = None, augment: bool | None = None, drop_last: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.steps):
            yield self.x, self.labels

    def pictures(self, indices: Tensor) -> Tensor:
        return (255 * self.x[indices % len(self.x)].clamp(0, 1)).byte().cpu()


def make_pictures(root: Path, count: int) -> Path:
    """JPEG files as large as ImageNet's usual ones: smooth shapes under noise, so that they pack about as well."""
    chance = np.random.RandomState(0)
    y, x = np.mgrid[0:375, 0:500] / 100
    for part, n in (("train", count), ("val", 2)):
        for i in range(n):
            folder = root / part / f"n{i % 2:08d}"
            folder.mkdir(parents=True, exist_ok=True)
            waves = [
                np.sin(chance.uniform(1, 6) * x + chance.uniform(1, 6) * y + chance.uniform(0, 6)) for _ in range(3)
            ]
            pixels = 128 + 60 * np.stack(waves, 2) + chance.normal(0, 14, (375, 500, 3))
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{i}.JPEG", quality=90)
    return root


def loader(root: str, workers: int, batch: int, images: int, device: str) -> float:
    """Images a second that the loader alone delivers to the device, counted after every worker's first batch.

    A worker makes whole batches, so there are far more batches than workers: the pictures are gone through again and again."""
    recipe = named("imagenet-width").data
    split: Any = load(replace(recipe, root=root, workers=workers), device).train
    first, timed = max(1, workers), max(-(-images // batch), 4 * workers)
    times = -(-(first + timed) * batch // len(split))
    split = replace(split, files=split.files * times, labels=split.labels.repeat(times))
    batches, started = split.batches(batch, torch.Generator().manual_seed(0)), 0.0
    for index, _ in enumerate(batches):
        if index == first - 1:
            started = time.perf_counter()
        if index == first + timed - 1:  # before the workers are waited for, who have begun other batches
            synchronise(device)
            return timed * batch / (time.perf_counter() - started)
    raise AssertionError("the pictures ended early")


def step(recipe: Recipe, steps: int, warm: int, device: str) -> float:
    """Images a second of the training step, after `warm` steps."""
    batch, size = recipe.train.batch, recipe.data.size
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, 3, size, size, generator=generator).to(device)
    held = Held(x, torch.randint(0, CLASSES, (batch,), generator=generator).to(device), steps + warm)
    data = DataSet("held", held, held, tuple(map(str, range(CLASSES))), MEAN, STD, (3, size, size))
    with tempfile.TemporaryDirectory() as folder:
        training = Training(recipe, RunDir.create(Path(folder) / "run"), data)
        started = 0.0
        for _, index in training.epochs():
            if index == warm - 1:
                synchronise(device)
                started = time.perf_counter()
            if index == steps + warm - 1:  # before the epoch's evaluation
                synchronise(device)
                return steps * batch / (time.perf_counter() - started)
    raise AssertionError("the epoch ended early")


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def tell(line: str) -> None:
    """A figure as soon as there is one: compiling a network for a GPU takes minutes."""
    print(line, file=sys.stderr, flush=True)


def hours(images_per_second: float) -> float:
    """Of the full training: 90 epochs. Evaluation after every epoch is a forward pass, about a third of a step an image."""
    return EPOCHS * (TRAIN + VALIDATION / 3) / images_per_second / 3600


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as made:
        root = options.root or str(make_pictures(Path(made), 4 * options.batch if options.device == "cuda" else 64))
        loaders = []
        for workers in options.workers:
            found = loader(root, workers, options.batch, options.images, options.device)
            loaders.append({"workers": workers, "images_per_second": round(found, 1)})
            tell(f"loader, {workers} workers: {found:,.0f} images/s")
    steps = []
    for name, strategy in product(options.recipes, options.strategies):
        settings = [f"strategy.name={strategy}", f"train.batch={options.batch}", f"train.device={options.device}"]
        # A rate near zero: on one random batch over and over a real one drives activations into denormals, slow on a CPU.
        settings += [
            "train.lr=1e-6",
            "train.epochs=1",
            f"data.size={options.size}",
            f"train.precision={options.precision}",
        ]
        found = step(override(named(name), settings), options.steps, options.warm, options.device)
        steps.append({"recipe": name, "strategy": strategy, "images_per_second": round(found, 1)})
        tell(f"{name}, {strategy}: {found:,.1f} images/s")
    fastest = max(each["images_per_second"] for each in loaders)
    for each in steps:
        each["hours_of_90_epochs"] = round(hours(min(fastest, each["images_per_second"])), 1)
        each["limited_by"] = "loader" if fastest < each["images_per_second"] else "step"
    conditions = {"batch": options.batch, "size": options.size, "precision": options.precision, "steps": options.steps}
    return {
        "loader": loaders,
        "step": steps,
        **conditions,
        "provenance": provenance(f"python {' '.join(sys.argv)}", options.device, time.time),
    }


def show(found: dict[str, Any]) -> None:
    origin = found["provenance"]
    title = f"{origin['device']}, torch {origin['versions']['torch']}, batch {found['batch']}, {found['precision']}"
    table = Table(
        "what", "images/s", "hours of 90 epochs", "limited by", title=f"ImageNet, {found['size']} pixels: {title}"
    )
    for each in found["loader"]:
        table.add_row(f"loader, {each['workers']} workers", f"{each['images_per_second']:,.0f}", "", "")
    for each in found["step"]:
        rate, time_left = f"{each['images_per_second']:,.1f}", f"{each['hours_of_90_epochs']:,.0f}"
        table.add_row(f"{each['recipe']}, {each['strategy']}", rate, time_left, each["limited_by"])
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--root", default="", help="a folder in ImageNet's layout; by default pictures are made")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="")
    parser.add_argument("--workers", type=int, nargs="+", default=[2])
    parser.add_argument("--images", type=int, default=256, help="that the loader is timed over")
    parser.add_argument("--steps", type=int, default=2, help="that the step is timed over")
    parser.add_argument("--warm", type=int, default=1, help="steps before the clock starts")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--json", action="store_true", help="one line for programs")
    options = parser.parse_args()
    options.precision = options.precision or ("bfloat16" if options.device == "cuda" else "float32")
    found = measure(options)
    print(json.dumps(found)) if options.json else show(found)


if __name__ == "__main__":
    main()
