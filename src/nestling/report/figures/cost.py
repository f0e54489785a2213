"""Pictures of what an answer costs: error against MACs, and against measured latency.

Comes in: a family, its baseline, the look of each line. Goes out: Pictures, or None where the runs do not say.
"""

from collections.abc import Callable, Mapping

from matplotlib.axes import Axes

from nestling.report.content import Picture
from nestling.report.families import ALONE, Family, Line
from nestling.report.figures.panel import cost_axis, draw, error_axis, panel
from nestling.report.theme import BASE_LOOK, Look, stage_colour
from nestling.report.times import Times, times
from nestling.report.words import percent

Cost = Callable[[Family, Line, int], float | None]  # of a stage's answer; None = not known


def macs(family: Family, line: Line, stage: int) -> float | None:
    found = line.number("macs", stage)
    return found.mean if found else None


def median_latency(conditions: str) -> Cost:
    """The median time until a stage's answer, measured under these conditions."""
    known: dict[Family, Times | None] = {}

    def cost(family: Family, line: Line, stage: int) -> float | None:
        if family not in known:
            known[family] = times(family, conditions)
        found = known[family]
        return found.median(line.kind, stage) if found else None

    return cost


def error_against(
    family: Family,
    base: Family | None,
    cost: Cost,
    text: Callable[[float], str],
    axis: str,
    looks: Mapping[str, Look],
    name: str,
    caption: str,
) -> Picture | None:
    with panel() as drawn:
        seen: list[tuple[float, float]] = []
        shown = [(family, line, line.label, looks[line.label]) for line in family.lines]
        shown.sort(key=lambda each: each[1].kind != ALONE)  # the nests on top
        if base:
            shown[:0] = [(base, line, f"Base ({base.name})", BASE_LOOK) for line in base.nests[:1]]
        for owner, line, label, look in shown:
            found = [(owner.sizes[s - 1], cost(owner, line, s), line.number("error", s)) for s in owner.stages]
            points = [(size, c, e) for size, c, e in found if c is not None and e]
            if not points:
                continue
            xs, ys = [x for _, x, _ in points], [error.mean for _, _, error in points]
            spread = [error.std or 0 for _, _, error in points]
            if any(spread):
                drawn.axes.errorbar(
                    xs, ys, spread, fmt="none", ecolor=look.colour, elinewidth=1, capsize=2.5, alpha=0.55, zorder=2
                )
            words = [f"{label}, {z}: {percent(e.mean)} % error at {text(x)} (n = {e.n})" for z, x, e in points]
            draw(drawn, look, label, xs, ys, words)
            seen += zip(xs, ys, strict=True)
        if not seen:
            return None
        cost_axis(drawn.axes, [x for x, _ in seen], text)
        name_stages(drawn.axes, family, cost)
        drawn.axes.set_xlabel(axis)
        error_axis(drawn.axes, [y for _, y in seen])
        drawn.legend_below(2)
        drawn.axes.set_title(f"{family.name}: error per stage", pad=20)
        return drawn.picture(name, f"{family.name}: error against {axis}", caption)


def name_stages(axes: Axes, family: Family, cost: Cost) -> None:
    """The sizes of the first nest, in their colours, over the picture at what they cost."""
    for line in family.judged_nests[:1]:
        for stage in family.stages:
            where = cost(family, line, stage)
            if where is not None:
                axes.axvline(where, color=stage_colour(stage), linewidth=1, alpha=0.5, zorder=1)
                axes.annotate(
                    family.sizes[stage - 1], (where, 1), xytext=(0, 3), xycoords=("data", "axes fraction"),
                    textcoords="offset points", ha="center", va="bottom", color=stage_colour(stage), fontweight="bold",
                )  # fmt: skip
