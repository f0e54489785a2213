"""`nestling profile`: how long each stage of a run takes on this device."""

from typing import Any

import torch
from rich.table import Table

from nestling.commands.describe import amount
from nestling.studies.profile import profile


def command(
    run: str,
    device: str = "auto",
    engine: str = "auto",
    threads: tuple[int, ...] = (),
    batch: tuple[int, ...] = (),
    repeats: int = 300,
    dry: bool = False,
    build: str = "",
    teacher: str = "",
) -> dict[str, Any]:
    """Measure the latency of every stage of a run on this device and store it with the run.

    Args:
        run: the run's folder, or the name of a trained network that comes with nestling (nothing is stored then).
        device: auto, cpu or cuda.
        engine: auto (the fastest there is), onnx, eager or graph.
        threads: how many CPU threads, 1 if not given; may be repeated. The first is the profile that others read.
        batch: images at a time, 1 if not given; may be repeated. The first is the profile that others read.
        repeats: how often every condition is measured.
        dry: measure, but store nothing; with --json, every repeat is printed.
        build: the function that builds a network of your own, such as my_file.py:build.
        teacher: the function that gives the module it learnt from, which is then measured, too.
    """
    return profile(run, device, engine, threads or (1,), batch or (1,), repeats, dry, build, teacher)


def show(result: dict[str, Any]) -> Table:
    """A row per condition and stage, for people."""
    title = f"{result['run']}: milliseconds until each stage's answer ({result['device']}, torch {torch.__version__})"
    table = Table("engine", "threads", "batch", "stage", "median", "p95", "p99", "MACs", title=title)
    for condition in result["conditions"]:
        for row in condition["stages"]:
            first = row["stage"] == 1
            cells = [str(condition[key]) if first else "" for key in ("engine", "threads", "batch")]
            cells += [str(row["stage"]), *(f"{row[key]:.3f}" for key in ("median_ms", "p95_ms", "p99_ms"))]
            table.add_row(
                *cells, amount(row["macs"]) if "macs" in row else "", end_section=row is condition["stages"][-1]
            )
    table.caption = None if result["stored"] else "nothing is stored"
    return table
