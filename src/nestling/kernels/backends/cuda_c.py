"""What the backends in CUDA C have in common: when they run, and room for what their kernels write.

Their modules bring `Tiles`, how a kernel is cut and launched, and take `forward`, `back` and `weights` from here.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nestling.kernels import chip, nvrtc
from nestling.kernels.backends import tile_tables
from nestling.kernels.images import empty_image, empty_moments

SIDES = (8, 16, 32)  # of images, in pixels


class Convolution(NamedTuple):
    """What a kernel is given, in its order: the convolution of relu(norm(x)), which is put into h, plus a shortcut, is put into
    y; or with z the transpose."""

    x: Tensor
    weight: Tensor
    y: Tensor
    shortcut: Tensor | None
    moments: Tensor | None
    z: Tensor | None
    affine: Tensor
    h: Tensor | None


class CudaTiles(Protocol):
    @property
    def splits(self) -> int:
        """Into how many parts a weight gradient is split."""

    def pixels(self, side: int) -> int:
        """Of images of this side, that a block makes."""

    def convolve(self, it: Convolution) -> None:
        """One launch."""

    def weight_gradients(self, xs: list[Tensor], dys: list[Tensor], partials: list[Tensor]) -> None:
        """Into each partial (splits, out, 3, 3, in): each split's share of the sum over pixels, of layers of one shape."""


def runs_on(device: torch.device) -> bool:
    return chip.of(device).has_mma and nvrtc.available()


def fits(channels: tuple[int, ...], cin: int, cout: int, size: tuple[int, ...]) -> bool:
    return cin in channels and cout in channels and size in [(side, side) for side in SIDES]


def fits_kernel(channels: tuple[int, ...], kernel: str, x: Tensor, cout: int) -> bool:
    return kernel != "stem" and x.dtype == torch.bfloat16 and fits(channels, x.shape[1], cout, tuple(x.shape[2:]))


def measured(backend: str, kernel: str, x: Tensor, cout: int) -> dict[str, int] | None:
    return tile_tables.measured(chip.of(x.device), backend, kernel, x.shape[1], cout, x.shape[2])


def forward(
    x: Tensor,
    affine: Tensor | None,
    weight: Tensor,
    cout: int,
    tiles: CudaTiles,
    *,
    shortcut: Tensor | None = None,
    moments: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    assert affine is not None, "these kernels have a norm on the way in"
    h, y = empty_image(x, x.shape[1]), empty_image(x, cout)
    found = empty_moments(x, cout, tiles.pixels(x.shape[3])) if moments else None
    tiles.convolve(Convolution(x, weight, y, shortcut, found, None, affine, h))
    return h, y, found if found is not None else affine.new_empty(0)


def back(dy: Tensor, weight: Tensor, z: Tensor, affine: Tensor, tiles: CudaTiles) -> tuple[Tensor, Tensor]:
    cout = z.shape[1]
    g, sums = empty_image(dy, cout), empty_moments(dy, cout, tiles.pixels(dy.shape[3]))
    tiles.convolve(Convolution(dy, weight, g, None, sums, z, affine, None))
    return g, sums


def weights(xs: list[Tensor], dys: list[Tensor], tiles: CudaTiles) -> list[Tensor]:
    size = dys[0].shape[1] * 9 * xs[0].shape[1]
    partials = [torch.empty(tiles.splits, size, dtype=torch.float32, device=x.device) for x in xs]
    tiles.weight_gradients(xs, dys, partials)
    return partials


def macros(**sizes: Any) -> nvrtc.Macros:
    return tuple((name.upper(), int(size)) for name, size in sizes.items())
