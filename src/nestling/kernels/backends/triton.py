"""3x3 convolutions in Triton's language: for any chip that it compiles for, any size of image, and any number of channels up to
128 that is a multiple of 8.

Tiles follow from a shape by rule, so that every shape has some; where a chip's table has measured ones, those come first. What
is waited for is to be done soon, on all processors. Weight gradients run beside it (side_stream.py) and are to take little of the
chip: fewer programs, less to add up at the end.
"""

import itertools
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestling.kernels import chip
from nestling.kernels.backends import sm80, tile_tables
from nestling.kernels.backends.cuda_c import fits
from nestling.kernels.elementwise import norm_relu
from nestling.kernels.images import (
    PIXEL_MULTIPLE,
    ceil_div,
    count_pixels,
    empty_image,
    empty_moments,
    pixel_stride,
    power_of_two,
)

NAME = "triton"
LARGE = 2**17  # pixels of 128 images of 32x32
STAGES = (2, 4, 1)  # tried in turn after the fastest, should its results be wrong


class Tiles(NamedTuple):
    """Of a convolution: pixels, output and input channels of a product, taps at a time (3 where a row of them is narrow)."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    taps: int = 1


class Splits(NamedTuple):
    """Of a weight gradient: pixels at a time, tile of outputs and inputs, programs wanted."""

    pixels: int
    outs: int
    ins: int
    programs: int
    warps: int
    stages: int


def kernels() -> Any:
    from nestling.kernels.backends import triton_kernels  # only where Triton is

    return triton_kernels


def runs_on(device: torch.device) -> bool:
    return chip.of(device).has_mma and find_spec("triton") is not None


def suits(kernel: str, x: Tensor, cout: int) -> bool:
    return True


def halves(device: torch.device, cin: int, cout: int, size: tuple[int, ...]) -> bool:
    """As sm80.py, whose place it takes where that is missing; not measured by itself."""
    return fits(sm80.CHANNELS, cin, cout, size)


def tiles(kernel: str, x: Tensor, cout: int) -> list[Any]:
    cin, side, pixels, on = x.shape[1], x.shape[2], count_pixels(x), chip.of(x.device)
    row = tile_tables.table(on.name).get((NAME, kernel, cin, cout, side), {"batch": 0})
    known = row["tiles"] if row["batch"] * side**2 == pixels else None  # of that many pixels, on this very chip
    if kernel == "weights":
        ruled: Any = weight_splits(pixels, cin, cout, on.processors)
        best = Splits(**known) if known else ruled
    else:
        ruled = conv_tiles(pixels, cin, cout, back=kernel == "back")
        best = Tiles(**known) if known else ruled
    return list(dict.fromkeys([best, ruled, *(ruled._replace(stages=stages) for stages in STAGES)]))


def conv_tiles(pixels: int, cin: int, cout: int, back: bool = False) -> Tiles:
    """The widest rows that still give the chip enough to do, and all channels at once."""
    columns, depth, taps = power_of_two(cout, 8), min(64, power_of_two(cin)), 1
    if columns > 64:
        return Tiles(128, 64, depth, 4, 3) if back and pixels % 128 == 0 else Tiles(64, 128, depth, 8, 4)
    if cin <= 8:
        depth, taps = power_of_two(3 * cin), 3
    rows = next(rows for rows in (512, 256, 128, 64) if few_enough(rows, columns, depth, pixels))
    # 256 x 16 x 16 in three stages is what Triton 3.6 has got wrong
    stages = 3 if columns > 16 or (columns == 16 and rows == 512) else 2 if pixels >= LARGE else 4
    return Tiles(rows, columns, depth, 4, stages, taps)


def few_enough(rows: int, columns: int, depth: int, pixels: int) -> bool:
    small = rows * columns <= 8192 and rows * depth <= 16384
    return rows == PIXEL_MULTIPLE or (small and pixels % rows == 0 and pixels // rows >= 128)


def weight_splits(pixels: int, cin: int, cout: int, processors: int) -> Splits:
    """Few channels: a row of taps at a time. Else tiles of outputs and inputs, tap by tap."""
    large = pixels >= LARGE
    programs = processors if large else processors // 2
    if cin == 8 == cout and large:
        return Splits(32, 16, 32, 3 * processors, 4, 3)
    if cin <= 16 and cout <= 64:
        return Splits(64, power_of_two(cout), power_of_two(3 * cin), programs, 4, 3)
    if cin <= 32 >= cout and pixels >= 2**15:
        return Splits(32, power_of_two(cout), power_of_two(3 * cin), programs, 4, 3)
    # `large` here means more than 128 images: three times the programs as timed alone, not yet beside the pass
    outs, ins = min(64, power_of_two(cout)), min(64, power_of_two(cin))
    return Splits(64, outs, ins, 3 * processors if large else programs, 4, 3)


def candidates(kernel: str, x: Tensor, cout: int) -> list[Any]:
    """Convolutions: all taps one by one, or three at a time where a row of them is narrow."""
    cin, processors = x.shape[1], chip.of(x.device).processors
    inner, outer, row = power_of_two(cin), power_of_two(cout), power_of_two(3 * cin)
    if kernel == "weights":
        shapes = {(min(outer, 64), min(inner, 64)), (min(outer, 64), min(inner, 32))}
        shapes |= {(outer, row)} if row <= 128 else set()
        programs = (processors // 2, processors, 2 * processors, 3 * processors)
        split = itertools.product((32, 64, 128), sorted(shapes), programs, (4, 8), (2, 3))
        return [Splits(p, o, i, n, w, s) for p, (o, i), n, w, s in split]
    depths = {(min(inner, 64), 1)} | ({(row, 3)} if cin <= 16 else set())
    columns = {8, 16} if cout == 8 else {min(outer, 64), min(outer, 128)}
    found = itertools.product((64, 128, 256, 512), columns, sorted(depths), (4, 8), (2, 3, 4))
    cut = [Tiles(r, c, depth, w, s, taps) for r, c, (depth, taps), w, s in found]
    return [t for t in cut if 2048 <= t.rows * t.columns <= 16384 and count_pixels(x) % t.rows == 0]


def forward(
    x: Tensor,
    affine: Tensor | None,
    weight: Tensor,
    cout: int,
    tiles: Tiles,
    *,
    shortcut: Tensor | None = None,
    moments: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    h = x if affine is None else norm_relu(x, affine)
    y = empty_image(h, cout)
    found = empty_moments(h, cout, tiles.rows) if moments else h.new_empty(0, dtype=torch.float32)
    cin = h.shape[1]
    launch(h, weight, y, shortcut, found, y, found, tiles, moments=moments, WK=1, WN=9 * cin, WT=cin)
    return h, y, found


def back(dy: Tensor, weight: Tensor, z: Tensor, affine: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
    cout = z.shape[1]
    g, sums = empty_image(dy, cout), empty_moments(dy, cout, tiles.rows)
    launch(dy, weight, g, None, sums, z, affine, tiles, transposed=True, WK=9 * cout, WN=1, WT=cout)
    return g, sums


def launch(
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    shortcut: Tensor | None,
    found: Tensor,
    z: Tensor,
    affine: Tensor,
    t: Tiles,
    *,
    moments: bool = False,
    transposed: bool = False,
    **strides: int,
) -> None:
    """Tensors that a kernel does not read are any of those it does."""
    pixels, cin, cout = count_pixels(x), x.shape[1], y.shape[1]
    assert pixels % t.rows == 0, "the last pixels would be left out"
    kernels().conv[(pixels // t.rows, ceil_div(cout, t.columns))](
        x, weight, y, shortcut if shortcut is not None else y, found, z, affine,
        H=x.shape[2], W=x.shape[3], CIN=cin, COUT=cout, **strides, FLIP=transposed,
        BM=t.rows, BN=t.columns, BK=t.depth, TAPS=t.taps, STAGES=t.stages,
        ADD=shortcut is not None, MOMENTS=moments, BACK=transposed, Z_STRIDE=pixel_stride(z), num_warps=t.warps,
    )  # fmt: skip


def weights(xs: list[Tensor], dys: list[Tensor], tiles: Splits) -> list[Tensor]:
    return [partial_weight_gradient(x, dy, tiles) for x, dy in zip(xs, dys, strict=True)]


def partial_weight_gradient(x: Tensor, dy: Tensor, s: Splits) -> Tensor:
    """The sum over each split's pixels, (splits, out * 3 * 3 * in)."""
    cin, cout, pixels = x.shape[1], dy.shape[1], count_pixels(x)
    whole = s.ins >= 3 * cin and s.outs >= cout  # then a program does all nine taps
    tiles = 1 if whole else ceil_div(cout, s.outs) * ceil_div(cin, s.ins)
    per = ceil_div(ceil_div(pixels, max(1, s.programs // (1 if whole else 3 * tiles))), s.pixels) * s.pixels
    count = ceil_div(pixels, per)
    partial = torch.empty(count, cout * 9 * cin, dtype=torch.float32, device=x.device)
    kernel = kernels().weight_gradient_narrow if whole else kernels().weight_gradient
    kernel[(count, 1, 1) if whole else (count, 3, tiles)](
        x, dy, partial, pixels, per, H=x.shape[2], W=x.shape[3], CIN=cin, COUT=cout, X_STRIDE=pixel_stride(x),
        BP=s.pixels, BO=s.outs, BI=s.ins, STAGES=s.stages, num_warps=s.warps,
    )  # fmt: skip
    return partial
