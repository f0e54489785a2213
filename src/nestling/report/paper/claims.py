"""What the paper claims, and what our seeds say to it: holds, does not hold, or open, with n.

In: rows of results, rows of deadline studies. Out: claims as data and as a table. A claim is settled by three seeds at
least, whose interval of 95 % leaves out the contrary; a claim about all networks by one number for each of them.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from nestling.recipes.rules import show
from nestling.report.content import Cell, Table
from nestling.studies.deadline import ORACLE_ALL
from nestling.studies.paper.grid import STUDIED, TABLES, four_orders, sizes_of
from nestling.studies.paper.results import ALONE, Row
from nestling.studies.paper.statistics import (
    HOLDS,
    NOT,
    OPEN,
    SURE,
    Estimate,
    difference,
    errors,
    estimate,
    gain,
    label,
    verdict,
)

CIFAR10 = (*TABLES["table1"], *TABLES["table2"])
NESTS, TINY_NETS = tuple(TABLES["table1"]), tuple(TABLES["tiny"])
LITTLE = 0.5  # points: what "little" and "close" mean below


@dataclass(frozen=True)
class Claim:
    text: str
    where: str  # in the paper
    verdict: str
    numbers: str
    n: str


def claims(rows: Sequence[Row], deadlines: Sequence[Row], tiny: Sequence[Row] = ()) -> list[Claim]:
    """`tiny`: rows of Tiny ImageNet, whose networks are ImageNet's."""
    return [
        about_all("OSGD beats SGD at the last stage", "tables 1, 2", rows, "osgd", "sgd", last),
        about_all("… and it beats SGD on the sum of the losses, too (our control)", "–", rows, "osgd", "sgd-sum", last),
        about_all("earlier stages lose little by it (first stage, 0.5 points)", "table 1", rows, "osgd", "sgd", first, -LITTLE),
        about_all("joint training beats greedy training at the last stage", "table 1", rows, "sgd", "greedy", last),
        about_all(
            "nests come close to independent nets at the last stage (0.5 points)", "error-FLOPs figure",
            rows, "osgd", ALONE, last, -LITTLE, NESTS,
        ),
        at_equal_cost("the depth nest beats the cascade at equal MACs", rows, "depth-sparse98", "cascade-sparse98"),
        at_equal_cost("the width nest beats even widths at equal MACs", rows, STUDIED, "even-resnet42"),
        under_deadlines(deadlines),
        priorities(rows, STUDIED),
        priorities(rows, "width-digits"),
        normalised(rows),
        about_all("OSGD beats SGD at the last stage, on Tiny ImageNet", "–", tiny, "osgd", "sgd", last, networks=TINY_NETS),
        Claim("the same on ImageNet", "table 3", OPEN, "not trained", "0"),
    ]  # fmt: skip


def first(network: str) -> int:
    return 1


def last(network: str) -> int:
    return len(sizes_of(network))


def about_all(
    text: str,
    where: str,
    rows: Sequence[Row],
    one: str,
    other: str,
    stage: Callable[[str], int],
    least: float = 0.0,
    networks: Sequence[str] = CIFAR10,
) -> Claim:
    """A claim about many networks: the mean over seeds of each is one number."""
    found = {network: gain(rows, network, one, other, stage(network)) for network in networks}
    known = {network: each for network, each in found.items() if each is not None}
    if not known:
        return Claim(text, where, OPEN, "–", "0")
    whole = estimate([each.mean for each in known.values()])
    by_network = ", ".join(f"{network.partition('-')[0]} {each}" for network, each in known.items())
    sure = len(known) == len(networks) and all(each.n >= SURE for each in known.values())
    settled = verdict(whole, least) if sure else OPEN
    numbers = f"{whole} over {len(known)} networks ({by_network})" if len(known) > 1 else by_network
    return Claim(text, where, settled, numbers, seeds(known.values()))


def seeds(found: Iterable[Estimate]) -> str:
    counts = sorted({each.n for each in found})
    return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def at_equal_cost(text: str, rows: Sequence[Row], nest: str, base: str, way: str = "osgd") -> Claim:
    """At each of the baseline's costs, the nest's best stage that costs no more."""
    gains: dict[str, Estimate] = {}
    for stage, (size, macs) in enumerate(sizes_of(base), start=1):
        mine = {
            (name, cost): errors(rows, nest, way, at)
            for at, (name, cost) in enumerate(sizes_of(nest), start=1)
            if cost <= 1.01 * macs
        }
        trained = {at: each for at, each in mine.items() if each}
        best = min(trained, key=lambda at: statistics.fmean(trained[at].values()), default=None)
        found = difference(errors(rows, base, way, stage), trained[best]) if best else None
        if best is not None and found is not None:
            share = best[1] / macs  # the nest may have no stage that costs as much
            gains[size if share > 0.95 else f"{size} ({best[0]}, {100 * share:.0f} %)"] = found
    verdicts = {verdict(each) for each in gains.values()}
    settled = HOLDS if verdicts == {HOLDS} else NOT if NOT in verdicts else OPEN
    numbers = ", ".join(f"{size} {found}" for size, found in gains.items())
    return Claim(text, "table 2", settled, numbers or "–", seeds(gains.values()) if gains else "0")


def under_deadlines(rows: Sequence[Row]) -> Claim:
    """Nest against the best single network, averaged over the deadlines of the study."""
    text, said = "nests beat the best single network under deadlines (Oracle_All)", []
    for network in dict.fromkeys(row["network"] for row in rows):
        mine = [row for row in rows if row["network"] == network]
        oracle = {row["deadline_ms"]: row["error"] for row in mine if row["scheme"] == ORACLE_ALL}
        for scheme in dict.fromkeys(row["scheme"] for row in mine if row["scheme"].startswith("Nest")):
            gaps = [oracle[row["deadline_ms"]] - row["error"] for row in mine if row["scheme"] == scheme]
            said.append(
                f"{network.partition('-')[0]}, {scheme.partition(', ')[2]} {Estimate(statistics.fmean(gaps), None, 1)}"
            )
    n = max((row["n"] for row in rows), default=0)
    return Claim(text, "deadline figure", OPEN, f"on a quiet machine: {', '.join(said)}" if said else "–", f"{n}")


def priorities(rows: Sequence[Row], network: str) -> Claim:
    """Whether a stage gains by being put first; the usual order puts the first stage first."""
    text = f"a stage gains by priority ({network})"
    found: dict[str, Estimate] = {}
    for order in four_orders(last(network))[1:]:
        stage = order[0]
        gained = gain(rows, network, f"osgd strategy.order={show(order)}", "osgd", stage)
        if gained is not None:
            found[f"stage {stage} in order {' '.join(map(str, order))}"] = gained
    verdicts = {verdict(each) for each in found.values()}
    settled = HOLDS if verdicts == {HOLDS} else NOT if verdicts and HOLDS not in verdicts and NOT in verdicts else OPEN
    numbers = ", ".join(f"{name} {each}" for name, each in found.items())
    return Claim(text, "priority figure", settled, numbers or "–", seeds(found.values()) if found else "0")


def normalised(rows: Sequence[Row], network: str = "width-digits") -> Claim:
    """Normalised gradients, each with its best constant, against plain ones at the first stage; the constant decides."""
    text = f"normalised gradients do as well as plain ones (first stage, best C, {network})"
    found: dict[str, Estimate] = {}
    for name, plain in {"normsgd": "sgd", "osgd-norm": "osgd"}.items():
        ways = {label(row) for row in rows if row["network"] == network and row["strategy"] == name}
        tried = {way: errors(rows, network, way, 1) for way in sorted(ways) if "train." not in way}
        best = min(tried, key=lambda way: statistics.fmean(tried[way].values()), default="")
        gained = gain(rows, network, best, plain, 1)
        if gained is not None:
            found[f"{name} with C = {best.partition('=')[2] or '0.5'}"] = gained
    verdicts = {verdict(each, -LITTLE) for each in found.values()}
    settled = HOLDS if verdicts == {HOLDS} else NOT if verdicts == {NOT} else OPEN
    numbers = ", ".join(f"{name} {each}" for name, each in found.items())
    return Claim(text, "table 1", settled, numbers or "–", seeds(found.values()) if found else "0")


def claims_table(found: Sequence[Claim]) -> Table:
    heads = tuple(map(Cell, ("the paper says", "in its", "so far", "points gained", "seeds")))
    lines = tuple(
        (
            Cell(each.text),
            Cell(each.where),
            Cell(each.verdict, strong=each.verdict != OPEN),
            Cell(each.numbers),
            Cell(each.n),
        )
        for each in found
    )
    caption = (
        "Points of error by which the one is better than the other, mean of differences seed by seed ± their standard error "
        "(over seeds; over networks where it says so); below zero it is worse. At equal MACs: in brackets the nest's "
        "best stage that takes no more, and its share of them. Settled: 95 % intervals, at least three seeds."
    )
    return Table("Claims", heads, lines, caption, name="claims", words=5, wide=True)


def gains_table(rows: Sequence[Row], other: str, networks: Sequence[str] = CIFAR10) -> Table:
    """OSGD against another strategy at every stage, seed by seed."""
    most = max(last(network) for network in networks)
    heads = (Cell(f"OSGD against {other}"), *(Cell(f"stage {stage}") for stage in range(1, most + 1)), Cell("seeds"))
    lines = []
    for network in networks:
        found = [gain(rows, network, "osgd", other, stage) for stage in range(1, last(network) + 1)]
        known = [each for each in found if each is not None]
        cells = [Cell("–" if each is None else str(each), strong=verdict(each) != OPEN) for each in found]
        padding = [Cell("")] * (most - len(found))
        lines.append((Cell(network), *cells, *padding, Cell(seeds(known) if known else "0")))
    return Table(f"OSGD against {other}, points gained at every stage", heads, tuple(lines), name=f"gains-{other}")
