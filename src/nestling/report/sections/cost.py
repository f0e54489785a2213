"""What an answer costs: error against MACs and against measured latency, and what has not been measured."""

from nestling.report.content import Cell, Note, PageBlock, Picture, Section, Table, Text
from nestling.report.families import ALONE, Family
from nestling.report.figures import cost as figures
from nestling.report.subject import Subject, pictures
from nestling.report.times import Times, times
from nestling.report.words import count_text, listed, plural, time_text
from nestling.runs.latency import Latency

DEARER = 1.5  # times the share of MACs that the first stage may take of the time before the reader is told why
BUSY = 2  # times the median that one answer in twenty may take before the reader is told


def cost(about: Subject) -> Section:
    drawn: list[Picture | None] = []
    for family in about.mains:
        base = family.baseline(about.families)
        about_lines = bars(family, base) + about_base(base)
        caption = f"Multiply-accumulates until the answer is out, for one image.{about_lines}"
        name = about.name(family, "macs")
        drawn.append(figures.error_against(family, base, figures.macs, count_text, "MACs", about.looks, name, caption))
        measured = times(family)
        if measured:
            clocked = figures.median_latency(measured.conditions)
            over = plural(measured.runs, "run")
            caption = f"Median time until the answer is out, over {over}. {measured.conditions}.{about_lines}"
            caption += by_operation(family, measured)
            name = about.name(family, "latency")
            drawn.append(
                figures.error_against(family, base, clocked, time_text, "median latency", about.looks, name, caption)
            )
    intro = Text(
        "A nest gives all its answers in one run, each reusing the work before it."
        + " The independent nets (dotted) give one answer each: which of them to run must be known beforehand."
        * about.alone
    )
    blocks = [*pictures(drawn), *latency_table(about), *unmeasured(about)]
    return Section("cost", "What an answer costs", (intro, *blocks) if blocks else ())


def bars(family: Family, base: Family | None) -> str:
    """What the bars are, where there are any: one run has no spread."""
    lines = [*family.lines, *(base.nests[:1] if base else ())]
    owned = [(line, stage) for line in lines for stage in line.stages()]
    several = any((found := line.number("error", stage)) and found.n > 1 for line, stage in owned)
    return " Bars: standard deviation over runs." if several else ""


def by_operation(family: Family, measured: Times) -> str:
    """Why the first stage looks dearer in time than in MACs, where it does."""
    for line in family.judged_nests[:1]:
        first, last = (line.number("macs", stage) for stage in (1, len(family.sizes)))
        taken, whole = (measured.median(line.kind, stage) for stage in (1, len(family.sizes)))
        if first and last and taken and whole and taken / whole > DEARER * first.mean / last.mean:
            return (
                f" {family.sizes[0]} does {100 * first.mean / last.mean:.2g} % of the multiply-accumulates in "
                f"{100 * taken / whole:.2g} % of the time: an operation takes its time however little it computes, so small "
                "stages look dearer here than in MACs."
            )
    return ""


def about_base(base: Family | None) -> str:
    return f" Base: {base.name}, the baseline that the paper sets beside this nest." if base and base.nests else ""


def unmeasured(about: Subject) -> list[PageBlock]:
    """Notes on networks without measured times, and on times that cannot stand beside the others."""
    notes: list[PageBlock] = []
    for family in about.families:
        measured, missing = times(family), dict[str, None]()
        for line in family.lines:
            for stage in line.stages():
                if measured is None or measured.median(line.kind, stage) is None:
                    missing[f"independent net {family.sizes[stage - 1]}" if line.kind == ALONE else line.kind] = None
        if missing:
            notes.append(Note(f"No measured latency (profile.json) for {family.name}: {listed(list(missing))}."))
        if measured and measured.others:
            count = plural(measured.others, "run")
            notes.append(
                Note(f"{family.name}: {count} measured under other conditions than most; left out of the times.")
            )
    uneven = [run.name for family in about.families for run in family.runs if run.latency and ratio(run.latency) > BUSY]
    if uneven:
        notes.append(
            Note(
                f"The machine was busy while it timed {listed(uneven)} (one answer in twenty took more than {BUSY} times the "
                "median). Medians stand that, deadline studies do not: delete profile.json there and time it again on a quiet "
                "machine."
            )
        )
    return notes


def ratio(latency: Latency) -> float:
    """How much longer than the median one of twenty answers takes, at the last stage."""
    return latency.percentile(95)[-1] / latency.median()[-1]


def latency_table(about: Subject) -> list[PageBlock]:
    """Every measured stage of every run."""
    rows = []
    for family in about.families:
        for run in family.runs:
            if run.latency is None:
                continue
            sizes = [family.sizes[run.alone - 1]] if run.alone else family.sizes
            measured = [run.latency.median(), run.latency.percentile(95), run.latency.percentile(99)]
            for size, *taken in zip(sizes, *measured, strict=False):
                numbers = [*map(time_text, taken), f"{len(run.latency.trace):,}"]
                rows.append((Cell(run.name, code=True), Cell(size), *map(Cell, numbers)))
    columns = tuple(map(Cell, ("run", "stage", "median", "95 %", "99 %", "repeats")))
    return [Table("Measured latency of every run", columns, tuple(rows), folded=True, words=2)] if rows else []
