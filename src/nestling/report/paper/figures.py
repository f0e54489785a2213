"""`nestling paper figures`: the paper's tables and figures from whatever results exist, as a page, Markdown and pictures.

In: a folder of CSV results, a folder of run folders. Out: the files, the means behind the tables, the deadline rows, and the
command lines that would train what is missing. Drawing is pictures.py's, tables are tables.py's; this room puts them together.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nestling.errors import NestlingError, nearest
from nestling.files import RECIPE
from nestling.recipes.rules import show
from nestling.report.content import Document, Note, PageBlock, Pictures, Section, Text
from nestling.report.paper import pictures
from nestling.report.paper.claims import CIFAR10, claims, claims_table
from nestling.report.paper.deadline_rows import read_studies, store_studies, view_rows
from nestling.report.paper.pictures import VIEWS
from nestling.report.paper.tables import LEGEND, coverage_table, missing, tables, tiny_tables
from nestling.report.publish import publish
from nestling.report.records import Run, find
from nestling.studies.paper.constant import as_usual
from nestling.studies.paper.grid import STUDIED, TABLES, four_orders, sizes_of, trains
from nestling.studies.paper.lent import lent
from nestling.studies.paper.results import (
    INDEPENDENT,
    SAME_RUN,
    TINY,
    Row,
    collect,
    compare,
    less,
    merged,
    read_results,
)
from nestling.studies.paper.statistics import label

SHOWN = ("osgd", "sgd")  # ways of training that the figures show, the paper's own first
FIXED = "strategy.order="


def draw(
    runs: str, results: str, page: str, names: Sequence[str] = (), data: str = "cifar10", settings: Sequence[str] = ()
) -> dict[str, Any]:
    """Read everything, draw everything, write everything, and say what is missing.

    `names`: the ways of training that the figures show. `settings`: only runs that were all trained with these changes.
    """
    if data not in VIEWS:
        raise NestlingError(f"there are no figures of {data!r}; did you mean {nearest(data, VIEWS)}?")
    names = tuple(names) or SHOWN
    parts = [part for part in TABLES if (part == "digits") == (data == "digits") and part != "tiny"]
    folders = sorted(path.parent for path in Path(runs).rglob(RECIPE)) if Path(runs).is_dir() else []
    rows = merged(read_results(results), collect(folders))
    tiny, whole = [row for row in rows if row.get("data") == TINY], data == "cifar10" and not settings
    rows = [row for row in rows if row.get("data") != TINY]
    shared = [{**row, "changes": less(row["changes"], settings)} for row in rows]
    asked = [
        row for row, whole_row in zip(shared, rows, strict=True) if row["changes"] is not None and trains(whole_row)
    ]
    rows = lent(as_usual(asked), parts)
    means = [{**row, "name": label(row)} for row in compare(rows)]
    refuse_unknown(names, means)
    orders, unordered = order_figure(means, data)
    absent = [*(command for part in parts for command in missing(part, means)), *unordered]
    absent = [" ".join([command, *(f"--set {each}" for each in settings)]) for command in absent]
    networks = [network for part in parts for network in TABLES[part]]
    study, drawn = deadlines(find(folders) if folders else [], results, names, settings, data)
    top5 = compare(rows, "top5")
    shown = tables(means, top5, networks)
    sections = (
        *(held(rows, study, means, tiny) if whole else ()),
        Section("tradeoff", "Error against MACs", tradeoff(means, names, data)),
        Section("deadlines", "Error under deadlines", drawn),
        Section("priorities", "Priority orders", orders),
        Section(
            "tables",
            "The tables, ours beside the paper's",
            (Text(LEGEND), *shown) if shown else (Text("Nothing yet."),),
        ),
        *([Section("tiny", "Table 3 on Tiny ImageNet", tuple(tiny_tables(tiny)))] if tiny and whole else []),
        Section("missing", "What is missing", tuple(map(Note, absent)) or (Text("Nothing."),)),
    )
    lead = (
        "“Orthogonalized SGD and Nested Architectures for Anytime Neural Networks” (ICML 2020): its tables and figures, "
        f"made from {runs_behind(shared, networks)} runs of ours. Every number is a row of a CSV file in the "
        "folder of results or of a run folder."
    )
    files = publish(Document("The paper's experiments", lead, sections), Path(page))
    return {**files, "networks": networks, "rows": means, "top5": top5, "deadlines": study, "missing": absent}


def held(rows: Sequence[Row], study: Sequence[Row], means: Sequence[Row], tiny: Sequence[Row]) -> tuple[Section, ...]:
    """What of the paper's claims holds, and how much of its grid that rests on."""
    return (
        Section("coverage", "How much has been trained", (coverage_table(means, CIFAR10),)),
        Section("claims", "What holds", (claims_table(claims(rows, study, tiny)),)),
    )


def runs_behind(rows: Sequence[Row], networks: Sequence[str]) -> int:
    """How many runs of these networks the rows come from; an independent net has one row."""
    own = [row for row in rows if row["changes"] is not None and row["network"] in networks]
    keys = [key for key in SAME_RUN if key != "stage"]
    return len({(*(row.get(key) for key in keys), row["strategy"] in INDEPENDENT and row["stage"]) for row in own})


def refuse_unknown(names: Sequence[str], means: Sequence[Row]) -> None:
    known = {*SHOWN, *(row["name"] for row in means)}
    for name in names:
        if name not in known:
            raise NestlingError(f"no results of {name!r}; did you mean {nearest(name, sorted(known))}?")


def tradeoff(means: Sequence[Row], names: Sequence[str], data: str) -> tuple[PageBlock, ...]:
    bars = " Bars: standard deviation over seeds." if any(row["n"] > 1 for row in means if row["name"] in names) else ""
    caption = (
        f"Base: the paper's baselines (even-width for width, the cascade for the others), trained with {names[0]}. Oracle: "
        f"independent nets of the stages' sizes, of which the right one would have to be known beforehand.{bars}"
    )
    if any(pictures.papers(view.nests[0], names[0].partition(" ")[0]).points for view in VIEWS[data]):
        caption += " Crosses: the paper's own errors, at the costs of our drawing of its networks."
    return (Pictures((pictures.tradeoffs(VIEWS[data], means, names, caption),)),)


def deadlines(
    runs: Sequence[Run], results: str, names: Sequence[str], settings: Sequence[str], data: str
) -> tuple[list[Row], tuple[PageBlock, ...]]:
    """The rows of all three panels and the picture of them; what was computed is kept with the results."""
    stored = (
        [row for path in sorted(Path(results).glob("deadlines-*.csv")) for row in read_studies(path)] if results else []
    )
    found = [view_rows(view, runs, names, settings, [] if settings else stored) for view in VIEWS[data]]
    rows = [row for panel, _ in found for row in panel]
    if results and rows and not settings:  # studies of a changed grid are drawn, not kept
        store_studies(rows, Path(results))
    largest = {row["network"]: row["deadlines_from"] for row in rows}
    counts = sorted({row["n"] for row in rows})
    behind = (
        f" Runs behind each bar: {' to '.join(dict.fromkeys(map(str, counts[:1] + counts[-1:])))}." if counts else ""
    )
    caption = (
        "Seven deadlines from 0.5 to 1 times a mean latency, then none; without an answer in time, a random guess. "
        f"Latencies are a measured trace, input by input, on the device under each panel.{behind} "
        + " ".join(f"{network}: deadlines from {text}." for network, text in largest.items())
    )
    picture = pictures.deadline_bars(VIEWS[data], [panel for panel, _ in found], [why for _, why in found], caption)
    return rows, (Pictures((picture,)),)


def order_figure(means: Sequence[Row], data: str) -> tuple[tuple[PageBlock, ...], list[str]]:
    """The network that was trained under most orders (the usual one, where none was), and the command that is missing."""
    usual = STUDIED if data == "cifar10" else "width-digits"
    alike = [network for table in TABLES.values() if usual in table for network in table]
    network = max([usual, *alike], key=lambda name: len({row["name"] for row in means if turned(row, name)}))
    orders = four_orders(len(sizes_of(network)))
    lines = []
    for order in orders:
        name = "osgd" if order == orders[0] else f"osgd {FIXED}{show(order)}"
        lines.append((f"osgd, order {show(order)}", of(means, network, name)))
    lines.append(("sgd", of(means, network, "sgd")))
    absent = [text for text, rows in lines if not rows]
    counted = [f"{text}: n = {min(row['n'] for row in rows)}" for text, rows in lines if rows]
    caption = " ".join(
        [
            "Orders name stages, most important first; 1 first is the paper's usual order.",
            *(f"{each}." for each in counted),
        ]
    )
    commands = [f"nestling paper priorities --network {network}"] if absent else []
    return (Pictures((pictures.priorities(network, lines, absent, caption),)),), commands


def turned(row: Row, network: str) -> bool:
    return bool(row["network"] == network and row["strategy"] == "osgd" and row["changes"].startswith(FIXED))


def of(means: Sequence[Row], network: str, name: str) -> list[Row]:
    found = [row for row in means if row["network"] == network and row["name"] == name]
    return sorted(found, key=lambda row: int(row["stage"]))
