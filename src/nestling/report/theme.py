"""Colours and type of a report: one palette for the page and for every picture on it.

Stages keep one colour each everywhere (a ramp from light to dark, so that order survives colour blindness and
grey print); ways of training have their own hues and markers. Pictures are drawn in the light colours; on the
page each becomes a CSS variable, so that the same picture follows the reader's light or dark mode.
"""

import re
from dataclasses import dataclass

INK, MUTED, GRID, PAPER, GUESS = "#1d2733", "#667085", "#e4e7ec", "#fefefe", "#c5cad3"
GOOD, BAD = "#14866d", "#c2392b"
STAGES = ("#f39c2c", "#dd5e66", "#aa2c94", "#6a1fb0", "#2a1a9c", "#0b6e8f")
SCHEMES = ("#0072b2", "#009e73", "#8c6d1f", "#56b4e9", "#1b3a6b", "#6f7d2c", "#d48fb5", "#3f3f3f")
ALONE, FAINT, BASE = "#4a5463", "#98a2b3", "#b0552b"
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")

LIGHT: dict[str, str] = {
    "ink": INK, "muted": MUTED, "grid": GRID, "paper": PAPER, "guess": GUESS, "good": GOOD, "bad": BAD,
    "alone": ALONE, "faint": FAINT, "base": BASE,
    **{f"stage{number}": colour for number, colour in enumerate(STAGES, start=1)},
    **{f"scheme{number}": colour for number, colour in enumerate(SCHEMES, start=1)},
}  # fmt: skip
DARK: dict[str, str] = {
    "ink": "#e8ebf0", "muted": "#9aa4b2", "grid": "#2d3541", "paper": "#181d25", "guess": "#4a5361", "good": "#4cc9a4",
    "bad": "#ff8577", "alone": "#b6bfcc", "faint": "#737d8c", "base": "#eb9468",
    "stage1": "#fdb655", "stage2": "#f58488", "stage3": "#e072cb", "stage4": "#b088f5", "stage5": "#8c9bff",
    "stage6": "#52c3e8",
    "scheme1": "#4fb3f0", "scheme2": "#3fd0a4", "scheme3": "#d9b95c", "scheme4": "#9bd7ff", "scheme5": "#8fa9e8",
    "scheme6": "#b9c76a", "scheme7": "#f0b6d4", "scheme8": "#cfcfcf",
}  # fmt: skip

RC: dict[str, object] = {
    "figure.facecolor": PAPER, "axes.facecolor": PAPER, "savefig.facecolor": PAPER,
    "text.color": INK, "axes.labelcolor": MUTED, "axes.edgecolor": GRID, "xtick.color": MUTED, "ytick.color": MUTED,
    "grid.color": GRID, "grid.linewidth": 0.8, "axes.grid": True, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "xtick.major.size": 3, "ytick.major.size": 0, "xtick.minor.size": 0, "ytick.minor.size": 0,
    "font.family": "sans-serif", "font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.titlepad": 10, "axes.labelsize": 9, "legend.fontsize": 8.5,
    "legend.frameon": False, "lines.linewidth": 1.8, "lines.markersize": 6, "lines.markeredgewidth": 1.2,
    "svg.fonttype": "none", "svg.hashsalt": "nestling", "figure.constrained_layout.use": True, "savefig.dpi": 160,
    "hatch.linewidth": 0.6,
}  # fmt: skip


def stage_colour(stage: int) -> str:
    return STAGES[(stage - 1) % len(STAGES)]


@dataclass(frozen=True)
class Look:
    """How one line of a picture is drawn."""

    colour: str
    marker: str
    style: str = "-"
    hollow: bool = False

    @property
    def face(self) -> str:
        return PAPER if self.hollow else self.colour


BASE_LOOK = Look(BASE, "v", "--", hollow=True)
ORACLE_LOOKS = {"Oracle_All": Look(ALONE, "o", ":", hollow=True), "Oracle_Each": Look(FAINT, "o", ":", hollow=True)}


def looks(nests: list[str], alone: list[str]) -> dict[str, Look]:
    """Label -> look, one for the whole report; the independent nets are always grey, dotted and hollow."""
    found = {label: Look(SCHEMES[i % len(SCHEMES)], MARKERS[i % len(MARKERS)]) for i, label in enumerate(nests)}
    return found | {label: Look(ALONE if i == 0 else FAINT, "o", ":", True) for i, label in enumerate(alone)}


def variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


def inline(svg: str, name: str) -> str:
    """A picture as a part of the page: its colours follow the page's, its ids are its own, its size is the room's."""
    svg = svg[svg.index("<svg") :]
    for role, colour in LIGHT.items():
        svg = svg.replace(colour, f"var(--{role})")
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    head, rest = svg.split(">", 1)
    return re.sub(r' (width|height|xmlns:xlink|version)="[^"]*"', "", head) + ">" + rest
