"""Frozen stages run by torch: what torch.export writes, CUDA graphs capture, and the eager engine goes through.

In: a `Frozen` program. Out: a module that takes the tensors of `frozen.takes` and returns the logits and those of
`frozen.gives`. `between` is called before every operation, so that a caller can stop in the middle.
"""

from collections.abc import Callable

from torch import Tensor, nn

from nestling.export.freeze import Frozen
from nestling.nets.net import last_uses
from nestling.nets.ops.frozen import Op


class TorchStage(nn.Module):
    """One frozen stage as an ordinary module without parameters, only buffers."""

    def __init__(self, frozen: Frozen) -> None:
        super().__init__()
        self.frozen = frozen
        self.given = nn.ModuleDict()
        for index, op in enumerate(frozen.ops):
            for name, tensor in (("weight", op.weight), ("bias", op.bias)):
                if tensor is not None:
                    self.register_buffer(f"{name}{index}", tensor)
            if op.module is not None:
                self.given[str(index)] = op.module
        self.last_use = last_uses(((op.out, op.reads) for op in frozen.ops), {frozen.head, *frozen.gives})
        self.between: Callable[[], None] | None = None
        self.eval()

    def forward(self, *state: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(self.frozen.takes, state, strict=True))
        for index, op in enumerate(self.frozen.ops):
            if self.between is not None:
                self.between()
            values[op.out] = self.compute(index, op, [values[read] for read in op.reads])
            for done in self.last_use.get(op.out, ()):
                del values[done]
        return (values[self.frozen.head], *(values[name] for name in self.frozen.gives))

    def compute(self, index: int, op: Op, reads: list[Tensor]) -> Tensor:
        if op.module is not None:
            out: Tensor = self.given[str(index)](*reads)
            return out
        weight: Tensor | None = getattr(self, f"weight{index}", None)
        bias: Tensor | None = getattr(self, f"bias{index}", None)
        return op.does.compute(reads, weight, bias)
