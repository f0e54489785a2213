"""Our convolution kernels against Triton's and cuDNN's, shape by shape, and the tile sizes that are fastest.

    python benchmarks/kernels.py --beside 6 --json results/kernels-h200.json     # those in use, against Triton's and torch's
    python benchmarks/kernels.py --tune --beside 6                               # tries many tiles, prints the best

Microseconds of one kernel inside a CUDA graph of twenty, inputs as they are in a training step of 128 images. torch's
figures are its convolution alone; ours do more: forward does batch norm and relu before it and gathers the next batch norm's
moments, backward goes on through relu and gathers what that norm's backward needs. With --beside the graph has that many
streams, each with images of its own, and the time is the graph's over all its kernels: what a kernel takes from the others,
which need not be how long it is on its way. Weight gradients are timed for one layer at a time; those in CUDA C are cut for
eight.
"""

import argparse
import itertools
import json
import multiprocessing
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nestling.kernels import cuts, launch, narrow, proof
from nestling.kernels.launch import InCuda
from nestling.kernels.narrow import Blocks
from nestling.runs.provenance import provenance

SHAPES = [(c * k, side) for k in (1, 2, 4) for c, side in ((8, 32), (16, 16), (32, 8))]


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
    """One convolution of a training step: its input, weight and gradient."""

    def __init__(self, channels: int, side: int, batch: int) -> None:
        def image() -> Tensor:
            x = torch.randn(batch, channels, side, side, device="cuda", dtype=torch.bfloat16)
            return x.contiguous(memory_format=torch.channels_last)

        self.channels, self.side, self.x, self.dy, self.z = channels, side, image(), image(), image()
        weight = torch.randn(channels, channels, 3, 3, device="cuda") / (3 * channels**0.5)
        self.weight = weight.contiguous(memory_format=torch.channels_last)
        self.affine = torch.rand(4, channels, device="cuda")
        self.shadow = launch.Shadow([self.weight])
        self.shadow.refresh()

    def forward(self, tiles: cuts.Tiles | InCuda | None = None) -> Any:
        shadow = self.shadow.parts[0]
        return launch.norm_relu_conv(self.z, self.affine, shadow, self.channels, moments=True, tiles=tiles)

    def back(self, tiles: cuts.Tiles | InCuda | None = None) -> Any:
        return launch.conv(self.dy, self.shadow.parts[0], self.channels, back=(self.z, self.affine), tiles=tiles)

    def weights(self, splits: cuts.Splits | InCuda | None = None) -> Any:
        """Of one layer, though a step makes those of up to eight at once."""
        return launch.weight_gradient(self.x, self.dy, None, splits)

    def torch_forward(self) -> Any:
        return torch.nn.functional.conv2d(self.x, self.weight.bfloat16(), padding=1)

    def torch_back(self, mask: tuple[bool, bool, bool]) -> Any:
        w = self.weight.bfloat16()
        return torch.ops.aten.convolution_backward(
            self.dy, self.x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask
        )


def conv_choices(case: Case) -> list[Any]:
    """Triton's: all taps one by one, or three at a time where a row of them is narrow. Those of conv.cu where it fits."""
    wide = cuts.power(case.channels)
    depths = {(min(wide, 64), 1)} | ({(cuts.power(3 * case.channels), 3)} if case.channels <= 16 else set())
    columns = {8, 16} if case.channels == 8 else {min(wide, 64), min(wide, 128)}
    found = itertools.product((64, 128, 256, 512), columns, sorted(depths), (4, 8), (2, 3, 4))
    tiles = [cuts.Tiles(r, c, depth, w, s, taps) for r, c, (depth, taps), w, s in found]
    found_blocks = [
        Blocks(r, w, n) for r, w, n in itertools.product((4, 8, 16), (4, 8), (2, 3, 4, 6)) if r <= case.side
    ]
    blocks = [b for b in found_blocks if b.rows * case.side % (16 * b.warps) == 0]
    few = narrow.suits(case.x, case.channels)
    return (blocks if few else []) + [t for t in tiles if 2048 <= t.rows * t.columns <= 16384]


def split_choices(case: Case) -> list[Any]:
    wide, row = cuts.power(case.channels), cuts.power(3 * case.channels)
    shapes = {(min(wide, 64), min(wide, 64)), (min(wide, 64), min(wide, 32))} | ({(wide, row)} if row <= 128 else set())
    found = itertools.product((32, 64, 128), sorted(shapes), (66, 132, 264, 396), (4, 8), (2, 3))
    counts = itertools.product((4, 8), (4, 8), (2, 3, 4), (32, 64, 128, 256))
    found_blocks = [Blocks(r, w, n, count) for r, w, n, count in counts if count * r <= len(case.x) * case.side]
    blocks = [b for b in found_blocks if b.rows * case.side % (16 * b.warps * 8 // max(8, case.channels)) == 0]
    few = narrow.suits(case.x, case.channels)
    return (blocks if few else []) + [cuts.Splits(p, o, i, n, w, s) for p, (o, i), n, w, s in found]


def compile_some(job: tuple[int, int, int, int, int]) -> None:
    """A process of its own: compile a share of all choices, which lands in Triton's cache."""
    channels, side, batch, part, parts = job
    case = Case(channels, side, batch)
    for tiles in conv_choices(case)[part::parts]:
        attempt(partial(case.forward, tiles))
        attempt(partial(case.back, tiles))
    for splits in split_choices(case)[part::parts]:
        attempt(partial(case.weights, splits))


def attempt(*works: Any, measure: bool = False) -> float:
    """A choice may want more shared memory than there is: then it is out."""
    try:
        works[0]()
        return graphed(*works) if measure else 0.0
    except Exception as error:
        if "resource" not in str(error).lower() and "shared" not in str(error).lower():
            print(f"  left out: {type(error).__name__}: {str(error)[:100]}", file=sys.stderr)
        return float("inf")


def compile_all(shapes: list[tuple[int, int]], batch: int, processes: int = 16) -> None:
    shares = max(1, processes // len(shapes))
    jobs = [(c, side, batch, part, shares) for c, side in shapes for part in range(shares)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(compile_some, jobs, chunksize=1)


def tune(shapes: list[tuple[int, int]], batch: int, beside: int) -> list[dict[str, Any]]:
    """The fastest choices that are right, and how the one in use does."""
    compile_all(shapes, batch)
    rows: list[dict[str, Any]] = []
    for c, side in shapes:
        cases = [Case(c, side, batch) for _ in range(beside)]
        x, tiles, splits = cases[0].x, conv_choices(cases[0]), split_choices(cases[0])
        kinds: list[tuple[str, list[Any], Any]] = [
            ("forward", tiles, partial(proof.conv_agrees, x, c, normed=True, adds=True, moments=True)),
            ("back", tiles, partial(proof.back_agrees, x, x)),
            ("weights", splits, partial(proof.weight_agrees, x, c)),
        ]
        for name, choices, agrees in kinds:

            def timed(choice: Any, n: int = beside, name: str = name, cases: list[Case] = cases) -> float:
                return attempt(*(partial(getattr(case, name), choice) for case in cases[:n]), measure=True)

            order = sorted((timed(choice), choice) for choice in choices)
            wrong: list[Any] = []
            right: list[tuple[float, Any]] = []
            for us, choice in order:
                if us < float("inf") and len(right) < 3:
                    right.append((us, choice)) if agrees(choice) else wrong.append(choice)

            def told(choice: Any, us: float, timed: Any = timed) -> dict[str, Any]:
                return {"us": round(us, 2), "alone_us": round(timed(choice, 1), 2), "choice": list(choice)}

            used = in_use(cases[0])[name]
            row = {"channels": c, "side": side, "batch": batch, "kernel": name, "beside": beside}
            row |= {
                "used": told(used, timed(used)),
                "best": [told(choice, us) for us, choice in right],
                "wrong": [list(each) for each in wrong],
            }
            rows.append(row)
            best = ", ".join(f"{us:.1f} {tuple(choice)}" for us, choice in right)
            print(f"{c:4} {side:3} {name:8} in use: {row['used']['us']:.1f} {tuple(used)}; best: {best}", flush=True)
    return rows


def in_use(case: Case) -> dict[str, Any]:
    x, c = case.x, case.channels
    return {"forward": proof.tiles(x, c, normed=True), "back": proof.back_tiles(x, x), "weights": proof.splits(x, c)}


def tritons(case: Case) -> dict[str, Any]:
    pixels, c = launch.rows_of(case.x), case.channels
    return {
        "forward": cuts.conv_tiles(pixels, c, c),
        "back": cuts.conv_tiles(pixels, c, c, back=True),
        "weights": cuts.weight_splits(pixels, c, c),
    }


def compare(shapes: list[tuple[int, int]], batch: int, beside: int) -> list[dict[str, Any]]:
    """Each kernel alone and, per kernel, so many at once: the choice in use, Triton's, torch's (alone)."""
    rows = []
    at_once = f"{beside} at once"
    print(
        f"{'channels':>8} {'side':>4} {'kernel':8} | {'ours':>6} {at_once:>9} | {'Triton':>6} {at_once:>9} | {'torch':>6}"
    )
    for c, side in shapes:
        cases = [Case(c, side, batch) for _ in range(beside)]
        torchs = {
            "forward": cases[0].torch_forward,
            "back": partial(cases[0].torch_back, (True, False, False)),
            "weights": partial(cases[0].torch_back, (False, True, False)),
        }
        for name in torchs:
            row: dict[str, Any] = {"channels": c, "side": side, "batch": batch, "kernel": name, "beside": beside}
            for whose, choices in (("ours", in_use(cases[0])), ("triton", tritons(cases[0]))):
                works = [partial(getattr(case, name), choices[name]) for case in cases]
                row |= {whose: round(graphed(works[0]), 2), f"{whose}_beside": round(graphed(*works), 2)}
            row["torch"] = round(graphed(torchs[name]), 2)
            rows.append(row)
            ours, ours_beside, theirs, theirs_beside, torchs_own = list(row.values())[5:]
            figures = f"{ours:6.1f} {ours_beside:9.1f} | {theirs:6.1f} {theirs_beside:9.1f} | {torchs_own:6.1f}"
            print(f"{c:8} {side:4} {name:8} | {figures}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="try many tiles")
    parser.add_argument("--beside", type=int, default=1, help="time or tune this many at once")
    parser.add_argument("--shapes", nargs="*", default=[], help="channels:side, such as 32:32; all by default")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    shapes = [(int(c), int(side)) for c, side in (each.split(":") for each in args.shapes)] or SHAPES
    rows = tune(shapes, args.batch, args.beside) if args.tune else compare(shapes, args.batch, args.beside)
    if args.json:
        found = {"benchmark": "kernels", "rows": rows, "provenance": provenance(" ".join(sys.argv), "cuda", time.time)}
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
