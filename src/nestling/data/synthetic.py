"""Images made from a seed: a smooth pattern per class under noise. For tests; a small network learns them.

Comes in: numbers of images and classes, a shape, a seed. Goes out: images like any others, so the recipe's
validation, limit and augment mean what they always mean. Stands for no real data.
"""

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from nestling.data.dataset import DataSet, Images, channel_statistics, in_memory
from nestling.recipes.recipe import DataRecipe


def load(recipe: DataRecipe, device: torch.device | str = "cpu") -> DataSet:
    """512 training and 128 test images of ten classes, 3x16x16."""
    images = make(512, 128, classes=10, shape=(3, 16, 16), seed=0)
    mean, std = channel_statistics(images.train)
    classes = tuple(f"pattern {i}" for i in range(10))
    return in_memory(images, recipe, classes, mean, std, device, pad=1, flip=False)


def make(train: int, test: int, classes: int, shape: tuple[int, int, int], seed: int, noise: float = 40.0) -> Images:
    """Classes take turns, so their numbers differ by one at most; noise is a deviation in grey levels of 255."""
    generator = torch.Generator().manual_seed(seed)
    channels, height, width = shape
    coarse = torch.rand(classes, channels, 4, 4, generator=generator) * 255
    patterns = interpolate(coarse, size=(height, width), mode="bilinear", align_corners=True)

    def part(n: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(n) % classes
        noisy = patterns[labels] + noise * torch.randn(n, *shape, generator=generator)
        return noisy.round().clamp(0, 255).to(torch.uint8), labels

    return Images(*part(train), *part(test))
