"""The paper's figures from a small grid that was really trained: every number in them is computed again by hand."""

import json
import re
import shutil
from math import inf
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from safetensors.torch import load_file

from nestling.commands.paper import command, show
from nestling.errors import NestlingError
from nestling.nets import plan
from nestling.recipes.recipe import NetworkRecipe
from nestling.report.figures.deadlines import limit_names
from nestling.report.paper.deadline_rows import read_studies
from nestling.report.paper.figures import lent
from nestling.report.paper.pictures import VIEWS
from nestling.studies.deadline import FRACTIONS
from nestling.studies.paper.grid import trains
from nestling.studies.paper.results import read_csv

SET = ("train.epochs=2", "data.limit=600", "train.batch=20", "train.diagnostics=false", "network.blocks=1,1")
SHARED = tuple(each for each in SET if "diagnostics" not in each)
Grid = dict[str, Any]


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Grid:
    """A width nest by osgd (two seeds, and in reverse order) and sgd, its independent nets, its baseline; all profiled."""
    root = tmp_path_factory.mktemp("grid")
    where: dict[str, Any] = {"out": str(root / "runs"), "results": str(root / "results")}
    command("digits", network=("width-digits",), strategy=("osgd",), seeds=2, set=SET, **where)
    command("digits", network=("width-digits",), strategy=("sgd", "alone"), set=SET, **where)
    command("digits", network=("even-digits",), strategy=("osgd",), set=SET, **where)
    command("priorities", network=("width-digits",), strategy=("osgd",), order=("3,2,1",), set=SET, **where)
    profiled = command("profile", **where)
    assert len(profiled["measured"]) == 5, (
        "the nest once, however often it was trained; its baseline; three sizes alone"
    )
    assert command("profile", **where)["measured"] == []
    found = command("figures", data="digits", set=SHARED, page=str(root / "figures.html"), **where)
    return {"root": root, **where, "found": found}


def titles(grid: Grid, picture: str) -> list[str]:
    """The words a reader sees when pointing at a mark."""
    text = (Path(grid["found"]["pictures"]) / f"{picture}.svg").read_text()
    ElementTree.fromstring(text)
    return re.findall(r"<title>([^<]*)</title>", text)[1:]  # the first is the picture's own


def folder(grid: Grid, kind: str, seed: int = 0) -> Path:
    return Path(grid["out"]) / f"{kind}-limit-600-blocks-1_1-epochs-2-batch-20-seed{seed}"


def errors(path: Path) -> list[float]:
    return [100 * stage["error"] for stage in json.loads((path / "results.json").read_text())["stages"]]


def points(words: list[str]) -> dict[str, tuple[float, int]]:
    """ "net, osgd, w1: 12.34 % (n = 2)" as {"net, osgd, w1": (12.34, 2)}."""
    found = [re.fullmatch(r"(.*): ([\d.]+) % \(n = (\d+)\)", word) for word in words]
    return {each[1]: (float(each[2]), int(each[3])) for each in found if each}


def about(error: float) -> Any:
    return pytest.approx(error, abs=0.006)  # two digits


def test_points_against_macs_are_the_results_files(grid: Grid) -> None:
    found = points(titles(grid, "error-against-macs"))
    sgd = errors(folder(grid, "width-digits-sgd"))
    both = [errors(folder(grid, "width-digits-osgd", seed)) for seed in (0, 1)]
    for at, size in enumerate(("w1", "w2", "w4")):
        [alone] = errors(folder(grid, f"width-digits-alone{at + 1}"))
        assert found[f"width-digits, sgd, {size}"] == (about(sgd[at]), 1)
        assert found[f"width-digits, osgd, {size}"] == (about((both[0][at] + both[1][at]) / 2), 2)
        assert found[f"width-digits, alone, {size}"] == (about(alone), 1)
    assert sum(word.startswith("even-digits, osgd") for word in found) == 4
    assert len(found) == 3 + 3 + 3 + 4


def test_the_tables_are_the_results_files(grid: Grid) -> None:
    text = Path(grid["found"]["markdown"]).read_text()
    assert "made from 8 runs of ours" in text  # osgd twice, in reverse, sgd, three alone, the baseline
    sgd = errors(folder(grid, "width-digits-sgd"))
    assert f"| sgd (n = 1, 2 epochs) | {sgd[0]:.2f} | {sgd[1]:.2f} | {sgd[2]:.2f} |" in text
    alone = [errors(folder(grid, f"width-digits-alone{stage}"))[0] for stage in (1, 2, 3)]
    gaps = [f"{round(a, 3) - round(b, 3):+.2f}".replace("-", "−") for a, b in zip(sgd, alone, strict=True)]
    assert f"| sgd | {' | '.join(gaps)} |" in text
    show(grid["found"])


# The deadline study by brute force: one input at a time, from the files alone.


def trace(path: Path) -> list[list[float]]:
    found: list[list[float]] = json.loads((path / "profile.json").read_text())["trace_ms"]
    return found


def right(path: Path) -> list[list[bool]]:
    tensors = load_file(path / "outputs.safetensors")
    return [[bool(c) for c in stage.argmax(1) == tensors["labels"]] for stage in tensors["logits"]]


def latency(rows: list[list[float]], i: int, n: int) -> list[float]:
    return rows[i * max(1, len(rows) // n) % len(rows)]


def brute_anytime(correct: list[list[bool]], times: list[list[float]], limit: float) -> float:
    n, total = len(correct[0]), 0.0
    for i in range(n):
        error = 0.9  # a guess among ten classes
        for stage, time in enumerate(latency(times, i, n)):
            if time <= limit:
                error = 0.0 if correct[stage][i] else 1.0
        total += error
    return 100 * total / n


def brute_oracles(nets: list[tuple[list[bool], list[list[float]]]], limit: float) -> tuple[float, float]:
    n = len(nets[0][0])
    every, accuracy = [], [sum(correct) / n for correct, _ in nets]
    for correct, times in nets:
        every.append(sum((not correct[i]) if latency(times, i, n)[0] <= limit else 0.9 for i in range(n)) / n)
    each = 0.0
    for i in range(n):
        ready = [k for k, (_, times) in enumerate(nets) if latency(times, i, n)[0] <= limit]
        best = max(ready, key=lambda k: (accuracy[k], k), default=None)
        each += 0.9 if best is None else float(not nets[best][0][i])
    return 100 * min(every), 100 * each / n


def test_the_deadline_study_equals_brute_force(grid: Grid) -> None:
    nest = trace(folder(grid, "width-digits-osgd"))
    base = folder(grid, "even-digits-osgd")
    alone = [folder(grid, f"width-digits-alone{stage}") for stage in (1, 2, 3)]
    nets = [(right(path)[0], trace(path)) for path in alone]
    n = len(nets[0][0])
    means = [sum(latency(times, i, n)[0] for i in range(n)) / n for _, times in nets]
    limits = [fraction * max(means) for fraction in FRACTIONS] + [inf]
    found: dict[str, list[dict[str, Any]]] = {}
    for row in grid["found"]["deadlines"]:
        found.setdefault(row["scheme"], []).append(row)
    assert list(found) == ["Base, osgd", "Nest, osgd", "Nest, sgd", "Oracle_All", "Oracle_Each"]
    for at, limit in enumerate(limits):
        osgd = [brute_anytime(right(folder(grid, "width-digits-osgd", seed)), nest, limit) for seed in (0, 1)]
        expected = {
            "Base, osgd": brute_anytime(right(base), trace(base), limit),
            "Nest, osgd": sum(osgd) / 2,
            "Nest, sgd": brute_anytime(right(folder(grid, "width-digits-sgd")), nest, limit),
            **dict(zip(("Oracle_All", "Oracle_Each"), brute_oracles(nets, limit), strict=True)),
        }
        for scheme, error in expected.items():
            assert found[scheme][at]["error"] == pytest.approx(error, abs=6e-4), (scheme, limit)
            assert found[scheme][at]["deadline_ms"] == pytest.approx(limit, abs=6e-5)
    assert [rows[0]["n"] for rows in found.values()] == [1, 2, 1, 1, 1]


def test_the_device_of_the_trace_is_named_in_the_picture(grid: Grid) -> None:
    device = json.loads((folder(grid, "width-digits-osgd") / "profile.json").read_text())["device"]
    assert f"measured on {device}" in (Path(grid["found"]["pictures"]) / "error-under-deadlines.svg").read_text()
    assert "Runs behind each bar: 1 to 2." in Path(grid["found"]["markdown"]).read_text()


def test_priorities_are_the_results_files(grid: Grid) -> None:
    words = titles(grid, "priorities")
    usual = [
        sum(pair) / 2 for pair in zip(*(errors(folder(grid, "width-digits-osgd", s)) for s in (0, 1)), strict=True)
    ]
    [path] = Path(grid["out"]).glob("width-digits-osgd-*order-3_2_1*")
    for size, mine, theirs in zip(("w1", "w2", "w4"), errors(path), usual, strict=True):
        assert points(words)[f"osgd, order 3,2,1, {size}"] == (about(mine), 1)
        [gap] = [word for word in words if word.startswith(f"osgd, order 3,2,1, {size}") and word.endswith("points")]
        assert float(gap.split()[-2]) == about(mine - theirs)


def test_what_is_missing_is_said_in_the_pictures_and_as_commands(grid: Grid) -> None:
    pictures = Path(grid["found"]["pictures"])
    assert "no run folder of depth-digits (osgd or sgd)" in (pictures / "error-under-deadlines.svg").read_text()
    text = Path(grid["found"]["markdown"]).read_text().replace("\\", "")
    assert (
        "Not there yet in Width-nested: " not in text
        and "not there yet" not in (pictures / "priorities.svg").read_text()
    )
    assert "Not there yet in width-digits: osgd, order 2,1,3, osgd, order 3,1,2." in text, "said beside what is drawn"
    macs = (pictures / "error-against-macs.svg").read_text()
    assert macs.count("not there yet") == 2 and "Nest (together), sgd" in macs, "and written into empty panels"
    lacking = grid["found"]["missing"]
    settings = " ".join(f"--set {each}" for each in SHARED)
    words = "--strategy sgd-sum --strategy normsgd --strategy osgd-norm --strategy greedy"
    assert f"nestling paper digits --network width-digits {words} {settings}" in lacking
    assert f"nestling paper priorities --network width-digits {settings}" in lacking
    assert all(command in Path(grid["found"]["markdown"]).read_text().replace("\\", "") for command in lacking)


def test_pictures_have_both_forms(grid: Grid) -> None:
    pictures = Path(grid["found"]["pictures"])
    names = ("error-against-macs", "error-under-deadlines", "priorities")
    assert sorted(path.name for path in pictures.iterdir()) == sorted(f"{n}.{e}" for n in names for e in ("png", "svg"))
    assert all((pictures / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in names)


def test_figures_come_from_results_alone_where_run_folders_are_gone(grid: Grid, tmp_path: Path) -> None:
    """Errors and studies that were stored are drawn again, the same, on a machine without the runs."""
    # as if the recipe itself were the small one, since studies of changed grids are not kept
    runs, stored = tmp_path / "runs", tmp_path / "results"
    shutil.copytree(grid["out"], runs)
    for path in runs.glob("*/recipe.json"):
        recipe = json.loads(path.read_text())
        recipe["data"]["limit"], recipe["network"]["blocks"] = 0, []
        recipe["train"]["epochs"], recipe["train"]["batch"] = 30, 64
        path.write_text(json.dumps(recipe))
    words: dict[str, Any] = {"data": "digits", "results": str(stored), "page": str(tmp_path / "a.html")}
    stored.mkdir()
    shutil.copy(next(Path(grid["results"]).glob("digits-*.csv")), stored / "rows.csv")
    text = (stored / "rows.csv").read_text()
    (stored / "rows.csv").write_text(
        re.sub(r"data.limit=600 network.blocks=1,1|train.epochs=2 train.batch=20", "", text)
    )
    first = command("figures", out=str(runs), **words)
    assert len(first["deadlines"]) == 5 * 8
    assert all(each["command"] and each["versions"] and each["seeds"].split() for each in first["deadlines"])
    [path] = stored.glob("deadlines-*.csv")
    assert read_studies(path) == first["deadlines"]
    again = command("figures", out=str(tmp_path / "nowhere"), **{**words, "page": str(tmp_path / "b.html")})
    assert again["deadlines"] == first["deadlines"]
    picture = "error-under-deadlines.svg"
    assert (tmp_path / "a" / picture).read_text() == (tmp_path / "b" / picture).read_text()


def test_deadlines_are_written_in_as_many_digits_as_tell_them_apart() -> None:
    assert limit_names([2.4, 3.6, 4.8, inf]) == ["2.4", "3.6", "4.8", "none"]
    assert limit_names([0.107, 0.112, 0.1178, inf]) == ["0.107", "0.112", "0.118", "none"]
    assert limit_names([99.2, 110.4, 120.0]) == ["99", "110", "120"]


def test_independent_nets_of_one_size_are_lent() -> None:
    """The paper's even and doubling widths share w1, w2 and w4: one training of each serves both."""
    wide = [plan(NetworkRecipe("width-resnet42", alone=stage)) for stage in (1, 2, 3)]
    rows = [
        {"network": "width-resnet42", "strategy": "alone", "changes": "", "stage": stage, "size": found.sizes[0],
         "macs": found.macs(1), "params": found.params(1), "error": 9.0 - stage}
        for stage, found in enumerate(wide, start=1)
    ]  # fmt: skip
    found = [
        (row["stage"], row["size"], row["error"])
        for row in lent(rows, ["table1", "table2"])
        if row["network"] == "even-resnet42"
    ]
    assert found == [(1, "w1", 8.0), (2, "w2", 7.0), (4, "w4", 6.0)]
    assert len(lent(rows, ["table1", "table2"])) == 6, "and to nobody else"
    mine = {**rows[0], "network": "even-resnet42", "error": 1.0}
    kept = [row["error"] for row in lent([*rows, mine], ["table2"]) if row["network"] == "even-resnet42"]
    assert kept == [1.0, 7.0, 6.0], "what is there is not replaced"


def test_with_nothing_at_all_every_panel_says_so(tmp_path: Path) -> None:
    found = command("figures", out=str(tmp_path / "runs"), results="", page=str(tmp_path / "page.html"))
    assert found["rows"] == found["deadlines"] == [] and len(found["missing"]) == 2 * (4 + 2) + 2 + 1
    for view in VIEWS["cifar10"]:
        assert f"no run folder of {view.nests[0]}" in (tmp_path / "page" / "error-under-deadlines.svg").read_text()
    words = re.findall(r"<title>([^<]*)</title>", (tmp_path / "page" / "error-against-macs.svg").read_text())
    assert "the paper's width-resnet42, osgd, w4: 7.3 %" in [word.replace("&#x27;", "'") for word in words]
    assert len(words) == 1 + 4 + 3 + 5


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    where: dict[str, Any] = {"out": str(tmp_path), "results": "", "page": str(tmp_path / "page.html")}
    with pytest.raises(NestlingError, match="did you mean cifar10"):
        command("figures", data="cifar", **where)
    with pytest.raises(NestlingError, match=r"no results of 'ogsd'; did you mean osgd"):
        command("figures", strategy=("ogsd",), **where)


def test_the_grids_rows_are_in_one_file_with_their_conditions(grid: Grid) -> None:
    [path] = Path(grid["results"]).glob("digits-*.csv")
    rows = read_csv(path)
    assert len(rows) == 2 * 3 + 3 + 3 + 4 + 3
    assert {row["changes"].replace("strategy.order=3,2,1 ", "") for row in rows} == {
        "data.limit=600 network.blocks=1,1 train.epochs=2 train.batch=20"
    }
    assert all(row["data"] == "digits" and row["split"] == "test" and row["n"] == 360 for row in rows)


def test_a_stage_without_a_loss_has_no_place_in_a_table() -> None:
    """What it says is chance: 90 % of error would only mislead."""
    nest = {"network": "width-resnet42", "strategy": "sgd", "changes": "strategy.importance=0.0,0.0,1.0"}
    assert [trains({**nest, "stage": stage}) for stage in (1, 2, 3)] == [False, False, True]
    later = {**nest, "changes": "strategy.importance=0.0,0.0,1.0,1.0,0.0,2.0 train.average=0.999"}
    assert [trains({**later, "stage": stage}) for stage in (1, 2, 3)] == [True, False, True], "as training ends"
    assert trains({**nest, "strategy": "alone", "stage": 1}) and trains({**nest, "changes": "", "stage": 1})
