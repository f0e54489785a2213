"""A report as Markdown, with its pictures as links into a folder.

Comes in: a Document and the folder's name. Goes out: text in GitHub's dialect. It says what the page says, less
what only a browser can do.
"""

from nestling.report.content import (
    Cell,
    Document,
    Gallery,
    NestSummary,
    Note,
    PageBlock,
    Picture,
    Pictures,
    Section,
    Table,
    Text,
)


def markdown(report: Document, folder: str) -> str:
    parts = [f"# {report.title}", report.lead, *(section_text(section, folder) for section in report.sections)]
    return "\n\n".join(parts) + "\n"


def section_text(section: Section, folder: str) -> str:
    return "\n\n".join([f"## {section.title}", *(block_text(block, folder) for block in section.blocks)])


def block_text(block: PageBlock, folder: str) -> str:
    if isinstance(block, Text):
        return plain(block.text)
    if isinstance(block, Note):
        return f"> {plain(block.text)}"
    if isinstance(block, Table):
        return table_text(block)
    if isinstance(block, NestSummary):
        return steps_text(block)
    if isinstance(block, Gallery):
        return gallery_text(block, folder)
    return pictures_text(block, folder)


def steps_text(block: NestSummary) -> str:
    steps = [f"- {plain(step.size)}: {plain(step.error)} error, {plain(step.cost)}" for step in block.items]
    beside = [f" ({plain(step.beside)})" if step.beside else "" for step in block.items]
    return "\n".join(
        [f"**{plain(block.title)}**, {plain(block.words)}", "", *map("".join, zip(steps, beside, strict=True))]
    )


def pictures_text(block: Pictures, folder: str) -> str:
    return "\n\n".join(picture_text(each, folder) for each in block.items)


def picture_text(picture: Picture, folder: str) -> str:
    shown = f"![{plain(picture.title)}]({folder}/{picture.name}.svg)"
    return f"{shown}\n\n*{plain(picture.caption)}*" if picture.caption else shown


def table_text(table: Table) -> str:
    heads = [cell_text(cell) for cell in table.columns]
    marks = ["---" if index < table.words else "---:" for index in range(len(heads))]
    lines = [heads, marks, *([cell_text(cell) for cell in row] for row in table.rows)]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join(part for part in (f"**{plain(table.title)}**", text, plain(table.caption)) if part)


def cell_text(cell: Cell) -> str:
    text = f"`{cell.text.replace('|', ' ')}`" if cell.code else plain(cell.text)
    text = f"**{text}**" if cell.strong else text
    text = f"{text} {plain(cell.after)}" if cell.after else text
    return f"{text} ({plain(cell.small)})" if cell.small else text


def gallery_text(block: Gallery, folder: str) -> str:
    lines = [f"- {plain(shelf.title)}: {shelf.count:,} of {block.n:,}" for shelf in block.shelves]
    title = f"**{plain(block.title)}**"
    return "\n\n".join([title, "\n".join(lines), f"![{plain(block.sheet.title)}]({folder}/{block.sheet.name}.png)"])


def plain(text: str) -> str:
    """Text that Markdown would not take for its own signs."""
    for sign in "\\`*_[]<>|#":
        text = text.replace(sign, f"\\{sign}")
    return text
