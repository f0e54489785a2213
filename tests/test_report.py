"""Reports of real runs: every number traces to a run folder, what is missing is said, and the files need nothing else."""

import io
import json
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from report_runs import NAME, make_runs, recipe
from rich.console import Console

from nestling.commands import report
from nestling.commands.cli import main
from nestling.errors import NestlingError
from nestling.recipes.recipe import Recipe
from nestling.report.content import spread_cell
from nestling.report.families import Family, Spread, families, spread
from nestling.report.figures import training as figures
from nestling.report.figures.panel import error_axis, panel
from nestling.report.records import Answers, Run, find, find_sound, read
from nestling.report.study import Study, study
from nestling.report.theme import LIGHT, inline
from nestling.report.times import pooled, times
from nestling.report.words import count_text, listed, percent, time_text
from nestling.runs.folder import RunDir
from nestling.runs.latency import load_profile
from nestling.studies import deadline


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def written(runs: Path) -> dict[str, Any]:
    return report.command((str(runs),), out=str(runs.parent / "report.html"))


def results(run: Path) -> list[dict[str, Any]]:
    return list(json.loads((run / "results.json").read_text())["stages"])


def width(runs: Path) -> Family:
    return families(find([runs / name for name in ("osgd-0", "osgd-1", "sgd-0")] + sorted(runs.glob("alone-*"))))[0]


def plain_run(made: Recipe, stages: list[dict[str, Any]] | None = None, name: str = "run") -> Run:
    """A run that exists in memory only."""
    rows = [{"stage": 1, "size": "w1", "error": 0.5}] if stages is None else stages
    found = {"split": "test", "n": 10, "classes": ["a", "b"], "stages": rows} if rows else {}
    return Run(RunDir(f"/nowhere/{name}"), made, {}, (), found)


# --- numbers -----------------------------------------------------------------------------------------------------


def test_the_headline_is_mean_and_deviation_of_the_results(runs: Path, written: dict[str, Any]) -> None:
    nest = written["headline"][0]
    assert (nest["network"], nest["n"], nest["sizes"]) == (NAME, 360, ["w1", "w2", "w4"])
    lines = {line["training"]: line for line in nest["lines"]}
    assert list(lines) == ["osgd", "sgd", "independent nets"]
    for index in range(3):
        osgd = [results(runs / name)[index]["error"] for name in ("osgd-0", "osgd-1")]
        found = lines["osgd"]["stages"][index]
        assert found["error"] == pytest.approx(statistics.fmean(osgd))
        assert found["std"] == pytest.approx(statistics.stdev(osgd))
        assert lines["sgd"]["stages"][index]["error"] == results(runs / "sgd-0")[index]["error"]
        assert lines["sgd"]["stages"][index]["std"] is None
        alone = [results(path)[0]["error"] for path in runs.glob(f"alone-{index + 1}-*")]
        assert len(alone) == (2 if index == 0 else 1)
        assert lines["independent nets"]["stages"][index]["error"] == pytest.approx(statistics.fmean(alone))
    assert (lines["osgd"]["n"], lines["sgd"]["n"], lines["independent nets"]["n"]) == (2, 1, 1)


def test_the_page_and_the_markdown_show_the_headline(runs: Path, written: dict[str, Any]) -> None:
    error = f"{100 * results(runs / 'sgd-0')[2]['error']:.2f}"
    assert f"<td>{error}" in Path(written["report"]).read_text()
    assert error in Path(written["markdown"]).read_text()


def test_a_page_speaks_of_what_is_on_it(runs: Path, written: dict[str, Any], tmp_path: Path) -> None:
    """A single nest has no independent nets beside it, no spread and no best."""
    told = ("independent net", "Oracle_All", "standard deviation", "bold is the best")
    whole = Path(written["report"]).read_text()
    assert all(words in whole for words in told)
    alone = Path(report.command((str(runs / "sgd-0"),), out=str(tmp_path / "report.html"))["report"]).read_text()
    assert not [words for words in told if words in alone]


def test_the_highest_mark_has_room() -> None:
    with panel() as drawn:
        drawn.axes.plot([1, 2], [0.58, 0.48], marker="o")
        error_axis(drawn.axes, [0.0])
        assert drawn.axes.get_ylim() == pytest.approx((0, 1.05 * 0.58))


def test_the_deadline_study_is_in_the_answer(written: dict[str, Any]) -> None:
    schemes = {row["scheme"] for row in written["deadlines"]}
    assert schemes == {"Base (even-digits)", "osgd", "sgd", "Oracle_All", "Oracle_Each"}
    assert len(written["deadlines"]) == 5 * 8
    assert all(0 <= row["error"] <= 1 for row in written["deadlines"])
    last = [row for row in written["deadlines"] if row["deadline_ms"] is None]
    nest = {line["training"]: line["stages"][-1]["error"] for line in written["headline"][0]["lines"]}
    assert {row["scheme"]: row["error"] for row in last}["osgd"] == pytest.approx(nest["osgd"])


def test_a_baseline_comes_after_what_it_is_measured_against(written: dict[str, Any]) -> None:
    assert [family["network"] for family in written["headline"]] == [NAME, "even-digits"]


def test_spread_by_hand() -> None:
    found = spread([0.1, 0.3])
    assert (found.mean, found.std, found.n) == (pytest.approx(0.2), pytest.approx(0.02**0.5), 2)
    assert spread([0.1]) == Spread(0.1, None, 1)


def test_numbers_are_written_for_people() -> None:
    cell = spread_cell(Spread(0.0831, 0.0012, 3))
    assert (cell.text, cell.after) == ("8.31", "±\u00a00.12")
    assert [percent(v) for v in (0.1234, 0.0312, 0.0)] == ["12.3", "3.12", "0.00"]
    assert [count_text(v) for v in (24_400_000, 999.6, 71_500)] == ["24.4\u00a0M", "1\u00a0k", "71.5\u00a0k"]
    assert [time_text(v) for v in (1.234, 0.05)] == ["1.23 ms", "50 µs"]
    assert [listed(words) for words in ([], ["a"], ["a", "b", "c"])] == ["", "a", "a, b and c"]


def test_an_image_settles_where_all_later_answers_are_right() -> None:
    said = np.array([[1, 1, 0, 0, 1], [1, 0, 1, 0, 1], [1, 1, 1, 1, 0]])  # three stages, the class is 1
    answers = Answers(said, np.ones_like(said, dtype=np.float32), np.ones(5, dtype=np.int64))
    assert answers.settled().tolist() == [1, 3, 2, 3, 4]


# --- groups ------------------------------------------------------------------------------------------------------


def test_seeds_are_one_line_and_other_settings_are_named() -> None:
    made = recipe(NAME, "osgd")
    scoped = replace(made, strategy=replace(made.strategy, scope="tensor"))
    ordered = replace(made, strategy=replace(made.strategy, order=(3, 1, 2)))
    seeded = replace(made, name="another name", train=replace(made.train, seed=7, device="cuda"))
    [family] = families([plain_run(each) for each in (made, scoped, ordered, seeded, recipe(NAME, "sgd"))])
    labels = {line.label: len(line.runs) for line in family.lines}
    assert labels == {
        "osgd, order default, scope all": 2,
        "osgd, order default, scope tensor": 1,
        "osgd, order 3-1-2, scope all": 1,
        "sgd": 1,
    }


def test_independent_nets_stand_beside_the_nest_of_the_same_name() -> None:
    made = [plain_run(recipe(NAME, "osgd"))] + [plain_run(recipe(NAME, "sgd", alone=stage)) for stage in (1, 2, 3)]
    made.append(plain_run(recipe("depth-digits", "sgd", alone=1)))
    width, depth = families(made)
    assert [line.kind for line in width.lines] == ["nest", "alone"]
    assert width.alone[0].stages() == (1, 2, 3)
    assert [line.kind for line in depth.lines] == ["alone"]


def test_how_an_independent_net_would_have_combined_tasks_does_not_matter() -> None:
    [family] = families([plain_run(recipe(NAME, s, seed=i, alone=1)) for i, s in enumerate(("sgd", "osgd", "greedy"))])
    assert [(line.label, len(line.runs)) for line in family.lines] == [("independent nets", 3)]


def test_the_papers_baselines() -> None:
    every = families(
        [plain_run(recipe(name, "osgd")) for name in (NAME, "even-digits", "depth-digits", "cascade-digits")]
    )
    bases = [base.name if (base := family.baseline(every)) else None for family in every]
    assert bases == ["even-digits", None, "cascade-digits", None]


# --- time ---------------------------------------------------------------------------------------------------------


def test_traces_of_one_network_are_pooled_in_turn() -> None:
    one, two = np.array([[1.0], [2.0], [3.0]]), np.array([[10.0], [20.0]])
    assert pooled([one, two])[:, 0].tolist() == [1, 10, 2, 20, 3]


def test_the_median_is_over_all_runs_of_the_network(runs: Path) -> None:
    found = times(width(runs))
    assert found is not None
    traces = [load_profile(RunDir(runs / name)).array for name in ("osgd-0", "osgd-1", "sgd-0")]
    assert found.median("nest", 2) == pytest.approx(np.median(np.concatenate(traces)[:, 1]))
    alone = [load_profile(RunDir(runs / f"alone-1-{seed}")).array for seed in (0, 1)]
    assert found.median("alone", 1) == pytest.approx(np.median(np.concatenate(alone)))
    assert (found.runs, found.others) == (7, 0)


def test_times_measured_under_other_conditions_are_left_out(runs: Path, tmp_path: Path) -> None:
    for name in ("osgd-0", "osgd-1"):
        shutil.copytree(runs / name, tmp_path / name)
    profile = json.loads((tmp_path / "osgd-1" / "profile.json").read_text())
    (tmp_path / "osgd-1" / "profile.json").write_text(json.dumps(profile | {"threads": 64}))
    [family] = families(find([tmp_path]))
    found = times(family)
    assert found is not None
    assert (found.runs, found.others) == (1, 1)
    assert "1 thread," in found.conditions
    written = report.command((str(tmp_path),), out=str(tmp_path / "report.html"))
    assert "1 run measured under other conditions" in Path(written["report"]).read_text()


def test_a_machine_that_was_busy_while_it_timed_is_told_of(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "osgd-0", tmp_path / "osgd-0")
    path = tmp_path / "osgd-0" / "profile.json"
    profile = json.loads(path.read_text())
    for slow, told in ((1.5, False), (3.0, True)):
        trace = [[1.0, 2.0, 4.0 * (slow if repeat % 10 == 0 else 1)] for repeat in range(100)]
        path.write_text(json.dumps(profile | {"trace_ms": trace, "repeats": 100}))
        written = report.command((str(tmp_path),), out=str(tmp_path / "report.html"))
        assert ("The machine was busy while it timed osgd-0" in Path(written["report"]).read_text()) == told


def test_the_deadline_study_is_the_rooms_own(runs: Path) -> None:
    """One seed, one profile each: the report's rows are deadline.study's."""
    names = ["osgd-0", *(f"alone-{stage}-0" for stage in (1, 2, 3))]
    [family] = families(find([runs / name for name in names]))
    found = study(family, None)
    assert isinstance(found, Study)
    plain = []
    for name in names:
        tensors, _ = RunDir(runs / name).load_tensors("outputs.safetensors")
        trace = load_profile(RunDir(runs / name)).trace
        plain.append(deadline.timed(name, tensors["logits"].numpy(), tensors["labels"].numpy(), trace))
    expected = deadline.by_scheme(deadline.study(plain[0], plain[1:], classes=10))
    for scheme, theirs in (("osgd", deadline.NEST), (deadline.ORACLE_ALL, None), (deadline.ORACLE_EACH, None)):
        rows = expected[theirs or scheme]
        assert [row.error for row in found.rows[scheme]] == pytest.approx([row.error for row in rows])
        assert [row.answered for row in found.rows[scheme]] == [row.answered for row in rows]


# --- what is missing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lost",
    [
        {
            "profile.json": "No measured latency (profile.json) for width-digits",
            "gallery.safetensors": "No outputs or pictures in osgd-0",
            "provenance.json": "Trained on unknown",
        },
        {"outputs.safetensors": "no nest with both outputs and measured latency"},
        {"results.json": "No results yet in osgd-0", "log.jsonl": "No log in osgd-0"},
    ],
    ids=lambda lost: " and ".join(lost),
)
def test_a_run_without_a_file_lacks_a_section_and_says_so(runs: Path, tmp_path: Path, lost: dict[str, str]) -> None:
    shutil.copytree(runs / "osgd-0", tmp_path / "osgd-0")
    for file in lost:
        (tmp_path / "osgd-0" / file).unlink()
    written = report.command((str(tmp_path / "osgd-0"),), out=str(tmp_path / "report.html"))
    for words in lost.values():
        assert words in Path(written["report"]).read_text()
        assert words in Path(written["markdown"]).read_text().replace("\\", "")


def shown(written: dict[str, Any]) -> str:
    """What people see of a command's answer."""
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report.show(written))
    return console.export_text()


def section_names(written: dict[str, Any]) -> list[str]:
    return re.findall(r'<section id="(\w+)">', Path(written["report"]).read_text())


def test_a_run_that_has_only_begun_is_reported_as_such(tmp_path: Path) -> None:
    RunDir(tmp_path).write_recipe(recipe(NAME, "osgd"))
    written = report.command((str(tmp_path),), out=str(tmp_path / "report.html"))
    assert "have not finished" in Path(written["report"]).read_text()
    assert written["headline"][0]["lines"] == [{"training": "osgd", "kind": "nest", "n": 0, "stages": []}]
    assert section_names(written) == ["headline", "training", "provenance"]


def unfinish(run: Path, into: Path) -> Path:
    """A copy of a run as it was when only its first two epochs had been trained."""
    into.mkdir()
    for file in ("recipe.json", "provenance.json"):
        shutil.copy(run / file, into / file)
    (into / "log.jsonl").write_text("".join((run / "log.jsonl").read_text().splitlines(keepends=True)[:2]))
    return into


def test_a_report_of_unfinished_runs_has_no_empty_sections(runs: Path, tmp_path: Path) -> None:
    begun = [str(unfinish(runs / name, tmp_path / name)) for name in ("osgd-0", "osgd-1")]
    written = report.command((*begun,), out=str(tmp_path / "report.html"))
    page = Path(written["report"]).read_text()
    assert section_names(written) == ["headline", "training", "gradients", "provenance"]
    assert re.findall(r'<a href="#(\w+)">', page) == section_names(written)
    assert "No results yet in osgd-0 and osgd-1." in page and "nestling train --resume RUN" in page
    assert "no results yet" in shown(written) and "stage 1" not in shown(written), "no table without numbers, either"


def test_errors_of_unfinished_runs_are_drawn_as_logged(runs: Path, tmp_path: Path) -> None:
    family = families([read(unfinish(runs / "osgd-0", tmp_path / "osgd-0"))])[0]
    errors = ({"epoch": 1, "test_error": [0.8, 0.5, 0.4]}, {"epoch": 2, "test_error": [0.4, 0.3, 0.2]})

    def drawn(n: int, *log: dict[str, Any]) -> str:
        line = replace(family.lines[0], runs=(replace(family.runs[0], log=log),))
        picture = figures.training(replace(family, n=n), line, "training", "")
        assert picture is not None
        return picture.svg

    assert family.n == 0 and drawn(0, *errors) == drawn(1000, *errors)
    dots = f"fill: {LIGHT['stage1']}"
    assert dots in drawn(0, errors[0]) and dots not in drawn(0, *errors), (
        "of one epoch there is a dot, not an empty frame"
    )


def test_the_caption_of_a_training_counts_unfinished_runs(runs: Path, tmp_path: Path) -> None:
    begun = [str(unfinish(runs / name, tmp_path / name)) for name in ("osgd-0", "osgd-1")]
    for some, caption in (
        (begun, "Test error. Line: mean, band: lowest to highest over runs."),
        (begun[:1], "One run."),
    ):
        written = report.command((*some,), out=str(tmp_path / "report.html"))
        assert caption in Path(written["report"]).read_text()


def test_a_run_without_a_log_leaves_the_others_curves(runs: Path, tmp_path: Path) -> None:
    begun = unfinish(runs / "osgd-1", tmp_path / "osgd-1")
    (begun / "log.jsonl").unlink()
    written = report.command((str(runs / "osgd-0"), str(begun)), out=str(tmp_path / "report.html"))
    words = Path(written["markdown"]).read_text()
    assert f"{NAME}, osgd: test error while training" in words and "Test error. One run." in words
    assert "No log in osgd-1." in words


def test_an_unfinished_run_takes_nothing_from_a_finished_one(runs: Path, tmp_path: Path) -> None:
    """osgd comes before sgd, but has nothing to show yet."""
    begun = unfinish(runs / "osgd-0", tmp_path / "osgd-0")
    alone = report.command((str(runs / "sgd-0"),), out=str(tmp_path / "alone.html"))
    both = report.command((str(begun), str(runs / "sgd-0")), out=str(tmp_path / "both.html"))
    assert section_names(both) == section_names(alone)
    for words in ("trained with sgd, 1 run", f"{NAME}, sgd: what each stage said"):
        assert words in Path(alone["markdown"]).read_text() and words in Path(both["markdown"]).read_text()
    assert "osgd" not in shown(both)


def test_gradients_that_were_not_logged_are_named(written: dict[str, Any]) -> None:
    assert "No logged gradients in sgd-0" in Path(written["report"]).read_text()


def test_without_matplotlib_the_error_says_what_to_install(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(NestlingError, match=r"pip install 'nestling\[report\]'"):
        report.command((str(runs),), out="report.html")


# --- wrong use --------------------------------------------------------------------------------------------------------


def test_wrong_paths_are_refused(tmp_path: Path, runs: Path) -> None:
    with pytest.raises(NestlingError, match="there is no run folder"):
        report.command((str(tmp_path / "nothing"),), out=str(tmp_path / "report.html"))
    with pytest.raises(NestlingError, match="is not a run folder"):
        report.command((str(tmp_path),), out=str(tmp_path / "report.html"))
    with pytest.raises(NestlingError, match=r"ends in \.html"):
        report.command((str(runs),), out=str(tmp_path / "report.pdf"))
    with pytest.raises(NestlingError, match="at least one"):
        find([])


def test_a_report_beside_its_run_leaves_the_runs_folder_alone(runs: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    shutil.copytree(next(runs.glob("*/recipe.json")).parent, first)
    before = sorted(path.name for path in first.iterdir())
    written = report.command((str(first),), out=str(tmp_path / "first.html"))
    assert sorted(path.name for path in first.iterdir()) == before
    assert written["pictures"] == str(tmp_path / "first-pictures") and list(Path(written["pictures"]).glob("*.png"))
    assert "](first-pictures/" in Path(written["markdown"]).read_text(encoding="utf-8")


def test_a_damaged_file_is_named(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "osgd-0", tmp_path / "osgd-0")
    path = tmp_path / "osgd-0" / "outputs.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(NestlingError, match=r"outputs\.safetensors is truncated"):
        report.command((str(tmp_path),), out=str(tmp_path / "report.html"))


@pytest.mark.parametrize(
    "name", ["recipe.json", "results.json", "profile.json", "provenance.json", "log.jsonl", "gallery.safetensors"]
)
def test_a_broken_run_is_left_out_and_named(
    name: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in ("osgd-0", "sgd-0"):
        shutil.copytree(runs / run, tmp_path / run)
    broken = tmp_path / "osgd-0" / name
    broken.write_text("{ no\n")
    page = tmp_path / "report.html"
    assert main(["report", str(tmp_path), "--out", str(page), "--json"]) == 1
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["runs"] == [str(tmp_path / "sgd-0")] and [*result["left_out"]] == [str(tmp_path / "osgd-0")]
    assert err.count(str(broken)) == 1 and "nestling: 1 run left out" in err  # a slow machine says first what it is at
    assert "1 run left out" in page.read_text(encoding="utf-8")
    assert main(["report", str(tmp_path / "osgd-0"), "--out", str(tmp_path / "none.html")]) == 1
    assert not (tmp_path / "none.html").exists()


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("results.json", lambda text: re.sub('"stage": 1', '"stage": "1"', text)),
        ("results.json", lambda text: re.sub('"size": ', '"sise": ', text)),
        ("results.json", lambda text: re.sub('"n": ', '"n": -0.5, "m": ', text)),
        ("log.jsonl", lambda text: text + "[1]\n"),
    ],
)
def test_json_that_says_other_things_than_a_run_does_is_left_out_too(
    name: str, spoil: Callable[[str], str], runs: Path, tmp_path: Path
) -> None:
    for run in ("osgd-0", "sgd-0"):
        shutil.copytree(runs / run, tmp_path / run)
    broken = tmp_path / "osgd-0" / name
    before = broken.read_text()
    broken.write_text(spoil(before))
    assert broken.read_text() != before
    found, left_out = find_sound([tmp_path])
    assert [run.name for run in found] == ["sgd-0"] and str(broken) in left_out[str(tmp_path / "osgd-0")]


REPAIRS = {
    "results.json": "nestling evaluate RUN writes it anew",
    "outputs.safetensors": "nestling evaluate RUN writes it anew",
    "gallery.safetensors": "nestling evaluate RUN writes it anew",
    "profile.json": "nestling profile RUN measures it anew",
    "provenance.json": "delete it, the run works without it",
}


@pytest.mark.parametrize("spoilt", ["{ no", "[1]"])
@pytest.mark.parametrize("name", REPAIRS)
def test_what_a_message_says_about_a_damaged_file_really_repairs_it(
    name: str, spoilt: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "osgd-0", run)
    (run / name).write_text(spoilt)
    words, remedy = ["report", str(run), "--out", str(tmp_path / "report.html")], REPAIRS[name].replace("RUN", str(run))
    assert main(words) == 1
    assert capsys.readouterr().err.endswith((f"; {remedy}\n", "; measure it again\n"))
    if remedy.startswith("delete"):
        (run / name).unlink()
    else:
        assert main([*remedy.split()[1:3], *(["--repeats", "3"] if "profile" in remedy else [])]) == 0
    assert main(words) == 0


def test_a_folder_of_runs_stands_for_its_runs(runs: Path) -> None:
    assert len(find([runs])) == 8
    assert len(find([runs, runs / "osgd-0"])) == 8, "each run once"
    assert read(runs / "osgd-0").name == "osgd-0"


# --- files -------------------------------------------------------------------------------------------------------------


def test_the_page_needs_nothing_outside_itself(written: dict[str, Any]) -> None:
    text = Path(written["report"]).read_text()
    bare = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert re.findall(r"https?://", bare) == []
    sources = re.findall(r'\b(?:src|href|xlink:href)="([^"]*)"', text)
    assert sources
    assert all(source.startswith(("data:", "#")) for source in sources)


def test_the_page_follows_the_readers_colours(written: dict[str, Any]) -> None:
    text = Path(written["report"]).read_text()
    body = text[text.index("<body>") :]
    left = {colour for colour in LIGHT.values() if colour in body}
    assert left == set(), "every colour of a picture on the page is a variable"
    used = set(re.findall(r"var\(--([a-z]+\d*)\)", body))
    assert {"ink", "stage1", "stage3", "scheme1", "alone", "base"} <= used


def test_the_ids_of_a_page_are_unique(written: dict[str, Any]) -> None:
    found = re.findall(r'\bid="([^"]+)"', Path(written["report"]).read_text())
    assert len(found) == len(set(found))


def test_references_inside_a_picture_follow_its_ids() -> None:
    svg = '<?xml?><svg width="3pt" height="2pt" viewBox="0 0 3 2"><g id="a" clip-path="url(#b)"/><use xlink:href="#c"/></svg>'
    assert (
        inline(svg, "n") == '<svg viewBox="0 0 3 2"><g id="n-a" clip-path="url(#n-b)"/><use xlink:href="#n-c"/></svg>'
    )


def test_every_picture_of_the_markdown_is_there_as_svg_and_png(written: dict[str, Any]) -> None:
    folder = Path(written["pictures"])
    links = re.findall(r"\]\(([^)]+)\)", Path(written["markdown"]).read_text())
    assert len(links) > 10
    for link in links:
        assert (folder.parent / link).is_file()
    for path in folder.glob("*.svg"):
        ElementTree.parse(path)
        assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    expected = {"macs", "latency", "deadlines", "answering", "repairs", "gallery", "cosines-osgd", "training-osgd"}
    assert {f"{NAME}-{name}.svg" for name in expected} <= {path.name for path in folder.glob("*.svg")}


def test_the_same_runs_give_the_same_report(runs: Path, written: dict[str, Any], tmp_path: Path) -> None:
    again = report.command((str(runs),), out=str(tmp_path / "report.html"))
    assert Path(again["report"]).read_text() == Path(written["report"]).read_text()


def test_names_from_the_data_cannot_become_markup(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "osgd-0", tmp_path / "osgd-0")
    path = tmp_path / "osgd-0" / "results.json"
    found = json.loads(path.read_text())
    found["classes"] = ["<script>alert(1)</script>", *found["classes"][1:]]
    path.write_text(json.dumps(found))
    written = report.command((str(tmp_path),), out=str(tmp_path / "report.html"))
    text = Path(written["report"]).read_text()
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_the_command_line_prints_one_json_document(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    done = subprocess.run(
        [sys.executable, "-m", "nestling", "report", str(runs / "osgd-0"), "--out", str(out), "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["report"] == str(out)
    assert out.is_file()
    assert (tmp_path / "page.md").is_file()
    assert found["headline"][0]["network"] == NAME


def test_what_people_see_names_the_report(written: dict[str, Any]) -> None:
    assert "independent nets" in shown(written)
    assert "report.html" in shown(written)
