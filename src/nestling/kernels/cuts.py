"""How Triton's kernels are cut into programs: tiles of a convolution, splits of a weight gradient, for each size of image.

Chosen by measurement on an H200 (benchmarks/kernels.py --tune). Images are waited for, so their kernels are to be done soon, on
all processors. Weight gradients run beside them (aside.py) and are to take little of the chip: fewer programs, less to add up at
the end. What narrow.py and hopper.py are for the kernels in CUDA C.
"""

from typing import NamedTuple

PROCESSORS = 132  # of the chip; fewer programs than these leave some of them idle
LEAST = 64  # rows of pixels come in multiples of this
LARGE = 2**17  # pixels of 128 images of 32x32


class Tiles(NamedTuple):
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    taps: int = 1  # at a time: 3 where a row of them is narrow enough


class Splits(NamedTuple):
    """Of a weight gradient: pixels at a time, tile of outputs and inputs, programs wanted."""

    pixels: int
    outs: int
    ins: int
    programs: int
    warps: int
    stages: int


def power(n: int, least: int = 16) -> int:
    return max(least, 1 << (n - 1).bit_length())


def conv_tiles(pixels: int, cin: int, cout: int, back: bool = False) -> Tiles:
    """The widest rows that still give the chip enough to do, and all channels at once."""
    columns, depth, taps = power(cout, 8), min(64, power(cin)), 1
    if columns > 64:
        return Tiles(128, 64, depth, 4, 3) if back and pixels % 128 == 0 else Tiles(64, 128, depth, 8, 4)
    if cin <= 8:
        depth, taps = power(3 * cin), 3
    rows = next(rows for rows in (512, 256, 128, 64) if fits(rows, columns, depth, pixels))
    # 256 x 16 x 16 in three stages is what Triton 3.6 has got wrong
    stages = 3 if columns > 16 or (columns == 16 and rows == 512) else 2 if pixels >= LARGE else 4
    return Tiles(rows, columns, depth, 4, stages, taps)


def fits(rows: int, columns: int, depth: int, pixels: int) -> bool:
    small = rows * columns <= 8192 and rows * depth <= 16384
    return rows == LEAST or (small and pixels % rows == 0 and pixels // rows >= 128)


def weight_splits(pixels: int, cin: int, cout: int) -> Splits:
    """Few channels: a row of taps at a time. Else tiles of outputs and inputs, tap by tap."""
    large = pixels >= LARGE
    programs = PROCESSORS if large else PROCESSORS // 2
    if cin == 8 == cout and large:
        return Splits(32, 16, 32, 3 * PROCESSORS, 4, 3)
    if cin <= 16 and cout <= 64:
        return Splits(64, power(cout), power(3 * cin), programs, 4, 3)
    if cin <= 32 >= cout and pixels >= 2**15:
        return Splits(32, power(cout), power(3 * cin), programs, 4, 3)
    # `large` here means more than 128 images: three times the programs as timed alone, not yet beside the pass
    return Splits(64, min(64, power(cout)), min(64, power(cin)), 3 * PROCESSORS if large else programs, 4, 3)
