"""A network under load, live: how right and how late its answers were, beside networks that one could choose from instead."""

from collections.abc import Mapping
from typing import Any

from nestling.report.content import Cell, PageBlock, Pictures, Section, Table, Text
from nestling.report.figures.choosing import errors_by_deadline
from nestling.report.subject import Subject
from nestling.report.words import percent

LOADS = {
    "quiet": "nothing else running",
    "busy": "two busy programs beside it",
    "bursts": "two programs that come and go",
}
LATE = "it came more than half a millisecond late"


def live(about: Subject) -> Section:
    blocks: list[PageBlock] = []
    for number, found in enumerate(about.live, start=1):
        kind = "own_errors" if found["own_errors"] else "equal_errors"
        rows = {name: row for name, row in found[kind].items() if name != "bare timer"}
        shown = [name for name in rows if name != "nest, soon"]
        blocks += [
            Pictures((errors_by_deadline(found, rows, shown, f"live-{number}", words(found, kind)),)),
            table(found, rows),
        ]
    intro = Text(
        "Whoever could use a nest can also keep independent networks and run the largest that was in time lately (chooser), or "
        f"always the same one. All were asked in turn on this machine. Strict error counts an answer as wrong where {LATE}, or "
        "where there was none but a guess."
    )
    return Section("live", "Live, beside choosing a network", (intro, *blocks) if blocks else ())


def words(found: Mapping[str, Any], kind: str) -> str:
    n = next(iter(found[kind].values()))["n"]
    errors = "every network's own errors" if kind == "own_errors" else "the nest's errors for all"
    load, rough = LOADS[found["load"]].capitalize(), f"one late answer more is about {90 / n:.1f} points"
    return f"{load}; deadlines {found['deadlines']}; {n:,} questions each, one run: {rough}; {errors}."


def table(found: Mapping[str, Any], rows: Mapping[str, Any]) -> Table:
    best = min(row["strict"] for row in rows.values())
    lines = tuple(
        (
            Cell(name),
            Cell(percent(row["strict"]), strong=row["strict"] == best),
            *(Cell(f"{100 * row[key]:.1f}") for key in ("late", "nothing")),
            *(Cell(f"{100 * share:.0f}", stage=stage) for stage, share in enumerate(row["stages"][1:], start=1)),
        )
        for name, row in rows.items()
    )
    columns = ("in %", "strict error", "late", "no answer", *found["sizes"])
    return Table(f"{found['run']}, live", tuple(map(Cell, columns)), lines, f"Late: {LATE}.", name="live")
