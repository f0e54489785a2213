"""How often and for how long stages are interrupted, and the least error that anybody could have by that.

    python benchmarks/interrupted.py --load busy --json results/interrupted-busy-cpu.json
    python benchmarks/interrupted.py --load bursts
    python benchmarks/interrupted.py --asking --runs 3000 --json results/asking-busy-cpu.json

D_s at once, for every s in turn (blocks of ten, a pause of 2 ms before each), beside the same other processes as in rival.py.
Work and waiting are told apart by the kernel (Linux). From the times follows, for deadlines of 1.5 to 12 ms, the strict error of
always running D_s, that of who knows these distributions and runs the best s for each deadline, and that of who knows beforehand
whether a run will be interrupted: no policy without such knowledge is better than the second, and none at all than the third.
`--asking`: D_2 by its session alone, by `Runtime.answer` and by a Chooser: how long each takes, and how often it is late.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nestling.runs.open import OpenedRun, resolve
from nestling.runs.provenance import provenance
from nestling.runtime.engine import Stop
from nestling.runtime.pace import NOTICED
from nestling.runtime.processor import Processor
from nestling.runtime.runtime import Runtime
from nestling.studies.live import BLOCK, LOADS, MUCH_TOO_LATE, PAUSE, made_up, open_rivals, other_processes

TURN = 10


def record(runtime: Runtime, load: str, runs: int) -> list[np.ndarray]:
    """For every s: seconds of each run of D_s at once, and how many of them it waited."""
    image, engine, processor = runtime.intake.one(made_up(runtime.spec)), runtime.engine, Processor()
    found: list[list[tuple[float, float]]] = [[] for _ in range(engine.stages)]
    with other_processes(load):
        for _ in range(0, runs, TURN):
            for stage in range(1, engine.stages + 1):
                for _ in range(TURN):
                    time.sleep(PAUSE)
                    before, began = processor.waited(), time.monotonic()
                    engine.step(stage, engine.start(image), Stop())
                    took = time.monotonic() - began
                    found[stage - 1].append((took, processor.since(before)[0]))
    return [np.array(each) for each in found]


def bounds(times: list[np.ndarray], errors: list[float], nothing: float, span: tuple[float, float]) -> dict[str, Any]:
    """Strict errors over deadlines spread evenly."""
    limits = np.linspace(*span, 200)
    table = np.array(
        [
            [error + (nothing - error) * (took[:, 0] > limit + MUCH_TOO_LATE).mean() for limit in limits]
            for error, took in zip(errors, times, strict=True)
        ]
    )
    fitting = [np.median(took[:, 0] - took[:, 1]) for took in times]  # who is never interrupted
    calm = [min((e for e, t in zip(errors, fitting, strict=True) if t <= limit), default=nothing) for limit in limits]
    return {
        "always": [float(row.mean()) for row in table],
        "best_for_each_deadline": float(table.min(axis=0).mean()),
        "never_interrupted": float(np.mean(calm)),
    }


def asking(run: OpenedRun, runtime: Runtime, load: str, runs: int) -> list[dict[str, Any]]:
    """Two and a half times what D_2 takes is given; late is who needs a millisecond more than twice that time."""
    picture, limit = made_up(runtime.spec), 2.5 * runtime.pace.jumps[1].base
    image, engine, late = runtime.intake.one(picture), runtime.engine, 2 * runtime.pace.jumps[1].base + 1e-3
    with open_rivals(run, runtime, ()) as chooser:
        ways: dict[str, Callable[[], object]] = {
            "the session alone": lambda: engine.step(2, engine.start(image), Stop()),
            "Runtime.answer": lambda: runtime.answer(picture, deadline=limit),
            "the chooser's session": lambda: chooser.run(2, image),
            "Chooser.answer": lambda: chooser.answer(picture, deadline=limit),
        }
        took: dict[str, list[float]] = {name: [] for name in ways}
        with other_processes(load):
            for _ in range(0, runs, BLOCK):
                for name, ask in random.sample(sorted(ways.items()), len(ways)):
                    for _ in range(BLOCK):
                        time.sleep(PAUSE)
                        began = time.monotonic()
                        ask()
                        took[name].append(time.monotonic() - began)
    return [
        {
            "way": name, "n": len(each), "median_ms": 1e3 * float(np.median(each)), "late_beyond_ms": 1e3 * late,
            "late": float((np.array(each) > late).mean()),
        }
        for name, each in took.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", nargs="?", default="width-resnet42-cifar10")
    parser.add_argument("--load", choices=LOADS, default="busy")
    parser.add_argument("--runs", type=int, default=1000, help="of each stage")
    parser.add_argument("--span", type=float, nargs=2, default=(1.5, 12.0), metavar="MS", help="of deadlines")
    parser.add_argument("--asking", action="store_true", help="what asking for D_2 adds")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    if options.asking:
        run = resolve(options.network)
        with Runtime(run, device="cpu", threads=1) as runtime:
            rows = asking(run, runtime, options.load, options.runs)
        for row in rows:
            print(f"{row['way']}: n={row['n']}, {row['median_ms']:.2f} ms, late {row['late']:.2%}")
        write(options, {"run": options.network, "load": options.load, "ways": rows})
        return
    with Runtime(resolve(options.network), device="cpu", threads=1) as runtime:
        times = record(runtime, options.load, options.runs)
        span = (options.span[0] / 1e3, options.span[1] / 1e3)
        nothing = 1 - float(runtime.prior.max())
        result: dict[str, Any] = {"run": options.network, "load": options.load, "stages": []}
        for size, took in zip(runtime.spec.sizes, times, strict=True):
            waits = took[took[:, 1] > NOTICED, 1]
            work = 1e3 * (took[:, 0] - took[:, 1])
            row = {
                "size": size, "n": len(took), "interrupted": len(waits) / len(took),
                "wait_ms": [float(v) for v in np.quantile(1e3 * waits, (0.1, 0.5, 0.9))] if len(waits) else [],
                "work_ms": [float(v) for v in np.quantile(work, (0.1, 0.5, 0.9))],
            }  # fmt: skip
            result["stages"].append(row)
            print(f"{size}: n={row['n']}, work {np.round(row['work_ms'], 2)} ms (10, 50, 90 %), interrupted", end=" ")
            print(f"{row['interrupted']:.1%}, for {np.round(row['wait_ms'], 2)} ms")
        result |= bounds(times, list(runtime.spec.errors), nothing, span)
    print("strict error, points: always", [f"{100 * each:.2f}" for each in result["always"]], end=", ")
    print(f"the best for each deadline {100 * result['best_for_each_deadline']:.2f}", end=", ")
    print(f"never interrupted {100 * result['never_interrupted']:.2f}")
    write(options, result)


def write(options: argparse.Namespace, result: dict[str, Any]) -> None:
    if options.json:
        result["provenance"] = provenance(" ".join(["python", *sys.argv]), "cpu", time.time)
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
