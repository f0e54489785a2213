"""Runs side by side: as one ends the next begins, one that fails leaves the others alone, rows are there at once."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train import digits, weights

from nestling.errors import NestlingError
from nestling.recipes import named
from nestling.recipes.recipe import Recipe
from nestling.runs.folder import RunDir
from nestling.train import Training, side_by_side, train
from nestling.train.beside import Turn, fitting
from nestling.train.capabilities import OutOfMemory


def runs(folder: Path, *lengths: int) -> list[tuple[Recipe, str]]:
    """Runs of so many epochs each."""
    return [
        (digits(f"train.epochs={epochs}", f"train.seed={seed}"), str(folder / f"run{seed}"))
        for seed, epochs in enumerate(lengths)
    ]


def watch(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Which runs were in progress at every step, in order."""
    going: dict[str, int] = {}
    seen: list[list[str]] = []
    epochs = Training._epochs

    def noting(self: Training) -> Any:
        going[self.run.path.name] = 1
        for place in epochs(self):
            seen.append(sorted(going))
            yield place
        del going[self.run.path.name]

    monkeypatch.setattr(Training, "_epochs", noting)
    return seen


def test_the_next_run_begins_as_soon_as_one_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    chosen = runs(tmp_path, 1, 3, 1, 1)
    ended = [Path(outcome.path).name for outcome in side_by_side(chosen, beside=2, quiet=True)]
    assert ended[:2] == ["run0", "run2"] and sorted(ended) == ["run0", "run1", "run2", "run3"]
    assert {tuple(each) for each in seen} >= {("run0", "run1"), ("run1", "run2"), ("run1", "run3")}
    assert max(map(len, seen)) == 2
    recipe, path = chosen[2]
    train(recipe, path + "-alone", quiet=True)
    assert all(torch.equal(value, weights(Path(path + "-alone"))[key]) for key, value in weights(Path(path)).items())


def test_what_would_not_be_finished_in_time_is_not_begun_while_others_can_be(tmp_path: Path) -> None:
    """Of 100 seconds the first takes 60: the second, of 50, waits, and the third, of 30, is begun in its place."""
    takes = {"run0": 60.0, "run1": 50.0, "run2": 30.0, "run3": 20.0}
    waiting = runs(tmp_path, 1, 1, 1, 1)
    turns: list[Any] = []
    for wanted in (0, 2, None):
        found = fitting(waiting, turns, 100.0, lambda recipe, path: takes[Path(path).name])
        assert (found is None) == (wanted is None)
        if found is not None:
            recipe, path = waiting.pop(found)
            assert path.endswith(f"run{wanted}")
            turns.append(Turn(recipe, path, None, iter(())))  # type: ignore[arg-type]
    assert fitting(waiting, [], 10.0, lambda recipe, path: 50.0) == 0, (
        "with nothing else to do one is begun, for another time"
    )
    ended = [
        Path(each.path).name
        for each in side_by_side(runs(tmp_path, 1, 1), 2, seconds=600, takes=lambda *_: 500, quiet=True)
    ]
    assert ended == ["run0", "run1"], "one after another, since both would not fit side by side"


def test_one_that_fails_leaves_the_others_alone(tmp_path: Path) -> None:
    chosen = runs(tmp_path, 1, 2, 1)
    RunDir.create(chosen[0][1]).write_recipe(named("digits-depth"))  # somebody else's
    chosen[1] = (digits("train.epochs=2", "train.lr=1e30"), chosen[1][1])  # becomes no number
    found = {Path(outcome.path).name: outcome.error for outcome in side_by_side(chosen, beside=3, quiet=True)}
    assert "another recipe" in str(found["run0"]) and "became" in str(found["run1"]) and found["run2"] is None


def test_a_run_without_room_waits_for_another_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    start, at_once = Training.start, []

    def full(self: Training) -> Any:
        if len(seen and seen[-1]) == 2 and self.run.path.name == "run2":
            at_once.append(self.run.path.name)
            raise RuntimeError("CUDA out of memory")
        return start(self)

    monkeypatch.setattr(Training, "start", full)
    outcomes = list(side_by_side(runs(tmp_path, 2, 2, 1), beside=3, quiet=True))
    assert at_once and all(outcome.error is None for outcome in outcomes) and len(outcomes) == 3
    monkeypatch.setattr(Training, "start", lambda self: (_ for _ in ()).throw(MemoryError()))
    [alone] = side_by_side(runs(tmp_path / "other", 1), beside=3, quiet=True)
    assert isinstance(alone.error, OutOfMemory), "where there is no other to wait for"


def test_a_network_without_room_waits_as_well_and_what_has_ended_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Training]] = []
    alive: list[int] = []
    begin = Training.__init__

    def noting(self: Training, *given: Any) -> None:
        gc.collect()
        alive.append(sum(each() is not None for each in made))
        if alive[-1] >= 2:
            raise MemoryError
        begin(self, *given)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Training, "__init__", noting)
    outcomes = list(side_by_side(runs(tmp_path, 1, 2, 1, 1), beside=3, quiet=True))
    assert len(outcomes) == 4 and all(outcome.error is None for outcome in outcomes)
    assert alive[:3] == [0, 1, 2] and max(alive[3:]) <= 1, "runs that have ended are gone when the next begins"


def test_nothing_is_begun_that_could_not_get_anywhere(tmp_path: Path) -> None:
    assert list(side_by_side(runs(tmp_path, 1, 1), beside=2, seconds=5.0, least=60.0, quiet=True)) == []
    assert list(tmp_path.iterdir()) == []
    assert list(side_by_side(runs(tmp_path, 3, 1), beside=1, seconds=0.01, least=0.0, quiet=True)) == []
    assert [path.name for path in tmp_path.iterdir()] == ["run0"], "an epoch of the first, and no second"
    assert RunDir(tmp_path / "run0").load_checkpoint()[1]["epoch"] == 1


def test_what_is_finished_is_an_outcome_at_once(tmp_path: Path) -> None:
    chosen = runs(tmp_path, 1)
    first = list(side_by_side(chosen, beside=1, quiet=True))
    before = RunDir(chosen[0][1]).read_json("results.json")
    assert list(side_by_side(chosen, beside=1, quiet=True)) == first
    assert RunDir(chosen[0][1]).read_json("results.json") == before
    with pytest.raises(NestlingError, match="there is no run folder"):
        RunDir.open(tmp_path / "none")
