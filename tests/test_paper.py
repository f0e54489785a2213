"""The grid and the comparison with the paper: cells, means and marks by hand, and a grid that is killed twice on the way."""

import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from nestling.commands.paper import command, show
from nestling.errors import NestlingError
from nestling.files import WEIGHTS
from nestling.nets import NETS, plan
from nestling.recipes import RECIPES, named
from nestling.recipes.recipe import StrategyRecipe, override
from nestling.report.content import Table
from nestling.report.markdown import table_text
from nestling.report.paper.tables import gap_table, missing, network_table
from nestling.runs.folder import RunDir
from nestling.studies.paper.constant import CONSTANTS, SHORT, as_usual, setting
from nestling.studies.paper.everything import Job, everything, missing_jobs
from nestling.studies.paper.grid import SCOPES, TABLES, cells, four_orders, recipe_of, run_name, train_cells
from nestling.studies.paper.packed import by_progress
from nestling.studies.paper.results import (
    TINY,
    changes,
    collect,
    command_of,
    compare,
    less,
    merged,
    others_of,
    published,
    read_csv,
    read_results,
    store,
    strategy_name,
)
from nestling.studies.sweep.processes import Processes
from nestling.train import Training, side_by_side, train

QUICK = ("train.epochs=2", "data.limit=256", "train.batch=64", "train.diagnostics=false")


# --- the grid --------------------------------------------------------------------------------------------------------


def test_the_papers_numbers_are_all_there() -> None:
    numbers = published()
    assert numbers["width-resnet42", "osgd", 3] == (7.3, 0.3)
    assert numbers["depth-sparse98", "greedy", 1] == (9.6, 0.2)
    assert len(numbers) == 139


def test_every_row_of_the_papers_tables_has_a_recipe() -> None:
    for network in {network for network, _, _ in published()}:
        [recipe] = [named(table[network]) for name, table in TABLES.items() if network in table and name != "tiny"]
        stages = {stage for name, _, stage in published() if name == network}
        assert recipe.network.name == network and stages == set(plan(recipe.network).answering)
    strategies = {strategy.partition(" ")[0] for _, strategy, _ in published()}
    made = {recipe.strategy.name for table in ("table1", "table2") for _, recipe in cells(table, (), (), 1)}
    assert strategies <= made


def test_cells_by_hand() -> None:
    chosen = dict(cells("table1", ("width-resnet42",), ("osgd", "alone"), seeds=2))
    assert list(chosen) == [
        "width-resnet42-osgd-seed0", "width-resnet42-alone1-seed0", "width-resnet42-alone2-seed0",
        "width-resnet42-alone3-seed0", "width-resnet42-osgd-seed1", "width-resnet42-alone1-seed1",
        "width-resnet42-alone2-seed1", "width-resnet42-alone3-seed1",
    ]  # fmt: skip
    assert chosen["width-resnet42-alone2-seed1"].network.alone == 2
    assert chosen["width-resnet42-osgd-seed1"].train.seed == 1
    assert chosen["width-resnet42-osgd-seed0"].train.epochs == 200
    # six CIFAR networks, six strategies each, and their 23 independent nets
    both = [name for table in ("table1", "table2") for name, _ in cells(table, (), (), seeds=1)]
    assert len(both) == len(set(both)) == 6 * 6 + (4 + 3 + 5 + 3 + 4 + 4)


def test_scopes_and_orders_are_one_line_each() -> None:
    scopes = dict(cells("scopes", (), (), seeds=1))
    assert [recipe.strategy.scope for recipe in scopes.values()] == list(SCOPES) == ["all", "shared", "block", "tensor"]
    assert next(iter(scopes)) == "width-resnet42-osgd-seed0", "scope all is the run of table 1"
    orders = dict(cells("priorities", ("depth-sparse98",), (), seeds=1))
    assert [recipe.strategy.order for recipe in orders.values()] == [(), (2, 3, 1, 4), (4, 1, 2, 3), (4, 3, 2, 1), ()]
    assert next(iter(orders)) == "depth-sparse98-osgd-seed0" and list(orders)[-1] == "depth-sparse98-sgd-seed0"
    one = dict(cells("table1", ("width-resnet42",), ("osgd", "sgd"), 1, (), ("block",), ("3,1,2",)))
    assert list(one) == ["width-resnet42-osgd-order-3_1_2-scope-block-seed0", "width-resnet42-sgd-seed0"]


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_four_orders_are_orders(stages: int) -> None:
    found = four_orders(stages)
    assert all(sorted(order) == list(range(1, stages + 1)) for order in found)
    assert len(set(found)) == (2 if stages == 2 else 4) and found[0] == tuple(range(1, stages + 1))


def test_settings_reach_independent_nets_and_the_folders_name() -> None:
    settings = ("network.blocks=1,1,1", "train.epochs=3")
    chosen = dict(cells("table1", ("width-resnet42",), ("alone",), 1, settings))
    assert next(iter(chosen)) == "width-resnet42-alone1-blocks-1_1_1-epochs-3-seed0"
    assert all(recipe.network.blocks == (1, 1, 1) for recipe in chosen.values())


def test_names_of_all_cells_of_the_grid_differ_and_so_do_their_recipes() -> None:
    every = [each for part in (*TABLES, "scopes", "priorities") for each in cells(part, (), (), seeds=2)]
    assert len(dict(every)) == len({recipe for _, recipe in every})


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("table9", (), ()), "did you mean table1"),
        (("table1", ("even-resnet42",), ()), "table1 has no network 'even-resnet42'"),
        (("table1", (), ("osdg",)), "did you mean osgd"),
        (("table1", (), ("osgd",), 1, (), ("blocks",)), "did you mean block"),
        (("table1", ("width-resnet42",), ("osgd",), 1, (), (), ("1,2",)), "name each of 1 to 3 once"),
    ],
)
def test_what_is_not_in_the_paper_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    full = arguments if len(arguments) > 3 else (*arguments, 1)
    with pytest.raises(NestlingError, match=message):
        list(cells(*full))


# --- rows ------------------------------------------------------------------------------------------------------------


def row(error: float, **more: Any) -> dict[str, Any]:
    usual = {"network": "width-resnet42", "strategy": "osgd", "changes": "", "epochs": 200, "seed": 0, "stage": 3}
    return {
        **usual,
        "size": "w4",
        "macs": 266_897_600,
        "device": "NVIDIA H200",
        "commit": "abc",
        "error": error,
        **more,
    }


def test_means_and_spread_by_hand() -> None:
    [found] = compare([row(7.0), row(8.0, seed=1), row(7.5, seed=2)])
    assert (found["error"], found["std"], found["n"], found["paper"], found["paper_std"]) == (7.5, 0.5, 3, 7.3, 0.3)
    assert not found["beyond"]
    [two] = compare([row(6.22), row(6.75, seed=1)])
    assert f"{two['std']:.2f}" == "0.37", "0.3748 rounded once"
    # two standard deviations: of one run against the paper's 0.3, then of two that differ by 0.2 (std 0.1414)
    for error, beyond in ((7.89, False), (7.91, True), (6.69, True), (6.71, False)):
        assert compare([row(error)])[0]["beyond"] is beyond
    # (0.3² + 0.1414²)^½ = 0.3317, twice that is 0.6633
    assert not compare([row(7.86), row(8.06, seed=1)])[0]["beyond"]
    assert compare([row(7.87), row(8.07, seed=1)])[0]["beyond"]


def test_imagenet_stands_beside_top_1_and_top_5_and_is_never_marked() -> None:
    one = row(30.0, network="width-resnet50", top5=10.0)
    assert (compare([one])[0]["paper"], compare([one], "top5")[0]["paper"]) == (28.3, 9.4)
    assert compare([one], "top5")[0]["error"] == 10.0
    assert not compare([one])[0]["beyond"], "the paper gives no deviation there"
    assert compare([row(30.0, network="width-resnet50", top5=None)], "top5") == []


def test_an_independent_net_stands_beside_greedys_first_stage() -> None:
    assert compare([row(8.9, strategy="alone", stage=1, size="w1")])[0]["paper"] == 10.2
    assert compare([row(8.9, strategy="alone", stage=2, size="w2")])[0]["paper"] is None


def test_a_row_says_what_was_changed() -> None:
    base = named("digits-width")
    assert (strategy_name(base), changes(base)) == ("osgd", "")
    changed = override(base, ["strategy.scope=block", "strategy.order=3,2,1", "train.distill=0.5", "train.seed=4"])
    assert changes(changed) == "strategy.order=3,2,1 strategy.scope=block train.distill=0.5"
    assert override(base, [*changes(changed).split(), "train.seed=4"]) == changed, "they are settings"
    alone = override(base, ["network.alone=2", "strategy.name=sgd", "strategy.scope=block"])
    assert (strategy_name(alone), changes(alone)) == ("alone", "")
    assert run_name(alone) == "width-digits-alone2-seed0"


def test_independent_nets_by_normalised_gradients_have_a_name_of_their_own() -> None:
    """With one task, osgd and sgd are one training, normsgd and osgd-norm another; C makes a third."""
    names = {}
    for strategy in ("sgd", "osgd", "greedy", "normsgd", "osgd-norm"):
        alone = override(named("cifar10-depth"), ["network.alone=4", f"strategy.name={strategy}"])
        names[strategy] = run_name(alone)
    plain_name, norm_name = "depth-sparse98-alone4-seed0", "depth-sparse98-alone-norm4-seed0"
    assert names == dict.fromkeys(("sgd", "osgd", "greedy"), plain_name) | dict.fromkeys(
        ("normsgd", "osgd-norm"), norm_name
    )
    changed = override(named("cifar10-depth"), ["network.alone=4", "strategy.name=normsgd", "strategy.constant=2"])
    assert (strategy_name(changed), changes(changed)) == ("alone-norm", "strategy.constant=2")
    chosen = dict(cells("table1", ("depth-sparse98",), ("alone-norm",), 1, ("strategy.constant=2",)))
    assert list(chosen)[-1] == run_name(changed) == "depth-sparse98-alone-norm4-constant-2-seed0"
    assert chosen[run_name(changed)].strategy == StrategyRecipe("normsgd", constant=2.0)


@pytest.mark.parametrize("name", RECIPES)
def test_named_recipes_change_nothing(name: str) -> None:
    assert changes(named(name)) == ""


def test_settings_that_a_grid_shares_are_taken_off() -> None:
    assert less("strategy.scope=block train.epochs=3", ["train.epochs=3"]) == "strategy.scope=block"
    assert less("train.epochs=3", []) == "train.epochs=3"
    assert less("strategy.scope=block", ["train.epochs=3"]) is None
    written = ["train.decay_norms=false", "train.weight_decay=1e-4", "strategy.importance=1,1,2"]
    changed = "strategy.importance=1.0,1.0,2.0 train.weight_decay=0.0001 train.decay_norms=False"
    assert less(changed, written) == "", "as changes() writes them"
    assert less(changed, [*written, "train.engine=eager"]) == "", "what changes() leaves out is not asked for"


def test_rows_survive_a_file_and_newer_ones_replace_older(tmp_path: Path) -> None:
    old = [row(7.0, data="cifar10"), row(8.0, data="cifar10", seed=1)]
    assert store(old, str(tmp_path)) == [str(tmp_path / "cifar10-h200.csv")]
    assert compare(read_csv(tmp_path / "cifar10-h200.csv")) == compare(old)
    store([row(6.5, data="cifar10"), row(9.0, data="cifar10", seed=2)], str(tmp_path))
    found = read_csv(tmp_path / "cifar10-h200.csv")
    assert [(each["seed"], each["error"]) for each in found] == [(0, 6.5), (1, 8.0), (2, 9.0)]
    assert len(merged(old, [row(7.0, commit="def")])) == 3, "another commit is another run"
    assert store(old, str(tmp_path / "one.csv")) == [str(tmp_path / "one.csv")]


def test_a_run_that_went_on_elsewhere_says_where() -> None:
    begun: dict[str, Any] = {"device": "NVIDIA H200"}
    assert others_of(begun) == others_of({**begun, "resumed": [begun]}) == []
    assert others_of({**begun, "resumed": [begun, {"device": "AMD EPYC"}]}) == ["AMD EPYC"]


def test_a_file_written_again_is_the_same_file(tmp_path: Path) -> None:
    stored = Path(__file__).parent.parent / "results" / "cifar10-h200.csv"
    store(read_csv(stored), str(tmp_path / "again.csv"))
    assert (tmp_path / "again.csv").read_text() == stored.read_text()


def test_files_of_something_else_and_damaged_rows(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("model,time\na,1\n")
    assert read_csv(tmp_path / "other.csv") == []
    store([row(7.0, data="cifar10")], str(tmp_path / "mine.csv"))
    text = (tmp_path / "mine.csv").read_text()
    (tmp_path / "mine.csv").write_text(text.replace("7.0", "seven"))
    with pytest.raises(NestlingError, match=r"mine\.csv: error is 'seven'"):
        read_csv(tmp_path / "mine.csv")


def test_the_stored_results_can_be_read_and_are_of_known_networks() -> None:
    folder = Path(__file__).parent.parent / "results"
    rows = [each for path in folder.glob("*.csv") for each in read_csv(path)]
    assert rows and all(each["network"] in NETS and 0 <= each["error"] <= 100 for each in rows)
    plans = cache(lambda network, tiny: plan(network, 200, (3, 64, 64)) if tiny else plan(network))
    for each in rows:
        recipe = recipe_of(each)
        assert (recipe.network.name, strategy_name(recipe)) == (each["network"], each["strategy"])
        drawn = plans(recipe.network, each["data"] == TINY)
        assert each["macs"] == drawn.macs(1 if recipe.network.alone else each["stage"])
        assert each.get("train") in (None, "", command_of(recipe)), "the command that makes the same run by itself"


# --- tables ----------------------------------------------------------------------------------------------------------


def cell_texts(table: Table, name: str) -> list[tuple[str, str, str]]:
    [line] = [line for line in table.rows if line[0].text == name]
    return [(cell.text, cell.after, cell.small.replace("\u00a0", " ")) for cell in line]


def test_a_table_by_hand() -> None:
    rows = [row(6.0, stage=3), row(6.4, stage=3, seed=1), row(9.0, stage=1, size="w1")]
    rows.append(row(8.0, stage=1, size="w1", changes="strategy.scope=block"))
    table = network_table("width-resnet42", compare(rows))
    assert [line[0].text for line in table.rows] == [
        "greedy", "sgd", "osgd", "osgd, scope block", "normsgd", "osgd-norm",
    ]  # fmt: skip
    assert cell_texts(table, "osgd") == [
        ("osgd", "", "n = 1-2, 200 epochs"), ("9.00", "▼", "paper 12.3±0.1"), ("–", "", "paper 8.9±0.2"),
        ("6.20", "±\u00a00.28 ▼", "paper 7.3±0.3"),
    ]  # fmt: skip
    assert cell_texts(table, "greedy")[1:] == [
        ("–", "", "paper 10.2±0.1"), ("–", "", "paper 9.9±0.2"), ("–", "", "paper 9.2±0.2"),
    ]  # fmt: skip
    assert "| osgd (n = 1-2, 200 epochs) | 9.00 ▼ (paper 12.3±0.1) | – (paper 8.9±0.2) |" in table_text(table)


def test_gaps_to_independent_nets_by_hand() -> None:
    rows = [row(6.0), row(6.25, strategy="alone"), row(9.0, stage=1, size="w1")]
    table = gap_table("width-resnet42", compare(rows))
    assert table is not None and [[cell.text for cell in line] for line in table.rows] == [["osgd", "–", "–", "−0.25"]]
    assert gap_table("width-resnet42", compare(rows[:1])) is None


def test_what_is_missing_is_a_command() -> None:
    names, sizes = ("sgd", "osgd", "sgd-sum", "normsgd", "osgd-norm", "alone"), ("w1", "w2", "w4")
    thrice = [(name, i, size, seed) for name in names for i, size in enumerate(sizes, 1) for seed in range(3)]
    every = [row(1.0, strategy=name, stage=i, size=size, seed=seed) for name, i, size, seed in thrice]
    lacking = missing("table1", compare(every))
    assert "nestling paper table1 --network width-resnet42 --strategy greedy --seeds 3" in lacking
    assert len(lacking) == 1 + 2 * 3, "of the others also normalised gradients, whose constant another part calibrates"
    partly = missing("table1", compare(every[:-1]))  # without a third largest independent net
    assert "nestling paper table1 --network width-resnet42 --strategy alone --strategy greedy --seeds 3" in partly
    assert missing("table3", [])[0] == "nestling paper table3 --network width-resnet50 --strategy sgd --strategy osgd"


# --- everything, most valuable first ----------------------------------------------------------------------------------


def trial_rows(best: float, names: tuple[str, ...] = ("normsgd", "osgd-norm")) -> list[dict[str, Any]]:
    """Rows of calibrations in which this constant was best, of all networks."""
    return [
        row(5.0 if constant == best else 9.0, network=network, strategy=name, changes=changes(recipe), epochs=30)
        for network, base in {**TABLES["table1"], **TABLES["table2"]}.items()
        for name in names
        for constant in CONSTANTS
        for recipe in [override(named(base), [f"strategy.name={name}", *SHORT, setting(constant)])]
    ]


def test_normalised_gradients_wait_for_their_constant_and_then_have_it() -> None:
    before = [job for job in everything() if "norm" in job.name]
    assert len(before) == 6 * 2 * len(CONSTANTS) and {job.recipe.train.epochs for job in before} == {30}
    assert {job.recipe.data.validation for job in before} == {5000}, "chosen on images that no result is told of"
    rows = trial_rows(8.0)
    found = [job for job in everything(rows=rows) if "norm" in job.name and job.recipe.train.epochs == 200]
    assert len(found) == 6 * 2 * 3 + 1 and {job.recipe.strategy.constant for job in found} == {8.0}
    assert "depth-sparse98-alone-norm4-constant-8-seed0" in {job.name for job in found}
    assert not [job for job in everything(rows=rows[:-1]) if job.name.startswith("even-resnet42-osgd-norm-constant")]
    finished = [
        row(1.0, network="width-resnet42", strategy="normsgd", changes=said) for said in ("strategy.constant=8", "")
    ]
    shown = as_usual([*rows, *finished])
    assert [each["changes"] for each in shown] == ["", "strategy.constant=0.5"], "and trials are no cells of a table"


def test_everything_comes_in_order_of_value_and_once() -> None:
    jobs = everything(rows=trial_rows(0.5))
    names = [job.name for job in jobs]
    assert len(names) == len(set(names)) == len({job.recipe for job in jobs})
    assert names.index("tiny-depth-sparse66-osgd-seed0") < names.index("width-resnet42-osgd-order-2_1_3-seed0")
    compared = [f"-{name}-seed{seed}" for seed in range(3) for name in ("sgd", "sgd-sum", "osgd")]
    first = names[: 6 * 9]
    assert all(sum(name.endswith(f"8{end}") or name.endswith(f"2{end}") for name in first) == 6 for end in compared)
    seeds = [job.recipe.train.seed for job in jobs[: 6 * 9]]
    assert seeds == sorted(seeds), "a first answer for all comes before a second"
    places = [names.index(f"depth-sparse98-{each}") for each in (
        "osgd-seed2", "normsgd-validation-5000-constant-2-epochs-30-schedule-cosine-seed0", "normsgd-seed0",
        "greedy-seed0", "alone1-seed0", "alone4-seed2", "osgd-order-4_3_2_1-seed0",
        "osgd-scope-block-seed0", "osgd-weight_decay-0.0001-seed0", "normsgd-seed1", "greedy-seed1",
    )]  # fmt: skip
    assert places == sorted(places)
    alone = {name for name in names if "-alone" in name and name.endswith("seed0")}
    assert {name for name in alone if name.startswith(("even", "together"))} == {"even-resnet42-alone3-seed0"}, "lent"
    assert {name for name in alone if "norm" in name} == {"depth-sparse98-alone-norm4-seed0"}
    assert all(0.1 < job.minutes(Path("/nowhere")) < 60 for job in jobs)


def test_rows_of_runs_whose_folders_are_gone_count_where_they_are_complete(tmp_path: Path) -> None:
    jobs = everything(("width-resnet42",), ("sgd", "alone"), seeds=2)
    assert [job.name.removeprefix("width-resnet42-") for job in jobs] == [
        "sgd-seed0", "sgd-seed1", "alone1-seed0", "alone2-seed0", "alone3-seed0", "alone1-seed1", "alone2-seed1",
        "alone3-seed1", "sgd-weight_decay-0.0001-seed0",
    ]  # fmt: skip
    nest = [row(1.0, strategy="sgd", stage=stage, data="cifar10", seed=1) for stage in (1, 2, 3)]
    alone = [row(1.0, strategy="alone", stage=2, data="cifar10", seed=0)]
    left = [job.name for job in missing_jobs(jobs, tmp_path, [*nest, *alone])]
    assert sorted({job.name for job in jobs} - set(left)) == ["width-resnet42-alone2-seed0", "width-resnet42-sgd-seed1"]
    for other in (nest[:2], [{**each, "data": "digits"} for each in nest], [{**each, "epochs": 20} for each in nest]):
        assert len(missing_jobs(jobs, tmp_path, other)) == len(jobs), "incomplete, or another run"


def test_a_plan_says_what_is_left(tmp_path: Path) -> None:
    words: dict[str, Any] = {"network": ("width-resnet42",), "strategy": ("sgd",), "out": str(tmp_path), "plan": True}
    every = command("all", **words, results="")["plan"]
    assert [line["run"] for line in every][:3] == [f"width-resnet42-sgd-seed{seed}" for seed in range(3)]
    run = RunDir.create(tmp_path / every[1]["run"])
    run.append_log({"epoch": 150})
    rows = [row(1.0, strategy="sgd", stage=stage, data="cifar10", seed=0) for stage in (1, 2, 3)]
    store([{**each, "device": "NVIDIA H200"} for each in rows], str(tmp_path / "results"))
    left = command("all", **words, results=str(tmp_path / "results"))["plan"]
    assert [line["run"] for line in left] == [line["run"] for line in every[1:]]
    assert left[0]["minutes"] == pytest.approx(every[1]["minutes"] / 4, abs=0.1)
    [greedy, *_] = command("all", **words | {"strategy": ("greedy",)}, results="")["plan"]
    assert greedy["minutes"] == pytest.approx(3 * every[0]["minutes"], abs=0.2), (
        "a step of SGD's for each of three stages"
    )
    show({"part": "all", "plan": left})
    with pytest.raises(NestlingError, match="did you mean width-resnet42"):
        command("all", network=("width-resnet",), plan=True)
    with pytest.raises(NestlingError, match="leave out --scope"):
        command("all", scope=("block",), plan=True)


# --- really trained --------------------------------------------------------------------------------------------------


def test_nothing_trained_is_said(tmp_path: Path) -> None:
    with pytest.raises(NestlingError, match="no run of table1 is finished"):
        command("table1", dry=True, out=str(tmp_path))


def test_time_that_is_up_stops_the_whole_grid(tmp_path: Path) -> None:
    """An epoch of the first run, then no other run is begun."""
    words: dict[str, Any] = {"network": ("width-digits",), "strategy": ("sgd", "osgd"), "set": QUICK, "results": ""}
    with pytest.raises(NestlingError, match="give them more time"):
        command("digits", **words, out=str(tmp_path), minutes=0.0005)
    assert [logged(path.parent) for path in tmp_path.glob("*/log.jsonl")] == [1]


def test_all_that_ran_out_of_time_says_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No error: it has a checkpoint, and goes on another time."""
    seen: list[Any] = []

    def no_time(chosen: Any, *rest: Any, takes: Any) -> dict[str, str]:
        seen.append((chosen, rest))
        return {}

    monkeypatch.setattr("nestling.commands.paper.train_cells", no_time)
    found = command(
        "all", network=("width-resnet42",), strategy=("sgd",), out=str(tmp_path), results="", minutes=2, beside=6
    )
    [(chosen, (out, beside, seconds, line, _))] = seen
    assert [line["run"] for line in found["plan"]] == [name for name, _ in chosen] and len(chosen) == 4
    assert (out, beside, seconds) == (str(tmp_path), 6, 120)
    assert line == "nestling paper all --network width-resnet42 --strategy sgd --seeds 3 --beside 6"
    show(found)


def test_all_goes_on_with_what_trials_have_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call is enough: trials choose the constant of normalised gradients, whose runs come next, before greedy training."""
    calls: list[list[str]] = []

    def told(chosen: Any, out: str, beside: int, seconds: float, *rest: Any, takes: Any) -> dict[str, str]:
        calls.append([name for name, _ in chosen])
        assert seconds <= 120
        rows = [{**each, "data": "cifar10", "device": "NVIDIA H200"} for each in trial_rows(8.0)]
        store(rows, str(tmp_path / "results"))
        return {}

    monkeypatch.setattr("nestling.commands.paper.train_cells", told)
    words: dict[str, Any] = {"out": str(tmp_path / "runs"), "results": str(tmp_path / "results"), "minutes": 2}
    command("all", network=("width-resnet42",), strategy=("normsgd", "sgd", "greedy"), **words)
    first, whole = calls
    trial = "width-resnet42-normsgd-validation-5000-constant-8-epochs-30-schedule-cosine-seed0"
    assert first[0] == "width-resnet42-sgd-seed0" and first[-1] == trial
    assert whole[: len(first)] == first
    assert whole[len(first) :][:2] == ["width-resnet42-normsgd-constant-8-seed0", "width-resnet42-greedy-seed0"]


def test_runs_travel_in_small_files_and_go_on_elsewhere_as_if_never_stopped(tmp_path: Path) -> None:
    """One finished run and one in progress are packed on a machine that is given back; on the next one nothing is trained
    twice, and the weights are those of a run that was never stopped."""
    words: dict[str, Any] = {"network": ("width-digits",), "strategy": ("sgd", "osgd"), "set": QUICK}
    first: dict[str, Any] = {"out": str(tmp_path / "a" / "runs"), "results": str(tmp_path / "a")}
    second: dict[str, Any] = {"out": str(tmp_path / "b" / "runs"), "results": str(tmp_path / "b")}
    packed = str(tmp_path / "packed")
    command("digits", **words | {"strategy": ("sgd",)}, **first)
    recipe = next(recipe for _, recipe in cells("digits", ("width-digits",), ("osgd",), 1, QUICK))
    halfway = Path(first["out"]) / run_name(recipe)
    for _ in side_by_side([(recipe, str(halfway))], 1, "test", seconds=0.01, quiet=True):
        pass
    assert logged(halfway) == 1
    found = command("pack", **first, packed=packed, files=40, mib=1)
    assert found["runs"] == (halfway.name.replace("osgd", "sgd"), halfway.name) and not found["left_out"]
    assert all(Path(path).stat().st_size <= 2**20 for path in found["files"])
    show(found)
    brought = command("unpack", **second, packed=packed)
    assert tuple(brought["runs"]) == found["runs"] and len(read_results(second["results"])) == 3
    show(brought)
    assert command("unpack", **second, packed=packed)["runs"] == [], "what is here is left as it is"
    assert not command("digits", **words, **second)["failed"]
    train(recipe, str(tmp_path / "whole"), quiet=True)
    mine, _ = RunDir(Path(second["out"]) / halfway.name).load_tensors(WEIGHTS)
    whole, _ = RunDir(tmp_path / "whole").load_tensors(WEIGHTS)
    assert all(torch.equal(mine[key], value) for key, value in whole.items())
    assert len(read_results(second["results"])) == 6


def test_greedy_runs_travel_by_how_near_their_own_end_they_are(tmp_path: Path) -> None:
    """Of 200 epochs for each of three stages 250 are not the end."""
    for name, epoch in (("greedy", 250), ("sgd", 190)):
        run = RunDir.create(tmp_path / name)
        run.write_recipe(override(named("cifar10-width"), [f"strategy.name={name}"]))
        run.append_log({"epoch": epoch})
        run.save_checkpoint({"noise": torch.rand(1)}, {})
    assert [run.path.name for run in by_progress(tmp_path)] == ["sgd", "greedy"]


def test_what_finds_no_room_is_named_and_what_is_not_packed_runs_is_refused(tmp_path: Path) -> None:
    for name in ("small", "large"):
        run = RunDir.create(tmp_path / "runs" / name)
        run.write_recipe(named("digits-width"))
        run.append_log({"epoch": 1})
        run.save_checkpoint({"noise": torch.rand(400_000 if name == "large" else 10)}, {})
    found = command("pack", out=str(tmp_path / "runs"), packed=str(tmp_path / "to"), files=1, mib=1)
    assert (found["runs"], found["left_out"]) == (("small",), ("large",))
    (tmp_path / "to" / "runs.tar.1").write_bytes(b"x" * 9999)
    with pytest.raises(NestlingError, match="damaged or lacks a part"):
        command("unpack", out=str(tmp_path / "new"), results="", packed=str(tmp_path / "to"))
    with tarfile.open(tmp_path / "to" / "runs.tar.1", "w") as tar:
        tar.addfile(tarfile.TarInfo("../recipe.json.z"))
    with pytest.raises(NestlingError, match="which nestling paper pack does not write"):
        command("unpack", out=str(tmp_path / "new"), results="", packed=str(tmp_path / "to"))
    with pytest.raises(NestlingError, match="holds no packed runs"):
        command("unpack", out=str(tmp_path / "new"), results="", packed=str(tmp_path / "nowhere"))


def test_rows_are_kept_as_soon_as_a_run_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is lost takes with it no run that was finished; its rows alone keep it from being trained again."""
    words: dict[str, Any] = {"network": ("width-digits",), "strategy": ("sgd", "osgd"), "set": QUICK}
    places: dict[str, Any] = {"out": str(tmp_path / "runs"), "results": str(tmp_path / "results")}
    finish, left = Training.finish, [1]

    def lost(self: Training) -> Any:
        if not left:
            raise RuntimeError("the machine is gone")
        left.pop()
        return finish(self)

    monkeypatch.setattr(Training, "finish", lost)
    with pytest.raises(RuntimeError, match="gone"):
        command("digits", **words, **places)
    rows = read_results(places["results"])
    assert [(each["strategy"], each["stage"]) for each in rows] == [("sgd", 1), ("sgd", 2), ("sgd", 3)]
    jobs = [Job(*each, "") for each in cells("digits", words["network"], words["strategy"], 1, QUICK)]
    assert [job.recipe.strategy.name for job in missing_jobs(jobs, tmp_path / "gone", rows)] == ["osgd"]
    settings = {word.partition("=")[0] for word in rows[0]["train"].split("--set ")[1:]}
    assert settings >= {"strategy.name", "train.epochs", "data.limit"} and rows[0]["train"].startswith(
        "nestling train digits-width"
    )
    assert rows[0]["commit_at_end"] == rows[0]["commit"] and rows[0]["command"].endswith("--seeds 1 --beside 3")


def test_a_run_that_fails_does_not_keep_the_others_from_theirs(tmp_path: Path) -> None:
    words: dict[str, Any] = {"network": ("width-digits",), "strategy": ("sgd", "osgd"), "set": QUICK, "results": ""}
    [(first, _), (second, _)] = cells("digits", words["network"], words["strategy"], 1, QUICK)
    RunDir.create(tmp_path / first).write_recipe(named("digits-depth"))  # somebody else's
    found = command("digits", **words, out=str(tmp_path))
    assert list(found["failed"]) == [str(tmp_path / first)]
    assert "was trained with another recipe" in found["failed"][str(tmp_path / first)]
    assert found["incomplete"].startswith("1 of 2 runs failed")
    assert {row["strategy"] for row in found["rows"]} == {"osgd"} and (tmp_path / second / "results.json").exists()
    with pytest.raises(NestlingError, match="was trained with another recipe"):
        command("digits", **{**words, "strategy": ("sgd",)}, out=str(tmp_path))


def test_a_grid_killed_twice_ends_like_one_never_killed(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    words = [sys.executable, "-m", "nestling", "paper", "digits", "--network", "width-digits", "--strategy", "sgd"]
    words += ["--strategy", "osgd", "--seeds", "2", *(word for each in QUICK for word in ("--set", each))]
    results = ["--results", str(tmp_path / "results")]
    subprocess.run([*words, "--out", str(whole), "--results", ""], check=True, capture_output=True)
    moments = sorted(random.sample(range(1, 8), 2))  # of the eight epochs: in any of the four runs, or between two
    for lines in moments:
        process = subprocess.Popen(
            [*words, *results, "--out", str(killed)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < until and logged(killed) < lines:
            time.sleep(0.005)
        time.sleep(0.1 * random.random())
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    done = subprocess.run(
        [*words, *results, "--out", str(killed), "--json"], check=True, capture_output=True, text=True
    )
    found = json.loads(done.stdout)
    assert len(found["rows"]) == 6
    assert without_origin(whole) == without_origin(killed), f"killed after {moments} epochs"
    [path] = found["results"]
    stored = read_csv(Path(path))
    assert [each["error"] for each in stored] == [each["error"] for each in collect(sorted(killed.iterdir()))]
    assert all(each["seed"] in (0, 1) and each["epochs"] == 2 for each in stored)
    assert all(each["device"] and each["torch"] in each["versions"] and "python" in each["versions"] for each in stored)
    show(found)


def logged(folder: Path) -> int:
    return sum(path.read_text().count("\n") for path in [*folder.glob("*/log.jsonl"), *folder.glob("log.jsonl")])


def without_origin(folder: Path) -> list[dict[str, object]]:
    rows = collect(sorted(folder.iterdir()))
    assert len(rows) == 4 * 3
    return [{key: value for key, value in row.items() if key != "command"} for row in rows]


@pytest.mark.slow
def test_a_grid_elsewhere_has_the_results_of_one_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--on ray is a sweep whose runs are the cells; processes stand in for a cluster. tests/test_ray.py has one."""

    class Elsewhere(Processes):
        gpus, beside = False, 0

    monkeypatch.setattr("nestling.studies.sweep.cluster.Cluster", Elsewhere)
    words: dict[str, Any] = {"network": ("width-digits",), "strategy": ("sgd", "osgd"), "set": QUICK, "beside": 2}
    found: dict[str, dict[str, Any]] = {}
    where: tuple[Literal["local", "ray"], ...] = ("local", "ray")
    for on in where:
        places: dict[str, Any] = {"out": str(tmp_path / on), "results": str(tmp_path / f"{on}.csv")}
        found[on] = command("digits", **words, **places, on=on, quiet=True)
        again = command("digits", **words, **places, on=on, quiet=True)
        assert again["rows"] == found[on]["rows"]
    assert found["ray"]["rows"] == found["local"]["rows"] and found["ray"]["runs"] == 2 and not found["ray"]["failed"]
    assert read_results(str(tmp_path / "ray.csv"))[0]["command"].endswith("--on ray")
    assert not (tmp_path / "ray" / "results.csv").exists(), "rows go where --results says"


def test_no_runs_beside_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NestlingError, match="--beside is 0"):
        train_cells([], str(tmp_path), 0, 1.0, "")
