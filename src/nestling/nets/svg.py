"""A picture of a nest as SVG: blocks as columns whose stripes are coloured by birth, links, heads, a legend.

In: a plan. Out: the text of an SVG file. Columns are as tall as their blocks are wide (in channels, on a square-root
scale); stripes of stage 1 are on top; ribbons and arcs have the colour of the stage that first uses them. Written by
hand, so that it needs nothing installed. What a block is, blocks.py says.
"""

from dataclasses import dataclass
from html import escape
from math import sqrt

from nestling.nets.blocks import Block, Survey, survey
from nestling.nets.plan import Plan

COLOURS = ("#20435c", "#2a9d8f", "#e9b44c", "#e76f51", "#9b4f96", "#6c8ebf", "#7f9c3b", "#b5838d")
INK, FAINT, PAPER = "#22303c", "#8896a3", "#ffffff"
HALO = f"stroke='{PAPER}' stroke-width='5' stroke-linejoin='round' paint-order='stroke'"  # readable over lines
FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"
LEFT, TOP, TALLEST, ARC, EXIT, LEGEND = 36.0, 84.0, 170.0, 118.0, 64.0, 254.0


def colour(birth: int) -> str:
    return COLOURS[(birth - 1) % len(COLOURS)]


@dataclass(frozen=True)
class Column:
    """Where a block stands: its left edge and width, its top, and the edges between its stripes."""

    block: Block
    x: float
    width: float
    edges: tuple[float, ...]  # y of the top, of each boundary between stripes, and of the bottom

    @property
    def middle(self) -> float:
        return self.x + self.width / 2

    @property
    def top(self) -> float:
        return self.edges[0]

    @property
    def bottom(self) -> float:
        return self.edges[-1]

    def until(self, birth: int) -> float:
        """The lower edge of what is born by a stage."""
        return self.edges[sum(b <= birth for b, _ in self.block.stripes)]


@dataclass(frozen=True)
class Placement:
    columns: dict[str, Column]
    branches: dict[str, str]  # exits that leave the trunk early: block -> where it leaves
    right: float  # where the trunk ends
    axis: float  # the height of the trunk's middle
    folded: bool  # the last stage's arcs go below, because levels are interlaced
    bottom: float  # how far down columns and arcs reach


def draw(plan: Plan) -> str:
    """The whole picture."""
    seen = survey(plan)
    laid = lay_out(seen)
    heads, bottom = draw_heads(plan, seen, laid)
    width = max(laid.right + 200, LEFT + LEGEND * len(plan.heads), 1060)
    parts = [
        *draw_title(plan),
        *draw_input(plan, laid),
        *draw_arcs(seen, laid),
        *draw_ribbons(seen, laid),
        *heads,
        *draw_columns(laid),
        *draw_brackets(laid),
    ]
    legend, height = draw_legend(plan, bottom)
    size = f"width='{width:.0f}' height='{height:.0f}' viewBox='0 0 {width:.0f} {height:.0f}'"
    title = f"<title>{escape(plan.name)}: births of its channels</title>"
    paper = f"<rect width='100%' height='100%' fill='{PAPER}'/>"
    opening = f"<svg xmlns='http://www.w3.org/2000/svg' {size} {FONT}>"
    return "\n".join([opening, title, paper, *parts, *legend, "</svg>\n"])


# --- where things stand -----------------------------------------------------------------------------------------------


def lay_out(seen: Survey) -> Placement:
    """Columns and arcs around an axis, then the axis where there is room for them."""
    trunk, branches = split_trunk(seen)
    births = [block.birth for block in trunk if block.kind == "block"]
    widest = max(block.channels for block in trunk)
    step = max(15.0, min(46.0, 980 / len(trunk)))
    places: list[tuple[Block, float, float]] = []
    x = LEFT + 74
    for block, before in zip(trunk, [trunk[0], *trunk], strict=False):
        x += step * 0.35 * (kin(before)[1:] != kin(block)[1:])
        wide = step * (0.62 if block.kind == "block" else 0.3)
        places.append((block, x, wide))
        x += wide + step * 0.38
    columns = {block.name: place(block, at, wide, 0.0, widest) for block, at, wide in places}
    flat = Placement(columns, branches, x, 0.0, births != sorted(births), 0.0)
    reach = [arc.peak for arc in find_arcs(seen, flat)]
    axis = TOP - min([*reach, *(c.top for c in columns.values())])
    bottom = axis + max([*reach, *(c.bottom for c in columns.values())])
    columns = {block.name: place(block, at, wide, axis, widest) for block, at, wide in places}
    for name, source in branches.items():
        block = next(b for b in seen.blocks if b.name == name)
        columns[name] = place(block, columns[source].middle - 14, 28, bottom + 90, block.channels, EXIT)
    return Placement(columns, branches, x, axis, flat.folded, bottom)


def split_trunk(seen: Survey) -> tuple[list[Block], dict[str, str]]:
    """Blocks that go on, and blocks that only lead from the middle of the trunk to a head."""
    heads = {block.name for block in seen.blocks if block.kind == "head"}
    body = [block for block in seen.blocks if block.kind != "head"]
    branches = {}
    for block in body[:-1]:
        readers = {link.reader for link in seen.links if link.source == block.name}
        sources = [link.source for link in seen.links if link.reader == block.name]
        later = [b.kind for b in body[body.index(block) + 1 :]]
        if readers and readers <= heads and sources and "block" in later and len(block.stripes) == 1:
            place_of = [b.name for b in body]
            known = [s for s in sources if s in place_of]
            branches[block.name] = max(known, key=place_of.index) if known else place_of[0]
    return [block for block in body if block.name not in branches], branches


def place(block: Block, x: float, wide: float, axis: float, widest: int, tallest: float = TALLEST) -> Column:
    tall = max(26.0, tallest * sqrt(block.channels / widest))
    edges = [axis - tall / 2]
    for _, count in block.stripes:
        edges.append(edges[-1] + tall * count / block.channels)
    return Column(block, x, wide, tuple(edges))


# --- what is drawn ----------------------------------------------------------------------------------------------------


def text(
    x: float,
    y: float,
    words: str,
    size: float = 12,
    fill: str = INK,
    anchor: str = "start",
    bold: bool = False,
    halo: str = "",
) -> str:
    weight = " font-weight='600'" if bold else ""
    place = f"x='{x:.1f}' y='{y:.1f}' font-size='{size:g}' fill='{fill}' text-anchor='{anchor}'{weight}"
    return f"<text {place} {halo}>{escape(words)}</text>" if halo else f"<text {place}>{escape(words)}</text>"


def draw_title(plan: Plan) -> list[str]:
    shared = len(plan.heads) == 1 or any(bits.bit_count() > 1 for bits in plan.owners[plan.nodes[1].name])
    sizes = (" ⊂ " if shared else ", ").join(plan.sizes)  # an ensemble shares nothing
    note = "Columns are blocks, their height their channels. Colours are births: a channel reads its own colour and earlier ones."
    return [text(LEFT, 36, plan.name, 21, bold=True), text(LEFT, 58, f"{sizes}.  {note}", 12.5, FAINT)]


def draw_input(plan: Plan, laid: Placement) -> list[str]:
    first = next(iter(laid.columns.values()))
    y, side = laid.axis, 46.0
    size = "×".join(map(str, (plan.input.channels, *plan.input.size)))
    return [
        f"<rect x='{LEFT}' y='{y - side / 2:.1f}' width='{side}' height='{side}' rx='7' fill='#f1f4f6' stroke='{FAINT}'/>",
        text(LEFT + side / 2, y + 4, "image", 12, anchor="middle"),
        text(LEFT + side / 2, y + side / 2 + 16, size, 10.5, FAINT, "middle"),
        f"<path d='M{LEFT + side} {y} L{first.x:.1f} {y}' stroke='{FAINT}' stroke-width='1.5' fill='none'/>",
    ]


def draw_columns(laid: Placement) -> list[str]:
    drawn = []
    for column in laid.columns.values():
        rounding = 3 if column.block.kind == "block" else column.width / 2
        drawn.append(f"<g><title>{escape(told(column.block))}</title>")
        clip = f"c{len(drawn)}"
        box = f"x='{column.x:.1f}' y='{column.top:.1f}' width='{column.width:.1f}' height='{column.bottom - column.top:.1f}'"
        drawn.append(f"<clipPath id='{clip}'><rect {box} rx='{rounding:.1f}'/></clipPath><g clip-path='url(#{clip})'>")
        for (birth, _), upper, lower in zip(column.block.stripes, column.edges, column.edges[1:], strict=False):
            stripe = f"x='{column.x:.1f}' y='{upper:.1f}' width='{column.width:.1f}' height='{lower - upper:.1f}'"
            drawn.append(f"<rect {stripe} fill='{colour(birth)}' stroke='{PAPER}' stroke-width='0.8'/>")
        drawn.append("</g></g>")
    return drawn


def told(block: Block) -> str:
    """What a pointing device shows."""
    stripes = ", ".join(f"{count} channels born at stage {birth}" for birth, count in block.stripes)
    size = "×".join(map(str, block.size))
    return f"{block.name}: {stripes}" + (f", {size} pixels" if size else "")


def draw_ribbons(seen: Survey, laid: Placement) -> list[str]:
    """Between neighbours: every stripe of the reader, tied to all it may read."""
    order = {name: i for i, name in enumerate(laid.columns)}
    drawn = []
    for link in seen.links:
        if link.source not in order or link.reader not in order or link.reader in laid.branches:
            continue
        if order[link.reader] - order[link.source] != 1:
            continue
        source, reader = laid.columns[link.source], laid.columns[link.reader]
        for (birth, _), upper, lower in reversed(
            list(zip(reader.block.stripes, reader.edges, reader.edges[1:], strict=False))
        ):
            a, b = source.x + source.width, reader.x
            shape = f"M{a:.1f} {source.top:.1f} L{b:.1f} {upper:.1f} L{b:.1f} {lower:.1f} L{a:.1f} {source.until(birth):.1f} Z"
            drawn.append(f"<path d='{shape}' fill='{colour(birth)}' fill-opacity='0.3'/>")
    return drawn


@dataclass(frozen=True)
class Arc:
    path: str
    birth: int
    peak: float  # y of its farthest point


def find_arcs(seen: Survey, laid: Placement) -> list[Arc]:
    """Between blocks that are not neighbours: arcs over the trunk, the last stage's under it where levels interlace."""
    order = {name: i for i, name in enumerate(laid.columns) if name not in laid.branches}
    last = max(link.birth for link in seen.links)
    found = []
    for link in seen.links:
        if link.source not in order or link.reader not in order or order[link.reader] - order[link.source] < 2:
            continue
        one, two = laid.columns[link.source], laid.columns[link.reader]
        down = laid.folded and link.birth == last
        y1, y2 = (one.bottom, two.bottom) if down else (one.top, two.top)
        span = two.middle - one.middle
        rise = min(ARC * 1.25, 14 + span * 0.62)
        level = max(y1, y2) + rise if down else min(y1, y2) - rise
        bend = f"{one.middle + span * 0.12:.1f} {level:.1f} {two.middle - span * 0.12:.1f} {level:.1f}"
        path = f"M{one.middle:.1f} {y1:.1f} C{bend} {two.middle:.1f} {y2:.1f}"
        found.append(Arc(path, link.birth, 0.75 * level + 0.125 * (y1 + y2)))
    return found


def draw_arcs(seen: Survey, laid: Placement) -> list[str]:
    last = max(link.birth for link in seen.links)
    drawn = []
    for arc in sorted(find_arcs(seen, laid), key=lambda arc: -arc.birth):  # earlier stages on top
        line = f"stroke='{colour(arc.birth)}' stroke-width='{1.5 if arc.birth < last else 1}' stroke-opacity='0.7'"
        drawn.append(f"<path d='{arc.path}' fill='none' {line}/>")
    return drawn


def draw_brackets(laid: Placement) -> list[str]:
    """Under columns of one size: how many pixels and channels they have."""
    trunk = [c for name, c in laid.columns.items() if name not in laid.branches]
    runs: list[list[Column]] = []
    for column in trunk:
        if runs and kin(runs[-1][0].block) == kin(column.block):
            runs[-1].append(column)
        else:
            runs.append([column])
    y = laid.bottom + 18
    drawn = []
    for run in runs:
        count = sum(column.block.kind == "block" for column in run)
        if count < 3:
            continue
        a, b = run[0].x, run[-1].x + run[-1].width
        size = "×".join(map(str, run[0].block.size))
        drawn.append(f"<path d='M{a:.1f} {y - 5:.1f} v5 H{b:.1f} v-5' fill='none' stroke='{FAINT}'/>")
        words = [f"{count} blocks, {size} pixels", f"{run[0].block.channels} channels"]
        if len(", ".join(words)) * 6.3 < b - a + 20:
            words = [", ".join(words)]
        for row, line in enumerate(words):
            drawn.append(text((a + b) / 2, y + 17 + 15 * row, line, 11.5, FAINT, "middle", halo=HALO))
    return drawn


def kin(block: Block) -> tuple[bool, tuple[int, ...], int]:
    """What blocks of one group have in common. The stem is no part of a group."""
    return block.name.rpartition(".")[2] == "stem", block.size, block.channels


def draw_heads(plan: Plan, seen: Survey, laid: Placement) -> tuple[list[str], float]:
    """A label for every answer, tied to the last thing its head reads: at the right end, or below an early exit.

    Returns also how far down the drawing reaches."""
    heads = [block for block in seen.blocks if block.kind == "head"]
    order = list(laid.columns)
    trunk = [c for name, c in laid.columns.items() if name not in laid.branches]
    ends = trunk[max(i for i, c in enumerate(trunk) if c.block.kind == "block") :]
    sources = []
    for head in heads:
        reads = [link.source for link in seen.links if link.reader == head.name and link.source in order]
        sources.append(laid.columns[max(reads, key=order.index)])
    right = [i for i, source in enumerate(sources) if source in ends]
    pitch = max(36.0, min(52.0, TALLEST / max(1, len(right))))
    drawn: list[str] = []
    bottom = laid.bottom + 52
    for row, i in enumerate(right):
        x, y = laid.right + 46, laid.axis + (row - (len(right) - 1) / 2) * pitch
        drawn += [tie(sources[i], plan.answering[i], x, y), *answer(plan, i, x, y)]
    for i in (i for i in range(len(heads)) if i not in right):
        box = sources[i]
        stem = laid.columns[laid.branches[box.block.name]] if box.block.name in laid.branches else box
        low = box.bottom if stem is not box else laid.bottom + 44
        line = f"M{stem.middle:.1f} {stem.bottom:.1f} V{low + 14:.1f}"
        drawn.append(f"<path d='{line}' stroke='{colour(plan.answering[i])}' stroke-width='2' fill='none'/>")
        drawn += answer(plan, i, box.middle - 12, low + 26)
        bottom = max(bottom, low + 56)
    return drawn, bottom


def tie(column: Column, stage: int, x: float, y: float) -> str:
    """From what a head reads (all that is born by its stage) to the head."""
    start, upper, lower = column.x + column.width, column.top, column.until(stage)
    bend = (x - start) * 0.5
    if column.block.kind == "join":  # joins stand side by side: a line leaves each at the height of its answer
        leave = min(max(y, upper + 8), column.bottom - 8)
        curve = f"M{start:.1f} {leave:.1f} C{start + bend:.1f} {leave:.1f} {x - bend:.1f} {y:.1f} {x:.1f} {y:.1f}"
        return f"<path d='{curve}' stroke='{colour(stage)}' stroke-width='2.5' stroke-opacity='0.8' fill='none'/>"
    shape = (
        f"M{start:.1f} {upper:.1f} C{start + bend:.1f} {upper:.1f} {x - bend:.1f} {y - 9:.1f} {x:.1f} {y - 9:.1f} V{y + 9:.1f} "
        f"C{x - bend:.1f} {y + 9:.1f} {start + bend:.1f} {lower:.1f} {start:.1f} {lower:.1f} Z"
    )
    return f"<path d='{shape}' fill='{colour(stage)}' fill-opacity='0.22'/>"


def answer(plan: Plan, i: int, x: float, y: float) -> list[str]:
    stage = plan.answering[i]
    return [
        f"<circle cx='{x + 12:.1f}' cy='{y:.1f}' r='12' fill='{colour(stage)}'/>",
        text(x + 12, y + 4.5, str(i + 1), 13, PAPER, "middle", bold=True),
        text(x + 32, y - 2, plan.sizes[i], 13.5, bold=True),
        text(x + 32, y + 13, f"{millions(plan.macs(stage))} MACs", 11.5, FAINT),
    ]


def draw_legend(plan: Plan, y: float) -> tuple[list[str], float]:
    drawn, x = [], LEFT
    y += 14
    for i, stage in enumerate(plan.answering):
        drawn.append(f"<rect x='{x:.1f}' y='{y:.1f}' width='15' height='15' rx='3' fill='{colour(stage)}'/>")
        drawn.append(text(x + 22, y + 12.5, f"born at stage {i + 1}", 12.5, bold=True))
        new = f"+{millions(plan.new_macs(stage))} MACs, +{millions(plan.new_params(stage))} parameters"
        drawn.append(text(x + 22, y + 29, new, 11.5, FAINT))
        x += LEGEND
    return drawn, y + 52


def millions(count: int) -> str:
    return (
        f"{count / 1e9:.2f} G" if count >= 1e9 else f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count / 1e3:.1f} k"
    )
