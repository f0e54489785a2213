"""The sections of a report: each a function from the Subject to what is said, shown and missing, in the order of reading.

A section says what finished runs lack for it; what unfinished ones lack the headline says, once. Without anything to
show or say a section has no blocks, and is left out. Sections decide what is said; how a figure looks is decided in
figures/, how a page looks in page.py.
"""

from collections.abc import Callable

from nestling.report.content import Section
from nestling.report.sections.answers import answers, calibration, repairs
from nestling.report.sections.choosing import live
from nestling.report.sections.cost import cost
from nestling.report.sections.deadlines import deadlines
from nestling.report.sections.headline import headline
from nestling.report.sections.origin import provenance
from nestling.report.sections.training import gradients, training
from nestling.report.subject import Subject

SECTIONS: tuple[Callable[[Subject], Section], ...] = (
    headline, cost, deadlines, live, answers, repairs, calibration, training, gradients, provenance,
)  # fmt: skip
