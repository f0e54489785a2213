"""Sweeps on Ray, with one node: bits are those of single runs, and what is killed comes back. Skipped where Ray is missing; all
but one sweep only with NESTLING_RAY=1. benchmarks/two_nodes.py loses a node of two."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_sweep
from test_sweep import GRID, assert_same, base, holder, started, wait_until, words

from nestling.commands import cli
from nestling.errors import NestlingError
from nestling.recipes.recipe import override
from nestling.runs.folder import RunDir
from nestling.runs.ray import connect, findable
from nestling.studies.paper.results import read_results
from nestling.studies.sweep import cluster
from nestling.studies.sweep.axes import grid_runs
from nestling.studies.sweep.cluster import bring, changed, train_away
from nestling.studies.sweep.driver import SweepRun, sweep

alone = test_sweep.alone  # each run by itself
longer = pytest.mark.skipif(
    not os.environ.get("NESTLING_RAY"), reason="one sweep on Ray is tried; more with NESTLING_RAY=1"
)


def begin_node(ray: Any, **more: Any) -> None:
    """A cluster of one node with two cores. Ray gives it 30 seconds to start, which a machine with much other work may exceed."""
    for last in (False, True):
        try:
            ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=findable(), **more)
            return
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
            if last:
                pytest.skip(f"Ray itself could not start a node here, twice: {error}")


@pytest.fixture(scope="module")
def node() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="Ray is not installed: sweeps on Ray are not tested")
    begin_node(ray)
    yield ray
    ray.shutdown()


def away(settings: list[str], path: Path, **changes: Any) -> Any:
    """What a node does, here and without Ray."""
    from dataclasses import asdict

    from nestling import __version__

    recipe = asdict(override(base(), settings))
    task = {"recipe": recipe, "path": str(path), "command": "x", "threads": 1, "version": __version__}
    return train_away({**task, **changes}, changed(path, {}))


def test_files_come_home_after_every_epoch_and_another_node_goes_on_with_them(tmp_path: Path, alone: Path) -> None:
    settings, home = ["strategy.name=sgd", "train.seed=0"], tmp_path / "run"
    node = away(settings, home)
    assert re.search(r"process \d+", next(node)["where"])
    for _ in range(2):
        bring(next(node)["files"], home)
    node.close()  # it is lost
    assert len(RunDir(home).read_log()) == 2 and RunDir(home).load_checkpoint()[1]["epoch"] == 2
    for news in away(settings, home):
        bring(news.get("files", {}), home)
    one, other = test_sweep.weights(home), test_sweep.weights(alone / "strategy-sgd-seed-0")
    assert all((one[key] == other[key]).all() for key in other)
    assert not list(home.glob(".*"))


def test_a_node_says_what_is_wrong(tmp_path: Path) -> None:
    assert "became nan" in list(away(["train.lr=1e30"], tmp_path / "run"))[-1]["error"]
    assert "nestling is 0.0.0 here" in list(away([], tmp_path / "run", version="0.0.0"))[-1]["error"]


def test_a_run_takes_its_share_of_a_gpu_and_none_where_it_trains_on_a_cpu(tmp_path: Path) -> None:
    """Of two GPUs, each for three runs; Ray is only asked."""
    asked: list[dict[str, Any]] = []

    def options(**given: Any) -> Any:
        asked.append(given)
        return SimpleNamespace(remote=lambda *_: object())

    place = object.__new__(cluster.Cluster)
    place.ray = SimpleNamespace(cluster_resources=lambda: {"GPU": 2.0, "CPU": 16.0})
    place.task, place.beside, place.gpus, place.at_work = SimpleNamespace(options=options), 3, True, {}
    assert place.slots() == 6
    for device in ("auto", "cpu"):
        one = SweepRun(device, override(base(), [f"train.device={device}"]), RunDir(tmp_path / device))
        place.start(one, "x")
        one.run.release()
    assert asked[0]["num_gpus"] == 1 / 3 and asked[0]["num_cpus"] == 1 and "num_gpus" not in asked[1]


def test_where_ray_is_missing_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(NestlingError, match=r"pip install 'nestling\[ray\]'"):
        cluster.Cluster()


@pytest.mark.parametrize(
    "address, said", [("", "Ray did not start here: it timed out;"), ("a:1", "reach the cluster at a:1")]
)
def test_where_ray_does_not_begin_it_is_said(address: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**given: Any) -> None:
        raise Exception("it timed out\nand more")  # as Ray does

    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(NestlingError, match=said):
        connect(SimpleNamespace(is_initialized=lambda: False, init=init))


@pytest.mark.ray
@pytest.mark.slow
def test_a_sweep_on_ray_has_the_bits_of_single_runs_though_a_worker_is_killed(
    node: Any, tmp_path: Path, alone: Path
) -> None:
    killed: list[int] = []
    seen: list[list[str]] = []

    def tell(runs: list[SweepRun]) -> None:
        seen.append(sorted(one.state for one in runs))
        for one in runs:
            found = re.search(r"process (\d+)", one.where)
            if found and one.state == "running" and 0 < one.epoch < one.epochs and not killed:
                os.kill(int(found[1]), signal.SIGKILL)
                killed.append(int(found[1]))

    found = sweep(grid_runs(base(), GRID), tmp_path, cluster.Cluster(), tell=tell)  # type: ignore[arg-type]
    assert killed and {one.state for one in found} == {"finished"}, [one.why for one in found]
    assert seen[0] == ["queued"] * 4 and ["queued", "queued", "running", "running"] in seen, "two cores, four runs"
    assert_same(tmp_path, alone)


@longer
@pytest.mark.ray
@pytest.mark.slow
def test_a_driver_that_is_killed_goes_on_when_called_again(node: Any, tmp_path: Path, alone: Path) -> None:
    out = tmp_path / "sweep"
    environment, os.environ["RAY_ADDRESS"] = dict(os.environ), node.get_runtime_context().gcs_address
    try:
        process = started(out, "--on", "ray")
        first = out / "strategy-sgd-seed-0"
        wait_until(lambda: (first / "checkpoint.safetensors").exists() and holder(first) != 0, process)
        process.kill()
        process.communicate(timeout=60)
        assert not (out / "results.csv").exists()
        assert cli.main(words(out, "--on", "ray")) == 0
    finally:
        os.environ.clear()
        os.environ.update(environment)
    assert_same(out, alone)


@longer
@pytest.mark.ray
@pytest.mark.slow
def test_the_papers_grid_is_trained_on_ray(node: Any, tmp_path: Path) -> None:
    words = ["paper", "digits", "--network", "width-digits", "--strategy", "sgd", "--set", "train.epochs=1", "--set"]
    words += ["data.limit=256", "--seeds", "2", "--json"]
    for on in ("ray", "local"):
        places = ["--out", str(tmp_path / on), "--results", str(tmp_path / f"{on}.csv"), "--on", on]
        assert cli.main([*words, *places]) == 0
    names = sorted(path.name for path in (tmp_path / "local").iterdir() if path.is_dir())
    assert len(names) == 2
    for name in names:
        one, other = (test_sweep.weights(tmp_path / on / name) for on in ("ray", "local"))
        assert all((one[key] == other[key]).all() for key in other)
    rows = {on: read_results(str(tmp_path / f"{on}.csv")) for on in ("ray", "local")}
    assert [row["error"] for row in rows["ray"]] == [row["error"] for row in rows["local"]] and len(rows["ray"]) == 6


@longer
@pytest.mark.ray
@pytest.mark.slow
def test_tune_gives_runs_up_by_the_errors_of_their_stages(node: Any, tmp_path: Path) -> None:
    """Of three rates, one after another, those that learn too little by the third epoch end there: a scheduler asks stage 3."""
    tune = pytest.importorskip("ray.tune", reason="Ray Tune is not installed", exc_type=ImportError)
    from nestling.studies.sweep.tune import trainable

    settings = ("train.epochs=5", "train.batch=32", "data.limit=512", "train.diagnostics=false")
    halving = tune.schedulers.AsyncHyperBandScheduler(time_attr="epoch", max_t=5, grace_period=3, reduction_factor=3)
    tuner = tune.Tuner(
        trainable("digits-width", settings),
        param_space={"strategy.name": "osgd", "train.lr": tune.grid_search([0.05, 1e-7, 1e-8])},
        tune_config=tune.TuneConfig(metric="error_3", mode="min", max_concurrent_trials=1, scheduler=halving),
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    )
    found = tuner.fit()
    assert not found.errors and len(found) == 3
    epochs = {each.config["train.lr"]: each.metrics["epoch"] for each in found}
    assert epochs == {0.05: 5, 1e-7: 3, 1e-8: 3}
    assert all(0 <= each.metrics[f"error_{stage}"] <= 1 for each in found for stage in (1, 2, 3))
    best = found.get_best_result()
    assert best.config["train.lr"] == 0.05
    with best.checkpoint.as_directory() as folder:
        assert RunDir(folder).load_checkpoint()[1]["epoch"] == 5
