"""The paper's deadline study, from run folders, or from the rows that an earlier study left in a CSV file.

In: runs, the ways of training to show, a folder of results. Out: rows (network, scheme, deadline, error, guesses, device), and
what is missing. The study itself is studies/deadline.py's, the sorting of runs and traces the report's; here both meet the paper.
"""

import csv
import time
from collections.abc import Sequence
from math import inf, isinf
from pathlib import Path

from nestling.files import WEIGHTS
from nestling.recipes.recipe import Recipe
from nestling.report.families import families
from nestling.report.paper.pictures import View
from nestling.report.records import Run
from nestling.report.study import study
from nestling.report.times import conditions
from nestling.runs.provenance import provenance
from nestling.studies.deadline import BASE, ORACLE_ALL, ORACLE_EACH
from nestling.studies.paper.results import ALONE, Row, changes, less, short, strategy_name, write_csv
from nestling.studies.paper.statistics import label
from nestling.studies.profile import profile

STUDY = "nestling paper figures"  # the command that computes and keeps studies


def way(recipe: Recipe, settings: Sequence[str] = ()) -> str:
    """A run's way of training, as tables and figures call it; "" for one that does not share the grid's settings."""
    changed = less(changes(recipe), settings)
    return "" if changed is None else label({"strategy": strategy_name(recipe), "changes": changed})


def deadline_rows(
    nest: str, base: str, runs: Sequence[Run], names: Sequence[str], settings: Sequence[str] = ()
) -> list[Row] | str:
    """The study of one nest trained in the ways named (Base in the first of them), or why there is none."""
    wanted = {(nest, name) for name in (*names, ALONE)} | {(base, names[0])}
    chosen = [run for run in runs if run.results and (run.recipe.network.name, way(run.recipe, settings)) in wanted]
    sorted_runs = families(chosen)
    family = next((each for each in sorted_runs if each.name == nest), None)
    if family is None or not family.nests:
        return f"no run folder of {nest} ({' or '.join(names)})"
    base_family = family.baseline(sorted_runs)
    found = study(family, base_family)
    if isinstance(found, str):
        return found
    origin = provenance(STUDY, "cpu", time.time)
    about = {
        "commit": (origin["commit"] or "")[:12],
        "versions": ", ".join(f"{name} {version}" for name, version in origin["versions"].items()),
        "command": STUDY,
    }
    seeds = {line.label: seeds_of(line.runs) for line in family.nests}
    alone = [run for line in family.alone for run in line.runs]
    beside = [run for line in (base_family.nests if base_family else ()) for run in line.runs]
    schemes = {line.label: f"Nest, {way(line.runs[0].recipe, settings)}" for line in family.nests}
    [device] = {run.latency.device for run in family.runs if run.latency and conditions(run) == found.conditions}
    return [
        {
            "network": nest,
            "scheme": f"{BASE}, {names[0]}" if scheme.startswith(BASE) else schemes.get(scheme, scheme),
            "deadline_ms": round(row.deadline, 4),
            "error": round(100 * row.error, 3),
            "guessed": round(100 * row.guessed, 3),
            "n": found.seeds[scheme],
            "seeds": seeds.get(scheme) or seeds_of(beside if scheme.startswith(BASE) else alone),
            "images": family.n,
            "device": device,
            "conditions": found.conditions,
            "deadlines_from": found.largest,
            **about,
        }
        for scheme, rows in found.rows.items()
        for row in rows
    ]


def seeds_of(runs: Sequence[Run]) -> str:
    """The seeds that runs were trained with."""
    return " ".join(map(str, sorted({run.recipe.train.seed for run in runs})))


def view_rows(
    view: View, runs: Sequence[Run], names: Sequence[str], settings: Sequence[str], stored: Sequence[Row]
) -> tuple[list[Row], str]:
    """The rows of one panel and what it lacks; from stored rows where there are no run folders to compute them from."""
    reasons = []
    for nest in view.nests:
        found = deadline_rows(nest, view.base, runs, names, settings)
        if isinstance(found, str):
            reasons.append(found)
            found = [row for row in stored if row["network"] == nest]
        if found:
            schemes = {row["scheme"] for row in found}
            wanted = [f"{BASE}, {names[0]}", *(f"Nest, {name}" for name in names), ORACLE_ALL, ORACLE_EACH]
            return found, "\n".join(scheme for scheme in wanted if scheme not in schemes)
    return [], "\n".join(reasons)


def profile_missing(runs: Sequence[Run], device: str = "auto") -> list[str]:
    """Profile one finished run of every network here that has no profile yet: latency does not depend on the training."""
    known = {run.recipe.network for run in runs if run.latency}
    measured = []
    for run in runs:
        if run.results and run.recipe.network not in known and run.folder.has(WEIGHTS):
            profile(str(run.folder.path), device)
            known.add(run.recipe.network)
            measured.append(run.name)
    return measured


def store_studies(rows: Sequence[Row], folder: Path) -> list[str]:
    """Write studies into one CSV file per device; those of other networks that are there already stay."""
    written = []
    for device in dict.fromkeys(row["device"] for row in rows):
        path = folder / f"deadlines-{short(device)}.csv"
        new = [row for row in rows if row["device"] == device]
        kept = [row for row in read_studies(path) if row["network"] not in {each["network"] for each in new}]
        both = sorted([*kept, *new], key=lambda row: str(row["network"]))
        write_csv(
            [{**row, "deadline_ms": "" if isinf(row["deadline_ms"]) else row["deadline_ms"]} for row in both], path
        )
        written.append(str(path))
    return written


def read_studies(path: Path) -> list[Row]:
    """The rows of a file that store_studies wrote; [] where there is none."""
    if not path.is_file():
        return []
    with open(path, encoding="utf-8", newline="") as file:
        return [
            {
                **row,
                "deadline_ms": float(row["deadline_ms"] or inf),
                **{key: float(row[key]) for key in ("error", "guessed")},
                **{key: int(row[key]) for key in ("n", "images")},
            }
            for row in csv.DictReader(file)
        ]
