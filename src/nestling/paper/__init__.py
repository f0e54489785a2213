"""The paper's experiments: its grid of runs, and our numbers beside its numbers.

grid.py knows which recipe stands behind each cell and trains it; results.py turns run folders into rows and compares.
"""

from pathlib import Path
from typing import Any

from rich.table import Table

from nestling.errors import NestlingError
from nestling.paper.grid import cells, train_cells
from nestling.paper.results import collect, compare, write_csv


def command(
    table: str,
    network: tuple[str, ...] = (),
    strategy: tuple[str, ...] = (),
    seeds: int = 1,
    set: tuple[str, ...] = (),
    out: str = "runs/paper",
    results: str = "",
    beside: int = 3,
    minutes: float = 0.0,
    dry: bool = False,
) -> dict[str, Any]:
    """Train a part of the paper's grid (skipping what is finished) and set the errors beside the paper's.

    Args:
        table: table1, table2, table3, or digits for a small grid on the digits.
        network: only these networks; may be repeated; by default all of the table.
        strategy: only these (sgd, osgd, sgd-sum, normsgd, osgd-norm, alone, greedy); may be repeated; by default all.
        seeds: runs of each cell.
        set: change a field of every recipe, key=value; may be repeated.
        out: folder of the run folders.
        results: write one row per run and stage to this CSV file.
        beside: runs trained at the same time on one GPU.
        minutes: stop after so many minutes with checkpoints, to be gone on with later; 0 means never.
        dry: train nothing, only collect what is there.
    """
    chosen = list(cells(table, network, strategy, seeds, set))
    words = [f"nestling paper {table}"]
    words += [f"--{key} {value}" for key, values in (("network", network), ("strategy", strategy)) for value in values]
    words += [f"--seeds {seeds}", *(f"--set {each}" for each in set)]
    if not dry:
        train_cells(chosen, out, beside, 60 * minutes if minutes else float("inf"), " ".join(words))
    rows = collect(Path(out) / name for name, _ in chosen)
    if not rows:
        raise NestlingError(
            f"no run of {table} is finished in {out}; train some (without --dry), or give them more time."
        )
    if results:
        write_csv(rows, Path(results))
    return {"table": table, "runs": len(chosen), "results": results, "rows": compare(rows)}


def show(result: dict[str, Any]) -> Table:
    title = (
        f"{result['table']}: error in %, ours beside the paper's (* = beyond two of the paper's standard deviations)"
    )
    table = Table("network", "strategy", "epochs", "size", "error %", "n", "paper", title=title)
    last = None
    for row in result["rows"]:
        head = (row["network"], row["strategy"], str(row["epochs"]))
        if last is not None and head != last:
            table.add_section()
        error = f"{row['error']:.2f}" + ("" if row["std"] is None else f" ± {row['std']:.2f}")
        paper = "" if row["paper"] is None else f"{row['paper']:.1f}" + (" *" if row["beyond"] else "")
        table.add_row(*(head if head != last else ("", "", "")), row["size"], error, str(row["n"]), paper)
        last = head
    return table
