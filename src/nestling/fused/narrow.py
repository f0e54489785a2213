"""3x3 convolutions of images of few channels, and their weights' gradients, by conv.cu: every pixel is read once, not nine times.

For 8, 16 and 32 channels, where reading is what takes the time; with more channels Triton's kernels are faster (docs/speed.md).
How rows are dealt to blocks was chosen by measurement on an H200 (benchmarks/kernels.py).
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from nestling.fused import cuda

CHANNELS = (8, 16, 32)
SIDES = (8, 16, 32)
Running = tuple[Tensor, Tensor] | None


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


class Norm(ctypes.Structure):
    """As conv.cu has it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("moments", "gamma", "beta", "mean", "var")),
        *((name, ctypes.c_float) for name in ("momentum", "eps")),
        ("pixels", ctypes.c_int),
    )


def norm_of(
    moments: Tensor, gamma: Tensor, beta: Tensor, running: Running, momentum: float, eps: float, pixels: int
) -> Norm:
    mean, var = (each.data_ptr() for each in running) if running is not None else (None, None)
    return Norm(moments.data_ptr(), gamma.data_ptr(), beta.data_ptr(), mean, var, momentum, eps, pixels)


def conv(
    x: Tensor,
    shadow: Tensor,
    y: Tensor,
    affine: Tensor,
    sums: Tensor | None,
    done: Tensor,
    blocks: Blocks,
    *,
    norm: Norm | None = None,
    h: Tensor | None = None,
    shortcut: Tensor | None = None,
    z: Tensor | None = None,
) -> None:
    """Into y: the convolution of relu(norm(x)), plus a shortcut; relu(norm(x)) into h, and what the norm did into affine.
    With z instead: the way back of a gradient x, through a norm that affine tells of. Into sums: y's mean and squares, or the
    gradients of the norm's bias and weight. `done` is 0 and will be 0."""
    cin, cout, back = x.shape[1], y.shape[1], z is not None
    lines, inner = (cin, cout) if back else (cout, cin)
    shared = tile_bytes(x.shape[2], blocks.rows, cin) + lines * (9 * inner // 8 | 1) * 16 + 2 * blocks.warps * cout * 4
    sizes = sizes_of(x, cout, blocks) | {"CONVOLVES": 1, "BACK": int(back)}
    kernel = cuda.kernel(x.device, "conv", 32 * blocks.warps, shared, tuple(sizes.items()))
    count = x.shape[0] * x.shape[2] // blocks.rows
    partial = torch.empty((2, cout, count), device=x.device) if sums is not None else None
    kernel(count, x, shadow, y, shortcut, z, h, affine, sums, partial, done, norm or Norm())


def weight_gradient(x: Tensor, dy: Tensor, partial: Tensor, blocks: Blocks) -> None:
    """Into partial (blocks, out, 3, 3, in): each block's share of the sum over pixels."""
    cin, cout, side = x.shape[1], dy.shape[1], x.shape[2]
    stage = -(-tile_bytes(side, blocks.rows, cin) // 128) * 128 + blocks.rows * side * cout * 2
    gathering = max(1, cout // 16) * 36 * (cin // 8) * 128  # where several warps share the pixels
    sizes = sizes_of(x, cout, blocks) | {"CONVOLVES": 0}
    kernel = cuda.kernel(x.device, "weights", 32 * blocks.warps, max(2 * stage, gathering), tuple(sizes.items()))
    kernel(blocks.splits, x, dy, partial, x.shape[0] * side // blocks.rows)
