"""The paper's C, the norm that normalised gradients get: calibrated once for each network and strategy, as the paper says.

In: rows of results, those of short trials on held-out images among them. Out: the settings of the trials, the constant they
chose (None before all of them are there), and rows in which it is the usual one. It trains nothing.
"""

import statistics
from collections.abc import Iterable, Sequence

from nestling.recipes.recipe import StrategyRecipe
from nestling.recipes.strategies import NORMALISED
from nestling.studies.paper.results import ALONE_NORM, Row, plain

CONSTANTS = (0.5, 2.0, 8.0)
SHORT = ("data.validation=5000", "train.epochs=30", "train.schedule=cosine")
FIELD = "strategy.constant="


def setting(constant: float) -> str:
    return f"{FIELD}{plain(constant)}"


def changed(constant: float) -> str:
    """How a row says that nothing but the constant was changed."""
    return "" if constant == StrategyRecipe().constant else setting(constant)


def trials(rows: Iterable[Row], network: str, strategy: str) -> dict[float, float]:
    """Constant -> the mean error over stages that its trial had on held-out images."""
    found: dict[float, list[float]] = {}
    for row in rows:
        said = set(row.get("changes", "").split())
        if (row["network"], row["strategy"]) != (network, strategy) or not set(SHORT) <= said:
            continue
        for constant in CONSTANTS:
            if said - set(SHORT) == set(changed(constant).split()):
                found.setdefault(constant, []).append(row["error"])
    return {constant: statistics.fmean(errors) for constant, errors in found.items()}


def calibrated(rows: Sequence[Row], network: str, strategy: str) -> float | None:
    """The constant whose trial was best; independent nets take that of their nest."""
    found = trials(rows, network, "normsgd" if strategy == ALONE_NORM else strategy)
    return min(found, key=lambda constant: found[constant]) if set(found) >= set(CONSTANTS) else None


def as_usual(rows: Sequence[Row]) -> list[Row]:
    """The rows, with the calibrated constant as the one that needs no saying; trials are left out."""
    best: dict[tuple[str, str], float | None] = {}
    found = []
    for row in rows:
        said = row.get("changes", "")
        if set(SHORT) <= set(said.split()):
            continue
        key = (row["network"], row["strategy"])
        if row["strategy"] in (*NORMALISED, ALONE_NORM) and key not in best:
            best[key] = calibrated(rows, *key)
        constant = best.get(key)
        if constant is not None and said == changed(constant):
            row = {**row, "changes": ""}
        elif constant is not None and said == "":
            row = {**row, "changes": setting(StrategyRecipe().constant)}
        found.append(row)
    return found
