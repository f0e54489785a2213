"""What being anytime costs, from rows of results: nests beside the independent networks that a user would run instead.

In: rows. Out: a table for docs/cost.md, mean ± sample standard deviation over as many seeds as there are. One recipe for all
(SGD, cosine schedule, averaged weights) but where the table says otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nestling.report.content import Cell, Table
from nestling.studies.paper.results import ALONE, Row, compare

PLAIN = "train.schedule=cosine train.average=0.999"
BEST = "strategy.importance=1.0,1.0,2.0 train.schedule=cosine train.distill=0.5 train.average=0.999"
TAUGHT = (
    "strategy.importance=1.0,1.0,2.0 train.schedule=cosine train.distill=0.9 train.teacher=runs/w4-dense-cos-s0 "
    "train.teaches=last train.distill_temperature=4 train.average=0.999"
)
WIDTH, DEPTH = "width-resnet42", "depth-sparse98"


@dataclass(frozen=True)
class Priced:
    """One way of training: what is said of it, and the rows it is made from."""

    text: str
    setting: str
    network: str
    strategy: str
    changes: str
    stages: tuple[int, ...]


LINES = (
    Priced("width: independent w4", "network.alone=3", WIDTH, ALONE, PLAIN, (3,)),
    Priced("width: independent, MACs of w4", "network.widths=24,56,112", WIDTH, ALONE, f"network.widths=24,56,112 {PLAIN}", (3,)),
    Priced("width: independent, MACs of w2", "network.widths=16,24,56", WIDTH, ALONE, f"network.widths=16,24,56 {PLAIN}", (3,)),
    Priced("width: independent, MACs of w1", "network.alone=1", WIDTH, ALONE, PLAIN, (1,)),
    Priced("width: nest trained for its last stage alone", "strategy.importance=0,0,1", WIDTH, "sgd",
         f"strategy.importance=0.0,0.0,1.0 {PLAIN}", (3,)),
    Priced("width: nest, our best recipe", "train.distill=0.5 strategy.importance=1,1,2", WIDTH, "sgd", BEST, (1, 2, 3)),
    Priced("width: the same, the independent w4 teaches its last stage", "train.teaches=last train.distill=0.9", WIDTH, "sgd",
         TAUGHT, (1, 2, 3)),
    Priced("depth: independent d8", "network.alone=4", DEPTH, ALONE, PLAIN, (4,)),
    Priced("depth: nest trained for its last stage alone", "strategy.importance=0,0,0,1", DEPTH, "sgd",
         f"strategy.importance=0.0,0.0,0.0,1.0 {PLAIN}", (4,)),
    Priced("depth: nest (OSGD, steps, no averaging)", "", DEPTH, "osgd", "", (1, 2, 3, 4)),
)  # fmt: skip


def means_of(rows: Sequence[Row], line: Priced) -> list[Row]:
    """Means over seeds, stage by stage; what was not trained is left out."""
    wanted = (line.network, line.strategy, line.changes, 200)
    keys = ("network", "strategy", "changes", "epochs")
    found = compare([row for row in rows if tuple(row[key] for key in keys) == wanted])
    by_stage = {row["stage"]: row for row in found}
    return [by_stage[stage] for stage in line.stages if stage in by_stage]


def cost_table(rows: Sequence[Row]) -> Table:
    lines = []
    for line in LINES:
        found = means_of(rows, line)
        errors = " / ".join(
            f"{row['error']:.2f}" + ("" if row["std"] is None else f" ± {row['std']:.2f}") for row in found
        )
        macs = " / ".join(f"{row['macs'] / 1e6:.0f}" for row in found)
        n = min((row["n"] for row in found), default=0)
        setting = Cell(line.setting, code=True) if line.setting else Cell("")
        lines.append((Cell(line.text), setting, Cell(macs or "–"), Cell(errors or "–"), Cell(str(n))))
    heads = tuple(map(Cell, ("CIFAR-10, 200 epochs", "set", "MACs, millions", "error, %", "seeds")))
    return Table("Nests beside independent networks", heads, tuple(lines), name="cost", words=2, wide=True)
