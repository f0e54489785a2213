"""3x3 convolutions of images of few channels, and their weights' gradients, by conv.cu: every pixel is read once, not nine times.

For 8, 16 and 32 channels, where reading is what takes the time; with more channels others are faster (docs/speed.md).
How rows are dealt to blocks was chosen by measurement on an H200 (benchmarks/kernels.py).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nestling.kernels import cuda

CHANNELS = (8, 16, 32)
SIDES = (8, 16, 32)


class Blocks(NamedTuple):
    """Rows of an image that a block makes, its warps, how many blocks a processor is to hold; and of a weight gradient how
    many blocks there are, which go over all images together."""

    rows: int
    warps: int
    resident: int
    splits: int = 0

    def pixels(self, side: int) -> int:
        return self.rows * side

    def sizes(self, x: Tensor, cout: int) -> dict[str, int]:
        sizes = {"CIN": x.shape[1], "COUT": cout, "SIDE": x.shape[2]}
        return sizes | {"ROWS": self.rows, "WARPS": self.warps, "RESIDENT": self.resident}

    def tile_bytes(self, side: int, channels: int) -> int:
        """Of shared memory: pixels with a border around them."""
        return (self.rows + 2) * (side + 2) * channels * 2

    def conv(
        self,
        x: Tensor,
        shadow: Tensor,
        y: Tensor,
        found: Tensor | None,
        affine: Tensor,
        *,
        h: Tensor | None = None,
        shortcut: Tensor | None = None,
        z: Tensor | None = None,
    ) -> None:
        """Into y: the convolution of relu(norm(x)), which is put into h, plus a shortcut; or with z the way back through relu."""
        cin, cout, back = x.shape[1], y.shape[1], z is not None
        lines, inner = (cin, cout) if back else (cout, cin)
        weights, other = lines * (9 * inner // 8 | 1) * 16, self.pixels(x.shape[3]) * cout * 2
        shared = self.tile_bytes(x.shape[2], cin) + weights + other
        sizes = self.sizes(x, cout) | {"CONVOLVES": 1, "BACK": int(back), "Z": cout if z is None else z.stride(3)}
        kernel = cuda.kernel(x.device, "conv.cu", "conv", 32 * self.warps, shared, tuple(sizes.items()))
        kernel(x.shape[0] * x.shape[2] // self.rows, x, shadow, y, shortcut, found, z, affine, h)

    def weight_gradients(self, xs: list[Tensor], dys: list[Tensor], partials: list[Tensor]) -> None:
        """Into each partial (splits, out, 3, 3, in): each block's share of the sum over pixels, of layers of one shape."""
        x, cout = xs[0], dys[0].shape[1]
        cin, side = x.shape[1:3]
        tiles = x.shape[0] * side // self.rows
        assert self.splits <= tiles, "every block begins with a tile of its own"
        stage = -(-self.tile_bytes(side, cin) // 128) * 128 + self.pixels(side) * cout * 2
        gathering = max(1, cout // 16) * 36 * (cin // 8) * 128  # where several warps share the pixels
        sizes = self.sizes(x, cout) | {"CONVOLVES": 0, "X": x.stride(3)}
        shared = max(2 * stage, gathering)
        kernel = cuda.kernel(x.device, "conv.cu", "weights", 32 * self.warps, shared, tuple(sizes.items()))
        kernel(self.splits, xs, dys, partials, tiles, layers=len(xs))


def suits(x: Tensor, cout: int) -> bool:
    shape = x.shape[1] in CHANNELS and cout in CHANNELS and x.shape[2] == x.shape[3] and x.shape[2] in SIDES
    return shape and x.dtype == torch.bfloat16 and cuda.available(x.device)


def conv_blocks(side: int, cout: int) -> Blocks:
    """Tall, since the rows above and below are read, too; enough warps that a thread has few numbers to sum up."""
    rows = min(16, side)
    numbers = rows * side * cout
    warps = min(max(4, numbers // 1024), 8, rows * side // 16)
    return Blocks(rows, warps, 4 if warps == 4 else 3 if numbers <= 1024 * warps else 2)


def weight_blocks(images: int, side: int, cout: int) -> Blocks:
    """Few, since each has as much to write as the weight is large, and several layers fill the chip."""
    tiles = images * side // 8
    return Blocks(8, 4, 3 if cout == 32 else 4, min(max(1, tiles // 4), 32))
