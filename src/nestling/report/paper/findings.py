"""`nestling paper findings`: the tables of docs/findings.md and the other PAGES, from what is in results/.

In: a folder of results and pages that have marks, `<!-- NAME: made by nestling paper findings -->` to `<!-- end -->`. Out: the
pages with every such part made anew. What stands outside the marks is a person's, and has no figures.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from nestling.errors import NestlingError, nearest
from nestling.files import write_atomically
from nestling.report.content import Table
from nestling.report.markdown import table_text
from nestling.report.paper.claims import claims, claims_table, gains_table
from nestling.report.paper.deadline_rows import read_studies
from nestling.report.paper.price import cost_table
from nestling.report.paper.tables import coverage_table, network_table, tiny_tables, variants_table
from nestling.report.paper.three_ways import own_table, ways_table
from nestling.studies.paper.constant import as_usual
from nestling.studies.paper.everything import CIFAR10, everything, missing_jobs
from nestling.studies.paper.grid import trains
from nestling.studies.paper.lent import lent
from nestling.studies.paper.results import TINY, Row, compare, read_results
from nestling.studies.paper.statistics import image_error

TABLES = ("table1", "table2", "digits")
MADE = "made by nestling paper findings"
MARK = re.compile(rf"<!-- (?P<name>[a-z0-9-]+): {MADE} -->\n.*?<!-- end -->", re.DOTALL)
DIGITS = ("width-digits", "depth-digits")
PAGES = (
    "docs/findings.md",
    "docs/tables.md",
    "docs/cost.md",
    "docs/nest.md",
    "docs/log/nest.md",
    "docs/log/tables.md",
)


def write_findings(results: str, pages: Sequence[str] = PAGES) -> dict[str, str]:
    """Make every marked part of these pages anew; which of them have changed."""
    paths = [Path(page) for page in pages]
    for path in paths:
        if not path.is_file():
            raise NestlingError(f"there is no page {path} to write findings into; --page names one that has marks.")
    before = {path: path.read_text(encoding="utf-8") for path in paths}
    after = {path: filled(text, results) for path, text in before.items()}
    for path, text in after.items():
        write_atomically(path, text.encode())
    return {str(path): "yes" if after[path] != before[path] else "no" for path in paths}


def filled(text: str, results: str) -> str:
    """The page with its marked parts made from the results."""
    every = read_results(results)
    tiny = [row for row in every if row.get("data") == TINY]
    rows = lent(as_usual([row for row in every if row.get("data") != TINY]), TABLES)
    studies = [row for path in sorted(Path(results).glob("deadlines-*.csv")) for row in read_studies(path)]
    parts: dict[str, Callable[[], str]] = {
        "claims": lambda: table_text(claims_table(claims(rows, studies, tiny))),
        "coverage": lambda: table_text(coverage_table(compare(rows), CIFAR10)),
        "gains": lambda: joined([gains_table(rows, "sgd"), gains_table(rows, "sgd-sum")]),
        "cifar10": lambda: joined([network_table(network, usual(rows)) for network in CIFAR10]),
        "variants": lambda: joined([variant_table(rows, network) for network in CIFAR10]),
        "cost": lambda: table_text(cost_table(every)),
        "ways": lambda: table_text(ways_table(results)),
        "own": lambda: table_text(own_table(results)),
        "digits": lambda: joined([network_table(network, compare(rows)) for network in DIGITS]),
        "tiny": lambda: joined(tiny_tables(tiny)) or "Not trained.",
        "images": lambda: images(rows),
        "left": lambda: left(results),
    }

    def made(mark: re.Match[str]) -> str:
        name = mark["name"]
        if name not in parts:
            raise NestlingError(f"the page has a mark {name!r}; did you mean {nearest(name, parts)}?")
        return f"<!-- {name}: {MADE} -->\n\n{parts[name]()}\n\n<!-- end -->"

    if not MARK.search(text):
        raise NestlingError("the page has no marks; see docs/findings.md for how they look.")
    return MARK.sub(made, text)


def joined(tables: Sequence[Table | None]) -> str:
    return "\n\n".join(table_text(table) for table in tables if table is not None)


def usual(rows: Sequence[Row]) -> list[Row]:
    """Means of runs that changed nothing about the paper's recipes."""
    return compare([row for row in rows if not row["changes"]])


def variant_table(rows: Sequence[Row], network: str) -> Table | None:
    found = variants(rows, network)
    return variants_table(network, found) if found else None


def variants(rows: Sequence[Row], network: str) -> list[Row]:
    """Means of one network's runs that changed something, at the stages that they train."""
    changed = [row for row in rows if row["network"] == network and row["changes"] and row["data"] == "cifar10"]
    return compare([row for row in changed if trains(row)])


def images(rows: Sequence[Row]) -> str:
    """What the number of test images alone leaves open."""
    tests = {row["data"]: row["n"] for row in rows}
    said = [
        f"{n:,} test images of {data} leave a standard error of {image_error(7.0, n):.2f} points in an error of 7 %"
        for data, n in tests.items()
    ]
    return f"The images' own error is another thing than ± over seeds: {', '.join(said)}."


def left(results: str) -> str:
    """How much of the grid is still to be trained."""
    rows = read_results(results)
    jobs = missing_jobs(everything(rows=rows), Path("/nonexistent"), rows)
    reasons = {job.why: [each for each in jobs if each.why == job.why] for job in jobs}
    lines = [
        f"- {why}: {len(each)} runs, about {sum(job.minutes(Path('/nonexistent')) for job in each):.0f} minutes of an H200"
        for why, each in reasons.items()
    ]
    return "\n".join(lines) or "Nothing."
