"""Kernels of a training pass that are not convolutions: batch norm, sums, pools, channels put elsewhere, small linear layers.

What they are given: shapes, how many rows a program makes, room for results. In Triton, over channels-last images; the kernels
themselves are in elementwise_kernels.py. Nothing here knows autograd or networks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nestling.kernels.images import (
    PIXEL_MULTIPLE,
    ceil_div,
    count_pixels,
    empty_image,
    pixel_matrix,
    pixel_stride,
    power_of_two,
)


def kernels() -> Any:
    from nestling.kernels import elementwise_kernels  # only where Triton is

    return elementwise_kernels


def moments_of(x: Tensor) -> Tensor:
    """The partial moments of an image that no kernel here has made."""
    return add_all((x,), True)[1]


def add_all(xs: tuple[Tensor, ...], moments: bool) -> tuple[Tensor, Tensor]:
    x = xs[0]
    c, m = x.shape[1], count_pixels(x)
    rows = elementwise_rows(m, c)
    y = empty_image(x, c) if len(xs) > 1 else x
    found = torch.empty((2, c, m // rows) if moments else (0,), dtype=torch.float32, device=x.device)
    pointers = (*xs, *[x] * (8 - len(xs)))
    kernels().add_all[(m // rows,)](
        *pointers, y, found, COUNT=len(xs), C=c, CP=power_of_two(c, 8), BM=rows, MOMENTS=moments, num_warps=4
    )
    return y, found


def elementwise_rows(m: int, c: int) -> int:
    """Rows per program: about 4,096 numbers, and a divisor of all rows, so that all blocks of moments are equal."""
    rows = max(PIXEL_MULTIPLE, 4096 // power_of_two(c, 8))
    while m % rows:
        rows //= 2
    return rows


def finish_moments(
    moments: Tensor,
    gamma: Tensor,
    beta: Tensor,
    running: tuple[Tensor, Tensor] | None,
    rows: int,
    momentum: float,
    eps: float,
    held: Tensor | None = None,
) -> Tensor:
    """Scale, shift, mean and 1/deviation, (4, channels), from partial moments; running statistics are brought up to date.

    Channels that are `held` are normalised by their running statistics, as in inference, and keep them.
    """
    c, blocks = moments.shape[1:]
    affine = torch.empty(4, c, dtype=torch.float32, device=moments.device)
    mean, var = running if running is not None else (affine, affine)
    kernels().finish_moments[(c,)](
        moments, gamma, beta, affine, mean, var, affine if held is None else held, blocks, rows, momentum, eps,
        C=c, BB=power_of_two(blocks), TRACK=running is not None, HELD=held is not None, num_warps=4,
    )  # fmt: skip
    return affine


def norm_relu(z: Tensor, affine: Tensor) -> Tensor:
    c, m = z.shape[1], count_pixels(z)
    rows = elementwise_rows(m, c)
    h = empty_image(z, c)
    kernels().norm_relu[(m // rows,)](z, affine, h, C=c, CP=power_of_two(c, 8), BM=rows, num_warps=4)
    return h


def relu_back(dh: Tensor, z: Tensor, affine: Tensor) -> tuple[Tensor, Tensor]:
    c, m = z.shape[1], count_pixels(z)
    rows = elementwise_rows(m, c)
    g = empty_image(z, c)
    sums = torch.empty(2, c, m // rows, dtype=torch.float32, device=z.device)
    kernels().relu_back[(m // rows,)](
        dh, z, affine, g, sums, C=c, Z_STRIDE=pixel_stride(z), CP=power_of_two(c, 8), BM=rows, num_warps=4
    )
    return g, sums


def norm_back(
    g: Tensor, sums: Tensor, z: Tensor, affine: Tensor, extra: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the norm's input, weight and bias; `extra` is a gradient of its input from elsewhere."""
    c, m = z.shape[1], count_pixels(z)
    dgamma, dbeta = torch.empty(2, c, dtype=torch.float32, device=z.device)
    blocks = sums.shape[2]
    kernels().finish_sums[(c,)](sums, dgamma, dbeta, blocks, C=c, BB=power_of_two(blocks), num_warps=4)
    rows = elementwise_rows(m, c)
    dz = empty_image(z, c)
    kernels().norm_back[(m // rows,)](
        g, z, affine, dgamma, dbeta, extra if extra is not None else g, dz, m,
        C=c, Z_STRIDE=pixel_stride(z), CP=power_of_two(c, 8), BM=rows, ADD=extra is not None, num_warps=4,
    )  # fmt: skip
    return dz, dgamma, dbeta


def pool2(x: Tensor) -> Tensor:
    return smaller(kernels().pool2, x)


def pool2_back(dy: Tensor) -> Tensor:
    return larger(kernels().pool2_back, dy)


def subsample(x: Tensor) -> Tensor:
    return smaller(kernels().subsample, x)


def subsample_back(dy: Tensor) -> Tensor:
    return larger(kernels().subsample_back, dy)


def smaller(kernel: Any, x: Tensor) -> Tensor:
    """Half as high and wide."""
    return resized(kernel, x, x.shape[2] // 2, x.shape[3] // 2)


def larger(kernel: Any, x: Tensor) -> Tensor:
    return resized(kernel, x, 2 * x.shape[2], 2 * x.shape[3])


def resized(kernel: Any, x: Tensor, h: int, w: int) -> Tensor:
    n, c = x.shape[:2]
    y = torch.empty((n, c, h, w), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    m = count_pixels(y)
    rows = elementwise_rows(m, c)
    kernel[(m // rows,)](x, y, W=w, C=c, CP=power_of_two(c, 8), BM=rows, num_warps=4)
    return y


def runs(table: Sequence[int], dtype: torch.dtype) -> list[int]:
    """A table of channels, as one of eight bytes of neighbours each if it is made of such."""
    n = 8 // dtype.itemsize
    found = [tuple(table[i : i + n]) for i in range(0, len(table), n)]
    zeros = (-1,) * n
    whole = all(run == zeros or (run[0] % n == 0 and run == tuple(range(run[0], run[0] + n))) for run in found)
    return [run[0] // n for run in found] if whole else list(table)


def select(x: Tensor, table: Tensor, channels: int) -> Tensor:
    """The channels of x that a table numbers, one by one or by runs, and zeros where it is negative."""
    m, c, cin = count_pixels(x), len(table), x.shape[1]
    rows = elementwise_rows(m, c)
    y = empty_image(x, channels)
    images = (x, y)
    if c < channels:
        cin = cin * c // channels
        images = (pixel_matrix(x).view(torch.int64), pixel_matrix(y).view(torch.int64))
    kernels().select[(m // rows,)](
        images[0], table, images[1], CIN=cin, C=c, CP=power_of_two(c, 8), BM=rows, num_warps=4
    )
    return y


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A head, in float32: so few numbers that cuBLAS takes longer to choose than to multiply."""
    (m, c), n = x.shape, len(weight)
    y = torch.empty(m, n, dtype=torch.float32, device=x.device)
    kernels().linear[(ceil_div(m, 16),)](
        x, weight, bias, y, m, C=c, N=n, WS=weight.stride(0), NP=power_of_two(n), BM=16, num_warps=4
    )
    return y


def linear_back(dy: Tensor, weight: Tensor) -> Tensor:
    m, (n, c) = len(dy), weight.shape
    dx = torch.empty(m, c, dtype=torch.float32, device=dy.device)
    kernels().linear_back[(ceil_div(m, 16), ceil_div(c, 32))](
        dy, weight, dx, m, C=c, N=n, WS=weight.stride(0), NP=power_of_two(n), BM=16, num_warps=4
    )
    return dx


def linear_weights(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    (m, n), c = dy.shape, x.shape[1]
    dw, dbias = (torch.empty(shape, dtype=torch.float32, device=x.device) for shape in ((n, c), (n,)))
    kernels().linear_weights[(ceil_div(c, 32),)](dy, x, dw, dbias, m, C=c, N=n, NP=power_of_two(n), BM=32, num_warps=4)
    return dw, dbias
