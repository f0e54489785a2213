"""The deadline study of a family: from its runs' outputs and measured times to rows of studies/deadline.py.

Comes in: a family, the one it is measured against (Base), and their times. Goes out: rows per scheme, averaged over
seeds, or a sentence that says why there are none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nestling.report.families import ALONE, Family, kind_of
from nestling.report.records import Run
from nestling.report.times import Times, times
from nestling.studies import deadline
from nestling.studies.deadline import SchemeResult, Timed


@dataclass(frozen=True, eq=False)
class Study:
    limits: tuple[float, ...]  # milliseconds, the last infinite
    rows: dict[str, list[SchemeResult]]  # scheme -> one row per limit
    nests: tuple[str, ...]  # the schemes that are nests of this family
    seeds: dict[str, int]  # scheme -> runs behind it
    conditions: str
    largest: str  # whose mean latency the deadlines are fractions of


def as_timed(run: Run, measured: Times) -> Timed | None:
    """A run's answers beside the times of its network; None where either is missing."""
    trace = measured.trace(kind_of(run), run.alone)
    if run.answers is None or trace is None or trace.shape[1] != len(run.answers.said):
        return None
    right = run.answers.right
    return Timed(run.name, right, deadline.spread(trace, right.shape[1]))


def all_timed(runs: Sequence[Run], measured: Times) -> list[Timed]:
    found = [as_timed(run, measured) for run in runs]
    return [each for each in found if each is not None]


def study(family: Family, base: Family | None) -> Study | str:
    """The study, or why there is none."""
    measured = times(family)
    if not family.classes:
        return f"{family.name} has no results yet, so it has no deadline study."
    if measured is None:
        return f"No latency was measured for {family.name} (profile.json), so it has no deadline study."
    nests = {line.label: all_timed(line.runs, measured) for line in family.nests}
    nests = {label: found for label, found in nests.items() if found}
    if not nests:
        return f"{family.name} has no nest with both outputs and measured latency, so it has no deadline study."
    sets = oracle_sets(family, measured)
    nest = next(iter(nests.values()))[0]
    largest = max(sets[0], key=lambda each: each.latency[:, -1].mean()) if sets else nest
    limits, classes = deadline.deadlines(largest), len(family.classes)
    rows: dict[str, list[SchemeResult]] = {}
    seeds: dict[str, int] = {}

    def add(scheme: str, several: Sequence[list[SchemeResult]]) -> None:
        rows[scheme], seeds[scheme] = deadline.mean_rows(several), len(several)

    for name, found in base_runs(base, measured.conditions).items():
        add(name, [deadline.anytime(name, each, limits, classes) for each in found])
    for label, found in nests.items():
        add(label, [deadline.anytime(label, each, limits, classes) for each in found])
    if sets:
        add(deadline.ORACLE_ALL, [deadline.oracle_all(each, limits, classes) for each in sets])
        add(deadline.ORACLE_EACH, [deadline.oracle_each(each, limits, classes) for each in sets])
    name = f"the independent {family.sizes[-1]} net" if sets else f"the whole {family.name} nest"
    return Study(limits, rows, tuple(nests), seeds, measured.conditions, name)


def base_runs(base: Family | None, conditions: str) -> dict[str, list[Timed]]:
    """The first nest of the baseline, if it was measured under the same conditions."""
    measured = times(base, conditions) if base else None
    if base is None or measured is None:
        return {}
    found = [(line, all_timed(line.runs, measured)) for line in base.nests[:1]]
    return {f"{deadline.BASE} ({base.name})": runs for _, runs in found if runs}


def oracle_sets(family: Family, measured: Times) -> list[list[Timed]]:
    """Per seed the independent nets of all sizes; seeds that lack one are left out, as the oracles need them all."""
    found: dict[int, dict[int, Timed]] = {}
    for run in family.alone[0].runs if family.alone else ():
        timed = as_timed(run, measured)
        if timed is not None and kind_of(run) == ALONE:
            found.setdefault(run.recipe.train.seed, {})[run.alone] = timed
    return [[nets[s] for s in family.stages] for _, nets in sorted(found.items()) if set(nets) >= set(family.stages)]
