"""The paper's loops as written, and the inputs every combiner is tried on. A test's reference, not the library."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import nestling.gradients as gradients
from nestling.gradients.combiners import Report
from nestling.gradients.contract import Combiner

TOLERANCE = 1e-12


def literal_osgd(rows: Tensor, order: Sequence[int], k: Sequence[float], tolerance: float = TOLERANCE) -> Tensor:
    """Algorithm 2 of the paper, row by row: each gradient minus its projections on the orthogonalised earlier ones."""
    done: list[Tensor] = []
    update = torch.zeros_like(rows[0])
    for task in order:
        g = rows[task].clone()
        for earlier in done:
            square = earlier @ earlier
            if square > 0:
                g = g - (g @ earlier) / square * earlier
        if g @ g <= tolerance * (rows[task] @ rows[task]):  # what rounding leaves of a dependent row
            g = torch.zeros_like(g)
        done.append(g)
        update = update + k[task] * g
    return update


def projected_on_originals(rows: Tensor) -> Tensor:
    """The tempting mistake: projections on the original earlier gradients."""
    update = torch.zeros_like(rows[0])
    for i in range(len(rows)):
        g = rows[i].clone()
        for j in range(i):
            g = g - (rows[i] @ rows[j]) / (rows[j] @ rows[j]) * rows[j]
        update = update + g
    return update


def normalised(rows: Tensor, owned: Tensor, constant: float = 0.5) -> tuple[Tensor, Tensor]:
    """Rows scaled to norm sqrt(d / d_n) C, and the scales."""
    d = owned.sum(1).to(rows.dtype)
    scales = torch.stack(
        [
            (d[t] / d.max()).sqrt() * constant / rows[t].norm() if rows[t].norm() > 0 else rows.new_zeros(())
            for t in range(len(rows))
        ]
    )
    return rows * scales[:, None], scales


def blocks_of(owned: Tensor, widths: Sequence[int], scope: str) -> list[list[int]]:
    """Columns of each block, from an ownership table (tasks, columns) and the columns of each parameter."""
    columns = range(owned.shape[1])
    tensor_of = [i for i, width in enumerate(widths) for _ in range(width)]
    keys: dict[str, Callable[[int], object]] = {
        "all": lambda c: 0,
        "shared": lambda c: int(owned[:, c].sum()) > 1,
        "block": lambda c: tuple(owned[:, c].tolist()),
        "tensor": lambda c: tensor_of[c],
    }
    found: dict[object, list[int]] = {}
    for c in columns:
        found.setdefault(keys[scope](c), []).append(c)
    return list(found.values())


def run(
    rows: Tensor,
    combine: Combiner[Report],
    widths: Sequence[int] | None = None,
    owned: Tensor | None = None,
    elementwise: bool = False,
) -> tuple[Tensor, Report]:
    """The update for given gradient rows, through real losses whose gradients they are.

    Parameters have `widths` columns each. Ownership (tasks, columns) is per parameter and found from the graph,
    or, elementwise, given as owners.
    """
    widths = widths or [rows.shape[1]]
    owned = torch.ones_like(rows, dtype=torch.bool) if owned is None else owned
    params = [torch.zeros(w, dtype=rows.dtype, requires_grad=True) for w in widths]
    parts, masks = rows.split(list(widths), 1), owned.split(list(widths), 1)
    losses = [
        sum(
            ((part[t] * p).sum() for part, mask, p in zip(parts, masks, params, strict=True) if mask[t].any()),
            start=torch.zeros((), dtype=rows.dtype, requires_grad=True),
        )
        for t in range(len(rows))
    ]
    bits = 2 ** torch.arange(len(rows))
    owners = {p: (mask.long() * bits[:, None]).sum(0) for p, mask in zip(params, masks, strict=True)}
    report = gradients.backward(losses, params, combine, owners=owners if elementwise else None, diagnose=True)
    return torch.cat([torch.zeros_like(p) if p.grad is None else p.grad for p in params]), report


def matrices() -> list[tuple[str, Tensor]]:
    """Named gradient matrices (float64): the shared zoo."""
    g = torch.Generator().manual_seed(7)

    def rand(n: int, d: int) -> Tensor:
        return torch.randn(n, d, generator=g, dtype=torch.float64)

    base = rand(4, 12)
    twice = torch.cat([base[:2], base[:1], base[2:]])
    zero = torch.cat([base[:1], torch.zeros(1, 12, dtype=torch.float64), base[1:]])
    opposed = torch.cat([base[:1], -0.5 * base[:1] + 0.1 * rand(1, 12), base[1:2]])
    return [
        ("one", rand(1, 9)),
        ("two", rand(2, 9)),
        ("three", rand(3, 9)),
        ("six", rand(6, 40)),
        ("duplicate", twice),
        ("zero row", zero),
        ("all zero", torch.zeros(3, 8, dtype=torch.float64)),
        ("collinear", torch.stack([base[0], 3 * base[0], -2 * base[0], base[1]])),
        ("opposed", opposed),
        ("more tasks than dimensions", rand(7, 3)),
        ("orthogonal", torch.eye(4, 10, dtype=torch.float64) * torch.tensor([[1.0], [2.0], [0.5], [4.0]])),
        ("nearly collinear", torch.stack([base[0], base[0] + 1e-3 * base[1], base[0] - 1e-3 * base[2]])),
    ]
