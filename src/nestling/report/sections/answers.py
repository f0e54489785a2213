"""The answers themselves: the gallery, what later stages repair and break, whether confidence can be believed."""

from nestling.report.content import Cell, PageBlock, Picture, Section, Table, Text, spread_cell
from nestling.report.figures import answers as figures
from nestling.report.gallery import gallery
from nestling.report.subject import Subject, lacking, pictures
from nestling.report.words import plural


def answers(about: Subject) -> Section:
    intro = Text(
        "Easy pictures are answered rightly at once, hard ones late or never. Each card shows what every stage said."
    )
    blocks: list[PageBlock] = []
    for family in about.mains:
        for line in family.judged_nests[:1]:
            runs = [run for run in line.runs if run.answers is not None and run.pictures is not None]
            found = gallery(family, runs[0], line.label, about.name(family, "gallery")) if runs else None
            if found:
                blocks.append(found)
            else:
                judged = [run for run in line.runs if run.results]
                blocks += lacking(judged, "outputs or pictures", "Evaluate these runs to see what they said.")
    return Section("gallery", "What each stage said", (intro, *blocks) if blocks else ())


def repairs(about: Subject) -> Section:
    caption = "Bars up: wrong answers made right; hatched bars down: right ones made wrong; the dash is the difference."
    blocks = pictures(
        [figures.repairs(family, about.looks, about.name(family, "repairs"), caption) for family in about.families]
    )
    intro = Text("A later stage should mend more answers than it spoils. Shares of all test images, mean over runs.")
    return Section("repairs", "Repaired and broken answers", (intro, *blocks) if blocks else ())


def calibration(about: Subject) -> Section:
    drawn: list[Picture | None] = []
    tables: list[PageBlock] = []
    for family in about.families:
        for line in family.nests:
            runs = sum(run.answers is not None for run in line.runs)
            bins = f"Bins of at least {figures.FEW} answers, {plural(runs, 'run')}."
            caption = f"On the dashed line confidence is justified. {bins}"
            drawn.append(figures.calibration(family, line, about.name(family, "calibration", line.label), caption))
        rows = [
            (Cell(line.label), *(spread_cell(line.number("ece", stage)) for stage in family.stages))
            for line in family.lines
            if line.stages()
        ]
        columns = (Cell("calibration error in %"), *(Cell(z, stage=s) for s, z in enumerate(family.sizes, start=1)))
        if rows:
            tables.append(Table(f"{family.name}: expected calibration error", columns, tuple(rows)))
    without = [run for run in about.runs if run.answers is None and run.results]
    blocks = [*pictures(drawn), *tables, *lacking(without, "outputs", "Evaluate these runs again.")]
    return Section("calibration", "Can confidence be believed?", tuple(blocks))
