"""Batch norm over the batches of all ranks: one training on many devices then equals one process with the global batch.

In: a network whose batch norms see their own rank's images; `synchronise` lets them see everybody's. Works on any device that
torch.distributed reaches. Ranks must run the same norms in the same order, with as many images each.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from nestling.errors import NestlingError

PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def together() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def averaged(tensor: Tensor) -> Tensor:
    """The mean over all ranks; the tensor itself in a lone process."""
    if not together():
        return tensor
    mean = tensor / dist.get_world_size()
    dist.all_reduce(mean)
    return mean


class RankMean(torch.autograd.Function):
    """The mean over all ranks. Each rank's value counts alike in every rank's mean, so gradients are averaged the same way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return averaged(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return averaged(grads[0])


def batch_norm(
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    synced: bool = False,
) -> Tensor:
    """torch's batch norm; `synced`: when training, by the statistics of all ranks' batches, which are also remembered."""
    if not (synced and training and together()):
        return F.batch_norm(x, mean, var, weight, bias, training, momentum, eps)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    axes, shape = [d for d in range(x.dim()) if d != 1], (-1, *[1] * (x.dim() - 2))
    centre: Tensor = RankMean.apply(wide.mean(axes))
    away = wide - centre.view(shape)
    square: Tensor = RankMean.apply(away.square().mean(axes))  # about the common mean: nothing cancels
    if mean is not None and var is not None:
        count = dist.get_world_size() * x.numel() // x.shape[1]
        with torch.no_grad():
            mean.lerp_(centre.to(mean.dtype), momentum)
            var.lerp_((square * (count / (count - 1))).to(var.dtype), momentum)
    out = away * (square + eps).rsqrt().view(shape)
    if weight is not None and bias is not None:
        out = out * weight.view(shape) + bias.view(shape)
    return out.to(x.dtype)


class SyncedBatchNorm(nn.BatchNorm2d):
    """What becomes of torch's own batch norms, whatever number of dimensions they take."""

    synced = True

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise NestlingError(f"batch norm takes (N, C, ...); found a tensor of shape {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            momentum = 1 / int(self.num_batches_tracked) if self.momentum is None else momentum
        mean, var = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
        return batch_norm(input, mean, var, self.weight, self.bias, True, momentum, self.eps, synced=True)


def synchronise(net: nn.Module) -> None:
    """Let all batch norms of a network use the statistics of all ranks' batches while they train."""
    for name, module in net.named_modules():
        if hasattr(module, "synced"):  # ours
            module.synced = True
        elif type(module) in PLAIN:
            module.__class__ = SyncedBatchNorm
        elif isinstance(module, _BatchNorm) and module.training and not isinstance(module, nn.SyncBatchNorm):
            raise NestlingError(
                f"the batch statistics of {name}, a {type(module).__name__}, cannot be synchronised between ranks; expected one "
                "of torch's batch norms. Use those, or train without train.sync_norms."
            )
