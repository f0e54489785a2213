"""Runs in order: a family is one network on one data set, a line is one way of training it, over all its seeds.

Comes in: Runs. Goes out: Families, whose lines are nests, ensembles, or the independent nets of the nest's sizes.
Labels say only what tells a family's lines apart. Knows nothing of files or pictures.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nestling.recipes.recipe import CHANCE, StrategyRecipe, flat
from nestling.recipes.strategies import NORMALISED, STRATEGIES
from nestling.report.records import Run

NEST, ENSEMBLE, ALONE = "nest", "ensemble", "alone"
INDEPENDENT = "independent nets"
BASELINES = {"width": "even", "depth": "cascade", "alternate": "cascade", "together": "cascade"}  # as in the paper


@dataclass(frozen=True)
class Spread:
    """Some numbers as mean, sample standard deviation (none for a single number) and how many they are."""

    mean: float
    std: float | None
    n: int


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


@dataclass(frozen=True, eq=False)
class Line:
    """One way of training one network. The runs of independent nets are one line, each run standing for a stage."""

    kind: str
    label: str
    runs: tuple[Run, ...]

    @property
    def strategy(self) -> str:
        return self.runs[0].recipe.strategy.name

    def stages(self) -> tuple[int, ...]:
        return tuple(sorted({row["stage"] for run in self.runs for row in run.stages}))

    def seeds(self) -> int:
        """Runs per stage; the fewest, where stages differ."""
        counts = [sum(any(row["stage"] == stage for row in run.stages) for run in self.runs) for stage in self.stages()]
        return min(counts, default=0)

    def number(self, field: str, stage: int) -> Spread | None:
        """A field of results.json at one stage, over the runs that have it."""
        values = [row.get(field) for run in self.runs for row in run.stages if row["stage"] == stage]
        found = [value for value in values if value is not None]
        return spread(found) if found else None


@dataclass(frozen=True, eq=False)
class Family:
    name: str  # of the network
    data: str
    split: str
    n: int  # images behind every error
    classes: tuple[str, ...]
    sizes: tuple[str, ...]  # of the stages, "w1", ...
    lines: tuple[Line, ...]

    @property
    def nests(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.kind != ALONE)

    @property
    def judged_nests(self) -> tuple[Line, ...]:
        """Those of which a run has finished."""
        return tuple(line for line in self.nests if line.stages())

    @property
    def alone(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.kind == ALONE)

    @property
    def stages(self) -> range:
        return range(1, len(self.sizes) + 1)

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(run for line in self.lines for run in line.runs)

    def baseline(self, families: "Sequence[Family]") -> "Family | None":
        """The family the paper calls this one's Base: even-width for width, cascade for all that grow deeper."""
        kind, _, body = self.name.partition("-")
        wanted = f"{BASELINES.get(kind, '')}-{body}"
        return next((each for each in families if each.name == wanted and each.data == self.data), None)


def families(runs: Iterable[Run]) -> list[Family]:
    """All runs, sorted into families and lines; families come in the order of their first run."""
    sorted_runs: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        sorted_runs.setdefault(family_key(run), []).append(run)
    return [make_family(found) for found in sorted_runs.values()]


def family_key(run: Run) -> tuple[Any, ...]:
    network = dataclasses.replace(run.recipe.network, alone=0, ensemble=False)
    return run.recipe.data.name, run.recipe.data.validation, network


def make_family(runs: Sequence[Run]) -> Family:
    lines: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        lines.setdefault((kind_of(run), tuple(sorted(settings(run).items()))), []).append(run)
    grouped = [(key[0], sorted(found, key=by_seed)) for key, found in lines.items()]
    grouped.sort(key=lambda each: (each[0] == ALONE, rank(each[1][0])))
    judged = [run for run in runs if run.results]
    first, network = judged[0].results if judged else {}, runs[0].recipe.network
    return Family(
        name=f"{network.name}-kept" if network.early else network.name.lstrip(":"),
        data="own data" if runs[0].recipe.data.name == "own" else runs[0].recipe.data.name,
        split=first.get("split", "test"),
        n=first.get("n", 0),
        classes=tuple(first.get("classes", ())),
        sizes=sizes(runs),
        lines=tuple(
            Line(kind, label(kind, found[0], [each for k, each in grouped if k == kind]), tuple(found))
            for kind, found in grouped
        ),
    )


def sizes(runs: Sequence[Run]) -> tuple[str, ...]:
    """The sizes of the stages, from whichever runs know them; stages without a result are numbered."""
    found: dict[int, str] = {row["stage"]: row["size"] for run in runs for row in run.stages}
    logged = [len(line.get("train_loss", ())) for run in runs if not run.alone for line in run.log[:1]]
    last = max([*found, *logged, *(run.alone for run in runs)], default=0)
    return tuple(found.get(stage, f"stage {stage}") for stage in range(1, last + 1))


def kind_of(run: Run) -> str:
    return ALONE if run.alone else ENSEMBLE if run.recipe.network.ensemble else NEST


def settings(run: Run) -> dict[str, Any]:
    """The recipe, flat, without what may differ inside one line."""
    recipe = run.recipe
    if run.alone:
        # With one task there is nothing to combine: only the strategies that rescale gradients differ from sgd.
        strategy = StrategyRecipe("sgd")
        if recipe.strategy.name in NORMALISED:
            strategy = StrategyRecipe("normsgd", constant=recipe.strategy.constant, literal=recipe.strategy.literal)
        recipe = dataclasses.replace(
            recipe, strategy=strategy, network=dataclasses.replace(recipe.network, alone=1, ensemble=False)
        )
    return {key: value for key, value in flat(recipe).items() if key not in CHANCE}


def label(kind: str, run: Run, others: Sequence[Sequence[Run]]) -> str:
    """What tells this line from the others of its kind: the strategy, then whatever else differs under it."""
    mine = settings(run)
    name = run.recipe.strategy.name
    alike = [settings(each[0]) for each in others if kind == ALONE or each[0].recipe.strategy.name == name]
    differs = [key for key in mine if any(other[key] != mine[key] for other in alike)]
    start = INDEPENDENT if kind == ALONE else f"ensemble, {name}" if kind == ENSEMBLE else name
    return ", ".join([start, *(f"{key.partition('.')[2].replace('_', ' ')} {shown(mine[key])}" for key in differs)])


def shown(value: Any) -> str:
    if isinstance(value, tuple):
        return "-".join(map(str, value)) or "default"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else f"{value}"


def rank(run: Run) -> int:
    return list(STRATEGIES).index(run.recipe.strategy.name)


def by_seed(run: Run) -> tuple[int, int, str]:
    return run.alone, run.recipe.train.seed, run.name
