"""The paper's tables with our errors beside its errors, one table per network: a row per way of training, a column per stage.

In: means over seeds. Out: tables as report/content.py knows them (so Markdown and HTML are the report's), the same for a
terminal, and what is missing. It reads no files.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import isnan

from nestling.recipes.strategies import NORMALISED, of_the_paper
from nestling.report.content import Cell, Table
from nestling.studies.paper.grid import GRID, PRIORITISED, TABLES, sizes_of
from nestling.studies.paper.results import ALONE, ALONE_NORM, INDEPENDENT, TINY, Row, compare, paper_number
from nestling.studies.paper.statistics import label

ORDER = (*of_the_paper(), *INDEPENDENT)  # the paper's columns, and ours between them
SEEDS = {"table1": 3, "table2": 3}  # of the paper
MARKS = {True: "▼", False: "▲"}  # ours is lower (better), higher (worse), beyond two standard deviations
LEGEND = (
    "Error in %, ± sample standard deviation over n runs; under it the paper's. ▼ and ▲: ours is lower or higher by more "
    "than two standard deviations (the paper's and, where n > 1, ours). alone: independent nets of each size, beside which "
    "the paper's figure is greedy's first stage, which is such a net; nests that share a size share its net."
)


WORDS = {  # what a setting is called in tables; the others by the last part of their key
    "strategy.order": "order {}",
    "strategy.importance": "loss weights {}",
    "strategy.constant": "C = {}",
    "strategy.scope": "scope {}",
    "train.schedule": "{} schedule",
    "train.distill": "self-distillation {}",
    "train.average": "averaged weights {}",
    "train.teacher": "taught by {}",
    "network.keep": "keeps {}",
    "network.early": "early stages {}",
    "network.heads": "{} heads",
    "data.cutmix": "CutMix {}",
}
SAID = {"train.decay_norms=False": "norms spared", "strategy.literal=True": "norms as the paper writes them"}


def words(name: str) -> str:
    """A way of training as a reader would say it: "osgd strategy.scope=block" as "osgd, scope block"."""
    strategy, *settings = name.split(" ")
    said = [SAID.get(each) or said_setting(*each.split("=", 1)) for each in settings]
    text = ", ".join([strategy, *said])
    return text.replace("self-distillation", "distillation") if "train.teacher=" in name else text


def said_setting(key: str, value: str) -> str:
    shown = " ".join(part.removesuffix(".0") for part in value.removeprefix("runs/").split(","))
    return WORDS.get(key, key.partition(".")[2].replace("_", " ") + " {}").format(shown)


def network_table(network: str, means: Iterable[Row], measure: str = "error", beside: bool = True) -> Table:
    """One network's table, from means over seeds; those of other networks are left out. `beside`: the paper's, too."""
    found: dict[tuple[str, int], dict[int, Row]] = {}
    for row in means:
        if row["network"] == network:
            found.setdefault((label(row), row["epochs"]), {})[row["stage"]] = row
    stages = sizes_of(network)
    known = {name for name, _ in found}
    for name in ORDER:  # what the paper has and we do not
        if beside and name not in known and name not in INDEPENDENT and paper_number(network, name, 1, measure):
            found[name, 0] = {}
    lines = []
    for (name, epochs), cells in sorted(found.items(), key=lambda each: rank(each[0][0])):
        about = f"n = {count_words([row['n'] for row in cells.values()])}, {epochs} epochs" if cells else "not trained"
        strategy = name.partition(" ")[0]
        numbers = [
            paper_number(network, strategy, stage, measure) if beside else None for stage, _ in enumerate(stages, 1)
        ]
        lines.append(
            (
                Cell(words(name), small=about),
                *(stage_cell(cells.get(stage), paper) for stage, paper in enumerate(numbers, start=1)),
            )
        )
    columns = (Cell(f"{'top-5 ' * (measure == 'top5')}error in %"), *(Cell(size) for size, _ in stages))
    title = f"{network}, top-5" if measure == "top5" else network
    return Table(title, columns, tuple(lines), name=f"{network}-{measure}", wide=True)


def variants_table(network: str, means: Iterable[Row]) -> Table:
    """One network's runs that changed something about the paper's recipes."""
    title = f"{network}, with something changed"
    return replace(network_table(network, means, beside=False), title=title, folded=True)


def stage_cell(row: Row | None, paper: tuple[float, float] | None) -> Cell:
    """Ours, and under it the paper's."""
    small = "" if paper is None else f"paper {paper[0]:.1f}" + ("" if isnan(paper[1]) else f"±{paper[1]:g}")
    if row is None:
        return Cell("–", small=small)
    spread = [] if row["std"] is None else [f"±\u00a0{row['std']:.2f}"]
    mark = [MARKS[row["error"] < row["paper"]]] if row["beyond"] and paper is not None else []
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
        (Cell(words(name)), *(Cell(f"{gaps[s]:+.2f}".replace("-", "−") if s in gaps else "–") for s in numbers))
        for name, gaps in sorted(lines.items(), key=lambda each: rank(each[0]))
    )
    columns = (Cell("points above the independent net"), *(Cell(size) for size, _ in sizes_of(network)))
    title = f"{network}: distance to the independent nets of the same size"
    caption = "The independent nets are trained as the paper trains them, whatever the nest was trained with."
    return Table(title, columns, body, caption, folded=True, wide=True)


def rank(name: str) -> tuple[int, str]:
    """The paper's order of strategies; what changed a strategy follows it, in alphabetical order."""
    strategy, _, changed = name.partition(" ")
    return (ORDER.index(strategy) if strategy in ORDER else len(ORDER)), changed


def missing(table: str, means: Iterable[Row]) -> list[str]:
    """The command lines that would train what this table still lacks; a cell with fewer seeds than the paper's is lacking."""
    seeds = SEEDS.get(table, 1)
    done = {(row["network"], label(row), row["stage"]) for row in means if row["n"] >= seeds}
    lacking = []
    for network in TABLES[table]:
        strategies = ("sgd", "osgd") if table == "table3" else GRID
        stages = range(1, len(sizes_of(network)) + 1)
        left = [name for name in strategies if not all((network, name, stage) in done for stage in stages)]
        often = f" --seeds {seeds}" if seeds > 1 else ""
        # of the paper's own grid `all` calibrates the constant of normalised gradients first; its table would train with 0.5
        constant = {"all": [name for name in left if table in SEEDS and name in NORMALISED]}
        for part, names in {table: [name for name in left if name not in constant["all"]], **constant}.items():
            if names:
                chosen = " ".join(f"--strategy {name}" for name in names)
                lacking.append(f"nestling paper {part} --network {network} {chosen}{often}")
    return lacking


def tables(means: Sequence[Row], top5: Sequence[Row], networks: Iterable[str]) -> list[Table]:
    """The tables of the networks of which something was trained: as the paper trains them (top-5 errors after the others
    where the paper has them), with something changed, and how far from independent nets."""
    found = []
    for network in networks:
        mine = [row for row in means if row["network"] == network]
        if not mine:
            continue
        beside = mine[0].get("data") != TINY
        usual = network_table(network, [row for row in mine if not row["changes"]], beside=beside)
        found += [usual] if usual.rows else []
        if paper_number(network, PRIORITISED[0], 1, "top5"):
            found.append(network_table(network, top5, "top5", beside))
        changed = [row for row in mine if row["changes"]]
        found += [variants_table(network, changed)] if changed else []
        gap = gap_table(network, means)
        found += [gap] if gap else []
    return found


def tiny_tables(rows: Sequence[Row]) -> list[Table]:
    """The networks of table 3 on Tiny ImageNet, top-1 and top-5 errors; the paper has no numbers for it."""
    return tables(compare(rows), compare(rows, "top5"), dict.fromkeys(row["network"] for row in rows))


def coverage_table(means: Iterable[Row], networks: Sequence[str], seeds: int = 3) -> Table:
    """How many seeds stand behind every cell that the paper has, and behind our own columns."""
    columns = [name for name in ORDER if name != ALONE_NORM]
    n: dict[tuple[str, str, int], int] = {}
    for row in means:
        if not row.get("changes"):
            n[row["network"], row["strategy"], row["stage"]] = row["n"]
    lines, cells = [], []
    for network in networks:
        stages = range(1, len(sizes_of(network)) + 1)
        found = {name: [n.get((network, name, stage), 0) for stage in stages] for name in columns}
        cells += [one for name in columns if paper_number(network, name, 1) and name != ALONE for one in found[name]]
        lines.append((Cell(network), *(Cell(count_words(found[name])) for name in columns)))
    done, whole = sum(one > 0 for one in cells), sum(one >= seeds for one in cells)
    caption = (
        f"{done} of the paper's {len(cells)} cells here have been trained, {whole} of them with {seeds} seeds, as the paper "
        "has. 1-3: as many seeds at the stage that has fewest as at the one that has most."
    )
    heads = tuple(Cell(words(name)) for name in columns)
    title = "Seeds behind every cell"
    return Table(title, (Cell("network"), *heads), tuple(lines), caption, name="coverage", wide=True)


def count_words(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return "–" if not high else f"{low}" if low == high else f"{low}-{high}"
