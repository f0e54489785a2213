"""What holds of the paper: differences seed by seed and verdicts by hand, and a page whose figures are those in results/."""

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from nestling.commands.evaluate import of_seeds
from nestling.errors import NestlingError
from nestling.nets import plan
from nestling.recipes.recipe import NetworkRecipe
from nestling.report.paper.claims import at_equal_cost, claims, priorities
from nestling.report.paper.findings import MARK, PAGES, filled, write_findings
from nestling.report.paper.tables import coverage_table, network_table, words
from nestling.report.paper.three_ways import FILE, SHORT, own_table, ways_table
from nestling.runs.folder import shipped
from nestling.runs.open import resolve
from nestling.studies.paper.cards import seeds
from nestling.studies.paper.results import compare, read_results
from nestling.studies.paper.statistics import Estimate, estimate, gain, image_error, verdict

ROOT = Path(__file__).parent.parent
CIFAR10 = (
    "depth-sparse98",
    "width-resnet42",
    "alternate-sparse98",
    "together-sparse98",
    "cascade-sparse98",
    "even-resnet42",
)


def rows(network: str, strategy: str, *seeds: list[float], changes: str = "") -> list[dict[str, Any]]:
    """The rows of a strategy: a list of errors, stage by stage, for every seed."""
    found = plan(NetworkRecipe(network))
    return [
        {
            "network": network, "strategy": strategy, "changes": changes, "seed": seed, "stage": stage, "error": error,
            "size": found.sizes[stage - 1], "macs": found.macs(stage), "params": found.params(stage), "epochs": 200,
            "data": "cifar10", "n": 10_000,
        }
        for seed, errors in enumerate(seeds)
        for stage, error in enumerate(errors, start=1)
    ]  # fmt: skip


def test_differences_are_taken_seed_by_seed() -> None:
    """What seeds have in common, here a whole point, is not in the spread of their difference."""
    sgd, osgd = (
        ([9.0, 8.0, 7.0], [10.0, 9.0, 8.0], [11.0, 10.0, 9.1]),
        ([9.5, 8.0, 6.5], [10.5, 9.0, 7.5], [11.5, 10.0, 8.5]),
    )
    both = [*rows("width-resnet42", "sgd", *sgd), *rows("width-resnet42", "osgd", *osgd, [1.0, 1.0, 1.0])]
    assert gain(both, "width-resnet42", "osgd", "sgd", 1) == Estimate(-0.5, 0.0, 3), "the fourth seed has no partner"
    third = gain(both, "width-resnet42", "osgd", "sgd", 3)
    assert third is not None and third.mean == pytest.approx((0.5 + 0.5 + 0.6) / 3) and third.n == 3
    assert third.error == pytest.approx(0.1 / 3**0.5 / 3**0.5)
    assert gain(both, "width-resnet42", "osgd", "greedy", 1) is None
    assert str(third) == "+0.53 ± 0.03" and str(Estimate(-0.5, None, 1)) == "−0.50"


def test_a_verdict_needs_three_seeds_and_an_interval_that_leaves_out_the_contrary() -> None:
    assert verdict(None) == verdict(estimate([0.5])) == verdict(estimate([0.5, 0.51])) == "open"
    assert (
        verdict(estimate([0.5, 0.51, 0.52])) == "holds" and verdict(estimate([-0.5, -0.51, -0.52])) == "does not hold"
    )
    assert verdict(estimate([0.1, 0.5, 0.9])) == "open", "0.5 ± 0.23 is 2.2 standard errors, but of three seeds"
    assert verdict(estimate([-0.2, -0.21, -0.22]), least=-0.5) == "holds"
    eleven = estimate([1.0, -1.0] * 5 + [0.0])  # of eleven, 2.228 standard errors
    assert eleven.interval is not None and eleven.error is not None and eleven.interval[1] >= 2.228 * eleven.error


def test_the_images_own_error_is_that_of_a_share() -> None:
    assert image_error(10.0, 10_000) == pytest.approx(0.3)


def claim(found: list[Any], text: str) -> Any:
    return next(each for each in found if each.text.startswith(text))


def test_a_claim_about_all_networks_needs_all_of_them_with_three_seeds() -> None:
    every = []
    for network in CIFAR10:
        stages = len(plan(NetworkRecipe(network)).sizes)
        for strategy, shift in (("sgd", 0.0), ("osgd", -0.5)):
            every += rows(network, strategy, *([8.0 + seed / 10 + shift] * stages for seed in range(3)))
    settled = claim(claims(every, []), "OSGD beats SGD")
    assert (settled.verdict, settled.n) == ("holds", "3") and settled.numbers.startswith("+0.50 ± 0.00 over 6 networks")
    assert claim(claims(every, []), "earlier stages lose little").verdict == "holds"
    fewer = [row for row in every if not (row["network"] == "even-resnet42" and row["seed"] == 2)]
    assert (claim(claims(fewer, []), "OSGD beats SGD").verdict, claim(claims(fewer, []), "OSGD beats SGD").n) == (
        "open",
        "2 to 3",
    )
    none = [row for row in every if row["network"] != "even-resnet42"]
    assert claim(claims(none, []), "OSGD beats SGD").verdict == "open"
    assert all(each.verdict == "open" and each.n == "0" for each in claims([], []))


def test_equal_cost_is_the_best_stage_that_costs_no_more() -> None:
    """even's stages cost 24, 73, 146 and 243 M, the nest's 24, 73 and 267: its last is never affordable."""
    nest = rows("width-resnet42", "osgd", *[[9.0, 8.0, 5.0]] * 3)
    even = rows("even-resnet42", "osgd", *[[9.5, 8.5, 7.0, 6.0]] * 3)
    found = at_equal_cost("…", [*nest, *even], "width-resnet42", "even-resnet42")
    by = ["w3 (w2, 50 %) −1.00 ± 0.00", "w4 (w2, 30 %) −2.00 ± 0.00"]
    assert found.numbers == ", ".join(["w1 +0.50 ± 0.00", "w2 +0.50 ± 0.00", *by])
    assert (found.verdict, found.n) == ("does not hold", "3")


def test_priority_looks_at_the_stage_that_comes_first() -> None:
    usual = rows("width-resnet42", "osgd", *[[9.0, 8.0, 7.0]] * 3)
    first = [("2,1,3", [1.0, 8.5, 1.0]), ("3,1,2", [1.0, 1.0, 7.25]), ("3,2,1", [1.0, 1.0, 7.5])]
    turned = [
        row
        for order, errors in first
        for row in rows("width-resnet42", "osgd", *[errors] * 3, changes=f"strategy.order={order}")
    ]
    found = priorities([*usual, *turned], "width-resnet42")
    assert found.verdict == "does not hold"
    assert found.numbers.startswith("stage 2 in order 2 1 3 −0.50 ± 0.00, stage 3 in order 3 1 2 −0.25 ± 0.00")


def test_coverage_counts_cells_by_n() -> None:
    some = [*rows("width-resnet42", "sgd", *[[1.0, 1.0, 1.0]] * 3), *rows("width-resnet42", "osgd", [1.0, 1.0, 1.0])]
    partly = [
        row for row in rows("width-resnet42", "greedy", *[[1.0, 1.0, 1.0]] * 2) if row["seed"] == 0 or row["stage"] == 1
    ]
    table = coverage_table(compare([*some, *partly]), CIFAR10)
    line = next(each for each in table.rows if each[0].text == "width-resnet42")
    assert dict(zip((cell.text for cell in table.columns), (cell.text for cell in line), strict=True)) == {
        "network": "width-resnet42", "greedy": "1-2", "sgd": "3", "sgd-sum": "–", "osgd": "1", "normsgd": "–", "osgd-norm": "–",
        "alone": "–",
    }  # fmt: skip
    assert table.caption.startswith("9 of the paper's 115 cells here have been trained, 3 of them with 3 seeds")


def test_settings_are_said_in_words() -> None:
    assert words("osgd") == "osgd"
    assert words("osgd strategy.order=3,1,2 strategy.scope=block") == "osgd, order 3 1 2, scope block"
    assert words("normsgd strategy.constant=8") == "normsgd, C = 8"
    flags = "strategy.importance=1.0,1.0,2.0 train.decay_norms=False train.schedule=cosine train.average=0.999"
    said = "sgd, loss weights 1 1 2, norms spared, cosine schedule, averaged weights 0.999"
    assert words(f"sgd {flags}") == said
    assert words("sgd train.distill=0.5 train.teacher=runs/w4") == "sgd, distillation 0.5, taught by w4", (
        "not by itself"
    )
    assert words("sgd network.heads=added train.distill=0.5") == "sgd, added heads, self-distillation 0.5"
    [line] = network_table(
        "width-resnet42", compare(rows("width-resnet42", "sgd", [1.0, 1.0, 1.0], changes=flags)), beside=False
    ).rows
    assert line[0].text == said


def test_the_page_is_what_the_results_say() -> None:
    """Made anew from results/ it is the same page. If this fails, results have come: run nestling paper findings."""
    for name, marks in zip(PAGES, (4, 3, 1, 1, 1, 2), strict=True):
        page = (ROOT / name).read_text(encoding="utf-8")
        assert filled(page, str(ROOT / "results")) == page
        assert len(MARK.findall(page)) == marks
        if name in ("docs/cost.md", "docs/nest.md", "docs/log/nest.md"):  # which tell of other results, too
            continue
        outside = re.sub(r"```.*?```", "", MARK.sub("", page), flags=re.DOTALL)
        assert not re.findall(r"\d+\.\d+", outside.replace("README.md", "")), "figures stand between marks only"


@pytest.mark.parametrize("name", ["docs/findings.md", "docs/cost.md", "docs/nest.md", "docs/scale.md"])
def test_some_pages_can_be_read_in_five_minutes_each(name: str) -> None:
    """At 240 words a minute, a table's cells counted as words, settings and commands not."""
    page = re.sub(r"```.*?```|`[^`]*`", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(re.findall(r"[A-Za-z]{2,}|[+−]?\d[\d.,]*", page)) < 5 * 240


def test_pages_without_marks_or_with_unknown_ones_are_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    with pytest.raises(NestlingError, match="there is no page"):
        write_findings("", [str(page)])
    page.write_text("# Nothing")
    with pytest.raises(NestlingError, match="no marks"):
        write_findings("", [str(page)])
    page.write_text("<!-- clams: made by nestling paper findings -->\n<!-- end -->")
    with pytest.raises(NestlingError, match="did you mean claims"):
        write_findings("", [str(page)])
    page.write_text("before\n<!-- coverage: made by nestling paper findings -->\nold\n<!-- end -->\nafter")
    assert [write_findings("", [str(page)])[str(page)] for _ in range(2)] == ["yes", "no"]
    assert (
        page.read_text().startswith("before\n") and page.read_text().endswith("after") and "old" not in page.read_text()
    )


@pytest.mark.parametrize("name", shipped())
def test_a_card_says_what_all_seeds_of_its_recipe_do(name: str) -> None:
    """The mean, not the better seed. If this fails, results have come: python -m nestling.studies.paper.cards results."""
    run = resolve(name)
    found = seeds(run.recipe, read_results(str(ROOT / "results")))
    assert run.results.get("seeds", {}) == found
    if name == "width-resnet42-cifar10":
        assert found["n"] >= 3 and found["std"][0] is not None
        said = of_seeds({"seeds": found})
        told = re.search(
            r"over three seeds ([\d./ ]+), deviations ([\d./ ]+) \|",
            (ROOT / "docs/networks.md").read_text(encoding="utf-8"),
        )
        assert told, "where the page on networks says what all seeds do"
        both = zip(told[1].split(" / "), told[2].split(" / "), strict=True)
        page = " / ".join(f"{mean} ± {spread}" for mean, spread in both)
        assert said == f"3 seeds of its recipe, on all test images: {page} %; "
    assert of_seeds({}) == ""


def test_what_the_three_ways_cost_is_the_last_test_of_every_seed(tmp_path: Path) -> None:
    """The epoch is the last one that all seeds were tested at, never the best."""
    stored = json.loads((ROOT / "results" / FILE).read_text(encoding="utf-8"))
    runs = [run for run in stored["third"]["runs"] if run["way"] == "keep, damped"]
    at = {epoch: statistics.fmean(run["test_error"][epoch][1] for run in runs) for epoch in ("80", "100")}
    assert at["80"] < at["100"]
    lines = {cells[0].text: [cell.text for cell in cells] for cells in own_table(str(ROOT / "results")).rows}
    damped = lines["keep, damped: weights drawn, later losses at a quarter"]
    assert damped[2].split(" / ")[1].startswith(f"{at['100']:.2f} ±") and damped[5:] == ["100", "6.0", "3"]
    assert lines["keep, damped: wider, later losses at half"][5] == "90 of 100"
    ways = [[cell.text for cell in cells] for cells in ways_table(str(ROOT / "results")).rows]
    assert tuple(way[0] for way in ways) == SHORT and ways[1][2:6] == damped[2:6], "one line of the long table for each"
    runs[0]["test_error"]["100"][1] += 3
    (tmp_path / FILE).write_text(json.dumps(stored))
    changed = {cells[0].text: cells[2].text for cells in own_table(str(tmp_path)).rows}
    assert changed[damped[0]].split(" / ")[1].startswith(f"{at['100'] + 1:.2f} ±")


def test_the_readme_says_what_osgd_gains_and_loses() -> None:
    """Its figures are those of the page, which are those in results/."""
    rows = read_results(str(ROOT / "results"))
    last: dict[str, list[float]] = {}
    earlier: dict[str, list[float]] = {}
    for rival in ("sgd", "sgd-sum"):
        for network in CIFAR10:
            found = [
                gain(rows, network, "osgd", rival, stage) for stage in range(1, plan(NetworkRecipe(network)).stages + 1)
            ]
            means = [each.mean for each in found if each is not None]
            assert len(means) == len(found)
            last.setdefault(rival, []).append(means[-1])
            earlier.setdefault(rival, []).extend(means[:-1])
    won = {rival: sorted(mean for mean in means if mean > 0) for rival, means in last.items()}
    lost = {rival: [mean for mean in means if mean < 0] for rival, means in earlier.items()}
    assert [len(each) for each in won.values()] == [5, 5] and len(earlier["sgd"]) == 17
    (low, high), (low_sum, high_sum) = ((means[0], means[-1]) for means in won.values())
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert (
        f"SGD (by {low:.1f} to {high:.1f} points) and SGD on the *sum* (by {low_sum:.1f} to {high_sum:.1f})." in readme
    )
    assert f"it loses {len(lost['sgd'])} to SGD, by up to {-min(lost['sgd']):.1f}," in readme
    assert f"and {len(lost['sgd-sum'])} to the sum, by up to {-min(lost['sgd-sum']):.1f} (" in readme
