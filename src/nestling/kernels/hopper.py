"""3x3 convolutions and their weights' gradients by hopper.cu: Hopper's own way of multiplying matrices, which leaves its threads
little to do but norm, relu and sums.

For 32, 64 and 128 channels (hopper.cu can do 16, where conv.cu is as fast). As in conv.cu every pixel is read once, where
Triton's kernels read it nine times. How images are dealt to blocks was chosen by measurement on an H200 (benchmarks/kernels.py).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nestling.kernels import cuda

CHANNELS = (32, 64, 128)
SIDES = (8, 16, 32)
TILES_AHEAD = 3  # of a weight gradient, in shared memory


class Patches(NamedTuple):
    """Images that a block makes, or rows of one; its groups of four warps, how many blocks a processor is to hold, stages of
    weights in shared memory; and of a weight gradient into how many parts the pixels are split."""

    images: int
    rows: int
    groups: int
    resident: int
    ring: int = 4
    splits: int = 0

    def pixels(self, side: int) -> int:
        return self.images * self.rows * side

    def sizes(self, x: Tensor, cout: int) -> dict[str, int]:
        names = {"ROWS": self.rows, "IMAGES": self.images, "GROUPS": self.groups, "RESIDENT": self.resident}
        return {"CIN": x.shape[1], "COUT": cout, "SIDE": x.shape[2]} | names

    def plane(self, side: int, cin: int) -> int:
        """Bytes of up to 64 channels of a tile, with a border around its images."""
        return -(-((self.images * (self.rows + 1) + 1) * (side + 1) + 3) * min(cin, 64) * 2 // 1024) * 1024

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
        (n, cin, side, _), cout = x.shape, y.shape[1]
        deep, wide, pixels = min(cin, 64), min(cout, 64), self.pixels(side)
        taps = 9 if cin < 64 else self.ring
        before = cin // deep * self.plane(side, cin) + taps * wide * deep * 2
        after = pixels * (wide * 2 + 16) + 2 * 4 * self.groups * wide * 4  # on its way out, and sums of each warp
        shared = max(before, after)
        sizes = self.sizes(x, cout) | {"CONVOLVES": 1, "BACK": int(z is not None), "RING": self.ring}
        sizes["Z"] = cout if z is None else z.stride(3)
        kernel = cuda.kernel(x.device, "hopper.cu", "conv", 128 * self.groups, shared, tuple(sizes.items()))
        blocks = n * side * side // pixels * (cout // wide)
        kernel(blocks, x, shadow, y, shortcut, found, z, affine, h)

    def weight_gradients(self, xs: list[Tensor], dys: list[Tensor], partials: list[Tensor]) -> None:
        """Into each partial (splits, out, 3, 3, in): each split's share of the sum over pixels, of layers of one shape."""
        x, cout = xs[0], dys[0].shape[1]
        n, cin, side, _ = x.shape
        tiles = n * side * side // self.pixels(side)
        assert self.splits <= tiles, "every block begins with a tile of its own"
        deep, wide = min(cin, 64), min(cout, 64)
        shared = TILES_AHEAD * (self.plane(side, cin) + self.pixels(side) * wide * 2)
        sizes = self.sizes(x, cout) | {"CONVOLVES": 0, "X": x.stride(3)}
        kernel = cuda.kernel(x.device, "hopper.cu", "weights", 128 * self.groups, shared, tuple(sizes.items()))
        kernel(self.splits * (cin // deep) * (cout // wide), xs, dys, partials, tiles, layers=len(xs))


def suits(x: Tensor, cout: int) -> bool:
    images, cin, height, width = x.shape
    shape = cin in CHANNELS and cout in CHANNELS and height == width and height in SIDES
    whole = shape and images % 4 == 0  # small images go by twos or fours
    return whole and x.dtype == torch.bfloat16 and runs_on(x.device)


def runs_on(device: torch.device) -> bool:
    return cuda.available(device) and cuda.is_hopper(device)


def conv_patches(side: int, cin: int, cout: int, back: bool = False) -> Patches:
    """As much as a block's registers can hold, so that weights are read seldom; less where more blocks have more under way."""
    many = max(cin, cout) >= 64
    if side == 8:
        return Patches(2, 8, 2, 2 if many else 4)
    if side == 32:
        return Patches(1, 16, 2, 2) if back and not many else Patches(1, 8, 2, 2 if many else 4)
    return Patches(1, 16, 2, 2 if many else 3)


def weight_patches(images: int, side: int, cin: int, cout: int) -> Patches:
    """Few splits, since each has as much to write as the weight is large, and several layers fill the chip."""
    many = cin >= 64
    chosen = Patches(2 if side == 8 else 1, 8, 3 if many else 1, 1 if many else 2 if side == 32 or cout > 32 else 3)
    tiles = images * side * side // chosen.pixels(side)
    wanted = (8 if side == 8 and cout == 64 else 16) * 64 * 64 // (cin * cout) if many else 22 if side == 32 else side
    return chosen._replace(splits=max(1, min(tiles, wanted)))
