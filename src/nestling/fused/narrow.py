"""3x3 convolutions of images of few channels, and their weights' gradients, by conv.cu: every pixel is read once, not nine times.

For 8, 16 and 32 channels, where reading is what takes the time; with more channels Triton's kernels are faster (docs/speed.md).
How rows are dealt to blocks was chosen by measurement on an H200 (benchmarks/kernels.py).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nestling.fused import cuda

CHANNELS = (8, 16, 32)
SIDES = (8, 16, 32)


class Blocks(NamedTuple):
    """Rows of an image that a block makes, its warps, how many blocks a processor is to hold; and of a weight gradient how
    many blocks there are, which go over all images together."""

    rows: int
    warps: int
    resident: int
    splits: int = 0


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
    """Few, since each has as much to write as the weight is large."""
    tiles = images * side // 8
    return Blocks(8, 4, 3 if cout == 32 else 4, min(max(1, tiles // 4), 128))


def sizes_of(x: Tensor, cout: int, blocks: Blocks) -> dict[str, int]:
    sizes = {"CIN": x.shape[1], "COUT": cout, "SIDE": x.shape[2]}
    return sizes | {"ROWS": blocks.rows, "WARPS": blocks.warps, "RESIDENT": blocks.resident}


def tile_bytes(side: int, rows: int, channels: int) -> int:
    """Of shared memory: pixels with a border around them."""
    return (rows + 2) * (side + 2) * channels * 2


def conv(
    x: Tensor,
    shadow: Tensor,
    y: Tensor,
    found: Tensor | None,
    affine: Tensor,
    blocks: Blocks,
    *,
    h: Tensor | None = None,
    shortcut: Tensor | None = None,
    z: Tensor | None = None,
) -> None:
    """Into y: the convolution of relu(norm(x)), which is put into h, plus a shortcut; or with z the way back through relu."""
    cin, cout, back = x.shape[1], y.shape[1], z is not None
    lines, inner = (cin, cout) if back else (cout, cin)
    weights, other = lines * (9 * inner // 8 | 1) * 16, blocks.rows * x.shape[3] * cout * 2
    shared = tile_bytes(x.shape[2], blocks.rows, cin) + weights + other
    sizes = sizes_of(x, cout, blocks) | {"CONVOLVES": 1, "BACK": int(back)}
    kernel = cuda.kernel(x.device, "conv", 32 * blocks.warps, shared, tuple(sizes.items()))
    kernel(x.shape[0] * x.shape[2] // blocks.rows, x, shadow, y, shortcut, found, z, affine, h)


def weight_gradient(x: Tensor, dy: Tensor, partial: Tensor, blocks: Blocks) -> None:
    """Into partial (blocks, out, 3, 3, in): each block's share of the sum over pixels."""
    cin, cout, side = x.shape[1], dy.shape[1], x.shape[2]
    tiles = x.shape[0] * side // blocks.rows
    assert blocks.splits <= tiles, "every block begins with a tile of its own"
    stage = -(-tile_bytes(side, blocks.rows, cin) // 128) * 128 + blocks.rows * side * cout * 2
    gathering = max(1, cout // 16) * 36 * (cin // 8) * 128  # where several warps share the pixels
    sizes = sizes_of(x, cout, blocks) | {"CONVOLVES": 0}
    kernel = cuda.kernel(x.device, "weights", 32 * blocks.warps, max(2 * stage, gathering), tuple(sizes.items()))
    kernel(blocks.splits, x, dy, partial, tiles)
