"""Random crops, flips, normalisation and CutMix of whole batches, in torch, on whichever device the images are.

Comes in: uint8 images (n,C,H,W), one row and column offset, one flip and one box per image, per-channel mean and std
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
    boxes: Tensor | None = (
        None  # (n,4) float32, None without CutMix: top, left, bottom, right, from 0 to 1; empty = none
    )

    def to(self, device: torch.device | str) -> "Draws":
        boxes = None if self.boxes is None else self.boxes.to(device)
        return Draws(self.order.to(device), self.offsets.to(device), self.flips.to(device), boxes)


def draws(n: int, generator: torch.Generator, pad: int = 0, flip: bool = False, cutmix: float = 0.0) -> Draws:
    """One epoch's random numbers. The same numbers are consumed whatever pad and flip are, so switching
    augmentation off leaves the order of every epoch as it was."""
    order = torch.randperm(n, generator=generator)
    corners = torch.rand(n, 2, generator=generator, dtype=torch.float64)
    coins = torch.rand(n, generator=generator)
    offsets = (corners * (2 * pad + 1)).long() - pad
    flips = coins < 0.5 if flip else torch.zeros(n, dtype=torch.bool)
    return Draws(order, offsets, flips, boxes(n, generator, cutmix) if cutmix else None)


def boxes(n: int, generator: torch.Generator, share: float) -> Tensor:
    """Boxes of CutMix (Yun et al. 2019) for a share of n images: their areas uniform from 0 to 1 before the image's edges cut
    them, their centres uniform; empty for the others."""
    coin, area, *centre = torch.rand(4, n, generator=generator)
    half = torch.where(coin < share, area.sqrt() / 2, 0.0)
    edges = [c - half for c in centre] + [c + half for c in centre]
    return torch.stack(edges, 1).clamp(0, 1)


def cutmix(x: Tensor, labels: Tensor, boxes: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Paste into each image what the one before it in the batch shows in the box. Labels become shares of classes by area.

    x (n,C,H,W), labels (n,) int64, boxes (n,4) -> x, (n,classes) float32.
    """
    height, width = x.shape[2:]
    (top, bottom), (left, right) = (
        boxes[:, i::2, None].mul(size).round().unbind(1) for i, size in enumerate((height, width))
    )
    rows, columns = torch.arange(height, device=x.device), torch.arange(width, device=x.device)
    inside = ((rows >= top) & (rows < bottom))[:, :, None] & ((columns >= left) & (columns < right))[:, None, :]
    area = inside.float().mean((1, 2))[:, None]
    known = torch.nn.functional.one_hot(labels, classes).float()
    return torch.where(inside[:, None], x.roll(1, 0), x), (1 - area) * known + area * known.roll(1, 0)


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
