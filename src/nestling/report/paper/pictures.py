"""The paper's figures: error against MACs, error under deadlines, and priority orders, each as panels side by side.

In: means over seeds, rows of deadline studies. Out: report Pictures. What is missing is written under it, or into its panel
where that is empty; the paper's own errors are drawn faintly where its tables give them. It reads no files.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isinf

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from nestling.report.content import Picture
from nestling.report.families import BASELINES
from nestling.report.figures.deadlines import named_limits, places
from nestling.report.figures.panel import Panel, cost_axis, draw, error_axis, panel, percent_axis
from nestling.report.theme import BASE as BASE_COLOUR
from nestling.report.theme import BASE_LOOK, FAINT, MARKERS, MUTED, ORACLE_LOOKS, SCHEMES, Look
from nestling.report.words import count_text, time_text
from nestling.studies.deadline import BASE, ORACLE_ALL, ORACLE_EACH
from nestling.studies.paper.grid import sizes_of
from nestling.studies.paper.results import ALONE, Row, paper_number

WIDTH, HEIGHT = 11.0, 3.9  # inches of a picture of three panels
PAPER_LOOK = Look(FAINT, "x", "-.")
ORACLE = "Oracle (independent nets)"


@dataclass(frozen=True)
class View:
    """One panel of the paper's figures: its title and the nests it shows."""

    title: str
    nests: tuple[str, ...]

    @property
    def base(self) -> str:
        """What the paper sets beside it: even-width for width, the cascade (EANN) for all that grow deeper."""
        kind, _, body = self.nests[0].partition("-")
        return f"{BASELINES[kind]}-{body}"


VIEWS: dict[str, tuple[View, View, View]] = {
    "cifar10": (
        View("Depth-nested Sparse ResNet-98", ("depth-sparse98",)),
        View("Width-nested ResNet-42", ("width-resnet42",)),
        View("Width-depth Sparse ResNet-98", ("alternate-sparse98", "together-sparse98")),
    ),
    "digits": (
        View("Depth-nested", ("depth-digits",)),
        View("Width-nested", ("width-digits",)),
        View("Width-depth", ("alternate-digits", "together-digits")),
    ),
}


@dataclass(frozen=True)
class Curve:
    """One line of a panel."""

    label: str
    look: Look
    points: tuple[tuple[float, float, float, str], ...]  # cost, error, standard deviation, words


def curve(label: str, look: Look, network: str, means: Sequence[Row], name: str) -> Curve:
    """One way of training one network, from means over seeds; without points where there are none."""
    rows = sorted((r for r in means if r["network"] == network and r["name"] == name), key=lambda r: int(r["stage"]))
    points = [
        (
            float(r["macs"]),
            r["error"] / 100,
            (r["std"] or 0.0) / 100,
            f"{network}, {name}, {r['size']}: {r['error']:.2f} % (n = {r['n']})",
        )
        for r in rows
    ]
    return Curve(label, look, tuple(points))


def papers(network: str, strategy: str) -> Curve:
    """The paper's own errors of a nest, at what our drawing of it costs."""
    points = []
    for stage, (size, macs) in enumerate(sizes_of(network), start=1):
        known = paper_number(network, strategy, stage)
        if known:
            points.append(
                (float(macs), known[0] / 100, 0.0, f"the paper's {network}, {strategy}, {size}: {known[0]:g} %")
            )
    return Curve(f"the paper's Nest, {strategy}", PAPER_LOOK, tuple(points))


def curves(view: View, means: Sequence[Row], names: Sequence[str]) -> list[Curve]:
    """What one panel of the first figure shows; curves without points are missing."""
    found = [papers(view.nests[0], names[0].partition(" ")[0])]
    found.append(curve(f"{BASE}, {names[0]}", BASE_LOOK, view.base, means, names[0]))
    found.append(curve(ORACLE, ORACLE_LOOKS[ORACLE_ALL], view.nests[0], means, ALONE))
    for at, network in enumerate(view.nests):
        for number, name in enumerate(names):
            look = Look(
                SCHEMES[number % len(SCHEMES)], MARKERS[number % len(MARKERS)], "-" if at == 0 else "--", at > 0
            )
            kind = "" if at == 0 else f" ({network.partition('-')[0]})"
            found.append(curve(f"Nest{kind}, {name}", look, network, means, name))
    return found


def tradeoffs(views: Sequence[View], means: Sequence[Row], names: Sequence[str], caption: str) -> Picture:
    """Error against multiply-accumulates: nests, baselines and Oracle."""
    with panel(WIDTH, HEIGHT) as whole:
        for part, view in zip(whole.split(len(views)), views, strict=True):
            found = curves(view, means, names)
            for each in found:
                xs, ys = [p[0] for p in each.points], [p[1] for p in each.points]
                if xs:
                    several = [p for p in each.points if p[2]]  # a single seed has no spread
                    if several:
                        at, to, spread, _ = zip(*several, strict=True)
                        part.axes.errorbar(
                            at, to, spread, fmt="none", ecolor=each.look.colour, elinewidth=1, capsize=2.5
                        )
                    draw(part, each.look, each.label, xs, ys, [p[3] for p in each.points])
            drawn = [point for each in found for point in each.points]
            lack = [each.label for each in found if not each.points and each.look != PAPER_LOOK]
            caption += lacking(part.axes, view.title, lack)
            if drawn:
                cost_axis(part.axes, [p[0] for p in drawn], count_text)
                error_axis(part.axes, [p[1] for p in drawn])
            part.axes.set_xlabel("MACs")
            part.axes.set_title(view.title)
        whole.legend_below(4)
        return whole.picture("error-against-macs", "Error against MACs: nests, baselines and Oracle", caption)


def deadline_bars(views: Sequence[View], studies: Sequence[Sequence[Row]], why: Sequence[str], caption: str) -> Picture:
    """Error under every deadline, a group of bars for each; `why` says what a panel lacks."""
    with panel(WIDTH, HEIGHT + 0.3) as whole:
        for part, view, rows, reason in zip(whole.split(len(views)), views, studies, why, strict=True):
            axes = part.axes
            axes.set_title(view.title)
            if rows:
                unit = bars(part, rows)
                device = rows[0]["device"]
                how = rows[0]["conditions"].removeprefix(f"{device}, ")
                axes.set_xlabel(f"deadline, {unit}\nmeasured on {device}:\n{how}", fontsize=8)
            else:
                axes.set_xlabel("deadline")
            caption += lacking(axes, view.title, reason.split("\n") if reason else [])
        whole.legend_below(5)
        return whole.picture("error-under-deadlines", "Error under 7 deadlines and none", caption)


def bars(part: Panel, rows: Sequence[Row]) -> str:
    """Draw the bars and say in which unit the deadlines stand under them."""
    schemes = list(dict.fromkeys(row["scheme"] for row in rows))
    limits = [row["deadline_ms"] for row in rows if row["scheme"] == schemes[0]]
    width = 0.84 / len(schemes)
    for number, scheme in enumerate(schemes):
        mine = [row for row in rows if row["scheme"] == scheme]
        xs = [x + (number - (len(schemes) - 1) / 2) * width for x in places(limits)]
        drawn = part.axes.bar(
            xs, [row["error"] / 100 for row in mine], 0.9 * width, color=colour(scheme, schemes), label=scheme
        )
        for bar, row in zip(drawn, mine, strict=True):
            limit = "no deadline" if isinf(row["deadline_ms"]) else time_text(row["deadline_ms"])
            part.tip(
                bar, f"{scheme}, {limit}: {row['error']:.2f} % error, {row['guessed']:.1f} % guessed (n = {row['n']})"
            )
    names, unit = named_limits(limits)
    part.axes.set_xticks(places(limits), names)
    part.axes.grid(visible=False, axis="x")
    above = [row["error"] / 100 for row in rows if row["error"] > 0]
    error_axis(part.axes, [0.0])
    if above and max(above) > 8 * min(above):  # a few guesses would press all else into the ground
        part.axes.set_yscale("log")
        part.axes.set_ylim(0.7 * min(above), 1)
        part.axes.yaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
        part.axes.yaxis.set_minor_formatter(NullFormatter())
        percent_axis(part.axes)
    return unit


def colour(scheme: str, schemes: Sequence[str]) -> str:
    if scheme.startswith(BASE):
        return BASE_COLOUR
    if scheme in (ORACLE_ALL, ORACLE_EACH):
        return ORACLE_LOOKS[scheme].colour
    return SCHEMES[[each for each in schemes if each.startswith("Nest")].index(scheme) % len(SCHEMES)]


def priorities(
    network: str, lines: Sequence[tuple[str, Sequence[Row]]], absent: Sequence[str], caption: str
) -> Picture:
    """Error per stage under each priority order, and how far that is from the usual order's error."""
    names = [size for size, _ in sizes_of(network)]
    usual = {row["stage"]: row["error"] for row in lines[0][1]}
    with panel(WIDTH, HEIGHT) as whole:
        left, right = whole.split(2)
        for number, (label, rows) in enumerate(lines):
            if not rows:
                continue
            look = BASE_LOOK if label == "sgd" else Look(SCHEMES[number % len(SCHEMES)], MARKERS[number % len(MARKERS)])
            xs = [float(row["stage"]) for row in rows]
            words = [f"{label}, {row['size']}: {row['error']:.2f} % (n = {row['n']})" for row in rows]
            draw(left, look, label, xs, [row["error"] / 100 for row in rows], words)
            if all(row["stage"] in usual for row in rows):
                gaps = [row["error"] - usual[row["stage"]] for row in rows]
                said = [f"{label}, {row['size']}: {gap:+.2f} points" for row, gap in zip(rows, gaps, strict=True)]
                draw(right, look, label, xs, gaps, said)
        caption += lacking(left.axes, network, absent)
        for part in (left, right):
            part.axes.set_xticks(range(1, len(names) + 1), names)
            part.axes.set_xlim(0.7, len(names) + 0.3)
            part.axes.set_xlabel("stage")
        left.axes.set_title(f"{network}: error per stage")
        error_axis(left.axes, [row["error"] / 100 for _, rows in lines for row in rows] or [0.0])
        right.axes.set_title("points above the usual order's error")
        right.axes.axhline(0, color=MUTED, linewidth=0.8)
        whole.legend_below(3)
        return whole.picture("priorities", f"{network}: error under several priority orders", caption)


def lacking(axes: Axes, title: str, what: Sequence[str]) -> str:
    """What is not there yet: for the caption, where it would cover something; else written into the empty panel."""
    if not what:
        return ""
    if axes.has_data():
        return f" Not there yet in {title}: {', '.join(what)}."
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(
        0.5, 0.5, "\n".join(["not there yet:", *what]), transform=axes.transAxes, ha="center", va="center", color=MUTED,
        fontsize=7.5, style="italic",
    )  # fmt: skip
    return ""
