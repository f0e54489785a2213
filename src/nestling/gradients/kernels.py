"""Gram matrix and update in one pass each on a GPU, as Triton kernels over tensors wherever they lie.

In come tables that say what lies where (gpu.py makes them): tensors are found through their addresses, so
nothing is copied together first. Every sum has a fixed order: equal input gives equal bits. Without Triton, or for
more than MOST tasks, the plain version in rows.py does the same.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

try:
    from triton import language

    from nestling.gradients import gram_kernels

    PRESENT = True
except ImportError:  # a CPU build of torch comes without Triton
    PRESENT = False

WANTED = os.environ.get("NESTLING_KERNELS") != "0"  # to compare with the plain versions
MOST = 8  # tasks: above, the products no longer fit in registers
WARPS = 4
SPAN = 2048  # a matrix of rows has a multiple of so many columns
TURNS = 4  # how often a program works on a block of entries

TYPES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def usable(tensor: Tensor, tasks: int) -> bool:
    """Whether the kernels can take this on: on a CUDA device, with Triton, not too many tasks."""
    return WANTED and PRESENT and tensor.is_cuda and tasks <= MOST and tensor.dtype in TYPES and works(tensor.device)


@lru_cache
def works(device: torch.device) -> bool:
    """Whether Triton can compile and run here (it needs a C compiler, for one); tried once, said once."""
    try:
        gram_of_matrix(torch.ones(2, SPAN, device=device))
    except Exception as error:  # whatever it is, the plain version does the same
        warnings.warn(f"Triton does not work here, so gradients are combined more slowly: {error!r}", stacklevel=2)
        return False
    return True


def block(tasks: int) -> int:
    """Entries a program works on at a time: as many as the products of all tasks leave registers for."""
    return 512 if tasks <= 4 else 256


def programs(sizes: Sequence[int], tasks: int, flat: bool) -> dict[str, tuple[list[int], list[int]]]:
    """Piece and first entry of every program: `full` ones need no bounds (and only exist where all is flat)."""
    span = block(tasks) * TURNS
    starts = [(piece, start) for piece, size in enumerate(sizes) for start in range(0, size, span)]
    full = [(piece, start) for piece, start in starts if flat and start + span <= sizes[piece]]
    rest = sorted(set(starts) - set(full))
    return {name: ([p for p, _ in found], [s for _, s in found]) for name, found in (("full", full), ("rest", rest))}


def gram(tables: Mapping[str, Tensor], addresses: Tensor, dtype: torch.dtype) -> Tensor:
    """One partial Gram matrix per program, (programs, tasks, tasks) float64, full ones first."""
    tasks = addresses.shape[1]
    counts = [len(tables["full pieces"]), len(tables["rest pieces"])]
    partial = torch.empty(sum(counts), tasks, tasks, dtype=torch.float64, device=addresses.device)
    for kind, part in zip(("full", "rest"), partial.split(counts), strict=True):
        if len(part):
            gram_kernels.gram[(len(part),)](
                tables[f"{kind} pieces"],
                tables[f"{kind} starts"],
                *(tables[name] for name in ("sizes", "columns", "strides", "hosts")),
                addresses,
                part,
                N=tasks,
                BLOCK=block(addresses.shape[1]),
                TURNS=TURNS,
                FULL=kind == "full",
                TYPE=getattr(language, TYPES[dtype]),
                num_warps=WARPS,
            )
    return partial


def update(tables: Mapping[str, Tensor], addresses: Tensor, weights: Tensor, dtype: torch.dtype) -> None:
    """The weighted sum of the rows, in place of each piece's host row."""
    for kind in ("full", "rest"):
        if len(tables[f"{kind} pieces"]):
            gram_kernels.update[(len(tables[f"{kind} pieces"]),)](
                tables[f"{kind} pieces"],
                tables[f"{kind} starts"],
                *(tables[name] for name in ("sizes", "columns", "strides", "hosts")),
                addresses,
                tables["labels"],
                weights,
                N=addresses.shape[1],
                BLOCK=block(addresses.shape[1]),
                TURNS=TURNS,
                FULL=kind == "full",
                TYPE=getattr(language, TYPES[dtype]),
                WIDE=language.float64 if dtype == torch.float64 else language.float32,
                num_warps=WARPS,
            )


def gram_of_matrix(rows: Tensor) -> Tensor:
    """Partial Gram matrices, (programs, tasks, tasks) float64, of a matrix (tasks, entries)."""
    tasks, width = rows.shape
    count = width // (block(tasks) * TURNS)
    partial = torch.empty(count, tasks, tasks, dtype=torch.float64, device=rows.device)
    gram_kernels.gram_of_matrix[(count,)](
        rows, partial, width, N=tasks, BLOCK=block(tasks), TURNS=TURNS, num_warps=WARPS
    )
    return partial


def update_of_matrix(rows: Tensor, weights: Tensor, out: Tensor) -> None:
    tasks, width = rows.shape
    gram_kernels.update_of_matrix[(width // SPAN,)](rows, weights, out, width, N=tasks, BLOCK=SPAN, num_warps=2 * WARPS)
