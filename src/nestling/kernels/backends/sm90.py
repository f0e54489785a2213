"""3x3 convolutions and their weights' gradients by sm90.cu: Hopper's `wgmma`, which leaves threads norm, relu and sums.

For 32, 64 and 128 channels (sm90.cu can do 16, where sm80.cu is as fast). As in sm80.cu every pixel is read once.
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from nestling.kernels import chip, nvrtc
from nestling.kernels.backends import cuda_c
from nestling.kernels.backends.cuda_c import Convolution, back, fits, fits_kernel, forward, macros, measured, weights

__all__ = ["NAME", "Tiles", "back", "candidates", "forward", "halves", "suits", "tiles", "weights"]

NAME = "sm90"
CHANNELS = (32, 64, 128)
STAGES_OF_WEIGHTS = 3  # tiles of a weight gradient in shared memory at once


class Tiles(NamedTuple):
    """Images that a block makes, or rows of one; its warpgroups, how many blocks a processor is to hold, stages of weights in
    shared memory; and of a weight gradient into how many parts the pixels are split."""

    images: int
    rows: int
    warpgroups: int
    blocks_per_sm: int
    stages: int = 4
    splits: int = 0

    def pixels(self, side: int) -> int:
        return self.images * self.rows * side

    def plane_bytes(self, side: int, cin: int) -> int:
        """Of shared memory: up to 64 channels of a tile, with a border around its images."""
        return -(-((self.images * (self.rows + 1) + 1) * (side + 1) + 3) * min(cin, 64) * 2 // 1024) * 1024

    def compiled(self, x: Tensor, cout: int, name: str, shared: int, **sizes: int) -> nvrtc.Kernel:
        own = {"rows": self.rows, "images": self.images, "warpgroups": self.warpgroups}
        own["blocks_per_sm"] = self.blocks_per_sm
        given = macros(cin=x.shape[1], cout=cout, side=x.shape[2], **own, **sizes)
        return nvrtc.kernel(x.device, "sm90.cu", name, 128 * self.warpgroups, shared, given)

    def convolve(self, it: Convolution) -> None:
        (n, cin, side, _), cout, z = it.x.shape, it.y.shape[1], it.z
        k, n_tile, pixels = min(cin, 64), min(cout, 64), self.pixels(side)
        taps = 9 if cin < 64 else self.stages
        before = cin // k * self.plane_bytes(side, cin) + taps * n_tile * k * 2
        after = (
            pixels * (n_tile * 2 + 16) + 2 * 4 * self.warpgroups * n_tile * 4
        )  # on its way out, and sums of each warp
        sizes = {"convolves": 1, "back": int(z is not None), "ring": self.stages}
        sizes["z_stride"] = cout if z is None else z.stride(3)
        kernel = self.compiled(it.x, cout, "conv", max(before, after), **sizes)
        kernel(n * side * side // pixels * (cout // n_tile), *it)

    def weight_gradients(self, xs: list[Tensor], dys: list[Tensor], partials: list[Tensor]) -> None:
        x, cout = xs[0], dys[0].shape[1]
        n, cin, side, _ = x.shape
        count = n * side * side // self.pixels(side)
        assert self.splits <= count, "every block begins with a tile of its own"
        k, n_tile = min(cin, 64), min(cout, 64)
        shared = STAGES_OF_WEIGHTS * (self.plane_bytes(side, cin) + self.pixels(side) * n_tile * 2)
        kernel = self.compiled(x, cout, "weights", shared, convolves=0, x_stride=x.stride(3))
        kernel(self.splits * (cin // k) * (cout // n_tile), xs, dys, partials, count, layers=len(xs))


def runs_on(device: torch.device) -> bool:
    return cuda_c.runs_on(device) and chip.of(device).has_wgmma


def suits(kernel: str, x: Tensor, cout: int) -> bool:
    whole = x.shape[0] % 4 == 0  # small images go by twos or fours
    return whole and fits_kernel(CHANNELS, kernel, x, cout) and runs_on(x.device)


def halves(device: torch.device, cin: int, cout: int, size: tuple[int, ...]) -> bool:
    """cuDNN's many small kernels take longer than four times the work."""
    return fits(CHANNELS, cin, cout, size) and runs_on(device)


def tiles(kernel: str, x: Tensor, cout: int) -> list[Tiles]:
    row = measured(NAME, kernel, x, cout)
    found = Tiles(**row) if row else candidates(kernel, x, cout)[0]  # the latter before the first measurement
    if kernel != "weights":
        return [found]
    count = x.shape[0] * x.shape[2] * x.shape[3] // found.pixels(x.shape[3])
    return [found._replace(splits=max(1, min(count, found.splits)))]


def candidates(kernel: str, x: Tensor, cout: int) -> list[Tiles]:
    n, cin, side, _ = x.shape
    shapes = [(1, rows) for rows in (8, 16, 32) if rows <= side] + [(i, side) for i in (2, 4) if side == 8]
    if kernel != "weights":
        stages = (3, 4, 6) if cin >= 64 else (4,)
        found = itertools.product(shapes, (1, 2, 4), (1, 2, 3, 4), stages)
        return [Tiles(i, r, g, b, s) for (i, r), g, b, s in found if i * r * side // 64 % g == 0]
    products = {16: 3, 32: 5}.get(cin, 9)
    split = itertools.product(shapes, (1, 3), (1, 2, 3), (4, 8, 16, 32, 64))
    cut = [Tiles(i, r, g, b, splits=s) for (i, r), g, b, s in split if products % g == 0]
    return [t for t in cut if t.splits <= n * side * side // t.pixels(side)]
