"""Weights of 3x3 convolutions: their bf16 copies, which the kernels read, and their gradients, which come in parts."""

import torch
from torch import Tensor

from nestling.kernels.backends import Choice
from nestling.kernels.elementwise import kernels
from nestling.kernels.images import ceil_div, power_of_two
from nestling.kernels.nvrtc import MAX_LAYERS

# A weight's input, the gradient of its output, room for its own gradient, its mask
Layer = tuple[Tensor, Tensor, Tensor, Tensor | None]


def can_pack(weight: Tensor) -> bool:
    """Whether a 3x3 weight lies in memory as `pack` reads it: float32, channels last, perhaps a corner of a larger one."""
    step = weight.stride(3)
    return weight.dtype == torch.float32 and weight.stride() == (9 * step, 1, 3 * step, step)


class PackedWeights:
    """The bf16 copies of many convolution weights, (out, 3, 3, in) each, brought up to date by one launch."""

    def __init__(self, weights: list[Tensor], dtype: torch.dtype = torch.bfloat16) -> None:
        self.weights = weights  # kept: their addresses are in the table
        device = weights[0].device
        sizes = [w.numel() for w in weights]
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self.largest = max(sizes)
        self.flat = torch.empty(sum(sizes), dtype=dtype, device=device)
        self.parts = [self.flat[p : p + s] for p, s in zip(offsets, sizes, strict=True)]
        table = [
            [w.data_ptr() for w in weights],
            offsets,
            sizes,
            [w.shape[1] for w in weights],
            [w.stride(3) for w in weights],
        ]
        self.table = torch.tensor(table, dtype=torch.int64, device=device)

    def refresh(self) -> None:
        block = 2048
        sources, offsets, sizes, inner, strides = self.table
        kernels().pack[(len(self.weights), ceil_div(self.largest, block))](
            sources, offsets, sizes, inner, strides, self.flat, BLOCK=block, num_warps=4
        )


def empty_gradient(x: Tensor, dy: Tensor) -> Tensor:
    """Room for the gradient of the weight between them: float32, (out, in, 3, 3), channels last."""
    shape = (dy.shape[1], 3, 3, x.shape[1])
    return torch.empty(shape, dtype=torch.float32, device=x.device).permute(0, 3, 1, 2)


def weight_gradient(x: Tensor, dy: Tensor, mask: Tensor | None, choice: Choice) -> Tensor:
    """The gradient of a 3x3 weight, zero where the mask is."""
    total = empty_gradient(x, dy)
    weight_gradients([(x, dy, total, mask)], choice)
    return total


def weight_gradients(layers: list[Layer], choice: Choice) -> None:
    """Fill the gradients of up to MAX_LAYERS layers of one shape, all with a mask or all without."""
    xs, dys, totals, masks = (list(each) for each in zip(*layers, strict=True))
    partials = choice.backend.weights(xs, dys, choice.tiles)
    sum_splits(list(zip(partials, totals, masks, strict=True)))


def sum_splits(sums: list[tuple[Tensor, Tensor, Tensor | None]]) -> None:
    """(partial, total, mask) of up to MAX_LAYERS weights of one shape, all with a mask or all without: totals are filled."""
    count, n = sums[0][0].shape
    columns = 64 if n < 2**16 else 256
    filled = sums + sums[:1] * (MAX_LAYERS - len(sums))
    partials, totals, masks = zip(*((p, t, t if m is None else m) for p, t, m in filled), strict=True)
    kernels().sum_splits[(ceil_div(n, columns), len(sums))](
        *partials, *totals, *masks, n, count,
        BS=min(16, power_of_two(count, 1)), BN=columns, MASK=sums[0][2] is not None, num_warps=4,
    )  # fmt: skip
