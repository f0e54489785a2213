"""The paper's tables with our errors beside its errors, one table per network: a row per way of training, a column per stage.

In: means over seeds. Out: tables as report/content.py knows them (so Markdown and HTML are the report's), the same for a
terminal, and what is missing. It reads no files.
"""

from collections.abc import Iterable, Sequence
from math import isnan

from nestling.paper.grid import PRIORITISED, STRATEGIES, TABLES, sizes_of
from nestling.paper.results import ALONE, INDEPENDENT, Row, paper_number
from nestling.report.content import Cell, Table

ORDER = (
    "greedy",
    "sgd",
    "sgd-sum",
    "osgd",
    "normsgd",
    "osgd-norm",
    *INDEPENDENT,
)  # the paper's columns, and ours between them
MARKS = {True: "▼", False: "▲"}  # ours is lower (better), higher (worse), beyond two standard deviations
LEGEND = (
    "Error in %, ± sample standard deviation over n runs; under it the paper's. ▼ and ▲: ours is lower or higher by more "
    "than two standard deviations (the paper's and, where n > 1, ours). alone: independent nets of each size, beside which "
    "the paper's figure is greedy's first stage, which is such a net; nests that share a size share its net."
)


def label(row: Row) -> str:
    """A way of training in words: "osgd", "osgd strategy.scope=block"."""
    return " ".join(filter(None, (row["strategy"], row.get("changes", ""))))


def network_table(network: str, means: Iterable[Row], measure: str = "error") -> Table:
    """One network's table, from means over seeds; those of other networks are left out."""
    found: dict[tuple[str, int], dict[int, Row]] = {}
    for row in means:
        if row["network"] == network:
            found.setdefault((label(row), row["epochs"]), {})[row["stage"]] = row
    stages = sizes_of(network)
    known = {name for name, _ in found}
    for name in ORDER:  # what the paper has and we do not
        if name not in known and name not in INDEPENDENT and paper_number(network, name, 1, measure):
            found[name, 0] = {}
    lines = []
    for (name, epochs), cells in sorted(found.items(), key=lambda each: rank(each[0][0])):
        n = min((row["n"] for row in cells.values()), default=0)
        words = f"n = {n}, {epochs} epochs" if n else "not trained"
        strategy = name.partition(" ")[0]
        beside = [paper_number(network, strategy, stage, measure) for stage in range(1, len(stages) + 1)]
        lines.append(
            (
                Cell(name, small=words),
                *(stage_cell(cells.get(stage), paper) for stage, paper in enumerate(beside, start=1)),
            )
        )
    columns = (Cell(f"{'top-5 ' * (measure == 'top5')}error in %"), *(Cell(size) for size, _ in stages))
    return Table(network, columns, tuple(lines), name=f"{network}-{measure}")


def stage_cell(row: Row | None, paper: tuple[float, float] | None) -> Cell:
    """Ours, and under it the paper's."""
    small = "" if paper is None else f"paper\u00a0{paper[0]:.1f}" + ("" if isnan(paper[1]) else f"±{paper[1]:g}")
    if row is None:
        return Cell("–", small=small)
    spread = [] if row["std"] is None else [f"± {row['std']:.2f}"]
    mark = [MARKS[row["error"] < row["paper"]]] if row["beyond"] else []
    return Cell(f"{row['error']:.2f}", " ".join(spread + mark), small)


def gap_table(network: str, means: Iterable[Row]) -> Table | None:
    """How far every way of training is from the independent nets of the same size, in points; None without such nets."""
    means = [row for row in means if row["network"] == network]
    alone = {row["stage"]: row["error"] for row in means if label(row) == ALONE}
    lines: dict[str, dict[int, float]] = {}
    for row in means:
        if row["strategy"] not in INDEPENDENT and row["stage"] in alone:
            lines.setdefault(label(row), {})[row["stage"]] = row["error"] - alone[row["stage"]]
    if not lines:
        return None
    numbers = range(1, len(sizes_of(network)) + 1)
    body = tuple(
        (Cell(name), *(Cell(f"{gaps[s]:+.2f}".replace("-", "−") if s in gaps else "–") for s in numbers))
        for name, gaps in sorted(lines.items(), key=lambda each: rank(each[0]))
    )
    columns = (Cell("points above the independent net"), *(Cell(size) for size, _ in sizes_of(network)))
    return Table(f"{network}: distance to the independent nets of the same size", columns, body)


def rank(name: str) -> tuple[int, str]:
    """The paper's order of strategies; what changed a strategy follows it, in alphabetical order."""
    strategy, _, changed = name.partition(" ")
    return (ORDER.index(strategy) if strategy in ORDER else len(ORDER)), changed


def missing(table: str, means: Iterable[Row]) -> list[str]:
    """The command lines that would train what this table still lacks."""
    done = {(row["network"], label(row), row["stage"]) for row in means}
    lacking = []
    for network in TABLES[table]:
        strategies = ("sgd", "osgd") if table == "table3" else STRATEGIES
        stages = range(1, len(sizes_of(network)) + 1)
        left = [name for name in strategies if not all((network, name, stage) in done for stage in stages)]
        if left:
            words = " ".join(f"--strategy {name}" for name in left)
            lacking.append(f"nestling paper {table} --network {network} {words}")
    return lacking


def tables(means: Sequence[Row], top5: Sequence[Row], networks: Iterable[str]) -> list[Table]:
    """The tables of these networks; top-5 errors after the others where the paper has them."""
    found = []
    for network in networks:
        found.append(network_table(network, means))
        if paper_number(network, PRIORITISED[0], 1, "top5"):
            found.append(network_table(network, top5, "top5"))
        gap = gap_table(network, means)
        found += [gap] if gap else []
    return found
