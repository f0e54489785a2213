"""Writing a report: the page, the Markdown beside it, and a folder of pictures.

Comes in: paths of runs and the page's path. Goes out: the files, and a dict that says where they are and what the
headline is. Every file is replaced whole.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nestling.errors import NestlingError
from nestling.files import RECIPE, from_text, write_atomically
from nestling.report.content import Document, Gallery, Picture, Pictures
from nestling.report.families import Family, families
from nestling.report.markdown import markdown
from nestling.report.page import page
from nestling.report.records import find_sound
from nestling.report.sections import SECTIONS
from nestling.report.sections.choosing import LOADS
from nestling.report.study import study
from nestling.report.subject import Subject, subject
from nestling.report.words import listed, plural
from nestling.runs.folder import RunDir


def write(runs: Sequence[str | Path], out: Path, live: Sequence[str | Path] = ()) -> dict[str, Any]:
    """Read the runs and the live comparisons, write everything, say where it is."""
    compared = [read_live(Path(path)) for path in live]
    found, broken = find_sound(runs)
    about = subject(families(found), compared)
    report = compose(about)
    left_out = f"{plural(len(broken), 'run')} left out, because a file is damaged: {'; '.join(broken.values())}"
    if broken:
        report = replace(report, lead=f"{report.lead} {left_out}.")
    return {
        **publish(report, out),
        "runs": [str(run.folder.path) for run in about.runs],
        "left_out": broken,
        "incomplete": left_out if broken else "",
        "headline": [headline(family) for family in about.families],
        "deadlines": [row for family in about.mains for row in deadline_rows(family, about)],
    }


def read_live(path: Path) -> dict[str, Any]:
    """What `nestling profile NAME --live --json` printed."""
    try:
        found = from_text(path.read_bytes())
        rows = {**found["own_errors"], **found["equal_errors"]}.values()
        right = found["load"] in LOADS and bool(rows) and all(row["by_deadline"] and row["n"] for row in rows)
    except OSError as error:
        raise NestlingError(f"cannot read {path}: {error.strerror}; expected a live comparison") from error
    except (ValueError, KeyError, TypeError):
        right = False
    if not right:
        raise NestlingError(f"{path} is no live comparison; make one: nestling profile NAME --live --json > {path}")
    return dict(found)


def publish(report: Document, out: Path) -> dict[str, Any]:
    """Write a report as a page, as Markdown and as pictures, and say where they are."""
    folder = out.with_suffix("")
    if RunDir(folder).has(RECIPE):  # runs/first.html beside the run runs/first: its folder holds the run alone
        folder = out.with_name(f"{out.stem}-pictures")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NestlingError(f"cannot make the folder {folder}: {error.strerror}; choose another --out") from error
    drawn = all_pictures(report)
    for picture in drawn:
        write_atomically(folder / f"{picture.name}.svg", picture.svg.encode())
        write_atomically(folder / f"{picture.name}.png", picture.png)
    words = out.with_suffix(".md")
    write_atomically(words, markdown(report, folder.name).encode())
    write_atomically(out, page(report).encode())
    return {"report": str(out), "markdown": str(words), "pictures": str(folder)}


def compose(about: Subject) -> Document:
    """Title and lead, then every section that has something to say."""
    data = sorted({family.data for family in about.families})
    nests = [family for family in about.families if family.nests]
    splits = dict.fromkeys(f"{family.n:,} {family.data} {family.split} images" for family in about.families if family.n)
    lead = (
        "An anytime network answers several times while it runs: a first answer early, better ones later, each reusing the "
        f"work before it. This report is made from {plural(len(about.runs), 'run folder')}; "
        f"errors are on {listed(list(splits)) or 'no images yet'}."
    )
    title = f"Anytime networks on {listed(data)}" if nests else f"Networks on {listed(data)}"
    sections = [section(about) for section in SECTIONS]
    return Document(title, lead, tuple(section for section in sections if section.blocks))


def all_pictures(report: Document) -> list[Picture]:
    blocks = [block for section in report.sections for block in section.blocks]
    drawn = [picture for block in blocks if isinstance(block, Pictures) for picture in block.items]
    return drawn + [block.sheet for block in blocks if isinstance(block, Gallery)]


def deadline_rows(family: Family, about: Subject) -> list[dict[str, Any]]:
    """The deadline study of a family as the command's answer holds it; empty where there is none."""
    found = study(family, family.baseline(about.families)) if family.nests else ""
    if isinstance(found, str):
        return []
    return [{"network": family.name, **row.to_dict()} for rows in found.rows.values() for row in rows]


def headline(family: Family) -> dict[str, Any]:
    lines = []
    for line in family.lines:
        stages = []
        for stage in line.stages():
            error, macs = line.number("error", stage), line.number("macs", stage)
            if error:
                row = {"stage": stage, "size": family.sizes[stage - 1], "error": error.mean, "std": error.std}
                stages.append(row | {"macs": macs.mean if macs else None})
        lines.append({"training": line.label, "kind": line.kind, "n": line.seeds(), "stages": stages})
    return {
        "network": family.name,
        "data": family.data,
        "split": family.split,
        "n": family.n,
        "sizes": list(family.sizes),
        "lines": lines,
    }
