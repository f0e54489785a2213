"""Modules compiled whole, whose graph no longer tells who owns what: their first pass runs as it was written, so that it does.

In comes a module as torch.compile gives it, bare or wrapped; until `done` is called its passes that train are not compiled. What
the first step tells is kept by Trained; knows nothing of losses.
"""

import sys
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def is_compiled(net: nn.Module) -> bool:
    """Whether torch.compile made this module; asked without loading the compiler."""
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(net, compiler.OptimizedModule)


def compiled_inside(net: nn.Module) -> nn.Module | None:
    """The module that torch.compile made, if this is one or wraps one."""
    while isinstance(net, DistributedDataParallel):
        net = net.module
    return net if is_compiled(net) else None


class EagerFirst:
    """Passes of a compiled module that train run as they were written, until `done`."""

    def __init__(self, net: nn.Module) -> None:
        self.before: list[Any] = []
        self.hooks = [
            net.register_forward_pre_hook(self._begin),
            net.register_forward_hook(self._end, always_call=True),
        ]

    def _begin(self, net: nn.Module, given: object) -> None:
        self.before.append(torch.compiler.set_stance("force_eager") if torch.is_grad_enabled() else None)

    def _end(self, net: nn.Module, given: object, gave: object) -> None:
        stance = self.before.pop()
        if stance is not None:
            stance.__exit__(None, None, None)

    def done(self) -> None:
        for hook in self.hooks:
            hook.remove()
