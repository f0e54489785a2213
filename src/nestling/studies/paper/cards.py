"""What the seeds of a recipe say, on the card of a network that comes with us: `python -m nestling.studies.paper.cards results`.

In: rows of results, the networks that come with us. Out: `seeds` in the results.json of each that has rows: how many seeds of its
recipe were trained, their mean error and its sample standard deviation, stage by stage. The network is one of them, not the mean.
"""

import sys
from collections.abc import Sequence
from typing import Any

from nestling.files import RESULTS, to_text, write_atomically
from nestling.recipes.recipe import Recipe
from nestling.runs.folder import SHIPPED, RunDir, shipped
from nestling.studies.paper.results import Row, changes, compare, read_results, strategy_name


def seeds(recipe: Recipe, rows: Sequence[Row]) -> dict[str, Any]:
    """Mean and deviation over the seeds of a recipe, as shares; {} without rows."""
    key = (recipe.data.name, recipe.network.name, strategy_name(recipe), changes(recipe), recipe.train.epochs)
    names = ("data", "network", "strategy", "changes", "epochs")
    found = sorted(
        compare([row for row in rows if tuple(row[name] for name in names) == key]), key=lambda row: int(row["stage"])
    )
    if not found:
        return {}
    spread = [None if row["std"] is None else round(row["std"] / 100, 8) for row in found]
    return {"n": min(row["n"] for row in found), "mean": [round(row["error"] / 100, 8) for row in found], "std": spread}


def write(results: str) -> None:
    rows = read_results(results)
    for name in shipped():
        run = RunDir(SHIPPED / name)
        found = seeds(run.read_recipe(), rows)
        card = run.read_json(RESULTS)
        if found and card.get("seeds") != found:
            write_atomically(run.path / RESULTS, (to_text({**card, "seeds": found}) + "\n").encode())


if __name__ == "__main__":
    write(sys.argv[1])
