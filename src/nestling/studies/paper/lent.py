"""Independent nets that several nests have in common, as rows of each of them.

In: rows of results. Out: the same and the lent ones. A net of the same size, MACs and parameters is trained once.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

from nestling.nets import plan
from nestling.recipes.recipe import NetworkRecipe
from nestling.studies.paper.grid import TABLES, sizes_of
from nestling.studies.paper.results import ALONE, Row


def lent(rows: Sequence[Row], parts: Sequence[str]) -> list[Row]:
    """The rows, and independent nets lent to every network that has one of the very same size and recipe.

    Width-depth nests that grow in turn and at once share three sizes, even width and doubling width three others.
    """
    found = list(rows)
    alone: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["strategy"] == ALONE and row["changes"] == "":
            alone.setdefault((row["size"], row["macs"], row["params"]), []).append(row)
    for network in (network for part in parts for network in TABLES[part]) if alone else ():
        have = {row["stage"] for row in rows if row["network"] == network and row["strategy"] == ALONE}
        for stage, (size, _) in enumerate(sizes_of(network), start=1):
            same = [] if stage in have else alone.get((size, *costs(network, stage)), [])
            one = [row for row in same if row["network"] == same[0]["network"]]  # of one lender: they are the same runs
            found += [{**row, "network": network, "stage": stage} for row in one]
    return found


@cache
def costs(network: str, stage: int) -> tuple[int, int]:
    """MACs and parameters of the independent net of one stage's size."""
    found = plan(NetworkRecipe(name=network, alone=stage))
    return found.macs(1), found.params(1)
