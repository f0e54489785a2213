"""`nestling sweep`: a recipe with several values of some fields becomes a folder of run folders and one file of results."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from nestling.recipes import named
from nestling.recipes.recipe import override, refuse_idle
from nestling.studies.paper.results import collect, compare
from nestling.studies.sweep.axes import grid_runs
from nestling.studies.sweep.driver import ROWS, SweepRun, Workplace, as_told, sweep
from nestling.studies.sweep.processes import Processes

EVERY = 30.0  # seconds between lines where there is no terminal
SHOWN = 30  # runs that a live table has room for


def command(
    recipe: str,
    grid: tuple[str, ...] = (),
    set: tuple[str, ...] = (),
    out: str = "",
    on: Literal["local", "ray"] = "local",
    beside: int = 0,
    quiet: bool = False,
) -> dict[str, Any]:
    """Train a recipe with every combination of some fields' values, each run into a folder of its own.

    A run that is killed is begun again from its checkpoint; one that fails leaves the others alone. Stopped anywhere, the same
    command goes on, and what is finished is not trained again. Each run ends with the bits it would have had alone.

    Args:
        recipe: a recipe's name, or a recipe.json.
        grid: a field and its values, strategy.name=sgd,osgd; values that are lists stand between semicolons,
            "strategy.order=1,2,3;3,2,1"; may be repeated.
        set: change a field of all runs, key=value; may be repeated.
        out: folder of the run folders and of results.csv (one row per run and stage); by default runs/sweep-RECIPE.
        on: where to train; local: processes of this machine; ray: a Ray cluster (RAY_ADDRESS, or the one that runs here).
        beside: runs at the same time, on each GPU or, without one, in all; by default 3 on a GPU, else 1, and with Ray one
            for each core.
        quiet: no progress.
    """
    base = override(named(recipe), set)
    folder = Path(out or f"runs/sweep-{base.name}")
    runs = grid_runs(base, grid)
    refuse_idle((*set, *grid), [made for _, made in runs])
    options = [*(f"--grid {each}" for each in grid), *(f"--set {each}" for each in set)]
    with told(quiet) as tell:
        every = sweep(runs, folder, place(on, beside), " ".join([f"nestling sweep {recipe}", *options]), tell)
    failed = {str(one.run.path): one.why for one in every if one.state == "failed"}
    missing = (
        f"{len(failed)} of {len(every)} runs failed; mend what they say and give the same command" if failed else ""
    )
    rows = collect(one.run.path for one in every)
    about = {"results": str(folder / ROWS) if rows else "", "rows": compare(rows), "runs": list(map(as_told, every))}
    return {"sweep": str(folder), **about, "failed": failed, "incomplete": missing}


def place(on: str, beside: int) -> Workplace:
    if on == "ray":
        from nestling.studies.sweep.cluster import Cluster

        return Cluster(beside)
    return Processes(beside)


@contextmanager
def told(quiet: bool) -> Iterator[Callable[[Sequence[SweepRun]], None]]:
    """Who is told how far all runs are: a live table, a line now and then where there is no terminal, or nobody."""
    console = Console(stderr=True)
    if quiet:
        yield lambda runs: None
    elif console.is_terminal:
        with Live(console=console, transient=True, auto_refresh=False) as live:
            yield lambda runs: live.update(progress_table(runs), refresh=True)
    else:
        last = [time.monotonic()]

        def line(runs: Sequence[SweepRun]) -> None:
            if time.monotonic() - last[0] >= EVERY:
                last[0] = time.monotonic()
                console.print(summary(runs), markup=False, highlight=False)

        yield line


def summary(runs: Sequence[SweepRun]) -> str:
    states = ("finished", "running", "elsewhere", "queued", "waiting", "failed")
    count = {state: sum(one.state == state for one in runs) for state in states}
    at = [f"{one.name} {one.epoch}/{one.epochs}" for one in runs if one.state == "running"]
    return "sweep: " + ", ".join(f"{n} {state}" for state, n in count.items() if n) + f" ({', '.join(at[:8])})"


def progress_table(runs: Sequence[SweepRun]) -> Table:
    """What runs where, and how far: those at work first, then those that failed, and as many others as there is room for."""
    order = ("running", "elsewhere", "failed", "queued", "waiting", "finished")
    shown = sorted(runs, key=lambda one: order.index(one.state))[:SHOWN]
    table = Table("run", "state", "where", "epoch", "error %", "", title=summary(runs).partition(" (")[0])
    for one in shown:
        errors = " / ".join(f"{100 * error:.2f}" for error in one.errors)
        table.add_row(one.name, one.state, one.where, f"{one.epoch}/{one.epochs}", errors, one.why[:60])
    if len(runs) > len(shown):
        table.caption = f"and {len(runs) - len(shown)} more"
    return table


def show(result: dict[str, Any]) -> Group:
    """Means over seeds, a row per stage, and where everything is."""
    table = Table("network", "strategy", "changes", "stage", "size", "error %", "n")
    for row in result["rows"]:
        spread = "" if row["std"] is None else f" ± {row['std']:.2f}"
        what = (row["network"], row["strategy"], row["changes"], str(row["stage"]), row["size"])
        table.add_row(*what, f"{row['error']:.2f}{spread}", str(row["n"]))
    lines = [f"rows are in {result['results']}, run folders in {result['sweep']}"] if result["results"] else []
    lines += [f"failed: {path}: {why}" for path, why in result["failed"].items()]
    return Group(*([table] if result["rows"] else []), Text("\n".join(lines), overflow="fold"))
