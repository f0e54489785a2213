"""One picture file as a square uint8 tensor: a random part of it for training, its middle for evaluation.

Comes in: a path, a side length, and for training a seed. Goes out: (3,size,size) uint8, or Unreadable. The
seed alone decides what is cut out, so it does not matter which process reads the file. Knows no data set.
"""

import math
import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

MARGIN = 256 / 224  # evaluation shows the middle 224 of a shorter side of 256, or the same in proportion
BILINEAR = Image.Resampling.BILINEAR


class Unreadable(Exception):
    """The file is not a picture, or its end is missing."""


def read(path: Path | str, size: int, seed: int | None = None) -> Tensor:
    """The picture at path, size x size: without a seed its middle, with one a random part, perhaps mirrored."""
    try:
        with Image.open(path) as file:
            image = to_rgb(file)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise Unreadable(str(error) or type(error).__name__) from error
    if seed is None:
        square = image.resize((size, size), BILINEAR, box=middle(image.width, image.height, size))
    else:
        chance = random.Random(seed)
        square = image.resize((size, size), BILINEAR, box=random_part(image.width, image.height, chance))
        if chance.random() < 0.5:
            square = square.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(square)).permute(2, 0, 1).contiguous()


def to_rgb(file: Image.Image) -> Image.Image:
    """Three channels of 8 bits. Pillow cuts deeper pixels off at 255, which turns a 16-bit picture white: they are scaled."""
    if file.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(file) >> 8).astype(np.uint8)).convert("RGB")
    if file.mode in ("I", "F"):
        raise ValueError(f"pixels of 32 bits (mode {file.mode}), of which nobody knows what is white; expected 8 or 16")
    return file.convert("RGB")


def middle(width: int, height: int, size: int) -> tuple[float, float, float, float]:
    """The square (left, top, right, bottom) that resizing and a centre crop would show."""
    side = min(width, height) * size / round(size * MARGIN)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_part(width: int, height: int, chance: random.Random) -> tuple[float, float, float, float]:
    """8 to 100 % of the area at a ratio of 3:4 to 4:3, as usual for ImageNet; the middle if none fits."""
    for _ in range(10):
        area = width * height * chance.uniform(0.08, 1.0)
        ratio = math.exp(chance.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = chance.randint(0, width - w), chance.randint(0, height - h)
            return left, top, left + w, top + h
    # A strip of a picture: its middle, as near to the permitted ratios as it can be.
    across, down = min(width, height * 4 / 3), min(height, width * 4 / 3)
    left_most, top_most = (width - across) / 2, (height - down) / 2
    return left_most, top_most, left_most + across, top_most + down
