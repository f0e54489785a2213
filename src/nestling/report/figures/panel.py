"""One small picture: a matplotlib panel in the report's style, written as SVG and PNG.

Comes in: what a figure room draws on the axes, and the words a reader sees when pointing at a mark. Goes out: a
Picture. Panels are small because a page can lay them side by side on a desk and below each other on a phone.
"""

import copy
import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from nestling.report.content import Picture
from nestling.report.theme import RC, Look

WIDTH, HEIGHT = 4.7, 3.2  # inches


class Panel:
    """A figure and, for each mark, the words a reader sees when pointing at it."""

    def __init__(self, width: float, height: float) -> None:
        self.figure = Figure(figsize=(width, height))
        self.tips: list[str] = []
        self.place: Axes | None = None

    @property
    def axes(self) -> Axes:
        """The panel's one axes, or its place in a picture of several panels."""
        return self.place or (self.figure.axes[0] if self.figure.axes else self.figure.add_subplot())

    def split(self, columns: int) -> "list[Panel]":
        """Panels side by side in one picture: each its own axes, one figure and one list of words."""
        parts = []
        for place in self.figure.subplots(1, columns, squeeze=False)[0]:
            part = copy.copy(self)
            part.place = place
            parts.append(part)
        return parts

    def tip(self, artist: Any, words: str) -> None:
        artist.set_gid(f"tip{len(self.tips)}")
        self.tips.append(words)

    def legend_below(self, columns: int) -> None:
        every = (axes.get_legend_handles_labels() for axes in self.figure.axes)
        named = {label: handle for handles, labels in every for handle, label in zip(handles, labels, strict=True)}
        self.figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=columns)  # each label once

    def picture(self, name: str, title: str, caption: str) -> Picture:
        """Call it inside `panel`: fonts and colours are settled only when the figure is written."""
        written, png = io.StringIO(), io.BytesIO()
        self.figure.draw_without_rendering()
        self.figure.set_layout_engine("none")  # laid out once, not once more for every file
        self.figure.savefig(written, format="svg", metadata={"Date": None, "Title": title})
        self.figure.savefig(png, format="png")

        def with_words(found: re.Match[str]) -> str:
            return f"{found[0]}<title>{escape(self.tips[int(found[1])])}</title>"

        drawn = re.sub(r'<g id="tip(\d+)">', with_words, written.getvalue())
        return Picture(name, title, caption, drawn, png.getvalue(), wide=self.figure.get_figwidth() > 1.2 * WIDTH)


@contextmanager
def panel(width: float = WIDTH, height: float = HEIGHT) -> Iterator[Panel]:
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        yield Panel(width, height)


def draw(drawn: Panel, look: Look, label: str, xs: Sequence[float], ys: Sequence[float], words: Sequence[str]) -> None:
    """One line with a mark, and words to point at, on each of its points."""
    drawn.axes.plot(xs, ys, color=look.colour, linestyle=look.style, zorder=2)
    drawn.axes.plot(
        [], [], color=look.colour, linestyle=look.style, marker=look.marker, markerfacecolor=look.face, label=label
    )
    for x, y, text in zip(xs, ys, words, strict=True):
        [dot] = drawn.axes.plot(x, y, marker=look.marker, color=look.colour, markerfacecolor=look.face, zorder=3)
        drawn.tip(dot, text)


def percent_axis(axes: Axes, which: str = "y") -> None:
    getattr(axes, f"{which}axis").set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))


def cost_axis(axes: Axes, values: Sequence[float], text: Callable[[float], str]) -> None:
    """An x axis of costs: logarithmic when they span more than a factor of five."""
    low, high = min(values), max(values)
    if low > 0 and high / low > 5:
        axes.set_xscale("log")
        axes.set_xlim(low / (high / low) ** 0.1, high * (high / low) ** 0.1)
        axes.xaxis.set_major_locator(LogLocator(10, (1, 2, 5) if high / low < 50 else (1, 3)))  # else labels touch
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(0 if low < 0.25 * high else None, high * 1.08)
        axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def error_axis(axes: Axes, errors: Sequence[float]) -> None:
    """A y axis of errors: from zero, unless that would press all of them into the upper part."""
    axes.set_ylim(bottom=0 if min(errors) < 0.4 * max(errors) or max(errors) == 0 else max(0, axes.get_ylim()[0]))
    axes.set_ylim(top=max(axes.get_ylim()[1], 1.05 * axes.dataLim.y1))  # room for the highest mark
    percent_axis(axes)


def epoch_axis(axes: Axes) -> None:
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
