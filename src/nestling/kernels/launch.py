"""What the kernels are given, Triton's and those in CUDA C: shapes, how they are cut, room for results. Images are channels-last
bf16. Nothing here knows autograd or networks.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from nestling.kernels.cuts import LEAST, Splits, Tiles, conv_tiles, power, weight_splits
from nestling.kernels.hopper import Patches
from nestling.kernels.narrow import Blocks

InCuda = Blocks | Patches  # a choice of kernels that are not Triton's
# A weight's input, the gradient of its output, room for its own, its mask
Layer = tuple[Tensor, Tensor, Tensor, Tensor | None]


def image(like: Tensor, channels: int) -> Tensor:
    n, _, h, w = like.shape
    return torch.empty((n, channels, h, w), dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def pitch(x: Tensor) -> int:
    """Numbers from one pixel to the next: more than it has channels where these are the first of a wider image's. The stride of a
    dimension of size one says nothing."""
    return next((x.stride(d) for d in (3, 2, 0) if x.shape[d] > 1), x.shape[1])


def pixels_of(x: Tensor) -> Tensor:
    """A dense image as a matrix, one row for each pixel."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def rows_of(x: Tensor) -> int:
    return x.shape[0] * x.shape[2] * x.shape[3]


def ceil(n: int, by: int) -> int:
    return -(-n // by)


def runs_on(device: torch.device) -> bool:
    """Whether Triton is there and the chip has what the kernels use: bf16 products and copies behind the program's back."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return find_spec("triton") is not None


def kernels() -> Any:
    from nestling.kernels import jitted  # only where Triton is

    return jitted


def conv(
    x: Tensor,
    shadow: Tensor,
    cout: int,
    *,
    extra: Tensor | None = None,
    moments: bool = False,
    back: tuple[Tensor, Tensor] | None = None,
    tiles: Tiles | InCuda | None = None,
) -> tuple[Tensor, Tensor]:
    """A 3x3 convolution by a weight (out, 3, 3, in); with `back`=(z, affine) its transpose, taken on through relu. z and affine
    may both be the first channels of wider ones.

    Gives the image and its moments (or, backward, the sums batch norm needs); moments are empty if not wanted."""
    cin = x.shape[1]
    m = rows_of(x)
    t = tiles or conv_tiles(m, cin, cout, back is not None)
    assert isinstance(t, InCuda) or m % t.rows == 0, "the last pixels would be left out"
    y = image(x, cout)
    if isinstance(t, InCuda):
        assert back is not None, "these kernels have a norm on either side: see norm_relu_conv"
        z, affine = back
        found = room_for_moments(x, cout, t.pixels(x.shape[3]))
        t.conv(x, shadow, y, found, affine, z=z)
        return y, found
    found = room_for_moments(x, cout, t.rows) if moments or back is not None else x.new_empty(0, dtype=torch.float32)
    z, affine = back if back is not None else (y, found)
    strides = {"WK": 9 * cout, "WN": 1, "WT": cout} if back is not None else {"WK": 1, "WN": 9 * cin, "WT": cin}
    kernels().conv[(m // t.rows, ceil(cout, t.columns))](
        x, shadow, y, extra if extra is not None else y, found, z, affine,
        H=x.shape[2], W=x.shape[3], CIN=cin, COUT=cout, **strides, FLIP=back is not None,
        BM=t.rows, BN=t.columns, BK=t.depth, TAPS=t.taps, STAGES=t.stages,
        ADD=extra is not None, MOMENTS=moments, BACK=back is not None, Z=pitch(z), num_warps=t.warps,
    )  # fmt: skip
    return y, found


def room_for_moments(x: Tensor, channels: int, pixels: int) -> Tensor:
    """Two numbers for each channel and each so many pixels of images like x."""
    return torch.empty((2, channels, rows_of(x) // pixels), dtype=torch.float32, device=x.device)


def norm_relu_conv(
    z: Tensor,
    affine: Tensor,
    shadow: Tensor,
    cout: int,
    *,
    shortcut: Tensor | None = None,
    moments: bool = False,
    tiles: Tiles | InCuda | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """relu(norm(z)), its convolution plus a shortcut, and the moments of that."""
    if not isinstance(tiles, InCuda):
        h = norm_relu(z, affine)
        return h, *conv(h, shadow, cout, extra=shortcut, moments=moments, tiles=tiles)
    h, y = image(z, z.shape[1]), image(z, cout)
    found = room_for_moments(z, cout, tiles.pixels(z.shape[3])) if moments else None
    tiles.conv(z, shadow, y, found, affine, h=h, shortcut=shortcut)
    return h, y, found if found is not None else affine.new_empty(0)


def weight_gradient(x: Tensor, dy: Tensor, mask: Tensor | None, splits: Splits | InCuda | None = None) -> Tensor:
    """The gradient of a 3x3 weight, float32, (out, in, 3, 3) in channels-last memory, zero where the mask is."""
    total = room_for_weight(x, dy)
    weight_gradients([(x, dy, total, mask)], splits or weight_splits(rows_of(x), x.shape[1], dy.shape[1]))
    return total


def room_for_weight(x: Tensor, dy: Tensor) -> Tensor:
    shape = (dy.shape[1], 3, 3, x.shape[1])
    return torch.empty(shape, dtype=torch.float32, device=x.device).permute(0, 3, 1, 2)


def weight_gradients(layers: list[Layer], s: Splits | InCuda) -> None:
    """Fill the totals of up to MOST layers of one shape, all with a mask or all without."""
    xs, dys, totals, masks = (list(each) for each in zip(*layers, strict=True))
    x, n = xs[0], totals[0].numel()
    if isinstance(s, InCuda):
        partials = [torch.empty(s.splits, n, dtype=torch.float32, device=x.device) for _ in layers]
        s.weight_gradients(xs, dys, partials)
    else:
        partials = [partial_weight_gradient(x, dy, s) for x, dy in zip(xs, dys, strict=True)]
    sum_splits(list(zip(partials, totals, masks, strict=True)))


def partial_weight_gradient(x: Tensor, dy: Tensor, s: Splits) -> Tensor:
    """The sum over each split's pixels, (splits, out * 3 * 3 * in)."""
    cin, cout, m = x.shape[1], dy.shape[1], rows_of(x)
    whole = s.ins >= 3 * cin and s.outs >= cout  # then a program does all nine taps
    tiles = 1 if whole else ceil(cout, s.outs) * ceil(cin, s.ins)
    per = ceil(ceil(m, max(1, s.programs // (1 if whole else 3 * tiles))), s.pixels) * s.pixels
    count = ceil(m, per)
    partial = torch.empty(count, cout * 9 * cin, dtype=torch.float32, device=x.device)
    kernel = kernels().weight_gradient_narrow if whole else kernels().weight_gradient
    kernel[(count, 1, 1) if whole else (count, 3, tiles)](
        x, dy, partial, m, per, H=x.shape[2], W=x.shape[3], CIN=cin, COUT=cout, X=pitch(x),
        BP=s.pixels, BO=s.outs, BI=s.ins, STAGES=s.stages, num_warps=s.warps,
    )  # fmt: skip
    return partial


def sum_splits(sums: list[tuple[Tensor, Tensor, Tensor | None]]) -> None:
    """(partial, total, mask) of up to eight weights of one shape, all with a mask or all without: totals are filled."""
    count, n = sums[0][0].shape
    columns = 64 if n < 2**16 else 256
    filled = sums + sums[:1] * (8 - len(sums))
    partials, totals, masks = zip(*((p, t, t if m is None else m) for p, t, m in filled), strict=True)
    kernels().sum_splits[(ceil(n, columns), len(sums))](
        *partials, *totals, *masks, n, count,
        BS=min(16, power(count, 1)), BN=columns, MASK=sums[0][2] is not None, num_warps=4,
    )  # fmt: skip


def moments_of(x: Tensor) -> Tensor:
    """The partial moments of an image that no kernel here has made."""
    return add_all((x,), True)[1]


def add_all(xs: tuple[Tensor, ...], moments: bool) -> tuple[Tensor, Tensor]:
    x = xs[0]
    c, m = x.shape[1], rows_of(x)
    rows = elementwise_rows(m, c)
    y = image(x, c) if len(xs) > 1 else x
    found = torch.empty((2, c, m // rows) if moments else (0,), dtype=torch.float32, device=x.device)
    pointers = (*xs, *[x] * (8 - len(xs)))
    kernels().add_all[(m // rows,)](
        *pointers, y, found, COUNT=len(xs), C=c, CP=power(c, 8), BM=rows, MOMENTS=moments, num_warps=4
    )
    return y, found


def elementwise_rows(m: int, c: int) -> int:
    """Rows per program: about 4,096 numbers, and a divisor of all rows, so that all blocks of moments are equal."""
    rows = max(LEAST, 4096 // power(c, 8))
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
) -> Tensor:
    """Scale, shift, mean and 1/deviation, (4, channels), from partial moments; running statistics are brought up to date."""
    c, blocks = moments.shape[1:]
    affine = torch.empty(4, c, dtype=torch.float32, device=moments.device)
    mean, var = running if running is not None else (affine, affine)
    kernels().finish_moments[(c,)](
        moments, gamma, beta, affine, mean, var, blocks, rows, momentum, eps,
        C=c, BB=power(blocks), TRACK=running is not None, num_warps=4,
    )  # fmt: skip
    return affine


def norm_relu(z: Tensor, affine: Tensor) -> Tensor:
    c, m = z.shape[1], rows_of(z)
    rows = elementwise_rows(m, c)
    h = image(z, c)
    kernels().norm_relu[(m // rows,)](z, affine, h, C=c, CP=power(c, 8), BM=rows, num_warps=4)
    return h


def relu_back(dh: Tensor, z: Tensor, affine: Tensor) -> tuple[Tensor, Tensor]:
    c, m = z.shape[1], rows_of(z)
    rows = elementwise_rows(m, c)
    g = image(z, c)
    sums = torch.empty(2, c, m // rows, dtype=torch.float32, device=z.device)
    kernels().relu_back[(m // rows,)](dh, z, affine, g, sums, C=c, Z=pitch(z), CP=power(c, 8), BM=rows, num_warps=4)
    return g, sums


def norm_back(
    g: Tensor, sums: Tensor, z: Tensor, affine: Tensor, extra: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the norm's input, weight and bias; `extra` is a gradient of its input from elsewhere."""
    c, m = z.shape[1], rows_of(z)
    dgamma, dbeta = torch.empty(2, c, dtype=torch.float32, device=z.device)
    blocks = sums.shape[2]
    kernels().finish_sums[(c,)](sums, dgamma, dbeta, blocks, C=c, BB=power(blocks), num_warps=4)
    rows = elementwise_rows(m, c)
    dz = image(z, c)
    kernels().norm_back[(m // rows,)](
        g, z, affine, dgamma, dbeta, extra if extra is not None else g, dz, m,
        C=c, Z=pitch(z), CP=power(c, 8), BM=rows, ADD=extra is not None, num_warps=4,
    )  # fmt: skip
    return dz, dgamma, dbeta


def halve(x: Tensor) -> Tensor:
    return smaller(kernels().halve, x)


def halve_back(dy: Tensor) -> Tensor:
    return larger(kernels().halve_back, dy)


def thin(x: Tensor) -> Tensor:
    return smaller(kernels().thin, x)


def thin_back(dy: Tensor) -> Tensor:
    return larger(kernels().thin_back, dy)


def smaller(kernel: Any, x: Tensor) -> Tensor:
    """Half as high and wide."""
    return resized(kernel, x, x.shape[2] // 2, x.shape[3] // 2)


def larger(kernel: Any, x: Tensor) -> Tensor:
    return resized(kernel, x, 2 * x.shape[2], 2 * x.shape[3])


def resized(kernel: Any, x: Tensor, h: int, w: int) -> Tensor:
    n, c = x.shape[:2]
    y = torch.empty((n, c, h, w), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    m = rows_of(y)
    rows = elementwise_rows(m, c)
    kernel[(m // rows,)](x, y, W=w, C=c, CP=power(c, 8), BM=rows, num_warps=4)
    return y


def runs(table: Sequence[int], dtype: torch.dtype) -> list[int]:
    """A table of channels, as one of eight bytes of neighbours each if it is made of such."""
    n = 8 // dtype.itemsize
    found = [tuple(table[i : i + n]) for i in range(0, len(table), n)]
    zeros = (-1,) * n
    whole = all(run == zeros or (run[0] % n == 0 and run == tuple(range(run[0], run[0] + n))) for run in found)
    return [run[0] // n for run in found] if whole else list(table)


def pick(x: Tensor, table: Tensor, channels: int) -> Tensor:
    """The channels of x that a table numbers, one by one or by runs, and zeros where it is negative."""
    m, c, cin = rows_of(x), len(table), x.shape[1]
    rows = elementwise_rows(m, c)
    y = image(x, channels)
    images = (x, y)
    if c < channels:
        cin = cin * c // channels
        images = (pixels_of(x).view(torch.int64), pixels_of(y).view(torch.int64))
    kernels().pick[(m // rows,)](images[0], table, images[1], CIN=cin, C=c, CP=power(c, 8), BM=rows, num_warps=4)
    return y


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A head, in float32: so few numbers that cuBLAS takes longer to choose than to multiply."""
    (m, c), n = x.shape, len(weight)
    y = torch.empty(m, n, dtype=torch.float32, device=x.device)
    kernels().linear[(ceil(m, 16),)](
        x, weight, bias, y, m, C=c, N=n, WS=weight.stride(0), NP=power(n), BM=16, num_warps=4
    )
    return y


def linear_back(dy: Tensor, weight: Tensor) -> Tensor:
    m, (n, c) = len(dy), weight.shape
    dx = torch.empty(m, c, dtype=torch.float32, device=dy.device)
    kernels().linear_back[(ceil(m, 16), ceil(c, 32))](
        dy, weight, dx, m, C=c, N=n, WS=weight.stride(0), NP=power(n), BM=16, num_warps=4
    )
    return dx


def linear_weights(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    (m, n), c = dy.shape, x.shape[1]
    dw, dbias = (torch.empty(shape, dtype=torch.float32, device=x.device) for shape in ((n, c), (n,)))
    kernels().linear_weights[(ceil(c, 32),)](dy, x, dw, dbias, m, C=c, N=n, NP=power(n), BM=32, num_warps=4)
    return dw, dbias


def can_pack(weight: Tensor) -> bool:
    """Whether a 3x3 weight lies in memory as `pack` reads it: float32, channels last, perhaps a corner of a larger one."""
    step = weight.stride(3)
    return weight.dtype == torch.float32 and weight.stride() == (9 * step, 1, 3 * step, step)


class Shadow:
    """The bf16 copies of many convolution weights, brought up to date by one launch."""

    def __init__(self, weights: list[Tensor], dtype: torch.dtype = torch.bfloat16) -> None:
        self.weights = weights  # kept: their addresses are in the table
        device = weights[0].device
        sizes = [w.numel() for w in weights]
        places = [sum(sizes[:i]) for i in range(len(sizes))]
        self.largest = max(sizes)
        self.flat = torch.empty(sum(sizes), dtype=dtype, device=device)
        self.parts = [self.flat[p : p + s] for p, s in zip(places, sizes, strict=True)]
        table = [
            [w.data_ptr() for w in weights],
            places,
            sizes,
            [w.shape[1] for w in weights],
            [w.stride(3) for w in weights],
        ]
        self.table = torch.tensor(table, dtype=torch.int64, device=device)

    def refresh(self) -> None:
        block = 2048
        sources, places, sizes, inner, strides = self.table
        kernels().pack[(len(self.weights), ceil(self.largest, block))](
            sources, places, sizes, inner, strides, self.flat, BLOCK=block, num_warps=4
        )
