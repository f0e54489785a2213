"""What pages say beside their pictures is true of what is drawn: costs, units, crosses, runs behind a bar."""

from math import inf

import numpy as np
import pytest

from nestling.recipes.recipe import NetworkRecipe, Recipe
from nestling.report.content import Pictures
from nestling.report.families import NEST, families
from nestling.report.figures.deadlines import named_limits
from nestling.report.paper.figures import deadlines, tradeoff
from nestling.report.records import Run
from nestling.report.sections.cost import by_operation
from nestling.report.times import Times
from nestling.runs.folder import RunDir


@pytest.mark.parametrize(("first", "told"), [(0.020, True), (0.0105, False), (0.007, False)])
def test_small_stages_that_pay_by_the_operation_are_told_of(first: float, told: bool) -> None:
    """A tenth of the MACs in a quarter of the time is told, and nothing where time goes as MACs do."""
    stages = [
        {"stage": stage, "size": size, "error": 0.1, "macs": macs}
        for stage, size, macs in ((1, "w1", 70), (2, "w2", 210), (3, "w4", 700))
    ]
    run = Run(RunDir("/nowhere/run"), Recipe("run", network=NetworkRecipe("width-digits")), {}, (), {"stages": stages})
    [family] = families([run])
    said = by_operation(family, Times("a chip", {(NEST, 0): np.array([[first, 0.045, 0.075]] * 3)}, 1, 0))
    assert bool(said) == told
    assert not told or "w1 does 10 % of the multiply-accumulates in 27 % of the time" in said


def test_deadlines_have_the_unit_of_the_shortest() -> None:
    assert named_limits([0.0117, 0.0137, 0.0235, inf]) == (["12", "14", "24", "none"], "µs")
    assert named_limits([2.4, 4.8, inf]) == (["2.4", "4.8", "none"], "ms")


def test_captions_speak_of_what_is_drawn() -> None:
    """The paper has no digits; a bar says how many runs are behind it."""
    for data, crosses in (("digits", False), ("cifar10", True)):
        [block] = tradeoff([], ("osgd",), data)
        assert isinstance(block, Pictures)
        assert ("Crosses" in block.items[0].caption) == crosses
    _, [drawn] = deadlines([], "results", ("osgd", "sgd"), ("train.epochs=3",), "digits")
    assert isinstance(drawn, Pictures) and "Runs behind" not in drawn.items[0].caption
