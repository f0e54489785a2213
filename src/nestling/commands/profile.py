"""`nestling profile`: how long each stage of a run takes on this device."""

import sys
from pathlib import Path
from typing import Any, Literal

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from nestling.commands import waiting
from nestling.commands.describe import amount
from nestling.errors import NestlingError
from nestling.studies.live import live as compare
from nestling.studies.live import read_trace
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
    live: bool = False,
    against: tuple[str, ...] = (),
    load: Literal["quiet", "busy", "bursts"] = "quiet",
    deadlines: Literal["known", "unknown"] = "known",
    questions: int = 500,
    trace: str = "",
) -> dict[str, Any]:
    """Measure the latency of every stage of a run on this device and store it with the run.

    Args:
        run: the run's folder, or the name of a trained network that comes with nestling (nothing is stored then).
        device: auto, cpu or cuda.
        engine: auto (the fastest there is), onnx, openvino, eager or graph.
        threads: how many CPU threads, 1 if not given; may be repeated. The first is the profile that others read.
        batch: images at a time, 1 if not given; may be repeated. The first is the profile that others read.
        repeats: how often every condition is measured.
        dry: measure, but store nothing; with --json, every repeat is printed.
        build: the function that builds a network of your own, such as my_file.py:build.
        teacher: the function that gives the module it learnt from, which is then measured, too.
        live: ask it questions with deadlines instead, in turn with networks to choose from, on a CPU; nothing is stored.
        against: live: a run to choose, the smallest first; may be repeated. Independent nets of each stage's size if not given.
        load: live: what two other processes do meanwhile.
        deadlines: live: known when a question is asked, or not.
        questions: live: how many for each contender.
        trace: live: a file of deadlines in milliseconds, one in a line, to ask with in this order; else they are drawn.
    """
    if live and (build or teacher):
        raise NestlingError("--live takes networks that nestling builds by name; leave --build and --teacher out")
    if live:
        waiting.at(f"asking {run} and its rivals")
        print(f"asking {run} and its rivals {questions} questions each, in turn", file=sys.stderr, flush=True)
        return compare(run, against, load, deadlines, questions, trace=read_trace(Path(trace)) if trace else ())
    waiting.at(f"measuring {run}, each condition {repeats} times")
    if against or trace:
        raise NestlingError(f"--{'against' if against else 'trace'} is for --live: add that")
    return profile(run, device, engine, threads or (1,), batch or (1,), repeats, dry, build, teacher)


def show(result: dict[str, Any]) -> Table | Group:
    """A row per condition and stage, for people; live, a row per contender."""
    if "equal_errors" in result:
        kinds = (("own_errors", "every network's own errors"), ("equal_errors", "the nest's errors for all"))
        return Group(*(contenders(result, result[kind], words) for kind, words in kinds if result[kind]))
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


def contenders(result: dict[str, Any], rows: dict[str, dict[str, Any]], errors: str) -> Table:
    """Late, unanswered and strict error of each contender, and by range of deadline: strict error, and who answered."""
    title = f"{result['run']}, live, {result['load']}, deadlines {result['deadlines']}, {errors}"
    ranges = next(iter(rows.values()))["by_deadline"]
    heads = [f"{part['from_ms']:.3g}-\n{part['to_ms']:.3g} ms" for part in ranges]
    table = Table(
        *("", "late\n%", "nothing\n%", "strict\nerror %", *heads),
        title=title, box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False,
    )  # fmt: skip
    for name, row in rows.items():
        cells = [f"{100 * row[key]:.1f}" for key in ("late", "nothing")] + [f"{100 * row['strict']:.2f}"]
        parts = (
            f"{100 * part['strict']:.1f}\n{' '.join(f'{100 * s:.0f}' for s in part['stages'])}"
            for part in row["by_deadline"]
        )
        table.add_row(name, *cells, *parts)
    n = next(iter(rows.values()))["n"]
    table.caption = (
        f"{n} questions each; late: by more than 0.5 ms. By range of deadline: strict error in %, below it the share of no "
        f"answer and of {', '.join(result['sizes'])}, in %"
    )
    return table
