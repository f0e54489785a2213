"""Pictures of the deadline study: error under each deadline, and which stage answers in time.

Comes in: a family and its Study. Goes out: Pictures.
"""

from collections.abc import Mapping, Sequence
from math import isinf
from typing import Any

import numpy as np

from nestling.report.content import Picture
from nestling.report.families import Family
from nestling.report.figures.panel import draw, error_axis, panel, percent_axis
from nestling.report.study import Study
from nestling.report.theme import BASE_LOOK, GUESS, ORACLE_LOOKS, PAPER, Look, stage_colour
from nestling.report.words import percent, time_text
from nestling.studies.deadline import ORACLE_ALL


def limit_names(limits: Sequence[float]) -> list[str]:
    """Deadlines in as few digits as tell them apart."""
    known = dict.fromkeys(limit for limit in limits if not isinf(limit))
    for digits in range(2, 7):
        names = {limit: f"{limit:.{digits}g}" if limit < 10**digits - 0.5 else f"{limit:.0f}" for limit in known}
        if len(set(names.values())) == len(known):
            break
    return ["none" if isinf(limit) else names[limit] for limit in limits]


def named_limits(milliseconds: Sequence[float]) -> tuple[list[str], str]:
    """Deadlines as they stand under an axis, and their unit, which is that of the shortest."""
    unit, size = ("ms", 1) if milliseconds[0] >= 0.1 else ("µs", 1000)
    return limit_names([limit * size for limit in milliseconds]), unit


def places(limits: Sequence[float]) -> list[float]:
    """Where the deadlines stand: side by side, and none at all a little apart."""
    return [float(i) for i in range(len(limits) - 1)] + [len(limits) - 0.4]


def errors_at_deadlines(family: Family, study: Study, looks: Mapping[str, Look], name: str, caption: str) -> Picture:
    with panel() as drawn:
        xs = places(study.limits)
        for scheme, rows in study.rows.items():
            look = looks[scheme] if scheme in study.nests else ORACLE_LOOKS.get(scheme, BASE_LOOK)
            words = []
            for row in rows:
                limit = "no deadline" if isinf(row.deadline) else f"a deadline of {time_text(row.deadline)}"
                words.append(f"{scheme}, {limit}: {percent(row.error)} % error, {percent(row.guessed)} % guessed")
            ys = [row.error for row in rows]
            draw(drawn, look, scheme, xs[:-1], ys[:-1], words[:-1])
            [dot] = drawn.axes.plot(xs[-1], ys[-1], marker=look.marker, color=look.colour, markerfacecolor=look.face)
            drawn.tip(dot, words[-1])
        names, unit = named_limits(study.limits)
        drawn.axes.set_xticks(xs, names)
        drawn.axes.set_xlabel(f"deadline, {unit}")
        error_axis(drawn.axes, [0.0])
        drawn.legend_below(3)
        drawn.axes.set_title(f"{family.name}: error under a deadline")
        return drawn.picture(name, f"{family.name}: error under deadlines", caption)


def busy_curve(
    family: Family, curve: Mapping[str, Any], nest: str, looks: Mapping[str, Look], name: str, caption: str
) -> Picture:
    """What a nest and the best single net leave, over a fine grid of deadlines."""
    with panel() as drawn:
        limits = curve["deadlines_ms"]
        lines = (
            (nest, curve["nest_error"], looks[nest]),
            (ORACLE_ALL, curve["oracle_all_error"], ORACLE_LOOKS[ORACLE_ALL]),
        )
        for scheme, errors, look in lines:
            points = zip(limits, errors, strict=True)
            words = [f"{scheme}, a deadline of {time_text(limit)}: {percent(error)} % error" for limit, error in points]
            draw(drawn, look, scheme, limits, errors, words)
        drawn.axes.set_xlabel("deadline, ms")
        error_axis(drawn.axes, [0.0])
        drawn.legend_below(2)
        drawn.axes.set_title(f"{family.name}: deadlines under changing load")
        return drawn.picture(name, f"{family.name}: error under deadlines while the load changes", caption)


def who_answered(family: Family, study: Study, scheme: str, name: str, caption: str) -> Picture:
    with panel() as drawn:
        axes, rows = drawn.axes, study.rows[scheme]
        xs = places(study.limits)
        parts: list[tuple[str, str, list[float]]] = [("nothing ready: a guess", GUESS, [row.guessed for row in rows])]
        for stage in family.stages:
            shares = [row.answered[stage - 1] for row in rows]
            parts.append((f"stage {stage} ({family.sizes[stage - 1]})", stage_colour(stage), shares))
        bottom = np.zeros(len(rows))
        for label, colour, shares in parts:
            bars = axes.bar(xs, shares, 0.82, bottom=bottom, color=colour, edgecolor=PAPER, linewidth=1.2, label=label)
            for bar, row, share in zip(bars, rows, shares, strict=True):
                limit = "no deadline" if isinf(row.deadline) else time_text(row.deadline)
                drawn.tip(bar, f"{limit}: {100 * share:.1f} % {label}")
            bottom = bottom + np.array(shares)
        names, unit = named_limits(study.limits)
        axes.set_xticks(xs, names)
        axes.set_xlabel(f"deadline, {unit}")
        axes.set_ylim(0, 1)
        axes.grid(visible=False, axis="x")
        percent_axis(axes)
        drawn.legend_below(2)
        axes.set_title(f"{family.name}, {scheme}: which stage answers")
        return drawn.picture(name, f"{family.name}, {scheme}: which stage answers", caption)
