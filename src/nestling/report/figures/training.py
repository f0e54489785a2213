"""Pictures of a training: test error, agreement of the tasks' gradients and their weights, over the epochs.

Comes in: a family and one of its lines. Goes out: Pictures, or None where the log does not say. Several seeds are
drawn as their mean and a band from the lowest to the highest.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter
from numpy.typing import NDArray

from nestling.report.content import Picture
from nestling.report.families import ALONE, Family, Line
from nestling.report.figures.panel import epoch_axis, panel, percent_axis
from nestling.report.records import Run
from nestling.report.theme import MUTED, stage_colour


def curve(runs: Sequence[Run], field: str, pick: Callable[[Any], float | None]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Epochs (E) and values (runs, E) of one number of the log, over the epochs that all runs logged which logged any."""
    tables = []
    for run in runs:
        found = {line["epoch"]: pick(line[field]) for line in run.log if line.get(field) is not None}
        tables.append({epoch: value for epoch, value in found.items() if value is not None})
    tables = [table for table in tables if table]
    shared = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    return np.array(shared), np.array([[table[epoch] for epoch in shared] for table in tables])


def draw_curve(axes: Axes, epochs: NDArray[Any], values: NDArray[Any], colour: str, label: str) -> None:
    """The mean over runs, and a band from the lowest to the highest."""
    axes.plot(epochs, values.mean(axis=0), color=colour, label=label, marker=dot(epochs))
    if len(values) > 1:
        axes.fill_between(epochs, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.18, linewidth=0)


def dot(epochs: NDArray[Any]) -> str:
    """The marker of a curve: of a single epoch no line can be drawn."""
    return "o" if len(epochs) == 1 else ""


def at(index: int) -> Callable[[Any], float | None]:
    return lambda values: values[index] if index < len(values) else None


def training(family: Family, line: Line, name: str, caption: str) -> Picture | None:
    with panel() as drawn:
        axes, lows, highs = drawn.axes, [], []
        for stage in family.stages:
            runs = [run for run in line.runs if not run.alone or run.alone == stage]
            epochs, values = curve(runs, "test_error", at(0 if line.kind == ALONE else stage - 1))
            if values.size == 0:
                continue
            # Zero has no place on a logarithmic axis: half an image is drawn instead. How many there are, results tell.
            values = np.maximum(values, 0.5 / (family.n or 10_000))
            draw_curve(axes, epochs, values, stage_colour(stage), family.sizes[stage - 1])
            lows.append(values.min())
            highs.append(values.max())
        if not highs:
            return None
        if max(highs) / min(lows) > 8:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
            axes.yaxis.set_minor_formatter(NullFormatter())
        else:
            axes.set_ylim(bottom=0)
        epoch_axis(axes)
        percent_axis(axes)
        drawn.legend_below(6)
        axes.set_title(f"{family.name}, {line.label}")
        return drawn.picture(name, f"{family.name}, {line.label}: {family.split} error while training", caption)


def cosines(family: Family, line: Line, name: str, caption: str) -> Picture | None:
    """The cosine of every two tasks' gradients; the colour is the earlier stage's, the dash tells the later one."""
    styles = ("-", "--", ":", "-.", (0, (5, 1, 1, 1)))
    with panel() as drawn:
        drew = False
        for i in family.stages:
            for j in range(i + 1, len(family.sizes) + 1):
                epochs, values = curve(line.runs, "cosines", one_cosine(i, j))
                if values.size:
                    drew = True
                    axes = drawn.axes
                    label = f"{family.sizes[i - 1]} and {family.sizes[j - 1]}"
                    style = styles[(j - i - 1) % len(styles)]
                    [mean] = axes.plot(epochs, values.mean(axis=0), color=stage_colour(i), linestyle=style, label=label)
                    mean.set_marker(dot(epochs))
                    if len(values) > 1:
                        low, high = values.min(axis=0), values.max(axis=0)
                        axes.fill_between(epochs, low, high, color=stage_colour(i), alpha=0.12, linewidth=0)
        if not drew:
            return None
        drawn.axes.axhline(0, color=MUTED, linewidth=0.8)
        epoch_axis(drawn.axes)
        drawn.axes.set_ylabel("cosine of task gradients")
        # "w1 and w2" is short; "stage 1 and stage 2", before there are results, is not.
        drawn.legend_below(3 if max(map(len, family.sizes)) < 6 else 2)
        drawn.axes.set_title(f"{family.name}, {line.label}: do the tasks agree?")
        return drawn.picture(name, f"{family.name}, {line.label}: cosines of task gradients", caption)


def one_cosine(earlier: int, later: int) -> Callable[[Any], float | None]:
    """Of two stages; None where one of them was not trained, as the last of a kept network is not."""
    return lambda table: table[earlier - 1][later - 1] if later <= len(table) else None


def weights(family: Family, line: Line, name: str, caption: str) -> Picture | None:
    """How much of each task's gradient goes into the update; only for one weight per task, and where it changes."""
    with panel() as drawn:
        changes = False
        for stage in family.stages:
            epochs, values = curve(line.runs, "weights", one_weight(stage))
            if values.size:
                changes |= bool((values != values.flat[0]).any())
                draw_curve(drawn.axes, epochs, values, stage_colour(stage), family.sizes[stage - 1])
        if not changes:
            return None
        drawn.axes.axhline(0, color=MUTED, linewidth=0.8)
        epoch_axis(drawn.axes)
        drawn.axes.set_ylabel("weight of the task's gradient")
        drawn.legend_below(5)
        drawn.axes.set_title(f"{family.name}, {line.label}: weights in the update")
        return drawn.picture(name, f"{family.name}, {line.label}: weights of the tasks", caption)


def one_weight(stage: int) -> Callable[[Any], float | None]:
    def pick(values: Any) -> float | None:
        rows = values if values and isinstance(values[0], list) else [values]  # one row per block of the scope
        return rows[0][stage - 1] if len(rows) == 1 and stage <= len(rows[0]) else None

    return pick
