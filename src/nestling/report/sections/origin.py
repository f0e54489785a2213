"""Where the numbers come from: commit, command, versions, device and time of every run."""

from typing import Any

from nestling.report.content import Cell, PageBlock, Section, Table, Text
from nestling.report.records import Run
from nestling.report.subject import Subject
from nestling.report.words import listed


def provenance(about: Subject) -> Section:
    rows = []
    for run in about.runs:
        recipe, origin = run.recipe, run.provenance
        seconds = sum(line.get("seconds", 0) for line in run.log)
        commit = (origin.get("commit") or "unknown")[:10] + (" + changes" if origin.get("dirty") else "")
        started = origin.get("started", "unknown").replace("T", " ").removesuffix("Z")
        words = (
            Cell(run.name, code=True),
            Cell(origin.get("command") or "unknown", code=True),
            Cell(commit, code=True),
            Cell(started),
        )
        epochs = (
            f"{len(run.log)}" if len(run.log) == recipe.train.epochs else f"{len(run.log)} of {recipe.train.epochs}"
        )
        took = f"{seconds:,.0f} s" if run.log else "–"
        rows.append((*words, Cell(str(recipe.train.seed)), Cell(epochs), Cell(took)))
    columns = tuple(map(Cell, ("run", "command", "commit", "started (UTC)", "seed", "epochs", "time")))
    devices = dict.fromkeys(run.provenance.get("device", "unknown") for run in about.runs)
    blocks: list[PageBlock] = [
        Text(f"Trained on {listed(list(devices))}, with {listed(versions(about.runs))}."),
        Table("Runs", columns, tuple(rows), "Times are of the training epochs alone.", name="provenance", words=4),
    ]
    return Section("provenance", "Where this comes from", tuple(blocks))


def versions(runs: tuple[Run, ...]) -> list[str]:
    """Every version of every package, once."""
    found: dict[str, None] = {}
    for run in runs:
        known: dict[str, Any] = run.provenance.get("versions", {})
        found |= {f"{package} {version}": None for package, version in known.items() if version}
    return list(found) or ["unknown"]
