"""Channels-last images as kernels see them: a matrix with a row for each pixel and a column for each channel.

Room for images and for the partial sums that are gathered while one is made; sizes, strides, and roundings of both.
"""

import torch
from torch import Tensor

PIXEL_MULTIPLE = 64  # kernels take pixels in multiples of this


def empty_image(like: Tensor, channels: int) -> Tensor:
    n, _, h, w = like.shape
    return torch.empty((n, channels, h, w), dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def empty_moments(like: Tensor, channels: int, pixels: int) -> Tensor:
    """Two numbers for each channel and each block of so many pixels of images like these."""
    return torch.empty((2, channels, count_pixels(like) // pixels), dtype=torch.float32, device=like.device)


def pixel_stride(x: Tensor) -> int:
    """From one pixel to the next: more than the channels where x is the first channels of a wider image. The stride of a
    dimension of size one says nothing."""
    return next((x.stride(d) for d in (3, 2, 0) if x.shape[d] > 1), x.shape[1])


def pixel_matrix(x: Tensor) -> Tensor:
    """(pixels, channels) of a dense image."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def count_pixels(x: Tensor) -> int:
    return x.shape[0] * x.shape[2] * x.shape[3]


def ceil_div(n: int, by: int) -> int:
    return -(-n // by)


def power_of_two(n: int, least: int = 16) -> int:
    """The smallest that is not below n."""
    return max(least, 1 << (n - 1).bit_length())
