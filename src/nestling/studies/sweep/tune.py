"""A recipe for Ray Tune: a search beyond grids, and runs given up early by the errors of their stages.

In: a recipe; then, from Tune, values for some of its fields. Out: a function for `ray.tune.Tuner`, which reports after every
epoch `error_1`, `error_2`, ... (of each stage), `error` (their mean) and `epoch`, with the run's folder as checkpoint. Which
values are tried and which runs are given up is Tune's business.
"""

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nestling.files import RECIPE
from nestling.recipes import named
from nestling.recipes.recipe import Recipe, override
from nestling.runs.folder import RunDir
from nestling.studies.sweep.cluster import engine
from nestling.train.begin import prepare


def trainable(recipe: str | Recipe, set: Sequence[str] = ()) -> Callable[[Mapping[str, Any]], None]:
    """What `ray.tune.Tuner` trains: its config gives fields of the recipe, {"train.lr": tune.loguniform(0.01, 1)}."""
    engine()
    base = override(named(recipe) if isinstance(recipe, str) else recipe, set)

    def train_config(config: Mapping[str, Any]) -> None:
        from ray import tune

        chosen = override(base, [f"{key}={as_text(value)}" for key, value in config.items()])
        with tempfile.TemporaryDirectory(prefix="nestling-") as folder:
            path, before = Path(folder) / "run", tune.get_checkpoint()
            if before is not None:
                with before.as_directory() as kept:
                    shutil.copytree(kept, path)
            train_reporting(chosen, path, tune)

    return train_config


def train_reporting(recipe: Recipe, path: Path, tune: Any) -> None:
    """Train, or go on; a report after every epoch, the last when the run is finished."""

    def report() -> None:
        tune.report(metrics(RunDir(path)), checkpoint=tune.Checkpoint.from_directory(str(path)))

    training = prepare(recipe, str(path), RunDir(path).has(RECIPE), "nestling.trainable")
    if training is not None:
        done = training.done
        for _ in training.epochs():
            if training.done > done:
                done = training.done
                if not training.finished:
                    report()
        training.finish()
        training.run.release()
    report()


def metrics(run: RunDir) -> dict[str, float]:
    """What is known of the stages after the newest epoch."""
    log = run.read_log()
    errors: list[float] = next((line["test_error"] for line in reversed(log) if "test_error" in line), [])
    found = {f"error_{stage}": error for stage, error in enumerate(errors, start=1)}
    mean = {"error": sum(errors) / len(errors)} if errors else {}
    return {"epoch": log[-1]["epoch"] if log else 0, **mean, **found}


def as_text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
