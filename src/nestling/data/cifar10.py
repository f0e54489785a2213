"""CIFAR-10: 50,000 training and 10,000 test photographs of ten things, 32x32, 3 channels.

Comes in: one prepared safetensors file, which `prepare` in cifar10_prepare.py makes from any known source.
Goes out: a DataSet. `Facts` is what must be true of the images, wherever they came from; nothing that fails
it is written.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nestling.data.dataset import DataSet, Images, channel_statistics, in_memory
from nestling.errors import NestlingError
from nestling.recipes.recipe import DataRecipe

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MEAN = (0.49140, 0.48216, 0.44653)
STD = (0.24703, 0.24349, 0.26159)
FILE = "cifar10.safetensors"


@dataclass(frozen=True)
class Facts:
    """Known truths about a data set in CIFAR-10's format, to check a copy against."""

    train: int = 50_000  # images, the same number of each class
    test: int = 10_000
    mean: tuple[float, ...] = MEAN  # of the training images, to 5 digits
    first: tuple[int, ...] = (6, 9, 9, 4, 1, 1, 2, 7, 8, 3)  # the first training labels


CIFAR10 = Facts()


def cache() -> Path:
    """The folder for prepared data: $NESTLING_DATA, or .cache/nestling at home."""
    return Path(os.environ.get("NESTLING_DATA") or Path.home() / ".cache" / "nestling")


def load(recipe: DataRecipe, device: torch.device | str = "cpu") -> DataSet:
    images = read(Path(recipe.root) if recipe.root else cache())
    return in_memory(images, recipe, CLASSES, MEAN, STD, device, pad=4, flip=True)


def read(root: Path, facts: Facts = CIFAR10) -> Images:
    """The prepared images in folder root."""
    path = root / FILE
    if not path.is_file():
        where = "" if root == cache() else f" --root {root}"
        raise NestlingError(f"CIFAR-10 is not prepared: there is no {path}; run: nestling data cifar10{where}")
    try:
        with safe_open(path, framework="pt") as file:
            found: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        images = Images(found["train"], found["train_labels"].long(), found["test"], found["test_labels"].long())
    except (SafetensorError, KeyError) as error:
        raise NestlingError(
            f"{path} is not a prepared CIFAR-10 ({error}); delete it and run: nestling data cifar10"
        ) from error
    check_counts(images, str(path), facts)
    return images


def check_counts(images: Images, what: str, facts: Facts = CIFAR10) -> None:
    """Number, shape and type of the images, and the number of images of each class."""
    parts = {
        "training": (images.train, images.train_labels, facts.train),
        "test": (images.test, images.test_labels, facts.test),
    }
    for part, (x, y, n) in parts.items():
        if x.dtype != torch.uint8 or tuple(x.shape[1:]) != (3, 32, 32):
            raise NestlingError(f"{what}: {part} images are {x.dtype} {tuple(x.shape[1:])}; expected uint8 (3, 32, 32)")
        if len(x) != n or len(y) != n:
            raise NestlingError(f"{what}: found {len(x)} {part} images and {len(y)} labels; expected {n} of each")
        counts = torch.bincount(y, minlength=10).tolist()
        if counts != [n // 10] * 10:
            raise NestlingError(f"{what}: {part} images per class are {counts}, not {n // 10} each")


def verify(images: Images, what: str, facts: Facts = CIFAR10) -> None:
    """Everything in facts; NestlingError if the images are not those they should be."""
    check_counts(images, what, facts)
    first = tuple(images.train_labels[: len(facts.first)].tolist())
    if first != facts.first:
        raise NestlingError(f"{what}: the first training labels are {first}; expected {facts.first}")
    mean, _ = channel_statistics(images.train)
    if any(abs(found - known) > 6e-6 for found, known in zip(mean, facts.mean, strict=True)):
        found = tuple(round(m, 5) for m in mean)
        raise NestlingError(f"{what}: the channel means are {found}; expected {facts.mean}")
