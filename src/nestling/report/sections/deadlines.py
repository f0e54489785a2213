"""Error under a deadline: the paper's study on every family that was measured, or why there is none."""

from nestling.report.content import Cell, Note, PageBlock, Picture, Section, Table, Text
from nestling.report.families import Family
from nestling.report.figures import deadlines as figures
from nestling.report.study import Study, study
from nestling.report.subject import Subject, pictures
from nestling.report.words import listed, percent, plural, time_text


def deadlines(about: Subject) -> Section:
    intro = Text(
        "Every test image must be answered by a deadline. An anytime network gives the latest answer that is ready"
        + "; an independent network gives its one answer or none" * about.alone
        + ", and without an answer there is only a random guess."
        + (
            " Oracle_All uses the one independent net that is best for all images at that deadline, Oracle_Each foresees how "
            "long every net will take on every image: neither can be built."
        )
        * about.alone
    )
    drawn: list[Picture | None] = []
    tables: list[PageBlock] = []
    notes: list[PageBlock] = []
    for family in about.mains:
        if not family.judged_nests:
            continue
        drawn += busy_curves(about, family)
        found = study(family, family.baseline(about.families))
        if isinstance(found, str):
            notes.append(Note(found))
            continue
        runs = listed([f"{scheme} n = {count}" for scheme, count in found.seeds.items()])
        caption = f"Deadlines are 0.5 to 1 times the mean latency of {found.largest}. {runs}. {found.conditions}."
        drawn.append(figures.errors_at_deadlines(family, found, about.looks, about.name(family, "deadlines"), caption))
        scheme = found.nests[0]
        shares = f"Share of the {family.n:,} {family.split} images that each stage answers in time."
        drawn.append(figures.who_answered(family, found, scheme, about.name(family, "answering"), shares))
        tables.append(deadline_table(family, found))
    blocks = [*pictures(drawn), *tables, *notes]
    return Section("deadlines", "Error under a deadline", (intro, *blocks) if blocks else ())


def busy_curves(about: Subject, family: Family) -> list[Picture | None]:
    """The first nest for which the grid of deadlines was gone through on a machine with changing load."""
    measured = [(line.label, run.curve) for line in family.nests for run in line.runs if run.curve]
    drawn: list[Picture | None] = []
    for label, curve in measured[:1]:
        better, worst = curve["mean_points_above_oracle_all"], curve["worst_points_below"]
        caption = (
            f"One run of each network, {curve['engine']}, {plural(curve['threads'], 'thread')}; {curve['repeats']:,} times "
            f"measured in turn while 0, 1 and 2 cores were busy. The nest's error is {better:.2f} points below the best "
            f"single net's on average, and nowhere more than {max(0, worst):.2f} above."
        )
        name = about.name(family, "busy-deadlines")
        drawn.append(figures.busy_curve(family, curve, label, about.looks, name, caption))
    return drawn


def deadline_table(family: Family, found: Study) -> Table:
    limits = [time_text(limit) for limit in found.limits[:-1]]
    rows = tuple(
        (Cell(scheme), *(Cell(f"{100 * row.error:.2f}", small=guesses(row.guessed)) for row in rows))
        for scheme, rows in found.rows.items()
    )
    columns = (Cell("error in %"), *map(Cell, limits), Cell("no deadline"))
    return Table(
        f"{family.name}: error under each deadline", columns, rows, "Small print: share of guesses.", folded=True
    )


def guesses(share: float) -> str:
    return f"{percent(share)} % guessed" if share else ""
