"""`nestling report`: run folders as one page."""

import importlib.util
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from nestling.commands import waiting
from nestling.errors import NestlingError


def command(runs: tuple[str, ...], out: str = "report.html", live: tuple[str, ...] = ()) -> dict[str, Any]:
    """Write run folders up as one HTML page that opens offline, with the same as Markdown and its pictures beside it.

    A run with a damaged file is named and left out, as long as another one is there.

    Args:
        runs: run folders, or folders that hold run folders.
        out: the page's file; report.html also makes report.md and the folder report/ with the pictures.
        live: a file that `nestling profile NAME --live --json` printed, shown as a section; may be repeated.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise NestlingError("reports are drawn with matplotlib, which is not installed; pip install 'nestling[report]'")
    from nestling.report.publish import write  # here, because matplotlib may be missing and takes its time

    page = Path(out)
    if page.suffix.lower() not in (".html", ".htm"):
        raise NestlingError(f"--out is {out!r}; expected a file that ends in .html, such as report.html")
    waiting.at(f"drawing {page}")
    return write(runs, page, live)


def show(result: dict[str, Any]) -> Group:
    """The headline tables, and where the report is."""
    parts: list[Table | Text] = []
    for family in result["headline"]:
        if not family["n"]:
            parts.append(Text(f"{family['network']} on {family['data']}: no results yet, as no run has finished"))
            continue
        title = f"{family['network']} on {family['data']}: error in % ({family['split']}, {family['n']:,} images)"
        table = Table("training", "n", *family["sizes"], title=title)
        for line in family["lines"]:
            if not line["stages"]:
                continue
            cells = {row["stage"]: row for row in line["stages"]}
            texts = [cell_text(cells.get(stage)) for stage in range(1, len(family["sizes"]) + 1)]
            table.add_row(line["training"], str(line["n"]), *texts)
        parts.append(table)
    parts.append(Text(f"report: {result['report']}\n    and {result['markdown']}, pictures in {result['pictures']}"))
    return Group(*parts)


def cell_text(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    text = f"{100 * row['error']:.2f}"
    return text if row["std"] is None else f"{text} ± {100 * row['std']:.2f}"
