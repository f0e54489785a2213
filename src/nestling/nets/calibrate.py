"""Batch norms that see what is there now: their statistics anew, from forward passes without labels.

In: a network whose weights were cut or copied, and batches of images. Out: the same network with running means and variances
of these images. No weight changes, and a kept network's own norms stay as they came.
"""

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from nestling.errors import NestlingError
from nestling.nets.extended import Extended
from nestling.nets.modes import evaluating

N = TypeVar("N", bound=nn.Module)


def calibrate(net: N, batches: Iterable[Tensor | tuple[Tensor, ...] | list[Tensor]]) -> N:
    """The statistics of all batch norms as the plain average over these batches: images, or tuples that begin with them."""
    kept = (
        each for each in net.modules() if isinstance(each, Extended)
    )  # also inside DataParallel, torch.compile or an average
    own = {layer for each in kept for layer in each.own_layers()}
    norms = [m for m in net.modules() if isinstance(m, _BatchNorm) and m.track_running_stats and m not in own]
    momenta = [norm.momentum for norm in norms]
    device = next((p.device for p in net.parameters()), torch.device("cpu"))
    seen = 0
    try:
        with evaluating(net), torch.no_grad():
            for norm in norms:
                norm.training = True
            for batch in batches:
                images = images_of(batch)
                seen += 1
                for norm in norms:
                    norm.momentum = 1 / seen  # so that all batches count alike
                net(images.to(device))
    finally:  # a batch that does not fit must not leave norms that learn at another pace
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    if not seen:
        raise NestlingError(
            "calibrate found no batches; expected some of the training images, such as 10 batches of 128"
        )
    return net


def images_of(batch: Any) -> Tensor:
    """The images of a batch."""
    images = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if not isinstance(images, Tensor) or not images.numel():
        found = "no images" if isinstance(images, Tensor) else f"type {type(images).__name__}"
        raise NestlingError(
            f"calibrate found a batch of {found}; expected images as the network takes them, or a tuple that begins with them"
        )
    return images
