"""`nestling paper`: a part of the paper's grid, or all of it in order of value, is trained, measured or drawn."""

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich import table
from rich.console import Group
from rich.text import Text

from nestling.commands.sweep import told
from nestling.data.tiny_imagenet import prepared
from nestling.errors import NestlingError
from nestling.files import RESULTS
from nestling.recipes.recipe import Recipe
from nestling.report.paper.tables import LEGEND, Table, tables
from nestling.runs.folder import RunDir
from nestling.studies.paper.everything import (
    CIFAR10,
    SEEDS,
    TINY_NETWORKS,
    Job,
    everything,
    missing_jobs,
    seconds_left,
    until_told,
)
from nestling.studies.paper.grid import CHOICES, cells, known, train_cells
from nestling.studies.paper.packed import pack, unpack
from nestling.studies.paper.results import TINY, collect, compare, read_results, store
from nestling.studies.sweep.driver import SweepRun, sweep

ALL = "all"
WRITE_UP = ("figures", "findings", "profile")  # parts that train nothing
CARRY = ("pack", "unpack")
UNPREPARED = "They need Tiny ImageNet, which is not prepared here: nestling data tiny-imagenet --root FOLDER"


def command(
    part: str,
    network: tuple[str, ...] = (),
    strategy: tuple[str, ...] = (),
    scope: tuple[str, ...] = (),
    order: tuple[str, ...] = (),
    seeds: int = 0,
    set: tuple[str, ...] = (),
    out: str = "runs/paper",
    results: str = "results",
    page: str = "",
    data: str = "cifar10",
    beside: int = 3,
    minutes: float = 0.0,
    dry: bool = False,
    plan: bool = False,
    on: Literal["local", "ray"] = "local",
    quiet: bool = False,
    packed: str = "runs/packed",
    files: int = 8,
    mib: int = 8,
) -> dict[str, Any]:
    """Train a part of the paper's grid (skipping what is finished), or draw its tables and figures from what there is.

    Args:
        part: table1, table2, table3, tiny (table 3 on Tiny ImageNet), scopes (osgd's four), priorities (four orders), digits
            (a small grid); all trains what is missing of CIFAR-10 and, where it is prepared, Tiny ImageNet, most valuable
            first, and counts rows of results whose run folders are gone; figures draws all tables and figures, findings writes
            the tables of docs/findings.md, tables.md, cost.md, nest.md and their logs from the results, profile measures the
            latency of every network with a finished run; pack puts what is needed to go on elsewhere (finished runs without their
            weights, checkpoints of those in progress) into a few small files, unpack brings it back and adds the rows.
        network: only these networks; may be repeated; by default all of the table, width-resnet42 for scopes and priorities.
        strategy: only these (sgd, osgd, sgd-sum, normsgd, osgd-norm, alone, alone-norm, greedy); may be repeated; by default
            all but alone-norm, which is independent nets with normalised gradients.
        scope: osgd with these scopes (all, shared, block, tensor); may be repeated.
        order: osgd with these priority orders, such as 3,1,2; may be repeated.
        seeds: runs of each cell, by default 1; of all: at most so many, by default 3.
        set: change a field of every recipe, key=value; may be repeated. Figures show only runs that were so changed.
        out: folder of the run folders.
        results: where one row per run and stage goes as soon as the run is finished: a CSV file, or a folder of files named
            by data and device. Figures read all files of this folder. Empty: nowhere.
        page: where figures go, by default runs/figures.html, which also makes runs/figures.md and the folder runs/figures/
            with the pictures; the page with marks that findings are written into, by default docs/findings.md,
            docs/tables.md, docs/cost.md, docs/nest.md, docs/log/nest.md and docs/log/tables.md.
        data: figures of cifar10 or of the small digits grid.
        beside: runs trained at the same time on one GPU.
        minutes: stop after so many minutes with checkpoints, to be gone on with later; 0 means never.
        dry: train nothing, only collect what is there.
        plan: train nothing, only say what would be trained, in order, and about how long it takes.
        on: where to train; local: this process; ray: a Ray cluster (RAY_ADDRESS, or the one that runs here), a run to a core or
            to its share of a GPU, as `nestling sweep --on ray` does. Run folders come home to --out.
        quiet: no progress of what Ray trains.
        packed: folder of the packed files.
        files: pack: how many files at most.
        mib: pack: how many MiB each of them at most.
    """
    if part in CARRY:
        return {"part": part, **carried(part, out, results, packed, files, mib)}
    if part in WRITE_UP:
        return {"part": part, **write_up(part, out, results, page, strategy, data, set)}
    if part == ALL and (scope or order):
        raise NestlingError("all has its own scopes and orders; leave out --scope and --order, or name another part.")
    jobs = (
        jobs_of_all(network, strategy, seeds or SEEDS, set, out, results)
        if part == ALL
        else [Job(*each, part) for each in cells(part, network, strategy, seeds or 1, set, scope, order)]
    )
    here = [job for job in jobs if part != ALL or ready(job)]
    unprepared, jobs = len(jobs) - len(here), here
    if plan or (part == ALL and not jobs):
        return {"part": part, "plan": planned(missing_jobs(jobs, Path(out), ()), out), "unprepared": unprepared}
    options = {"network": network, "strategy": strategy, "scope": scope, "order": order, "set": set}
    words = [f"nestling paper {part}", *(f"--{key} {value}" for key, values in options.items() for value in values)]
    line = f"{' '.join(words)} --seeds {seeds or (SEEDS if part == ALL else 1)} --beside {beside}"
    seconds = 60 * minutes if minutes else float("inf")
    train = partial(train_on_ray, quiet=quiet) if on == "ray" else partial(train_cells, takes=seconds_left)
    line += " --on ray" if on == "ray" else ""
    first = until_told(jobs) if part == ALL and not dry else []
    if first:  # else normalised gradients would wait for the next call, behind all that is worth less
        began = time.monotonic()
        train([(job.name, job.recipe) for job in first], out, beside, seconds, line, lambda path: keep([path], results))
        seconds = max(0.0, seconds - (time.monotonic() - began))
        names = {job.name for job in first}
        more = jobs_of_all(network, strategy, seeds or SEEDS, set, out, results)
        jobs = [*first, *(job for job in more if ready(job) and job.name not in names)]
    return trained(part, jobs, line, out, results, beside, seconds, dry, train)


def carried(part: str, out: str, results: str, where: str, files: int, mib: int) -> dict[str, Any]:
    """Runs packed to travel, or brought home: then with their rows."""
    if part == "pack":
        return asdict(pack(Path(out), Path(where), files, mib))
    brought = unpack(Path(where), Path(out))
    return {"runs": brought, "rows": keep([Path(out) / name for name in brought], results)}


def train_on_ray(
    chosen: Sequence[tuple[str, Recipe]],
    out: str,
    beside: int,
    seconds: float,
    command: str,
    finished: Callable[[Path], object],
    quiet: bool,
) -> dict[str, str]:
    """`train_cells` on a Ray cluster: as a sweep, whose runs are the cells."""
    from nestling.studies.sweep.cluster import Cluster

    cluster, seen = Cluster(beside), list[SweepRun]()
    if not cluster.gpus:
        cluster.beside = 0  # a run for each core
    with told(quiet) as tell:

        def look(runs: Sequence[SweepRun]) -> None:
            tell(runs)
            for one in runs:
                if one.state == "finished" and one not in seen:
                    seen.append(one)
                    finished(one.run.path)

        every = sweep(chosen, Path(out), cluster, command, look, seconds=seconds, rows="")
    return {str(one.run.path): one.why for one in every if one.state == "failed"}


def trained(
    part: str,
    jobs: Sequence[Job],
    command: str,
    out: str,
    results: str,
    beside: int,
    seconds: float,
    dry: bool,
    train: Callable[..., dict[str, str]],
) -> dict[str, Any]:
    """Train these runs and set what is finished of them beside the paper."""
    failed: dict[str, str] = {}
    chosen = [(job.name, job.recipe) for job in jobs]
    if not dry:
        failed = train(chosen, out, beside, seconds, command, lambda path: keep([path], results))
    paths = [Path(out) / name for name, _ in chosen]
    rows = collect(paths)
    if (
        not rows and part == ALL and not failed
    ):  # its time was up before the first was finished; it goes on another time
        return {"part": part, "plan": planned(jobs, out)}
    if not rows:
        why = next((f"; {path} failed: {text}" for path, text in failed.items()), "")
        raise NestlingError(
            f"no run of {part} is finished in {out}; train some (without --dry), or give them more time{why or '.'}"
        )
    means = {"rows": compare(rows), "top5": compare(rows, "top5")}
    left = sum(not RunDir(path).has(RESULTS) and str(path) not in failed for path in paths)
    missing = (
        f"{len(failed)} of {len(chosen)} runs failed; mend what they say and give the same command" if failed else ""
    )
    networks = list(dict.fromkeys(row["network"] for row in rows))
    found = {"part": part, "runs": len(chosen), "networks": networks, "results": keep(paths, results), **means}
    return {**found, "left": left, "failed": failed, "incomplete": missing}


def keep(paths: Sequence[Path], results: str) -> list[str]:
    """Add the rows of finished runs to the results; the files they went to."""
    return store(collect(paths), results) if results else []


def jobs_of_all(
    network: tuple[str, ...], strategy: tuple[str, ...], seeds: int, settings: tuple[str, ...], out: str, results: str
) -> list[Job]:
    """What is missing, in order of value."""
    known(network, (*CIFAR10, *TINY_NETWORKS), "network")
    known(strategy, CHOICES, "strategy")
    rows = [*read_results(results), *collect(path.parent for path in sorted(Path(out).glob(f"*/{RESULTS}")))]
    return missing_jobs(everything(network, strategy, seeds, settings, rows=rows), Path(out), rows)


def ready(job: Job) -> bool:
    """Whether its data are there, as far as can be told at once: Tiny ImageNet is not everyone's."""
    return job.recipe.data.name != TINY or prepared(job.recipe.data.root)


def planned(jobs: Sequence[Job], out: str) -> list[dict[str, Any]]:
    """Jobs as lines of a plan; of runs that were begun, what is left."""
    return [{"run": job.name, "why": job.why, "minutes": round(job.minutes(Path(out)), 1)} for job in jobs]


def write_up(
    part: str, out: str, results: str, page: str, strategy: tuple[str, ...], data: str, set: tuple[str, ...]
) -> dict[str, Any]:
    """What is done with runs that are there: draw them, or measure the latency of their networks."""
    if importlib.util.find_spec("matplotlib") is None:
        raise NestlingError("figures need matplotlib, which is not installed; pip install 'nestling[report]'")
    # here, because matplotlib may be missing and takes its time
    from nestling.report.paper import deadline_rows, figures, findings
    from nestling.report.records import find

    if part == "profile":
        return {"measured": deadline_rows.profile_missing(find([out]))}
    if part == "findings":
        return {"changed": findings.write_findings(results, (page,) if page else findings.PAGES)}
    return figures.draw(out, results, page or "runs/figures.html", strategy, data, set)


def show(result: dict[str, Any]) -> Group:
    """The tables, and where everything is."""
    if "plan" in result:
        more = result.get("unprepared", 0)
        parts = [plan_table(result["plan"])] if result["plan"] else [] if more else [Text("Nothing is missing.")]
        return Group(*parts, *([Text(f"{more} runs more are missing. {UNPREPARED}")] if more else []))
    if result["part"] == "unpack":
        return Group(
            Text("\n".join([f"{len(result['runs'])} runs are here", *(f"rows are in {p}" for p in result["rows"])]))
        )
    if result["part"] == "pack":
        lines = [f"{len(result['runs'])} runs in {', '.join(result['files']) or 'no file: there are none'}"]
        return Group(Text("\n".join([*lines, *(f"no room for {name}" for name in result["left_out"])])))
    if result["part"] == "profile":
        return Group(Text("\n".join(["measured:", *(result["measured"] or ["nothing: all networks have profiles"])])))
    if result["part"] == "findings":
        said = {"yes": "made anew", "no": "nothing has changed"}
        return Group(Text("\n".join(f"{page}: {said[changed]}" for page, changed in result["changed"].items())))
    lines = [LEGEND]
    if result["part"] == "figures":
        lines.append(f"page: {result['report']}, {result['markdown']}, pictures in {result['pictures']}")
        lines += [f"missing: {command}" for command in result["missing"]]
    else:
        lines += [f"rows are in {path}" for path in result["results"]]
        lines += [f"failed: {path}: {why}" for path, why in result["failed"].items()]
        if result["left"]:
            lines.append(
                f"{result['left']} of {result['runs']} runs are not finished; the same command goes on with them"
            )
    shown = tables(result["rows"], result["top5"], result["networks"])
    return Group(*(terminal(each) for each in shown), Text("\n".join(lines)))


def plan_table(lines: Sequence[dict[str, Any]]) -> table.Table:
    """A plan with the minutes added up; of an H200, six runs side by side."""
    shown = table.Table(caption="About how many minutes of an H200 each takes with five others beside it.")
    for name in ("run", "why", "minutes", "in all"):
        shown.add_column(name, justify="right" if name in ("minutes", "in all") else "left", overflow="fold")
    total = 0.0
    for line in lines:
        total += line["minutes"]
        shown.add_row(line["run"], line["why"], f"{line['minutes']:.1f}", f"{total:.0f}")
    return shown


def terminal(content: Table) -> table.Table:
    """A table for people at a terminal."""
    shown = table.Table(title=content.title, show_lines=True)
    for cell in content.columns:
        shown.add_column(cell.text, overflow="fold")  # settings are long words, and all of one matters
    for line in content.rows:
        shown.add_row(*("\n".join(filter(None, (f"{c.text} {c.after}".strip(), c.small))) for c in line))
    return shown
