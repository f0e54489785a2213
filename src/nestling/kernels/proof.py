"""Kernels that are right, not only fast: before a shape is first used on a GPU, they are compared with torch's own.

A compiler may turn one choice of tiles into wrong code (Triton 3.6 did, for 256 x 16 x 16 in three stages). The first choice
whose results agree is kept for the process; if none does, that is an error, and the caller may do without our kernels.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import grad

from nestling.kernels.backends import BACKENDS, Choice, KernelName, choices
from nestling.kernels.images import pixel_stride
from nestling.kernels.weights import weight_gradient

CLOSE = 0.02  # of the largest value: far above the rounding of bf16, far below a wrong tap

known: dict[tuple[Any, ...], Choice] = {}


class Miscompiled(RuntimeError):
    """No choice of tiles gives right results here."""


def for_forward(x: Tensor, cout: int, *, normed: bool, adds: bool = False, moments: bool = True) -> Choice:
    """For a convolution of relu(norm(x)), or of x itself, to `cout` channels, with or without a shortcut and moments."""
    kernel: KernelName = "forward" if normed else "stem"
    agrees = partial(forward_agrees, x, cout, normed=normed, adds=adds, moments=moments)
    return first_right(kernel, x, cout, (adds, moments), agrees)


def for_back(dy: Tensor, z: Tensor) -> Choice:
    """For the way back of a gradient like dy, through a convolution and the relu of images like z."""
    return first_right("back", dy, z.shape[1], (pixel_stride(z),), partial(back_agrees, dy, z))


def for_weights(x: Tensor, cout: int) -> Choice:
    """For the gradient of the weight between images like x and `cout` channels."""
    return first_right("weights", x, cout, (pixel_stride(x),), partial(weight_agrees, x, cout))


def first_right(
    kernel: KernelName, x: Tensor, cout: int, kind: tuple[Any, ...], agrees: Callable[[Choice], bool]
) -> Choice:
    if x.device.type != "cuda":  # interpreted, for tests: there is no compiler to distrust
        return choices(kernel, x, cout)[0]
    key = (kernel, cout, *kind, x.shape, x.dtype, x.device)
    if key not in known:
        with torch.no_grad(), torch.autocast("cuda", enabled=False):
            right = next((choice for choice in choices(kernel, x, cout) if runs_and(agrees, choice)), None)
        if right is None:
            told = " ".join(map(str, (kernel, cout, *kind)))
            raise Miscompiled(
                f"our kernels give wrong results here for {tuple(x.shape)} ({told}), with every choice of tiles: "
                "this version of Triton miscompiles them, or none of our choices suits such images"
            )
        known[key] = right
    return known[key]


def runs_and(agrees: Callable[[Choice], bool], choice: Choice) -> bool:
    """A choice that wants more shared memory than this chip has is as good as a wrong one; so is a kernel that cannot be compiled
    or loaded here, where another backend stands behind it."""
    try:
        return agrees(choice)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if choice.backend is BACKENDS[-1] and "resource" not in str(error).lower():
            raise
        return False


def random_image(like: Tensor, channels: int, seed: int) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(seed)
    x = torch.randn((like.shape[0], channels, *like.shape[2:]), device=like.device, generator=generator)
    return x.to(like.dtype).contiguous(memory_format=torch.channels_last)


def random_like(like: Tensor, seed: int) -> Tensor:
    """An image that lies in memory as another: perhaps the first channels of a wider one."""
    return random_image(like, pixel_stride(like), seed)[:, : like.shape[1]]


def random_weight(like: Tensor, cout: int, cin: int) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(3)
    return torch.randn((cout, 3, 3, cin), device=like.device, generator=generator).to(like.dtype)


def forward_agrees(like: Tensor, cout: int, choice: Choice, normed: bool, adds: bool, moments: bool) -> bool:
    x, w = random_image(like, like.shape[1], 0), random_weight(like, cout, like.shape[1])
    shortcut = 8 + 8 * random_image(like, cout, 2) if adds else None
    affine = random_affine(x, x.shape[1]) if normed else None
    h = x if affine is None else normed_by(affine, x)
    expected = torch.nn.functional.conv2d(h, w.permute(0, 3, 1, 2), padding=1).float()
    expected = expected if shortcut is None else expected + shortcut
    kept, y, found = choice.backend.forward(x, affine, w, cout, choice.tiles, shortcut=shortcut, moments=moments)
    right = close(y, expected) and close(kept, h)
    return right and (not moments or moments_agree(found, expected))


def random_affine(like: Tensor, channels: int) -> Tensor:
    """What finish_moments might say of a norm: scale, shift, mean and 1/deviation, of each channel its own."""
    generator = torch.Generator(like.device).manual_seed(5)
    return torch.rand((4, channels), device=like.device, generator=generator) + 0.5


def normed_by(affine: Tensor, x: Tensor) -> Tensor:
    scale, shift = affine[:2, None, :, None, None]
    return torch.relu(x.float() * scale + shift).to(x.dtype)


def moments_agree(found: Tensor, image: Tensor) -> bool:
    """Whether each block's mean and squared deviations are those of its pixels."""
    blocks = image.permute(1, 0, 2, 3).reshape(*found.shape[1:], -1)
    return close(found[0], blocks.mean(2)) and close(found[1], blocks.var(2, correction=0) * blocks.shape[2])


def back_agrees(like: Tensor, before: Tensor, choice: Choice) -> bool:
    cout = before.shape[1]
    x, w = random_image(like, like.shape[1], 0), random_weight(like, like.shape[1], cout)
    z, affine = random_like(before, 1), random_affine(like, pixel_stride(before))[:, :cout]
    g, sums = choice.backend.back(x, w, z, affine, choice.tiles)
    whole = torch.nn.functional.conv_transpose2d(x, w.permute(0, 3, 1, 2), padding=1).float()
    scale, shift, mean, rstd = affine[:, None, :, None, None]
    expected = torch.where(z.float() * scale + shift > 0, whole, 0)
    gathered = torch.stack([expected, expected * (z.float() - mean) * rstd])
    whole_sums = gathered.sum((1, 3, 4))
    return close(g, expected) and close(sums.sum(2), whole_sums, gathered.abs().sum((1, 3, 4)))


def weight_agrees(like: Tensor, cout: int, choice: Choice) -> bool:
    x, dy = random_like(like, 0), random_image(like, cout, 1)
    shape = (cout, like.shape[1], 3, 3)
    found = weight_gradient(x, dy, None, choice)
    return close(found, grad.conv2d_weight(x, shape, dy, padding=1))


def close(found: Tensor, expected: Tensor, scale: Tensor | None = None) -> bool:
    """Whether two tensors agree to a small part of the largest value; this waits for the device."""
    largest = (expected if scale is None else scale).abs().max()
    return bool((found.float() - expected.float()).abs().max() <= CLOSE * largest)
