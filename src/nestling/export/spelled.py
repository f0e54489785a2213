"""A stage spelled in what torch's exporter knows.

In: a frozen stage. Out: a module that computes the same. The exporter writes fused attention of four dimensions only; where
windows have a dimension of their own, they stand beside the images while it runs. Nothing is written here.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nestling.export.torchstage import TorchStage


class Spelled(TorchStage):
    """A stage whose attention has four dimensions."""

    def forward(self, *state: Tensor) -> tuple[Tensor, ...]:
        with FourDimensions():
            return super().forward(*state)


class FourDimensions(TorchFunctionMode):
    """While it runs: fused attention over (.., tokens, channels) as over (all of these, 1, tokens, channels)."""

    words = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {**dict(zip(self.words, args, strict=False)), **(kwargs or {})}
        if func is not F.scaled_dot_product_attention or given["query"].dim() == 4 or given.get("enable_gqa"):
            return func(*args, **(kwargs or {}))
        lead = given["query"].shape[:-2]
        for word in self.words[:4]:
            if given.get(word) is not None:
                sides = given[word].shape[-2:]
                given[word] = given[word].expand(*lead, *sides).reshape(-1, 1, *sides)
        out: Tensor = func(**given)
        return out.reshape(*lead, *out.shape[-2:])
