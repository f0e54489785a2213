"""Autograd functions of what the kernels compute: batch norm + relu + 3x3 convolution (+ shortcut), sums, norm + relu, the stem,
pools, selected channels, small linear layers.

Their results are computed before: `forward` only hands them to autograd, in a tuple, since they are no inputs, and saves what
`backward` reads. `passed` is the input handed on: whoever else reads it should read that instead, so that its gradient is added
inside a kernel.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestling.kernels import elementwise, proof
from nestling.kernels.images import pixel_stride
from nestling.kernels.side_stream import SideStream
from nestling.kernels.weights import empty_gradient, weight_gradients


class Done(NamedTuple):
    """A unit as it was computed: all of it, or its first channels as part of a wider network."""

    z: Tensor  # the norm's input
    affine: Tensor  # (4, channels): the norm's scale and shift, the mean and 1/deviation of its input
    h: Tensor  # relu(norm(z))
    y: Tensor  # what the unit gives


class Weight(NamedTuple):
    """A convolution's weight as the kernels read it, and where its gradient is made."""

    packed: Tensor
    mask: Tensor | None
    side: SideStream


def channels_last(gradient: Tensor, like: Tensor) -> Tensor:
    """A gradient as the kernels read it; most of them come that way."""
    return gradient.to(like.dtype).contiguous(memory_format=torch.channels_last)


def weight_gradient(x: Tensor, dy: Tensor, mask: Tensor | None, side: SideStream) -> Tensor:
    """Made on the side stream; not there before that is joined."""
    total, choice = empty_gradient(x, dy), proof.for_weights(x, dy.shape[1])
    shape = (x.shape, pixel_stride(x), dy.shape[1], mask is None)
    side.submit(partial(weight_gradients, choice=choice), (x, dy, total, mask), *shape)
    return total


class NormReluConv(torch.autograd.Function):
    """(z) -> (convolution of relu(norm(z)) plus a shortcut, z)."""

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        gamma: Tensor,
        beta: Tensor,
        weight: Tensor,
        shortcut: Tensor | None,
        done: Done,
        read: Weight,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(done.z, done.affine, done.h, read.packed, read.mask)
        ctx.shortcut, ctx.side = shortcut is not None, read.side
        ctx.set_materialize_grads(False)
        return done.y, z.view_as(z)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dy, passed = grads
        z, affine, h, packed, mask = ctx.saved_tensors
        if dy is None:  # only those who read `passed` have anything to say
            return passed, *[None] * 6
        dy = channels_last(dy, z)
        dw = None
        if ctx.needs_input_grad[3]:
            dw = weight_gradient(h, dy, mask, ctx.side)
        backend, tiles = proof.for_back(dy, z)
        g, sums = backend.back(dy, packed, z, affine, tiles)
        dz, dgamma, dbeta = elementwise.norm_back(
            g, sums, z, affine, None if passed is None else channels_last(passed, z)
        )
        return dz, dgamma, dbeta, dw, dy if ctx.shortcut else None, None, None


class PlainConv(torch.autograd.Function):
    """(pictures) -> their convolution."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, made: tuple[Tensor], read: Weight) -> Tensor:
        ctx.save_for_backward(x, read.mask)
        ctx.side = read.side
        return made[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, mask = ctx.saved_tensors
        dw = None
        if ctx.needs_input_grad[1]:
            dw = weight_gradient(x, channels_last(grads[0], x), mask, ctx.side)
        return None, dw, None, None


class NormRelu(torch.autograd.Function):
    """(z) -> (relu(norm(z)), z)."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, gamma: Tensor, beta: Tensor, done: Done) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(done.z, done.affine)
        ctx.set_materialize_grads(False)
        return done.y, z.view_as(z)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dh, passed = grads
        z, affine = ctx.saved_tensors
        if dh is None:
            return passed, None, None, None
        g, sums = elementwise.relu_back(channels_last(dh, z), z, affine)
        dz, dgamma, dbeta = elementwise.norm_back(
            g, sums, z, affine, None if passed is None else channels_last(passed, z)
        )
        return dz, dgamma, dbeta, None


class AddAll(torch.autograd.Function):
    """(images) -> their sum."""

    @staticmethod
    def forward(ctx: Any, made: tuple[Tensor], *xs: Tensor) -> Tensor:
        ctx.count = len(xs)
        return made[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *[grads[0]] * ctx.count)


class Fan(torch.autograd.Function):
    """(z) -> z as often as it is read, so that all its gradients are added by one kernel."""

    @staticmethod
    def forward(ctx: Any, readers: int, z: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(z.view_as(z) for _ in range(readers))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found = tuple(channels_last(g, g) for g in grads if g is not None)
        return None, elementwise.add_all(found, False)[0]


class Back(torch.autograd.Function):
    """(x) -> an image made of it by a linear kernel: one half as high and wide, or some of its channels. `back` is the way back
    of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, made: tuple[Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return made[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(channels_last(grads[0], grads[0])), None, None


class PlainLinear(torch.autograd.Function):
    """(x) -> a linear layer of it, all in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return elementwise.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = grads[0].contiguous()
        wanted = ctx.needs_input_grad
        dx = elementwise.linear_back(dy, weight) if wanted[0] else None
        dw, dbias = elementwise.linear_weights(dy, x) if wanted[1] or wanted[2] else (None, None)
        return dx, dw if wanted[1] else None, dbias if wanted[2] else None
