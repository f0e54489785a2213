"""Run folders as rows of a table, one per run and stage, and the paper's own numbers beside them.

In: run folders, CSV files of earlier rows. Out: rows with everything needed to judge a number (seed, epochs, commit,
device, versions), CSV files named by data and device, and means over seeds. It trains nothing and draws nothing.
"""

import csv
import io
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.resources import files
from math import isnan
from pathlib import Path
from typing import Any

from nestling.errors import NestlingError
from nestling.files import PROVENANCE, RESULTS, write_atomically
from nestling.recipes import RECIPES
from nestling.recipes.recipe import CHANCE, Recipe, flat, override
from nestling.recipes.rules import show
from nestling.recipes.strategies import NORMALISED
from nestling.runs.folder import RunDir

Row = dict[str, Any]
ALONE = "alone"  # the column of independent nets: one net per size, trained by itself
ALONE_NORM = "alone-norm"  # the same by normsgd, as the paper has it for the largest Sparse ResNet-98
INDEPENDENT = (ALONE, ALONE_NORM)
WHOLE = ("seed", "stage", "macs", "params", "epochs", "batch", "n")
DECIMAL = ("error", "top5", "loss", "ece", "weight_decay")
NEEDED = {"network", "strategy", "seed", "stage", "size", "error", "macs", "epochs"}  # of a file of such rows
NORM_FIELDS = {"strategy.constant", "strategy.literal"}
TINY = "tiny-imagenet"  # the data beside which the paper has no numbers, though it has of its networks
SAME_RUN = ("data", "network", "strategy", "changes", "epochs", "seed", "stage", "device", "commit")

SAME_SEED = ("network", "strategy", "changes", "epochs", "stage", "size", "data", "seed")


def strategy_name(recipe: Recipe) -> str:
    """The column a run belongs to: its strategy, or that of independent nets. With one task there is nothing to combine:
    only normalised gradients make another training."""
    if not recipe.network.alone:
        return recipe.strategy.name
    return ALONE_NORM if recipe.strategy.name in NORMALISED else ALONE


def changes(recipe: Recipe) -> str:
    """What a run changed about the recipe it is named after, as settings: "strategy.scope=block train.distill=0.5".

    Chance, the strategy's name and which size stands alone are left out: they have columns of their own.
    """
    base = RECIPES[recipe.name]() if recipe.name in RECIPES else Recipe(recipe.name)
    mine, theirs = flat(recipe), flat(base)
    skip = CHANCE | {"strategy.name", "network.alone"}
    if recipe.network.alone:  # with one task there is nothing to combine
        matters = NORM_FIELDS if recipe.strategy.name in NORMALISED else set()
        skip |= {key for key in mine if key.startswith("strategy.")} - matters
    return " ".join(f"{key}={plain(mine[key])}" for key in mine if key not in skip and mine[key] != theirs[key])


def command_of(recipe: Recipe) -> str:
    """The command line that trains this run and no other; "" for a recipe that has no name of ours."""
    if recipe.name not in RECIPES:
        return ""
    mine, theirs = flat(recipe), flat(RECIPES[recipe.name]())
    changed = [f"--set {key}={plain(mine[key])}" for key in mine if mine[key] != theirs[key]]
    return " ".join([f"nestling train {recipe.name}", *changed])


def less(changed: str, settings: Sequence[str]) -> str | None:
    """Changes without settings that are common to a whole grid; None for a run that does not share them. Fields that
    `changes` leaves out are not asked for."""
    keys = {each: each.partition("=")[0].strip() for each in settings}
    shared = {
        f"{key}={plain(flat(override(Recipe('grid'), [each]))[key])}" for each, key in keys.items() if key not in CHANCE
    }
    words = changed.split()
    return " ".join(word for word in words if word not in shared) if shared <= set(words) else None


def plain(value: Any) -> str:
    return show(value) if isinstance(value, tuple) else f"{value:g}" if isinstance(value, float) else f"{value}"


def run_rows(run: RunDir) -> list[Row]:
    """One row per stage of a finished run."""
    recipe, found, origin = run.read_recipe(), run.read_json(RESULTS), run.read_json(PROVENANCE)
    return [
        {
            "network": recipe.network.name,
            "strategy": strategy_name(recipe),
            "changes": changes(recipe),
            "seed": recipe.train.seed,
            "stage": recipe.network.alone or stage["stage"],
            "size": stage["size"],
            "error": round(100 * stage["error"], 3),
            "top5": round(100 * stage["top5"], 3) if "top5" in stage else None,
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
            "resumed_on": " ".join(others_of(origin)),
            "commit": (origin["commit"] or "")[:12],
            "commit_at_end": (origin.get("resumed", [origin])[-1]["commit"] or "")[:12],
            "torch": origin["versions"]["torch"],
            "versions": ", ".join(f"{name} {version}" for name, version in origin["versions"].items()),
            "command": origin["command"],
            "train": command_of(recipe),
        }
        for stage in found["stages"]
    ]


def others_of(origin: dict[str, Any]) -> list[str]:
    """The devices a run was gone on with that it was not begun on."""
    return sorted({each["device"] for each in origin.get("resumed", [])} - {origin["device"]})


def collect(paths: Iterable[Path]) -> list[Row]:
    """The rows of all finished runs, in a fixed order."""
    return ordered(row for path in paths if RunDir(path).has(RESULTS) for row in run_rows(RunDir(path)))


def ordered(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda r: (r["network"], r["strategy"], r["changes"], r["epochs"], r["seed"], r["stage"]))


# --- CSV -------------------------------------------------------------------------------------------------------------


def merged(older: Iterable[Row], newer: Iterable[Row]) -> list[Row]:
    """All rows; of two that are the same run and stage, the newer."""
    found = {tuple(row.get(key) for key in SAME_RUN): row for row in [*older, *newer]}
    return ordered(found.values())


def write_csv(rows: list[Row], path: Path) -> None:
    text = io.StringIO()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.getvalue().encode())


def read_csv(path: Path) -> list[Row]:
    """The rows of a file that write_csv wrote; [] for a file of something else."""
    with open(path, encoding="utf-8", newline="") as file:
        found = csv.DictReader(file)
        if not set(found.fieldnames or ()) >= NEEDED:
            return []
        return [typed(row, path) for row in found]


def typed(row: dict[str, str], path: Path) -> Row:
    """A row of text with its numbers; columns that older files lack are empty."""
    found: Row = {**row}
    for key in ("changes", "device", "commit"):
        found.setdefault(key, "")
    for keys, kind in ((WHOLE, int), (DECIMAL, float)):
        number: Callable[[str], Any] = kind
        for key in keys:
            try:
                found[key] = number(row[key]) if row.get(key) else None
            except ValueError as error:
                raise NestlingError(
                    f"{path}: {key} is {row[key]!r} where a number should be; mend that row or remove it"
                ) from error
    return found


def read_results(where: str) -> list[Row]:
    """The rows of all files of a folder, or of one CSV file; [] for nowhere."""
    path = Path(where)
    found = [path] if where.endswith(".csv") and path.is_file() else sorted(path.glob("*.csv")) if where else []
    return [row for file in found for row in read_csv(file)]


def store(rows: list[Row], where: str) -> list[str]:
    """Add rows to the files they belong to: one CSV file if `where` is one, else a file per data set and device in it."""
    places: dict[Path, list[Row]] = {}
    for row in rows:
        path = Path(where) if where.endswith(".csv") else Path(where) / f"{row['data']}-{short(row['device'])}.csv"
        places.setdefault(path, []).append(row)
    for path, new in places.items():
        write_csv(merged(read_csv(path) if path.is_file() else [], new), path)
    return [str(path) for path in places]


def short(device: str) -> str:
    """A device's name as a part of a file's name: "NVIDIA H200" as "h200"."""
    return re.sub("[^a-z0-9]+", "-", device.lower().removeprefix("nvidia ")).strip("-") or "unknown"


# --- beside the paper ------------------------------------------------------------------------------------------------


@cache
def published() -> dict[tuple[str, str, int], tuple[float, float]]:
    """The paper's (error, standard deviation) by network, strategy and stage, in %; nan where it gives no deviation."""
    text = files("nestling.studies.paper").joinpath("paper.csv").read_text(encoding="utf-8")
    return {
        (row["network"], row["strategy"], int(row["stage"])): (float(row["error"]), float(row["std"] or "nan"))
        for row in csv.DictReader(text.splitlines())
    }


def paper_number(network: str, strategy: str, stage: int, measure: str = "error") -> tuple[float, float] | None:
    """The paper's figure for one cell. Greedy's first stage is an independent net: nothing else was trained with it."""
    if strategy == ALONE and stage == 1:
        strategy = "greedy"
    top = "top5" if measure == "top5" else "top1"
    known = published()
    plain_one = known.get((network, strategy, stage)) if measure == "error" else None
    return plain_one or known.get((network, f"{strategy} {top}", stage))


def compare(rows: Iterable[Row], measure: str = "error") -> list[Row]:
    """Means over seeds with n and spread, beside the paper's figure.

    `beyond`: the two differ by more than two standard deviations, the paper's and ours (where n > 1) taken together;
    never where the paper gives none.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    newest = {tuple(row.get(key) for key in SAME_SEED): row for row in rows if row.get(measure) is not None}
    for row in newest.values():  # a seed that was trained again, at another commit or device, is no second one
        key = (
            row.get("data"),
            row["network"],
            row["strategy"],
            row.get("changes", ""),
            row["epochs"],
            row["stage"],
            row["size"],
        )
        groups.setdefault(key, []).append(row)
    found = []
    for (data, network, strategy, changed, epochs, stage, size), several in groups.items():
        errors = [row[measure] for row in several]
        mean = statistics.fmean(errors)
        spread = statistics.stdev(errors) if len(errors) > 1 else None
        known = None if data == TINY else paper_number(network, strategy, stage, measure)
        error, std = known or (None, float("nan"))
        deviation = (std**2 + (spread or 0.0) ** 2) ** 0.5
        found.append(
            {
                "data": data,
                "network": network,
                "strategy": strategy,
                "changes": changed,
                "epochs": epochs,
                "stage": stage,
                "size": size,
                "error": round(mean, 6),
                "std": None if spread is None else round(spread, 6),
                "n": len(errors),
                "macs": several[0].get("macs"),
                "paper": error,
                "paper_std": None if isnan(std) else std,
                "beyond": error is not None and abs(mean - error) > 2 * deviation,  # nan compares as false
            }
        )
    return found
