"""What a report says, before it is a page: sections of texts, notes, tables, pictures and galleries.

Comes in: plain values. Goes out: frozen dataclasses that page.py turns into HTML and markdown.py into Markdown, so
that both say the same. Also how numbers are written. Knows nothing of runs, files or plots.
"""

from dataclasses import dataclass

from nestling.report.families import Spread


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Note:
    """Something a reader should know before believing a figure, such as what is missing."""

    text: str


@dataclass(frozen=True)
class Cell:
    text: str
    after: str = ""  # beside the text, in a lower voice
    small: str = ""  # a remark under the text
    strong: bool = False
    stage: int = 0  # a swatch of this stage's colour before the text
    code: bool = False


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[Cell, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""
    folded: bool = False  # shown on request only
    name: str = ""  # what tests and links call it
    words: int = 1  # this many columns from the left are words, the others numbers
    wide: bool = False  # stands alone, over the whole width of the page


@dataclass(frozen=True)
class Picture:
    name: str  # of its files
    title: str
    caption: str
    svg: str
    png: bytes
    wide: bool = False  # several panels side by side: over the whole width of the page


@dataclass(frozen=True)
class Pictures:
    items: tuple[Picture, ...]


@dataclass(frozen=True)
class Said:
    """One stage's word on one image."""

    stage: int
    word: str
    confidence: float
    right: bool


@dataclass(frozen=True)
class Card:
    png: bytes  # the image, at its own size
    label: str
    said: tuple[Said, ...]


@dataclass(frozen=True)
class Shelf:
    """Images that settle at the same stage."""

    title: str
    stage: int  # one more than the last stage = never
    count: int  # in the whole test split
    cards: tuple[Card, ...]


@dataclass(frozen=True)
class Gallery:
    name: str
    title: str
    n: int
    shelves: tuple[Shelf, ...]
    sizes: tuple[str, ...]
    errors: tuple[float, ...]  # of every stage, on all n images
    times: tuple[float, ...]  # milliseconds until each stage answers; empty = not measured
    sheet: Picture  # the same as one picture, for Markdown


@dataclass(frozen=True)
class StageSummary:
    """One stage of a nest in large print."""

    stage: int
    size: str
    error: str
    cost: str
    beside: str  # the independent net of the same size; empty = there is none


@dataclass(frozen=True)
class NestSummary:
    """A nest at a glance: what each answer costs and how good it is."""

    title: str
    words: str
    items: tuple[StageSummary, ...]


PageBlock = Text | Note | Table | Pictures | Gallery | NestSummary


@dataclass(frozen=True)
class Section:
    name: str
    title: str
    blocks: tuple[PageBlock, ...]


@dataclass(frozen=True)
class Document:
    title: str
    lead: str
    sections: tuple[Section, ...]


def spread_cell(found: Spread | None, small: str = "", strong: bool = False) -> Cell:
    """A Spread of fractions in percent: "8.31", and after it "± 0.12"."""
    if found is None:
        return Cell("–")
    after = "" if found.std is None else f"±\u00a0{100 * found.std:.2f}"
    return Cell(f"{100 * found.mean:.2f}", after, small, strong)
