"""The headline: every nest at a glance, then error per stage of every way of training, beside the independent nets."""

from typing import Any

from nestling.report.content import Cell, NestSummary, PageBlock, Section, StageSummary, Table, Text, spread_cell
from nestling.report.families import ALONE, Family, Line
from nestling.report.records import Run
from nestling.report.subject import Subject, lacking
from nestling.report.times import conditions, times
from nestling.report.words import count_text, percent, plural, time_text


def headline(about: Subject) -> Section:
    blocks: list[PageBlock] = []
    blocks += [beside_original(run) for run in about.runs if "teacher" in run.results]
    for family in about.mains:
        blocks += [steps(family, line) for line in family.judged_nests[:1]]
    for family in about.families:
        if any(run.results for run in family.runs):
            blocks.append(headline_table(family))
    unjudged = [run for run in about.runs if not run.results]
    if signs := meanings(about):
        blocks.append(Text(f"In these tables {'; '.join(signs)}."))
    remedy = (
        "These runs have not finished: nestling train --resume RUN goes on with one, and what is left out here follows."
    )
    blocks += lacking(unjudged, "results yet", remedy)
    return Section("headline", "Error per stage", tuple(blocks))


def meanings(about: Subject) -> list[str]:
    """What the signs in the tables mean, those that are there."""
    said = []
    if any(line.seeds() > 1 for family in about.families for line in family.lines):
        said.append("± is the sample standard deviation over n runs")
    if about.alone:
        said.append("small print under an error is the difference to the independent net of the same size, in points")
    if any(len(family.judged_nests) > 1 for family in about.families):
        said.append("bold is the best nest of a column")
    return said


def beside_original(run: Run) -> Table:
    """The network a run learnt from, and each of its stages beside it: error, and milliseconds where they were measured."""
    theirs, timed = run.results["teacher"], run.profile.get("teacher", {})
    measured = run.latency.median() if run.latency else ()
    rows = [original_row(theirs, timed)]
    for place, row in enumerate(run.stages):
        away = points(row["error"] - theirs["error"]) if "error" in theirs else ""
        ms = measured[place] if place < len(measured) else None
        share = f"{ms / timed['median_ms']:.0%}" if ms is not None and timed.get("median_ms") else ""
        macs = f"{row['macs'] / timed['macs']:.0%}" if timed.get("macs") else ""
        rows.append(
            (
                Cell(f"stage {row['stage']}, {row['size']}", stage=row["stage"]),
                Cell(f"{100 * row['error']:.2f}"),
                Cell(away),
                Cell(time_text(ms) if ms is not None else "–", small=share),
                Cell(count_text(row["macs"]), small=macs),
            )
        )
    columns = tuple(Cell(text) for text in ("", "error in %", "against yours", "answers after", "MACs"))
    n = run.results["n"]
    caption = f"{n:,} {run.results['data']} {run.results['split']} inputs"
    caption += f"; {conditions(run)}, medians" if measured else "; nestling profile measures the times"
    if timed and run.latency and timed["engine"] != run.latency.engine:
        caption += f". Your network was timed by {timed['engine']}, as it could not be read"
    return Table(f"Your network, and {run.name} beside it", columns, tuple(rows), f"{caption}.", name="yours")


def original_row(theirs: dict[str, Any], timed: dict[str, Any]) -> tuple[Cell, ...]:
    ms, macs = timed.get("median_ms"), timed.get("macs")
    return (
        Cell("your network", small="" if theirs["name"].startswith("teacher") else theirs["name"], strong=True),
        Cell(f"{100 * theirs['error']:.2f}" if "error" in theirs else "–"),
        Cell(""),
        Cell(time_text(ms) if ms is not None else "–"),
        Cell(count_text(macs) if macs else "–"),
    )


def steps(family: Family, line: Line) -> NestSummary:
    """The first nest of a family at a glance."""
    items, measured = [], times(family)
    for stage in line.stages():
        error, macs = line.number("error", stage), line.number("macs", stage)
        time = measured.median(line.kind, stage) if measured else None
        beside = family.alone[0].number("error", stage) if family.alone else None
        items.append(
            StageSummary(
                stage,
                family.sizes[stage - 1],
                f"{percent(error.mean)}\u00a0%" if error else "–",
                f"after {time_text(time)}"
                if time is not None
                else f"after {count_text(macs.mean)} MACs"
                if macs
                else "",
                f"independent {percent(beside.mean)}\u00a0%" if beside else "",
            )
        )
    return NestSummary(family.name, f"trained with {line.label}, {plural(line.seeds(), 'run')}", tuple(items))


def headline_table(family: Family) -> Table:
    lines = [line for line in family.lines if line.stages()]
    best = {stage: min(errors) for stage in family.stages if (errors := nest_errors(family, stage))}
    rows = []
    for line in lines:
        cells = [Cell(line.label, small=f"n = {line.seeds()}")]
        for stage in family.stages:
            found = line.number("error", stage)
            beside = difference(family, line, stage)
            strong = line.kind != ALONE and found is not None and found.mean <= best[stage] and len(family.nests) > 1
            cells.append(spread_cell(found, beside, strong))
        rows.append(tuple(cells))
    for line in lines:
        overlaps = [line.number("iou", stage) for stage in family.stages]
        if any(overlaps):
            rows.append((Cell(f"intersection over union in %, {line.label}"), *map(spread_cell, overlaps)))
    for line in lines[:1] if family.nests else []:
        rows.append(cost_row(family, line, f"MACs, {'independent nets' if line.kind == ALONE else 'nest'}"))
    for line in family.alone[:1] if family.nests else ():
        rows.append(cost_row(family, line, "MACs, independent nets"))
    columns = (
        Cell("error in %"),
        *(Cell(size, small=f"stage {s}", stage=s) for s, size in zip(family.stages, family.sizes, strict=True)),
    )
    caption = f"{family.n:,} {family.data} {family.split} images: one image is {100 / family.n:.2g} points."
    return Table(family.name, columns, tuple(rows), caption, name="headline")


def nest_errors(family: Family, stage: int) -> list[float]:
    found = [line.number("error", stage) for line in family.nests]
    return [each.mean for each in found if each]


def difference(family: Family, line: Line, stage: int) -> str:
    """How far a nest's stage is from the independent net of its size, in points."""
    if line.kind == ALONE or not family.alone:
        return ""
    mine, theirs = line.number("error", stage), family.alone[0].number("error", stage)
    return points(mine.mean - theirs.mean) if mine and theirs else ""


def points(difference: float) -> str:
    """A difference of fractions: +0.12, −0.12, 0.00."""
    rounded = round(100 * difference, 2)
    return f"{rounded:+.2f}".replace("-", "−") if rounded else "0.00"


def cost_row(family: Family, line: Line, name: str) -> tuple[Cell, ...]:
    found = [line.number("macs", stage) for stage in family.stages]
    return (Cell(name), *(Cell(count_text(each.mean) if each else "–") for each in found))
