"""Run folders as a report sees them: read whole, with a note of what each one lacks.

Comes in: paths of run folders, or of folders that hold some. Goes out: Runs. A file that is missing is a gap the
report names; a run with a damaged file is left out, with the reason. Only this room of the report touches run folders.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestling.errors import NestlingError
from nestling.files import CURVE, GALLERY, OUTPUTS, PROFILE, PROVENANCE, RECIPE
from nestling.recipes.recipe import Recipe
from nestling.runs.folder import RunDir
from nestling.runs.latency import Latency, load_profile
from nestling.runs.open import resolve


@dataclass(frozen=True, eq=False)
class Answers:
    """What every stage said about every test image, and how sure it was."""

    said: NDArray[np.int64]  # (stages, N) class numbers
    confidence: NDArray[np.float32]  # (stages, N) softmax of the class said
    labels: NDArray[np.int64]  # (N)

    @property
    def right(self) -> NDArray[np.bool_]:
        return self.said == self.labels[None, :]

    def settled(self) -> NDArray[np.int64]:
        """Per image the first stage (from 1) from which on every answer is right; stages + 1 = wrong at the end."""
        steady = np.logical_and.accumulate(self.right[::-1], axis=0)[::-1]
        return len(self.said) + 1 - steady.sum(axis=0)


@dataclass(frozen=True, eq=False)
class GalleryImages:
    """Some test images, as people see them."""

    images: NDArray[np.uint8]  # (K, C, H, W)
    indices: NDArray[np.int64]  # (K) into the test split


@dataclass(frozen=True, eq=False)
class Run:
    folder: RunDir
    recipe: Recipe
    provenance: dict[str, Any]
    log: tuple[dict[str, Any], ...]
    results: dict[str, Any]  # empty = the run has not been evaluated

    @property
    def name(self) -> str:
        return self.folder.path.resolve().name

    @property
    def alone(self) -> int:
        return self.recipe.network.alone

    @property
    def stages(self) -> tuple[dict[str, Any], ...]:
        """The rows of results.json; an independent net's one row carries the number of the stage it stands beside."""
        rows = self.results.get("stages", [])
        return tuple({**row, "stage": self.alone or row["stage"]} for row in rows)

    @cached_property
    def profile(self) -> dict[str, Any]:
        """profile.json as it is; {} = not measured."""
        return self.folder.read_facts(PROFILE)

    @cached_property
    def latency(self) -> Latency | None:
        return load_profile(self.folder) if self.folder.has(PROFILE) else None

    @cached_property
    def curve(self) -> dict[str, Any]:
        """Errors under deadlines against the independent nets, measured while the machine was more and less busy
        (benchmarks/deadlines.py curve); {} = not measured."""
        return self.folder.read_facts(CURVE)

    @cached_property
    def answers(self) -> Answers | None:
        """Reduced at once to what is needed: the logits of a large test set would not fit in memory run by run."""
        if not self.folder.has(OUTPUTS) or self.results.get("task"):
            return None
        tensors = resolve(self.folder).outputs()
        sure, said = tensors["logits"].softmax(2).max(2)
        return Answers(said.numpy(), sure.numpy(), tensors["labels"].numpy())

    @cached_property
    def pictures(self) -> GalleryImages | None:
        if not self.folder.has(GALLERY):
            return None
        tensors = resolve(self.folder).gallery()
        if "images" not in tensors:
            return None
        return GalleryImages(tensors["images"].numpy(), tensors["indices"].numpy())


def read(path: str | Path) -> Run:
    folder = RunDir.open(path)
    return Run(
        folder,
        folder.read_recipe(),
        folder.read_facts(PROVENANCE),
        tuple(folder.read_log()),
        resolve(folder).results,
    )


def find(paths: Sequence[str | Path]) -> list[Run]:
    """The runs at these paths; a folder that is no run itself stands for the runs inside it."""
    return [read(folder) for folder in folders_of(paths)]


def find_sound(paths: Sequence[str | Path]) -> tuple[list[Run], dict[str, str]]:
    """The runs at these paths whose every file can be read, and the folders of the others, each with the reason."""
    found: list[Run] = []
    broken: dict[str, str] = {}
    for folder in folders_of(paths):
        try:
            run = read(folder)
            _ = run.latency, run.curve, run.answers, run.pictures  # now, while the run can still be left out
            found.append(run)
        except NestlingError as error:
            broken[str(folder)] = str(error)
    if not found:
        raise NestlingError("; ".join(broken.values()))
    return found, broken


def folders_of(paths: Sequence[str | Path]) -> list[Path]:
    folders: dict[Path, None] = {}  # in order, each once
    for path in map(Path, paths):
        inside = [] if (path / RECIPE).is_file() else sorted(each.parent for each in path.rglob(RECIPE))
        for folder in inside or [RunDir.open(path).path]:
            folders[folder.resolve()] = None
    if not folders:
        raise NestlingError("no run folders were named; name at least one, or a folder that holds some")
    return list(folders)
