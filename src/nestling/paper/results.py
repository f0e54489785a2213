"""Run folders as rows of a table, one per run and stage, and the paper's own numbers beside them.

In: run folders. Out: rows with everything needed to judge a number (seed, epochs, commit, device, versions), a CSV file,
and means over seeds. It trains nothing and draws nothing.
"""

import csv
import io
import statistics
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from nestling.files import write_atomically
from nestling.recipe import Recipe
from nestling.rundir import PROVENANCE, RESULTS, RunDir


def strategy_name(recipe: Recipe) -> str:
    """The column a run belongs to: its strategy, with what was changed about it; "alone" for an independent net."""
    if recipe.network.alone:
        return "alone"
    name: str = recipe.strategy.name
    if recipe.strategy.scope != "all" and name.startswith("osgd"):
        name += f" scope {recipe.strategy.scope}"
    if recipe.strategy.order:
        name += " order " + ",".join(map(str, recipe.strategy.order))
    if recipe.train.distill:
        name += f" distill {recipe.train.distill:g}"
    return name


def run_rows(run: RunDir) -> list[dict[str, Any]]:
    """One row per stage of a finished run."""
    recipe, found, origin = run.read_recipe(), run.read_json(RESULTS), run.read_json(PROVENANCE)
    rows = []
    for stage in found["stages"]:
        rows.append(
            {
                "network": recipe.network.name,
                "strategy": strategy_name(recipe),
                "seed": recipe.train.seed,
                "stage": recipe.network.alone or stage["stage"],
                "size": stage["size"],
                "error": round(100 * stage["error"], 3),
                "loss": round(stage["loss"], 5),
                "ece": round(100 * stage["ece"], 3),
                "macs": stage["macs"],
                "params": stage["params"],
                "epochs": recipe.train.epochs,
                "batch": recipe.train.batch,
                "weight_decay": recipe.train.weight_decay,
                "precision": recipe.train.precision,
                "data": found["data"],
                "split": found["split"],
                "n": found["n"],
                "device": origin["device"],
                "commit": (origin["commit"] or "")[:12],
                "torch": origin["versions"]["torch"],
                "command": origin["command"],
            }
        )
    return rows


def collect(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The rows of all finished runs, in a fixed order."""
    rows = [row for path in paths if RunDir(path).has(RESULTS) for row in run_rows(RunDir(path))]
    return sorted(rows, key=lambda r: (r["network"], r["strategy"], r["epochs"], r["seed"], r["stage"]))


def write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.getvalue().encode())


@cache
def published() -> dict[tuple[str, str, int], tuple[float, float]]:
    """The paper's (error, standard deviation) by network, strategy and stage, in %."""
    text = files("nestling.paper").joinpath("paper.csv").read_text(encoding="utf-8")
    return {
        (row["network"], row["strategy"], int(row["stage"])): (float(row["error"]), float(row["std"] or "nan"))
        for row in csv.DictReader(text.splitlines())
    }


def compare(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds with n and spread, beside the paper's figure; `beyond`: they differ by more than two of its std."""
    groups: dict[tuple[str, str, int, int, str], list[float]] = {}
    for row in rows:
        key = (row["network"], row["strategy"], row["epochs"], row["stage"], row["size"])
        groups.setdefault(key, []).append(row["error"])
    found = []
    for (network, strategy, epochs, stage, size), errors in groups.items():
        paper = published().get((network, strategy, stage))
        mean = statistics.mean(errors)
        spread = statistics.stdev(errors) if len(errors) > 1 else None
        found.append(
            {
                "network": network,
                "strategy": strategy,
                "epochs": epochs,
                "stage": stage,
                "size": size,
                "error": round(mean, 3),
                "std": None if spread is None else round(spread, 3),
                "n": len(errors),
                "paper": None if paper is None else paper[0],
                "beyond": paper is not None and abs(mean - paper[0]) > 2 * (paper[1] if paper[1] == paper[1] else 0),
            }
        )
    return found
