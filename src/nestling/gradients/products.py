"""Matrix products on a CPU by whichever of torch's two libraries is faster.

torch multiplies matrices by MKL, which keeps chips of other makers from their widest instructions; oneDNN, by which torch
convolves, does not: on an AMD EPYC with AVX-512 it is 2.3 times as fast. In come two matrices, or a backward pass whose products
of plain matrices are to be made so; out come products.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

LEAST = 1 << 18  # multiplications below which a call costs more than it saves
WEIGHTS = 1 << 15  # of the largest matrix, below which watching a pass costs more than it saves


_known: dict[str, bool] = {}  # not lru_cache, which torch.compile warns of


def present() -> bool:
    """Whether torch has oneDNN, with a product of plain matrices that is right, on a chip it has been measured on the like of."""
    if "here" not in _known:
        _known["here"] = _tried()
    return _known["here"]


def _tried() -> bool:
    if not torch.backends.mkldnn.is_available() or not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return False
    try:
        a = torch.arange(6.0).view(2, 3)
        return torch.equal(_wide(a, a.T), a @ a.T)
    except Exception:  # an operation of torch's own compiler, which promises it to nobody
        return False


def faster(size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of so many multiplications go by oneDNN."""
    known = dtype == torch.float32 and device.type == "cpu" and size >= LEAST
    return known and bool(torch.backends.mkldnn.enabled) and present()


def _plain(matrix: Tensor) -> bool:
    return type(matrix) in (Tensor, nn.Parameter) and matrix.layout == torch.strided


class _Passing(TorchDispatchMode):
    """Products inside go by `product`, all else as ever."""

    supports_higher_order_operators = True  # they go through like any other

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch loads its whole compiler at the first operation, 70 MiB of it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default and all(_plain(a) for a in args) and not kwargs:
            return product(*args)
        return func(*args, **(kwargs or {}))


def faster_inside(params: Sequence[Tensor], compiled: Callable[[], bool]) -> AbstractContextManager[object]:
    """For a backward pass to these parameters: worth it where some are large matrices. `compiled`: asks whether a part of the
    graph is, which has products of its own."""
    many = any(p.dim() == 2 and p.numel() >= WEIGHTS and faster(LEAST, p.dtype, p.device) for p in params)
    return _Passing() if many and not compiled() else nullcontext()


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, of two matrices."""
    size = a.shape[0] * a.shape[1] * b.shape[1]
    return _wide(a, b) if b.dtype == a.dtype and faster(size, a.dtype, a.device) else a @ b


def _wide(a: Tensor, b: Tensor) -> Tensor:
    multiply: Any = torch.ops.mkldnn._linear_pointwise
    found: Tensor = multiply(_run(a), _run(b.T), None, "none", [], "")
    return found


def _run(matrix: Tensor) -> Tensor:
    """In one run of memory, row by row or column by column: others are multiplied a thousand times slower."""
    return matrix if matrix.is_contiguous() or matrix.T.is_contiguous() else matrix.contiguous()
