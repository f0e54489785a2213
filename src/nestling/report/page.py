"""A report as one HTML page that needs nothing else: styles, pictures and a little script are inside it.

Comes in: a Document. Goes out: the page as text. It asks the network for nothing (its own policy forbids it), follows
the reader's light or dark mode, and works without its script.
"""

import base64
import json
from collections.abc import Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from nestling import __version__
from nestling.report.content import (
    Card,
    Cell,
    Document,
    Gallery,
    NestSummary,
    Note,
    PageBlock,
    Picture,
    Pictures,
    Section,
    Shelf,
    StageSummary,
    Table,
    Text,
)
from nestling.report.theme import DARK, LIGHT, inline, variables
from nestling.report.words import percent, time_text

HERE = Path(__file__).parent
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(report: Document) -> str:
    styles = (HERE / "page.css").read_text(encoding="utf-8")
    script = (HERE / "page.js").read_text(encoding="utf-8")
    links = "".join(f'<a href="#{section.name}">{section.name.capitalize()}</a>' for section in report.sections)
    body = "\n".join(section_html(section) for section in report.sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<link rel="icon" href="data:,">
<title>{escape(report.title)}</title>
<style>
:root {{ {variables(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {variables(DARK)} }} }}
{styles}</style>
</head>
<body>
<header>
<h1>{escape(report.title)}</h1>
<p class="lead">{escape(report.lead)}</p>
<nav aria-label="Sections">{links}</nav>
</header>
<main>
{body}
</main>
<footer>Written by nestling {__version__}. Everything on this page is inside this file.</footer>
<script>
{script}</script>
</body>
</html>
"""


def section_html(section: Section) -> str:
    groups = [list(found) for _, found in groupby(section.blocks, key=kind)]
    blocks = "\n".join(beside([block_html(block) for block in found]) for found in groups)
    return f'<section id="{section.name}">\n<h2>{escape(section.title)}</h2>\n{blocks}\n</section>'


def kind(block: PageBlock) -> str:
    """Neighbours of one kind stand side by side where there is room; most blocks stand alone."""
    if isinstance(block, Table):
        if block.wide:
            return str(id(block))
        return "folded" if block.folded else "provenance" if block.name == "provenance" else "table"
    return "steps" if isinstance(block, NestSummary) else str(id(block))


def beside(blocks: Sequence[str]) -> str:
    return blocks[0] if len(blocks) == 1 else f'<div class="beside">{"".join(blocks)}</div>'


def block_html(block: PageBlock) -> str:
    if isinstance(block, Text):
        return f'<p class="text">{escape(block.text)}</p>'
    if isinstance(block, Note):
        return f'<p class="note">{escape(block.text)}</p>'
    if isinstance(block, Table):
        return table_html(block)
    if isinstance(block, NestSummary):
        return steps_html(block)
    if isinstance(block, Gallery):
        return gallery_html(block)
    return pictures_html(block)


def swatch(stage: int) -> str:
    return f'<i class="swatch" style="--c: var(--stage{(stage - 1) % 6 + 1})"></i>'


def steps_html(block: NestSummary) -> str:
    items = "".join(step_html(step) for step in block.items)
    return (
        f'<div class="steps"><h3>{escape(block.title)} <small>{escape(block.words)}</small></h3><ol>{items}</ol></div>'
    )


def step_html(step: StageSummary) -> str:
    beside = f"<small>{escape(step.beside)}</small>" if step.beside else ""
    return (
        f'<li style="--c: var(--stage{(step.stage - 1) % 6 + 1})"><b>{escape(step.size)}</b>'
        f"<strong>{escape(step.error)}</strong><span>{escape(step.cost)}</span>{beside}</li>"
    )


def table_html(table: Table) -> str:
    head = "".join(f'<th scope="col">{cell_html(cell)}</th>' for cell in table.columns)
    rows = "\n".join(row_html(row) for row in table.rows)
    caption = f"<figcaption>{escape(table.caption)}</figcaption>" if table.caption else ""
    name = f' data-name="{table.name}"' if table.name else ""
    inner = (
        f'<div class="scroll"><table class="words{table.words}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{caption}"
    )
    if table.folded:
        return f'<details class="table"{name}><summary>{escape(table.title)}</summary>{inner}</details>'
    return f'<figure class="table"{name}><h3>{escape(table.title)}</h3>{inner}</figure>'


def row_html(row: Sequence[Cell]) -> str:
    first, *others = row
    cells = "".join(f"<td>{cell_html(cell)}</td>" for cell in others)
    return f'<tr><th scope="row">{cell_html(first)}</th>{cells}</tr>'


def cell_html(cell: Cell) -> str:
    text = escape(cell.text)
    text = f"<code>{text}</code>" if cell.code else f"<b>{text}</b>" if cell.strong else text
    before = swatch(cell.stage) if cell.stage else ""
    after = f" <span>{escape(cell.after)}</span>" if cell.after else ""
    return f"{before}{text}{after}" + (f"<small>{escape(cell.small)}</small>" if cell.small else "")


def pictures_html(block: Pictures) -> str:
    return f'<div class="pictures">{"".join(picture_html(each) for each in block.items)}</div>'


def picture_html(picture: Picture) -> str:
    svg = inline(picture.svg, picture.name).replace("<svg", f'<svg role="img" aria-label="{escape(picture.title)}"', 1)
    caption = f"<figcaption>{escape(picture.caption)}</figcaption>" if picture.caption else ""
    kind = "picture wide" if picture.wide else "picture"
    return f'<figure class="{kind}" data-name="{picture.name}">{svg}{caption}</figure>'


# --- the gallery ----------------------------------------------------------------------------------------------------


def gallery_html(block: Gallery) -> str:
    shares = "".join(
        f'<span style="--share: {shelf.count}; --c: {shelf_colour(block, shelf)}" '
        f'title="{escape(shelf.title)}: {shelf.count:,} of {block.n:,}"></span>'
        for shelf in block.shelves
    )
    shelves = "\n".join(shelf_html(block, shelf) for shelf in block.shelves)
    facts = {"sizes": block.sizes, "errors": block.errors, "times": block.times, "n": block.n}
    return f"""<div class="gallery" data-name="{block.name}" data-facts="{escape(json.dumps(facts))}">
<h3>{escape(block.title)}</h3>
<div class="shares">{shares}</div>
{slider_html(block)}
{shelves}
</div>"""


def slider_html(block: Gallery) -> str:
    """Drawn by the script, because without it a slider would do nothing."""
    steps = [
        f"{size}: {percent(error)} %" + (f" after {time_text(block.times[i])}" if block.times else "")
        for i, (size, error) in enumerate(zip(block.sizes, block.errors, strict=True))
    ]
    text = f"Error on all {block.n:,} images: {', '.join(steps)}."
    return f'<div class="slider"><p>{escape(text)}</p></div>'


def shelf_colour(block: Gallery, shelf: Shelf) -> str:
    return f"var(--stage{(shelf.stage - 1) % 6 + 1})" if shelf.stage <= len(block.sizes) else "var(--guess)"


def shelf_html(block: Gallery, shelf: Shelf) -> str:
    cards = "".join(card_html(card, block) for card in shelf.cards)
    dot = f'<i class="swatch" style="--c: {shelf_colour(block, shelf)}"></i>'
    count = f"<small>{shelf.count:,} of {block.n:,} images</small>"
    return f'<div class="shelf"><h4>{dot}{escape(shelf.title)} {count}</h4><div class="cards">{cards}</div></div>'


def card_html(card: Card, block: Gallery) -> str:
    image = f"data:image/png;base64,{base64.b64encode(card.png).decode()}"
    words = "".join(
        f'<li class="{"right" if said.right else "wrong"}" data-stage="{said.stage}" '
        f'style="--sure: {said.confidence:.3f}; --c: var(--stage{(said.stage - 1) % 6 + 1})" '
        f'title="{escape(block.sizes[said.stage - 1])}: {escape(said.word)}, {100 * said.confidence:.0f} % sure">'
        f"<span>{escape(said.word)}</span></li>"
        for said in card.said
    )
    label = escape(card.label)
    return f'<figure class="card"><img src="{image}" alt="{label}"><figcaption>{label}</figcaption><ol>{words}</ol></figure>'
