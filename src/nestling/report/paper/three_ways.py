"""What making a trained network anytime costs on CIFAR-10, three ways, from results/own-h200.json.

In: what `benchmarks/own_cifar.py` left, in sections of several calls. Out: a line per way for docs/nest.md, and every line for
docs/log/nest.md; mean ± sample standard deviation over seeds of the last test errors. A run that was stopped says at which
epoch; no epoch is chosen by its test error.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestling.report.content import Cell, Table

FILE = "own-h200.json"
NETWORK = 387.8  # millions of MACs
SHORT = ("the network", "keep", "exits", "nest")  # the lines of the table of one line per way


@dataclass(frozen=True)
class OwnWay:
    """One line: what is said of it, and where its runs are."""

    text: str
    setting: str
    section: str
    name: str
    short: str = ""  # its name there
    choose: str = ""  # when to choose it


WAYS = (
    OwnWay("the network", "", "first", "network", "the network"),
    OwnWay("keep, undamped: distill=0.9, temperature 4, weights copied", "stripes=(0.25, 0.375)", "second", "keep"),
    OwnWay("keep, damped: weights drawn, later losses at a quarter", "stripes=(0.25, 0.375), multiple=8", "third",
           "keep, damped", "keep", "its answer must stay, and early ones must be good"),
    OwnWay("keep, damped: wider, later losses at half", "stripes=(0.3, 0.36), multiple=8", "fourth", "keep, damped"),
    OwnWay("stripes", 'nest(module, "w,w")', "stripes", "stripes", "nest",
           "all stages together must cost less, and a worse last answer will do"),
    OwnWay("exits, linear heads", "at=(0.25, 0.5)", "third", "exits"),
    OwnWay("exits, convolutional heads", 'at=(0.25, 0.5), head="conv"', "third", "exits, conv", "exits",
           "its answer must stay, nothing may be done twice, or it cannot be cut"),
)  # fmt: skip


def ways_table(results: str) -> Table:
    """The network and one finished line of each way, without what it took."""
    sections = sections_of(results)
    heads = ("", "choose it if", "errors of the stages, %", "M MACs until then", "of the network's", "epochs", "n")
    rows = []
    for way in sorted((way for way in WAYS if way.short), key=lambda way: SHORT.index(way.short)):
        _, _, errors, macs, shares, epochs, _, n = line(way, sections[way.section])
        rows.append((Cell(way.short, code=bool(way.choose)), Cell(way.choose), errors, macs, shares, epochs, n))
    return Table("Three ways", tuple(map(Cell, heads)), tuple(rows), name="ways", words=2, wide=True)


def own_table(results: str) -> Table:
    sections = sections_of(results)
    heads = ("", "set", "errors of the stages, %", "M MACs until then", "of the network's", "epochs", "minutes", "n")
    return Table(
        "An ordinary network, made anytime",
        tuple(map(Cell, heads)),
        tuple(line(way, sections[way.section]) for way in WAYS),
        "Errors at the last test of each run. Minutes are of a run with others beside it on the GPU, by itself it takes fewer.",
        name="own",
        words=2,
        wide=True,
    )


def sections_of(results: str) -> dict[str, Any]:
    sections: dict[str, Any] = json.loads((Path(results) / FILE).read_text(encoding="utf-8"))
    return sections


def line(way: OwnWay, section: Mapping[str, Any]) -> tuple[Cell, ...]:
    macs: Sequence[float] = section["macs_millions"][way.name]
    runs = [run for run in section["runs"] if run["way"] == way.name]
    if not runs:  # only its table was kept
        found, n, epochs = list(zip(section["error_mean"], section["error_deviation"], strict=True)), section["n"], "40"
        minutes = f"{section['minutes']:.1f}"
    else:
        tested = min(max(map(int, run["test_error"])) for run in runs)
        errors = zip(*(run["test_error"][str(tested)] for run in runs), strict=True)
        found = [(statistics.fmean(stage), statistics.stdev(stage)) for stage in errors]
        n, asked = len(runs), runs[0]["epochs"]
        epochs = f"{asked}" if tested == asked else f"{tested} of {asked}"
        took = [run["minutes"] for run in runs if "minutes" in run]
        minutes = f"{statistics.fmean(took):.1f}" if took else "–"
    said = " / ".join(f"{mean:.2f}" + (f" ± {spread:.2f}" if spread else "") for mean, spread in found)
    shares = " / ".join(f"{100 * each / NETWORK:.1f}" for each in macs)
    return (
        Cell(way.text),
        Cell(way.setting, code=bool(way.setting)),
        Cell(said),
        Cell(" / ".join(f"{each:.0f}" for each in macs)),
        Cell(f"{shares} %"),
        Cell(epochs),
        Cell(minutes),
        Cell(f"{n}"),
    )
