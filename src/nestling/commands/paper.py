"""`nestling paper`: a part of the paper's grid is trained, measured or drawn."""

import importlib.util
from pathlib import Path
from typing import Any

from rich import table
from rich.console import Group
from rich.text import Text

from nestling.errors import NestlingError
from nestling.paper.grid import cells, train_cells
from nestling.paper.results import collect, compare, store
from nestling.paper.tables import LEGEND, Table, tables

WRITE_UP = ("figures", "profile")  # parts that train nothing


def command(
    part: str,
    network: tuple[str, ...] = (),
    strategy: tuple[str, ...] = (),
    scope: tuple[str, ...] = (),
    order: tuple[str, ...] = (),
    seeds: int = 1,
    set: tuple[str, ...] = (),
    out: str = "runs/paper",
    results: str = "results",
    page: str = "runs/figures.html",
    data: str = "cifar10",
    beside: int = 3,
    minutes: float = 0.0,
    dry: bool = False,
) -> dict[str, Any]:
    """Train a part of the paper's grid (skipping what is finished), or draw its tables and figures from what there is.

    Args:
        part: table1, table2, table3, scopes (osgd's four), priorities (four orders), digits (a small grid); figures
            draws all tables and figures, profile measures the latency of every network that has a finished run.
        network: only these networks; may be repeated; by default all of the table, width-resnet42 for scopes and priorities.
        strategy: only these (sgd, osgd, sgd-sum, normsgd, osgd-norm, alone, alone-norm, greedy); may be repeated; by default
            all but alone-norm, which is independent nets with normalised gradients.
        scope: osgd with these scopes (all, shared, block, tensor); may be repeated.
        order: osgd with these priority orders, such as 3,1,2; may be repeated.
        seeds: runs of each cell.
        set: change a field of every recipe, key=value; may be repeated. Figures show only runs that were so changed.
        out: folder of the run folders.
        results: where one row per run and stage goes: a CSV file, or a folder of files named by data and device. Figures
            read all files of this folder. Empty: nowhere.
        page: where figures go: report.html also makes report.md and the folder report/ with the pictures.
        data: figures of cifar10 or of the small digits grid.
        beside: runs trained at the same time on one GPU.
        minutes: stop after so many minutes with checkpoints, to be gone on with later; 0 means never.
        dry: train nothing, only collect what is there.
    """
    if part in WRITE_UP:
        return {"part": part, **write_up(part, out, results, page, strategy, data, set)}
    chosen = list(cells(part, network, strategy, seeds, set, scope, order))
    failed: dict[str, str] = {}
    if not dry:
        options = {"network": network, "strategy": strategy, "scope": scope, "order": order, "set": set}
        words = [f"nestling paper {part}", *(f"--{key} {value}" for key, values in options.items() for value in values)]
        seconds = 60 * minutes if minutes else float("inf")
        failed = train_cells(chosen, out, beside, seconds, f"{' '.join(words)} --seeds {seeds}")
    rows = collect(Path(out) / name for name, _ in chosen)
    if not rows:
        why = next((f"; {path} failed: {text}" for path, text in failed.items()), "")
        raise NestlingError(
            f"no run of {part} is finished in {out}; train some (without --dry), or give them more time{why or '.'}"
        )
    files = store(rows, results) if results else []
    networks = list(dict.fromkeys(row["network"] for row in rows))
    means = {"rows": compare(rows), "top5": compare(rows, "top5")}
    missing = (
        f"{len(failed)} of {len(chosen)} runs failed; mend what they say and give the same command" if failed else ""
    )
    found = {"part": part, "runs": len(chosen), "networks": networks, "results": files, **means}
    return {**found, "failed": failed, "incomplete": missing}


def write_up(
    part: str, out: str, results: str, page: str, strategy: tuple[str, ...], data: str, set: tuple[str, ...]
) -> dict[str, Any]:
    """What is done with runs that are there: draw them, or measure the latency of their networks."""
    if importlib.util.find_spec("matplotlib") is None:
        raise NestlingError("figures need matplotlib, which is not installed; pip install 'nestling[report]'")
    from nestling.paper import figures, studies  # here, because matplotlib may be missing and takes its time
    from nestling.report.runs import find

    if part == "profile":
        return {"measured": studies.measure(find([out]))}
    return figures.draw(out, results, page, strategy, data, set)


def show(result: dict[str, Any]) -> Group:
    """The tables, and where everything is."""
    if result["part"] == "profile":
        return Group(Text("\n".join(["measured:", *(result["measured"] or ["nothing: all networks have profiles"])])))
    lines = [LEGEND]
    if result["part"] == "figures":
        lines.append(f"page: {result['report']}, {result['markdown']}, pictures in {result['pictures']}")
        lines += [f"missing: {command}" for command in result["missing"]]
    else:
        lines += [f"rows are in {path}" for path in result["results"]]
        lines += [f"failed: {path}: {why}" for path, why in result["failed"].items()]
    shown = tables(result["rows"], result["top5"], result["networks"])
    return Group(*(terminal(each) for each in shown), Text("\n".join(lines)))


def terminal(content: Table) -> table.Table:
    """A table for people at a terminal."""
    shown = table.Table(title=content.title, show_lines=True)
    for cell in content.columns:
        shown.add_column(cell.text, overflow="fold")  # settings are long words, and all of one matters
    for line in content.rows:
        shown.add_row(*("\n".join(filter(None, (f"{c.text} {c.after}".strip(), c.small))) for c in line))
    return shown
