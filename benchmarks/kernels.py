"""Our convolution kernels against Triton's and cuDNN's, shape by shape, and the tile sizes that are fastest.

    python benchmarks/kernels.py --beside 6 --json results/kernels-h200.json        # those in use, against Triton's and torch's
    python benchmarks/kernels.py --tune --beside 6 --json tiles.json                # tries many tiles, prints the best
    python benchmarks/kernels.py --tune --beside 6 --table                          # and writes them to this chip's table

Microseconds of one kernel inside a CUDA graph of twenty, inputs as they are in a training step of 128 images. torch's
figures are its convolution alone; ours do more: forward does batch norm and relu before it and gathers the next batch norm's
moments, backward goes on through relu and gathers what that norm's backward needs. With --beside the graph has that many
streams, each with images of its own, and the time is the graph's over all its kernels: what a kernel takes from the others,
which need not be how long it is on its way. Weight gradients are tuned eight layers at a time, as a step makes them, and
compared one layer at a time.

A table (src/nestling/kernels/backends/tiles/) has the tiles of every shape that was tuned. Those in use stay unless others are
more than 4 % faster: then the same training gives other bits. Convolutions are waited for, so they are judged alone; weight
gradients run beside the pass, so they are judged beside one another.
"""

import argparse
import json
import multiprocessing
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nestling.kernels import chip, proof
from nestling.kernels.backends import BACKENDS, Backend, Choice, KernelName, choices, tile_tables, triton
from nestling.kernels.nvrtc import MAX_LAYERS
from nestling.kernels.weights import PackedWeights, empty_gradient, weight_gradients
from nestling.runs.provenance import provenance

SHAPES = [(c * k, c * k, side) for k in (1, 2, 4) for c, side in ((8, 32), (16, 16), (32, 8))]  # read, written, side
KERNELS: tuple[KernelName, ...] = ("forward", "back", "weights")
WORTH = 1.04  # by which tiles must be faster to take the place of those in use


def graphed(*works: Any, repeats: int = 20) -> float:
    """Microseconds of one call, the best of five rounds; several works go beside one another."""
    stream, sides = torch.cuda.Stream(), [torch.cuda.Stream() for _ in works]
    graph = torch.cuda.CUDAGraph()
    repeats = repeats if len(works) == 1 else repeats // 2
    with torch.cuda.stream(stream):
        for work in works:
            work()
        torch.cuda.synchronize()
        graph.capture_begin()  # torch.cuda.graph would collect garbage first, thousands of times
        for work, side in zip(works, sides, strict=True):
            side.wait_stream(stream)
            with torch.cuda.stream(side):
                for _ in range(repeats):
                    work()
        for side in sides:
            stream.wait_stream(side)
        graph.capture_end()
        graph.replay()
        torch.cuda.synchronize()
        found = []
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(5):
                graph.replay()
            torch.cuda.synchronize()
            found.append((time.perf_counter() - start) / (5 * repeats * len(works)) * 1e6)
    del graph
    torch.cuda.empty_cache()  # else a graph's memory stays until there is none left
    return min(found)


class Case:
    """One convolution of a training step: images that are read and written, weights, gradients."""

    def __init__(self, cin: int, cout: int, side: int, batch: int, layers: int = 1) -> None:
        def image(channels: int) -> Tensor:
            x = torch.randn(batch, channels, side, side, device="cuda", dtype=torch.bfloat16)
            return x.contiguous(memory_format=torch.channels_last)

        def weight(outer: int, inner: int) -> Tensor:
            found = torch.randn(outer, inner, 3, 3, device="cuda") / (3 * inner**0.5)
            return found.contiguous(memory_format=torch.channels_last)

        self.cout, self.x, self.y = cout, image(cin), image(cout)
        self.weight, self.transposed = weight(cout, cin), weight(cin, cout)
        self.packed = PackedWeights([self.weight, self.transposed])
        self.packed.refresh()
        self.norm_in, self.norm_out = (torch.rand(4, channels, device="cuda") for channels in (cin, cout))
        pairs = [(self.x, self.y), *((image(cin), image(cout)) for _ in range(layers - 1))]
        self.layers = [(x, dy, empty_gradient(x, dy), None) for x, dy in pairs]

    def run(self, kernel: KernelName, choice: Choice) -> None:
        weight, transposed = self.packed.parts
        if kernel == "forward":
            choice.backend.forward(self.x, self.norm_in, weight, self.cout, choice.tiles, moments=True)
        elif kernel == "back":
            choice.backend.back(self.x, transposed, self.y, self.norm_out, choice.tiles)
        else:
            weight_gradients(list(self.layers), choice)

    def torchs(self, kernel: KernelName) -> None:
        if kernel == "forward":
            torch.nn.functional.conv2d(self.x, self.weight.bfloat16(), padding=1)
        elif kernel == "back":
            self.torch_back(self.x, self.y, self.transposed, (True, False, False))
        else:
            self.torch_back(self.y, self.x, self.weight, (False, True, False))

    def torch_back(self, dy: Tensor, x: Tensor, weight: Tensor, mask: tuple[bool, bool, bool]) -> None:
        torch.ops.aten.convolution_backward(
            dy, x, weight.bfloat16(), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask
        )

    def agrees(self, kernel: KernelName, choice: Choice) -> bool:
        if kernel == "forward":
            return proof.forward_agrees(self.x, self.cout, choice, normed=True, adds=True, moments=True)
        return (
            proof.back_agrees(self.x, self.y, choice)
            if kernel == "back"
            else proof.weight_agrees(self.x, self.cout, choice)
        )

    def suited(self, kernel: KernelName) -> list[Backend]:
        return [backend for backend in BACKENDS if backend.suits(kernel, self.x, self.cout)]

    def candidates(self, kernel: KernelName) -> list[Choice]:
        suited = self.suited(kernel)
        return [Choice(b, tiles) for b in suited for tiles in b.candidates(kernel, self.x, self.cout)]


def compile_some(job: tuple[tuple[int, int, int], int, int, int]) -> None:
    """A process of its own: compile a share of all choices, which lands in the caches of Triton and NVRTC."""
    shape, batch, part, parts = job
    case = Case(*shape, batch)
    for kernel in KERNELS:
        for choice in case.candidates(kernel)[part::parts]:
            attempt(partial(case.run, kernel, choice))


def attempt(*works: Any, measure: bool = False) -> float:
    """A choice may want more shared memory than there is: then it is out."""
    try:
        works[0]()
        return graphed(*works) if measure else 0.0
    except Exception as error:
        if "resource" not in str(error).lower() and "shared" not in str(error).lower():
            print(f"  left out: {type(error).__name__}: {str(error)[:100]}", file=sys.stderr)
        return float("inf")


def compile_all(shapes: list[tuple[int, int, int]], batch: int, processes: int = 16) -> None:
    shares = max(1, processes // len(shapes))
    jobs = [(shape, batch, part, shares) for shape in shapes for part in range(shares)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(compile_some, jobs, chunksize=1)


def tune(shapes: list[tuple[int, int, int]], batch: int, beside: int) -> list[dict[str, Any]]:
    """For each shape, kernel and backend: the fastest tiles that are right, and how those in use do."""
    compile_all(shapes, batch)
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        cases = [Case(*shape, batch, MAX_LAYERS) for _ in range(beside)]
        for kernel in KERNELS:
            for backend in cases[0].suited(kernel):
                row = {
                    "backend": backend.NAME,
                    "kernel": kernel,
                    **dict(zip(("cin", "cout", "side"), shape, strict=True)),
                }
                rows.append(row | {"batch": batch, "beside": beside} | tuned(cases, kernel, backend))
                print_tuned(rows[-1])
    return rows


def tuned(cases: list[Case], kernel: KernelName, backend: Backend) -> dict[str, Any]:
    layers = MAX_LAYERS if kernel == "weights" else 1

    def timed(tiles: Any, n: int = len(cases)) -> float:
        works = [partial(case.run, kernel, Choice(backend, tiles)) for case in cases[:n]]
        return attempt(*works, measure=True) / layers

    def told(tiles: Any, us: float) -> dict[str, Any]:
        return {"us": round(us, 2), "alone_us": round(timed(tiles, 1), 2), "tiles": tiles._asdict()}

    first = cases[0]
    used = backend.tiles(kernel, first.x, first.cout)[0]
    wrong: list[Any] = []
    right: list[tuple[float, Any]] = []
    for us, tiles in sorted((timed(tiles), tiles) for tiles in backend.candidates(kernel, first.x, first.cout)):
        if us < float("inf") and len(right) < 3:
            right.append((us, tiles)) if first.agrees(kernel, Choice(backend, tiles)) else wrong.append(tiles)
    return {
        "used": told(used, timed(used)),
        "best": [told(tiles, us) for us, tiles in right],
        "wrong": [tiles._asdict() for tiles in wrong],
    }


def print_tuned(row: dict[str, Any]) -> None:
    best = ", ".join(f"{each['us']:.1f} {tuple(each['tiles'].values())}" for each in row["best"])
    used = f"{row['used']['us']:.1f} {tuple(row['used']['tiles'].values())}"
    shape = f"{row['cin']:4} {row['cout']:4} {row['side']:3}"
    print(f"{shape} {row['kernel']:8} {row['backend']:6} in use: {used}; best: {best}", flush=True)


def table_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a chip's table says of shapes that were tuned: the tiles in use, or others that are worth the change."""
    found = []
    for row in rows:
        judged = "us" if row["kernel"] == "weights" else "alone_us"
        best = min(row["best"], key=lambda each: each[judged], default=row["used"])
        chosen = best if WORTH * best[judged] < row["used"][judged] else row["used"]
        shape = {name: row[name] for name in ("backend", "kernel", "cin", "cout", "side", "batch")}
        found.append(shape | {"tiles": chosen["tiles"]} | {name: chosen[name] for name in ("us", "alone_us")})
    return found


def write_table(name: str, rows: list[dict[str, Any]], made: dict[str, Any]) -> Path:
    """Rows of shapes that were not tuned this time stay as they are."""
    path = tile_tables.file_of(name)
    names = ("backend", "kernel", "cin", "cout", "side")
    before = json.loads(path.read_text())["rows"] if path.is_file() else []
    known = {tuple(row[name] for name in names): row for row in (*before, *table_rows(rows))}
    path.write_text(tile_tables.written(name, made, list(known.values())))
    return path


def compare(shapes: list[tuple[int, int, int]], batch: int, beside: int) -> list[dict[str, Any]]:
    """Each kernel alone and, per kernel, so many at once: the choice in use, Triton's, torch's (alone)."""
    rows = []
    at_once = f"{beside} at once"
    print(
        f"{'channels':>8} {'side':>4} {'kernel':8} | {'ours':>6} {at_once:>9} | {'Triton':>6} {at_once:>9} | {'torch':>6}"
    )
    for cin, cout, side in shapes:
        cases = [Case(cin, cout, side, batch) for _ in range(beside)]
        x, y = cases[0].x, cases[0].y
        used = {"forward": proof.for_forward(x, cout, normed=True), "back": proof.for_back(x, y)}
        used["weights"] = proof.for_weights(x, cout)
        for kernel in KERNELS:
            row: dict[str, Any] = {"channels": cout, "side": side, "batch": batch, "kernel": kernel, "beside": beside}
            tritons = next(each for each in choices(kernel, x, cout) if each.backend is triton)
            for whose, choice in (("ours", used[kernel]), ("triton", tritons)):
                works = [partial(case.run, kernel, choice) for case in cases]
                row |= {whose: round(graphed(works[0]), 2), f"{whose}_beside": round(graphed(*works), 2)}
            row["torch"] = round(graphed(partial(cases[0].torchs, kernel)), 2)
            rows.append(row)
            ours, ours_beside, theirs, theirs_beside, torchs_own = list(row.values())[5:]
            figures = f"{ours:6.1f} {ours_beside:9.1f} | {theirs:6.1f} {theirs_beside:9.1f} | {torchs_own:6.1f}"
            print(f"{cout:8} {side:4} {kernel:8} | {figures}", flush=True)
    return rows


def shape_of(words: str) -> tuple[int, int, int]:
    """32:16 is 32 channels read and written at 16x16 pixels, 8:16:32 is 8 read and 16 written at 32x32."""
    *channels, side = (int(each) for each in words.split(":"))
    return channels[0], channels[-1], side


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="try many tiles")
    parser.add_argument("--table", action="store_true", help="with --tune: write the best to this chip's table")
    parser.add_argument("--beside", type=int, default=1, help="time or tune this many at once")
    parser.add_argument("--shapes", nargs="*", default=[], help="channels:side, such as 32:32, or read:written:side")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    shapes = [shape_of(each) for each in args.shapes] or SHAPES
    rows = tune(shapes, args.batch, args.beside) if args.tune else compare(shapes, args.batch, args.beside)
    made = provenance(" ".join(sys.argv), "cuda", time.time)
    if args.tune and args.table:
        print(f"written: {write_table(chip.of(torch.device('cuda')).name, rows, made)}")
    if args.json:
        found = {"benchmark": "kernels", "rows": rows, "provenance": made}
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
