"""The differentiable operations made of the kernels: batch norm + relu + 3x3 convolution (+ shortcut), sums, norm + relu, the
stem, halving, channels picked, small linear layers.

Each is the function autograd would find for torch's own operations; moments passed beside the images are a cache of what
batch norm would compute from its input, and have no gradient. `passed` is the input handed on: whoever else reads it
should read that instead, so that its gradient is added inside a kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nestling.fused import launch, proof
from nestling.fused.aside import Aside


@dataclass(frozen=True)
class Norm:
    """What a batch norm does besides its weight and bias."""

    running: tuple[Tensor, Tensor] | None
    momentum: float
    eps: float


def laid_out(gradient: Tensor, like: Tensor) -> Tensor:
    """A gradient as the kernels read it; most of them come that way."""
    return gradient.to(like.dtype).contiguous(memory_format=torch.channels_last)


def weight_gradient(x: Tensor, dy: Tensor, mask: Tensor | None, aside: Aside) -> Tensor:
    """Begun beside the pass; not there before those aside are joined."""
    partial, total = aside.run(launch.partial_weight_gradients, x, dy, proof.splits(x, dy.shape[1]))
    aside.together(launch.sum_splits, (partial, total, mask), partial.shape, mask is None)
    found: Tensor = total
    return found


class NormReluConv(torch.autograd.Function):
    """(z) -> (convolution of relu(norm(z)) plus a shortcut, its moments, z)."""

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        moments: Tensor,
        gamma: Tensor,
        beta: Tensor,
        weight: Tensor,
        shadow: Tensor,
        mask: Tensor | None,
        shortcut: Tensor | None,
        norm: Norm,
        wants_moments: bool,
        aside: Aside,
    ) -> tuple[Tensor, Tensor, Tensor]:
        affine = launch.finish_moments(moments, gamma, beta, norm.running, launch.rows_of(z), norm.momentum, norm.eps)
        cout = weight.shape[0]
        adds = shortcut is not None
        tiles = proof.tiles(z, cout, normed=True, adds=adds, moments=wants_moments)
        h, y, found = launch.norm_relu_conv(
            z, affine, shadow, cout, shortcut=shortcut, moments=wants_moments, tiles=tiles
        )
        ctx.save_for_backward(z, affine, h, shadow, mask)
        ctx.shortcut, ctx.aside = adds, aside
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(found)
        return y, found, z.view_as(z)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dy, _, passed = grads
        z, affine, h, shadow, mask = ctx.saved_tensors
        if dy is None:  # only those who read `passed` have anything to say
            return passed, *[None] * 10
        dy = laid_out(dy, z)
        dw = None
        if ctx.needs_input_grad[4]:
            dw = weight_gradient(h, dy, mask, ctx.aside)
        cin = z.shape[1]
        tiles = proof.back_tiles(dy, cin)
        g, sums = launch.conv(dy, shadow, cin, back=(z, affine), tiles=tiles)
        dz, dgamma, dbeta = launch.norm_back(g, sums, z, affine, None if passed is None else laid_out(passed, z))
        return dz, None, dgamma, dbeta, dw, None, None, dy if ctx.shortcut else None, None, None, None


class Conv(torch.autograd.Function):
    """(pictures) -> (their convolution, its moments)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, shadow: Tensor, mask: Tensor | None, wants_moments: bool, aside: Aside
    ) -> tuple[Tensor, Tensor]:
        cout = weight.shape[0]
        tiles = proof.tiles(x, cout, moments=wants_moments)
        y, found = launch.conv(x, shadow, cout, moments=wants_moments, tiles=tiles)
        ctx.save_for_backward(x, mask)
        ctx.aside = aside
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(found)
        return y, found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if grads[0] is None:
            return (None,) * 6
        x, mask = ctx.saved_tensors
        dw = None
        if ctx.needs_input_grad[1]:
            dw = weight_gradient(x, laid_out(grads[0], x), mask, ctx.aside)
        return None, dw, *[None] * 4


class NormRelu(torch.autograd.Function):
    """(z) -> (relu(norm(z)), z)."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, moments: Tensor, gamma: Tensor, beta: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        affine = launch.finish_moments(moments, gamma, beta, norm.running, launch.rows_of(z), norm.momentum, norm.eps)
        ctx.save_for_backward(z, affine)
        ctx.set_materialize_grads(False)
        return launch.norm_relu(z, affine), z.view_as(z)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dh, passed = grads
        z, affine = ctx.saved_tensors
        if dh is None:
            return passed, *[None] * 4
        g, sums = launch.relu_back(laid_out(dh, z), z, affine)
        dz, dgamma, dbeta = launch.norm_back(g, sums, z, affine, None if passed is None else laid_out(passed, z))
        return dz, None, dgamma, dbeta, None


class AddAll(torch.autograd.Function):
    """(images) -> (their sum, its moments)."""

    @staticmethod
    def forward(ctx: Any, wants_moments: bool, *xs: Tensor) -> tuple[Tensor, Tensor]:
        y, moments = launch.add_all(xs, wants_moments)
        ctx.count = len(xs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(moments)
        return y, moments

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *[grads[0]] * ctx.count)


class Fan(torch.autograd.Function):
    """(z) -> z as often as it is read, so that all its gradients are added by one kernel."""

    @staticmethod
    def forward(ctx: Any, readers: int, z: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(z.view_as(z) for _ in range(readers))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found = tuple(laid_out(g, g) for g in grads if g is not None)
        return None, launch.add_all(found, False)[0]


class Smaller(torch.autograd.Function):
    """(x) -> an image half as high and wide: means of 2x2 pixels (launch.halve), or the first of each, which is what a
    convolution of stride 2 keeps of one of stride 1 (launch.thin). `back` is the way back of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(laid_out(grads[0], grads[0])), None, None


class Pick(torch.autograd.Function):
    """(x) -> some of its channels, each at most once, and zeros between them; `back` says where each went, if anywhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.back = back
        return launch.pick(x, there)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return launch.pick(laid_out(grads[0], grads[0]), ctx.back), None, None


class Linear(torch.autograd.Function):
    """(x) -> a linear layer of it, all in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return launch.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = grads[0].contiguous()
        wanted = ctx.needs_input_grad
        dx = launch.linear_back(dy, weight) if wanted[0] else None
        dw, dbias = launch.linear_weights(dy, x) if wanted[1] or wanted[2] else (None, None)
        return dx, dw if wanted[1] else None, dbias if wanted[2] else None
