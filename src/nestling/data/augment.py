"""Random crops, flips and normalisation of whole batches, in torch, on whichever device the images are.

Comes in: uint8 images (n,C,H,W), one row and column offset and one flip per image, per-channel mean and std
of [0,1] pixels. Goes out: normalised float32 images. Every random number comes from `draws`, made on the CPU
by a generator passed in, so that a seed gives the same batches on every device. Pixels outside the image are
black *before* normalisation, as usual for CIFAR: zero-pad, crop, flip, normalise. Knows no data set.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Draws:
    """The random numbers of one epoch over n images: position i of the epoch shows image order[i]."""

    order: Tensor  # (n,) int64, a permutation
    offsets: Tensor  # (n,2) int64: row and column of the crop's corner, from -pad to pad
    flips: Tensor  # (n,) bool

    def to(self, device: torch.device | str) -> "Draws":
        return Draws(self.order.to(device), self.offsets.to(device), self.flips.to(device))


def draws(n: int, generator: torch.Generator, pad: int = 0, flip: bool = False) -> Draws:
    """One epoch's random numbers. The same numbers are consumed whatever pad and flip are, so switching
    augmentation off leaves the order of every epoch as it was."""
    order = torch.randperm(n, generator=generator)
    corners = torch.rand(n, 2, generator=generator, dtype=torch.float64)
    coins = torch.rand(n, generator=generator)
    offsets = (corners * (2 * pad + 1)).long() - pad
    return Draws(order, offsets, coins < 0.5 if flip else torch.zeros(n, dtype=torch.bool))


def augment(images: Tensor, offsets: Tensor, flips: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Crop at offsets, mirror where flips, normalise. All tensors live on one device; nothing waits for the
    host, so a captured CUDA graph may contain this call.

    images (n,C,H,W) uint8, offsets (n,2) int64, flips (n,) bool, mean and std (C,) -> (n,C,H,W) float32.
    """
    n, channels, height, width = images.shape
    rows = torch.arange(height, device=images.device) + offsets[:, :1]  # (n,H): which row each output row shows
    columns = torch.arange(width, device=images.device).expand(n, width)
    columns = torch.where(flips[:, None], width - 1 - columns, columns) + offsets[:, 1:]
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    index = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None, :]
    pixels = images.reshape(n, channels, height * width)
    seen = pixels.gather(2, index.view(n, 1, -1).expand(n, channels, -1)).view(images.shape)
    return normalise(seen * inside[:, None], mean, std)


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """uint8 (n,C,H,W) as float32 with mean 0 and deviation 1 per channel: (pixel/255 - mean) / std.

    Subtracting and multiplying are two correctly rounded steps, so CPU and GPU agree to the last bit.
    """
    centre = (mean * 255).view(-1, 1, 1)
    scale = (1 / (std * 255)).view(-1, 1, 1)
    return images.float().sub_(centre).mul_(scale)
