"""A picture of a live comparison: strict error by range of deadline, the nest beside networks to choose from.

Comes in: what nestling.studies.live found. Goes out: a Picture.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nestling.report.content import Picture
from nestling.report.figures.panel import draw, panel, percent_axis
from nestling.report.theme import ALONE, FAINT, SCHEMES, Look, stage_colour
from nestling.report.words import percent

ROOM = 1.6  # times the worst of those that know the deadline: who is mostly late would press all others to the bottom


def errors_by_deadline(
    found: Mapping[str, Any], rows: Mapping[str, Any], shown: Sequence[str], name: str, caption: str
) -> Picture:
    with panel() as drawn:
        ranges = sorted({(each["from_ms"], each["to_ms"]) for label in shown for each in rows[label]["by_deadline"]})
        for label in shown:
            parts = rows[label]["by_deadline"]  # those that deadlines were drawn from: with few questions not all
            errors = [each["strict"] for each in parts]
            words = [
                f"{label}, deadlines of {each['from_ms']:.3g} to {each['to_ms']:.3g} ms: {percent(each['strict'])} % strict error"
                for each in parts
            ]
            xs = [ranges.index((each["from_ms"], each["to_ms"])) for each in parts]
            draw(drawn, look(label), label, xs, errors, words)
        known = [label for label in shown if not label.startswith("always")]
        top = ROOM * max(each["strict"] for label in known for each in rows[label]["by_deadline"])
        drawn.axes.set_ylim(0, min(1.0, top))
        drawn.axes.set_xticks(range(len(ranges)), [f"{low:.2g}-{high:.2g}" for low, high in ranges])
        drawn.axes.set_xlabel("deadline, ms")
        percent_axis(drawn.axes)
        drawn.legend_below(3)
        drawn.axes.set_title(f"{found['run']}, live")
        return drawn.picture(name, f"{found['run']}, live: strict error by deadline", caption)


def look(label: str) -> Look:
    if label.startswith("nest"):
        return Look(SCHEMES[0], "o")
    if label.startswith("always"):
        return Look(stage_colour(int(label.split()[-1])), "D", ":", True)
    return Look(ALONE if label == "chooser" else FAINT, "s", "--")
