"""Gram matrix, weights and update of rows that are there, against copying as many bytes.

    python benchmarks/combining.py --device cuda --rounds 50 --json results/gradients-h200.json

25.6 M entries in the 161 tensors of a ResNet-50, tasks that own everything. On a GPU by kernels and by plain torch, called from
Python and inside a CUDA graph. Checked in float64 before it is timed.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from gradients import condition, table
from torch import Tensor

Step = Callable[[], None]


def resnet50_shapes() -> list[tuple[int, ...]]:
    """The parameters of a ResNet-50: 25.6 M entries in 161 tensors."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    before = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convs = [(width, before, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if block == 0:
                convs.append((4 * width, before, 1, 1))
            before = 4 * width
            shapes += [shape for conv in convs for shape in (conv, conv[:1], conv[:1])]
    return [*shapes, (1000, 2048), (1000,)]


def combine_only(device: str, tasks: int, repeats: int, asked: bool = False) -> list[dict[str, object]]:
    """Gram matrix, weights and update of rows that own everything, checked, against copying as many bytes."""
    from nestling.gradients import kernels
    from nestling.gradients.combiners import OSGD
    from nestling.gradients.owners import MemoryShape, from_masks
    from nestling.gradients.rows import Rows

    kernels.WANTED = asked
    generator = torch.Generator(device).manual_seed(0)
    params = [torch.zeros(shape, device=device, requires_grad=True) for shape in resnet50_shapes()]
    entries = sum(p.numel() for p in params)
    base = torch.randn(entries, generator=generator, device=device)
    dense = torch.stack([base + torch.randn(entries, generator=generator, device=device) for _ in range(tasks)])
    layout = from_masks(tuple(MemoryShape.of(p) for p in params), (2**tasks - 1,) * len(params), tasks)
    combine = OSGD()

    def fresh() -> list[list[Tensor | None]]:
        split = [dense[t].split([p.numel() for p in params]) for t in range(tasks)]
        return [[part.view(p.shape).clone() for part, p in zip(parts, params, strict=True)] for parts in split]

    def step(rows: list[list[Tensor | None]]) -> Tensor:
        for p in params:
            p.grad = None
        report = combine(Rows(params, layout, [list(row) for row in rows]))
        assert report.gram is not None
        return report.gram[0]

    stored = fresh()
    gram = step(stored).cpu()
    found = torch.cat([p.grad.flatten() for p in params if p.grad is not None])
    wide = dense.double()
    exact = (wide @ wide.T).cpu()
    lower = torch.linalg.cholesky(exact)
    weights = torch.linalg.solve_triangular((lower / lower.diagonal()).T, torch.ones(tasks, 1).double(), upper=True)
    wanted = (weights.T.to(device) @ wide)[0]
    errors = {
        "gram_error": float(((gram - exact).abs() / exact.abs().max()).max()),
        "update_error": float((found.double() - wanted).norm() / wanted.norm()),
    }
    assert errors["gram_error"] < 1e-8 and errors["update_error"] < 1e-6, errors
    del wide, found, wanted

    stored = fresh()
    bandwidth = copy_bandwidth(device, repeats)
    floor = (2 * tasks + 1) * entries * 4 / bandwidth  # read for the Gram matrix, read and write for the update
    ways: dict[str, Step] = {"eager": lambda: void(step(stored))}
    if device == "cuda":
        ways["cuda graph"] = captured(lambda: void(step(stored)))
    rows = []
    for name, way in ways.items():
        seconds = clocked(way, device, repeats)
        rows.append(
            {
                "tasks": tasks,
                "entries": entries,
                "way": f"{name}, {'kernels' if asked else 'plain'}",
                "ms": round(1000 * statistics.median(seconds), 4),
                "floor_ms": round(1000 * floor, 4),
                "ratio": round(statistics.median(seconds) / floor, 3),
                "low": round(min(seconds) / floor, 3),
                "high": round(max(seconds) / floor, 3),
                "copy_gb_s": round(bandwidth / 1e9, 1),
                "repeats": repeats,
                **{key: f"{value:.1e}" for key, value in errors.items()},
            }
        )
    return rows


def void(_: object) -> None:
    """Drop a value, so that a step returns nothing."""


def captured(step: Step) -> Step:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def clocked(step: Step, device: str, repeats: int) -> list[float]:
    """Seconds per step; on a GPU of ten steps in a row, which is how a training loop queues them."""
    seconds = []
    for _ in range(3):
        step()
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(10):
                step()
            stop.record()
            torch.cuda.synchronize()
            seconds.append(start.elapsed_time(stop) / 10_000)
        else:
            begin = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begin)
    return seconds


def copy_bandwidth(device: str, repeats: int) -> float:
    """Bytes read and written per second by one large copy."""
    source = torch.ones(100_000_000, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / statistics.median(clocked(lambda: void(target.copy_(source)), device, repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    found = []
    for asked in (True, False) if options.device == "cuda" else (False,):
        try:
            found += combine_only(options.device, options.tasks, options.rounds, asked)
        except Exception as error:  # the other version is still worth measuring
            print(f"{'kernels' if asked else 'plain'}: {error!r}", file=sys.stderr)
    if not found:
        sys.exit(1)
    heading = condition(options.device)
    print(heading, table(found), sep="\n\n")
    if options.json:
        options.json.write_text(json.dumps({"condition": heading, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
