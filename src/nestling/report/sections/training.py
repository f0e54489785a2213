"""How the runs were trained: error over the epochs, and whether the stages' gradients agreed."""

from collections import Counter

from nestling.report.content import Picture, Section, Text
from nestling.report.figures import training as figures
from nestling.report.subject import Subject, lacking, pictures


def training(about: Subject) -> Section:
    drawn = []
    for family in about.families:
        for line in family.lines:
            several = max(Counter(run.alone for run in line.runs if run.log).values(), default=0) > 1
            seeds = "Line: mean, band: lowest to highest over runs." if several else "One run."
            name = about.name(family, "training", line.label)
            drawn.append(figures.training(family, line, name, f"{family.split.capitalize()} error. {seeds}"))
    without = [run for run in about.runs if not run.log]
    blocks = [*pictures(drawn), *lacking(without, "log", "A run writes it as its epochs end.")]
    return Section("training", "Training", tuple(blocks))


def gradients(about: Subject) -> Section:
    drawn: list[Picture | None] = []
    for family in about.families:
        for line in family.nests:
            name = about.name(family, "cosines", line.label)
            drawn.append(figures.cosines(family, line, name, "Above zero two stages pull the same way."))
            name = about.name(family, "weights", line.label)
            drawn.append(figures.weights(family, line, name, "Below zero a stage's gradient is turned around."))
    shown = pictures(drawn)
    without = [
        run for family in about.families for line in family.nests for run in line.runs
        if run.log and not any(each.get("cosines") for each in run.log)
    ]  # fmt: skip
    remedy = "Train with --set train.diagnostics=true to log them."
    intro = Text("Each stage is a task with a gradient of its own. Logged while training, over all parameters.")
    blocks = [*shown, *lacking(without, "logged gradients", remedy)]
    return Section("gradients", "Do the stages agree?", (intro, *blocks) if blocks else ())
