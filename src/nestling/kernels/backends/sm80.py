"""3x3 convolutions of images of few channels, and their weights' gradients, by sm80.cu: `mma.sync`, for Ampere and later.

For 8, 16 and 32 channels, where reading is what takes the time: every pixel is read once, where Triton's kernels read it nine
times. With more channels others are faster (docs/speed.md).
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from nestling.kernels import nvrtc
from nestling.kernels.backends.cuda_c import (
    Convolution,
    back,
    fits,
    fits_kernel,
    forward,
    macros,
    measured,
    runs_on,
    weights,
)

__all__ = ["NAME", "Tiles", "back", "candidates", "forward", "halves", "suits", "tiles", "weights"]

NAME = "sm80"
CHANNELS = (8, 16, 32)


class Tiles(NamedTuple):
    """Rows of an image that a block makes, its warps, how many blocks a processor is to hold; and of a weight gradient how
    many blocks there are, which go over all images together."""

    rows: int
    warps: int
    blocks_per_sm: int
    splits: int = 0

    def pixels(self, side: int) -> int:
        return self.rows * side

    def tile_bytes(self, side: int, channels: int) -> int:
        """Of shared memory: pixels with a border around them."""
        return (self.rows + 2) * (side + 2) * channels * 2

    def compiled(self, x: Tensor, cout: int, name: str, shared: int, **sizes: int) -> nvrtc.Kernel:
        own = {"rows": self.rows, "warps": self.warps, "blocks_per_sm": self.blocks_per_sm}
        given = macros(cin=x.shape[1], cout=cout, side=x.shape[2], **own, **sizes)
        return nvrtc.kernel(x.device, "sm80.cu", name, 32 * self.warps, shared, given)

    def convolve(self, it: Convolution) -> None:
        (n, cin, side, _), cout, z = it.x.shape, it.y.shape[1], it.z
        lines, inner = (cout, cin) if z is None else (cin, cout)
        weights, other = lines * (9 * inner // 8 | 1) * 16, self.pixels(side) * cout * 2
        shared = self.tile_bytes(side, cin) + weights + other
        z_stride = cout if z is None else z.stride(3)
        kernel = self.compiled(it.x, cout, "conv", shared, convolves=1, back=int(z is not None), z_stride=z_stride)
        kernel(n * side // self.rows, *it)

    def weight_gradients(self, xs: list[Tensor], dys: list[Tensor], partials: list[Tensor]) -> None:
        x, cout = xs[0], dys[0].shape[1]
        n, cin, side, _ = x.shape
        count = n * side // self.rows
        assert self.splits <= count, "every block begins with a tile of its own"
        stage = -(-self.tile_bytes(side, cin) // 128) * 128 + self.pixels(side) * cout * 2
        gathering = max(1, cout // 16) * 36 * (cin // 8) * 128  # where several warps share the pixels
        kernel = self.compiled(x, cout, "weights", max(2 * stage, gathering), convolves=0, x_stride=x.stride(3))
        kernel(self.splits, xs, dys, partials, count, layers=len(xs))


def suits(kernel: str, x: Tensor, cout: int) -> bool:
    return fits_kernel(CHANNELS, kernel, x, cout) and runs_on(x.device)


def halves(device: torch.device, cin: int, cout: int, size: tuple[int, ...]) -> bool:
    """cuDNN's many small kernels take longer than four times the work."""
    return fits(CHANNELS, cin, cout, size) and runs_on(device)


def tiles(kernel: str, x: Tensor, cout: int) -> list[Tiles]:
    row = measured(NAME, kernel, x, cout)
    found = Tiles(**row) if row else candidates(kernel, x, cout)[0]  # the latter before the first measurement
    if kernel != "weights":
        return [found]
    count = x.shape[0] * x.shape[2] // found.rows
    return [found._replace(splits=min(max(1, count // 4), found.splits))]


def candidates(kernel: str, x: Tensor, cout: int) -> list[Tiles]:
    n, cin, side, _ = x.shape
    if kernel != "weights":
        found = itertools.product((4, 8, 16), (4, 8), (2, 3, 4, 6))
        return [Tiles(r, w, b) for r, w, b in found if r <= side and r * side % (16 * w) == 0]
    split = itertools.product((4, 8), (4, 8), (2, 3, 4), (16, 32, 64, 128, 256))
    shared = [Tiles(r, w, b, s) for r, w, b, s in split if s * r <= n * side and w % (cin // 8) == 0]
    return [t for t in shared if t.pixels(side) % (16 * t.warps * 8 // cin) == 0]
