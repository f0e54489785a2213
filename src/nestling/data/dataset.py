"""A data set: a training split, a test split, and what a network must know about them.

Comes in: all training and test images as uint8, and the recipe's wishes (validation, limit, augment). Goes
out: a DataSet on the device. The shuffle behind `validation` and `limit` is fixed for all time and data sets.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nestling.data.split import MemorySplit, Split
from nestling.errors import NestlingError
from nestling.recipes.recipe import DataRecipe

SHUFFLE_SEED = 20200


@dataclass(frozen=True, eq=False)
class DataSet:
    name: str
    train: Split
    test: Split  # the held-out part of the training images when the recipe asks for validation
    classes: tuple[str, ...]  # empty: not named, or there are none
    mean: tuple[float, ...]  # per channel, of [0,1] pixels; empty: inputs come as the network takes them
    std: tuple[float, ...]
    shape: tuple[int, ...]  # C,H,W of images


@dataclass(frozen=True, eq=False)
class Images:
    """Raw images in memory, before any choice: what a reader of files hands over."""

    train: Tensor  # (n,C,H,W) uint8
    train_labels: Tensor  # (n,) int64
    test: Tensor
    test_labels: Tensor


def in_memory(
    images: Images,
    recipe: DataRecipe,
    classes: tuple[str, ...],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    device: torch.device | str,
    pad: int,
    flip: bool,
) -> DataSet:
    """The recipe's choice of raw images, on the device."""
    kept, held = choose(len(images.train), recipe)
    mean_on, std_on = (torch.tensor(v, dtype=torch.float32, device=device) for v in (mean, std))

    def split(x: Tensor, y: Tensor, pad: int, flip: bool) -> MemorySplit:
        return MemorySplit(x.contiguous().to(device), y.to(device), mean_on, std_on, pad, flip)

    x, y = images.train, images.train_labels
    train = split(x[kept], y[kept], pad, flip) if len(kept) < len(x) else split(x, y, pad, flip)
    test = split(x[held], y[held], 0, False) if len(held) else split(images.test, images.test_labels, 0, False)
    if recipe.cutmix:
        train = dataclasses.replace(train, cutmix=recipe.cutmix, classes=len(classes))
    if not recipe.augment:
        train = MemorySplit(train.images, train.labels, mean_on, std_on)
    channels, height, width = x.shape[1:]
    return DataSet(recipe.name, train, test, classes, mean, std, (channels, height, width))


def choose(n: int, recipe: DataRecipe) -> tuple[Tensor, Tensor]:
    """Positions of the n training images to train on and to hold out.

    The last `validation` images of the fixed shuffle are held out, the first `limit` of it are trained on, so
    a limit never changes which images are held out.
    """
    if recipe.validation >= n:
        raise NestlingError(
            f"data.validation={recipe.validation} leaves nothing to train on: {recipe.name} has {n} training images"
        )
    if recipe.limit > n - recipe.validation:
        raise NestlingError(
            f"data.limit={recipe.limit} is more than the {n - recipe.validation} training images of "
            f"{recipe.name} ({n}, less data.validation={recipe.validation}); 0 means all"
        )
    if not recipe.validation and not recipe.limit:
        return torch.arange(n), torch.arange(0)  # all of them, in their own order
    shuffle = torch.from_numpy(fixed_shuffle(n))
    return shuffle[: recipe.limit or n - recipe.validation], shuffle[n - recipe.validation :]


def fixed_shuffle(n: int) -> np.ndarray:
    """The same permutation of n for ever: numpy promises never to change RandomState's stream, torch does
    not.
    """
    return np.random.RandomState(SHUFFLE_SEED).permutation(n)


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Exact mean and standard deviation per channel of uint8 images (n,C,H,W), as fractions of 255."""
    levels = torch.arange(256, dtype=torch.float64) / 255
    counts = [torch.bincount(images[:, c].flatten(), minlength=256).double() for c in range(images.shape[1])]
    mean = [float(count @ levels / count.sum()) for count in counts]
    variance = [float(count @ (levels - m) ** 2 / count.sum()) for count, m in zip(counts, mean, strict=True)]
    return tuple(mean), tuple(v**0.5 for v in variance)
