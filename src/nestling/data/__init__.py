"""Data sets by name, as batches on the device: digits, CIFAR-10, Tiny ImageNet, folders, synthetic ones, your own.

Comes in: a DataRecipe and a device. Goes out: a DataSet, whose splits yield (x normalised, y). Knows no
network.
"""

from collections.abc import Callable

import torch

from nestling.data import cifar10, digits, image_folder, own, synthetic, tiny_imagenet
from nestling.data.dataset import DataSet
from nestling.data.split import MemorySplit, Split
from nestling.errors import NestlingError, nearest
from nestling.recipes.recipe import DataRecipe

__all__ = ["DATASETS", "DataSet", "MemorySplit", "Split", "load"]

DATASETS: dict[str, Callable[[DataRecipe, torch.device | str], DataSet]] = {
    "digits": digits.load,
    "cifar10": cifar10.load,
    "tiny-imagenet": tiny_imagenet.load,
    "folder": image_folder.load,
    "synthetic": synthetic.load,
    "own": own.load,
}


def load(recipe: DataRecipe, device: torch.device | str = "cpu") -> DataSet:
    """The data set a recipe names, on the device."""
    if recipe.name not in DATASETS:
        raise NestlingError(f"unknown data set {recipe.name!r}; did you mean {nearest(recipe.name, DATASETS)}?")
    return DATASETS[recipe.name](recipe, device)
