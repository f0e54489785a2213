"""Inner products of the patches that a convolution of stride 1 sees, without the patches.

The product of two patches is a sum over the kernel's taps of products of two pixels, and those of all taps are entries of one
matrix, pixels by pixels, along its diagonals. So it takes a multiplication per channel where patches take one per channel
and tap. In comes what a convolution was given; out come products of some images' patches with those of images before them.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from nestling.gradients.products import product

TAP = 24  # products that cost as much as to add one number along a diagonal, on a CPU


def image_bands(
    images: Tensor, kernel: Sequence[int], padding: Sequence[int], dilation: Sequence[int], band: int
) -> Iterator[Tensor]:
    """(patches here, patches up to here), for about `band` patches of whole images at a time."""
    high, wide = images.shape[2:]
    count = max(1, band // (high * wide))
    pixels = images.flatten(2).transpose(1, 2).contiguous()  # (images, pixels, channels)
    for start in range(0, len(pixels), count):
        here, before = pixels[start : start + count], pixels[: start + count]
        among = product(here.flatten(0, 1), before.flatten(0, 1).T)
        among = among.view(len(here), high, wide, len(before), high, wide)
        for dim in (1, 0):
            among = _along(among, (1 + dim, 4 + dim), kernel[dim], padding[dim], dilation[dim])
        yield among.reshape(len(here) * among.shape[1] * among.shape[2], -1)


def _along(among: Tensor, dims: tuple[int, int], taps: int, padding: int, dilation: int) -> Tensor:
    """Sums over the taps of one direction, both pixels moved alike; what is outside the image is zero."""
    size = among.shape[dims[0]]
    gives = size + 2 * padding - dilation * (taps - 1)
    if taps == 1 and not padding:
        return among
    shape = [gives if dim in dims else length for dim, length in enumerate(among.shape)]
    total = among.new_zeros(shape)
    for tap in range(taps):
        moved = tap * dilation - padding
        start, stop = max(0, -moved), min(gives, size - moved)
        if start < stop:
            part = total.narrow(dims[0], start, stop - start).narrow(dims[1], start, stop - start)
            part += among.narrow(dims[0], start + moved, stop - start).narrow(dims[1], start + moved, stop - start)
    return total
