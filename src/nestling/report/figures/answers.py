"""Pictures of the answers themselves: what later stages repair and break, and whether confidence can be believed.

Comes in: a family. Goes out: Pictures, or None where the runs do not say.
"""

from collections.abc import Mapping

import numpy as np
from matplotlib.ticker import FuncFormatter

from nestling.report.content import Picture
from nestling.report.families import ALONE, Family, Line
from nestling.report.figures.panel import panel, percent_axis
from nestling.report.theme import FAINT, INK, MUTED, PAPER, Look, stage_colour
from nestling.report.words import percent


def repairs(family: Family, looks: Mapping[str, Look], name: str, caption: str) -> Picture | None:
    moves = list(zip(family.stages, family.stages[1:], strict=False))
    with panel() as drawn:
        axes = drawn.axes
        lines = [line for line in family.nests if any(run.results.get("transitions") for run in line.runs)]
        if not lines or not moves:
            return None
        width = 0.8 / len(lines)
        for number, line in enumerate(lines):
            colour = looks[line.label].colour
            for place, (start, end) in enumerate(moves):
                found = [move for run in line.runs for move in run.results.get("transitions", ()) if move["to"] == end]
                if not found:
                    continue
                x = place + (number - (len(lines) - 1) / 2) * width
                up, down = (float(np.mean([move[key] for move in found])) for key in ("repaired", "broken"))
                [good] = axes.bar(x, up, 0.86 * width, color=colour, label=line.label if place == 0 else None)
                [bad] = axes.bar(x, -down, 0.86 * width, color=PAPER, edgecolor=colour, hatch="////", linewidth=1.2)
                [dot] = axes.plot(x, up - down, marker="_", markersize=11, color=INK, markeredgewidth=2)
                between = f"{line.label}, stage {start} to {end}"
                drawn.tip(good, f"{between}: {percent(up)} % repaired")
                drawn.tip(bad, f"{between}: {percent(down)} % broken")
                drawn.tip(dot, f"{between}: {percent(up - down)} % fewer errors")
        axes.axhline(0, color=MUTED, linewidth=0.8)
        axes.set_xticks(range(len(moves)), [f"{family.sizes[a - 1]} → {family.sizes[b - 1]}" for a, b in moves])
        axes.grid(visible=False, axis="x")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * abs(value):g} %"))
        axes.set_ylabel("broken  |  repaired")
        drawn.legend_below(3)
        axes.set_title(f"{family.name}: what later stages change")
        return drawn.picture(name, f"{family.name}: answers repaired and broken", caption)


BINS = 10
FEW = 10  # answers: a bin with fewer says nothing
CURVE = 3  # bins of one stage: with fewer there is no curve to see, and the table says enough


def calibration(family: Family, line: Line, name: str, caption: str) -> Picture | None:
    with panel() as drawn:
        axes = drawn.axes
        axes.plot([0, 1], [0, 1], color=FAINT, linestyle="--", linewidth=1)
        lowest, most = 1.0, 0
        for stage in family.stages:
            bins = reliability(line, stage)
            colour, size = stage_colour(stage), family.sizes[stage - 1]
            most = max(most, len(bins))
            if not bins:
                continue
            axes.plot([], [], color=colour, marker="o", label=size)
            axes.plot([sure for sure, _, _ in bins], [right for _, right, _ in bins], color=colour, zorder=2)
            for sure, right, count in bins:
                [dot] = axes.plot(sure, right, marker="o", color=colour, markeredgecolor=PAPER, zorder=3, clip_on=False)
                drawn.tip(dot, f"{size}: {100 * sure:.0f} % sure, {100 * right:.0f} % right ({count:,} answers)")
                lowest = min(lowest, sure, right)
        if most < CURVE:
            return None
        low = min(0.5, max(0.0, float(np.floor(10 * lowest) / 10)))
        axes.set_xlim(low, 1)
        axes.set_ylim(low, 1)
        percent_axis(axes, "x")
        percent_axis(axes)
        axes.set_xlabel("how sure the stage was")
        axes.set_ylabel("how often it was right")
        drawn.legend_below(6)
        axes.set_title(f"{family.name}, {line.label}")
        return drawn.picture(name, f"{family.name}, {line.label}: calibration", caption)


def reliability(line: Line, stage: int) -> list[tuple[float, float, int]]:
    """(mean confidence, share right, answers) of every bin of confidence with enough answers, over all runs."""
    index = 0 if line.kind == ALONE else stage - 1
    runs = [run for run in line.runs if not run.alone or run.alone == stage]
    answers = [run.answers for run in runs if run.answers is not None and index < len(run.answers.said)]
    if not answers:
        return []
    sure = np.concatenate([each.confidence[index] for each in answers])
    right = np.concatenate([each.right[index] for each in answers])
    bins = np.minimum((sure * BINS).astype(int), BINS - 1)
    chosen = [bins == number for number in range(BINS) if (bins == number).sum() >= FEW]
    return [(float(sure[each].mean()), float(right[each].mean()), int(each.sum())) for each in chosen]
