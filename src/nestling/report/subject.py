"""What a report is about: its families in order, which of them are baselines, and the look of every line.

Comes in: families, and live comparisons. Goes out: a Subject, which every section is made from, and what sections share:
pictures that may be missing, and notes that say which runs lack something.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nestling.report.content import Note, PageBlock, Picture, Pictures
from nestling.report.families import Family
from nestling.report.records import Run
from nestling.report.theme import Look, looks
from nestling.report.words import listed


@dataclass(frozen=True, eq=False)
class Subject:
    """What a report is about."""

    families: tuple[Family, ...]  # those that others are measured against come last
    looks: Mapping[str, Look]
    live: tuple[Mapping[str, Any], ...] = ()  # what `nestling profile NAME --live --json` printed

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(run for family in self.families for run in family.runs)

    @property
    def alone(self) -> bool:
        """Whether there is any independent network to speak of."""
        return any(family.alone for family in self.families)

    @property
    def mains(self) -> tuple[Family, ...]:
        """The families that are not merely another one's baseline."""
        bases = [family.baseline(self.families) for family in self.families]
        return tuple(family for family in self.families if family not in bases)

    def name(self, family: Family, *words: str) -> str:
        """A file name for a picture of this family, unique in the report."""
        same = [each for each in self.families if each.name == family.name]
        number = [] if len(same) == 1 else [str(same.index(family) + 1)]
        text = "-".join([family.name, *number, *words])
        return "".join(letter if letter.isalnum() else "-" for letter in text).strip("-")


def subject(families: list[Family], live: Sequence[Mapping[str, Any]] = ()) -> Subject:
    bases = [family.baseline(families) for family in families]
    families = sorted(families, key=lambda family: family in bases)
    nests = dict.fromkeys(line.label for family in families for line in family.nests)
    alone = dict.fromkeys(line.label for family in families for line in family.alone)
    return Subject(tuple(families), looks(list(nests), list(alone)), tuple(live))


def pictures(found: list[Picture | None]) -> list[PageBlock]:
    drawn = tuple(each for each in found if each is not None)
    return [Pictures(drawn)] if drawn else []


def lacking(runs: list[Run], what: str, remedy: str) -> list[PageBlock]:
    """A note that names the runs without something."""
    if not runs:
        return []
    names = [run.name for run in runs]
    shown = names if len(names) <= 6 else [*names[:5], f"{len(names) - 5} more"]
    return [Note(f"No {what} in {listed(shown)}. {remedy}")]
