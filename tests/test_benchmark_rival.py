"""The live comparison with a chooser: who is chosen, and how answers are counted."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import rival


class Net:
    def __init__(self, usual: float, takes: float) -> None:
        self.usual, self.run = lambda: usual, lambda: takes


def test_the_largest_net_that_usually_fits_is_chosen_and_the_smallest_if_none_does() -> None:
    nets: Any = [Net(0.001, 0.001), Net(0.003, 0.005), Net(0.009, 0.009)]
    assert [rival.choose(nets, limit) for limit in (0.0005, 0.001, 0.004, 0.02)] == [1, 1, 2, 3]
    asked = rival.chooser(nets)(0.004)
    assert (asked.stage, asked.late) == (2, pytest.approx(0.001))
    assert rival.blind(nets, None, 0.004)(0.002).stage == 0, "it takes 5 ms, and the interrupt came after 2"
    asked = rival.blind(nets, 1, 0.0)(0.002)
    assert (asked.stage, asked.late) == (1, pytest.approx(-0.001))


def test_an_answer_that_comes_late_or_not_at_all_is_worth_nothing() -> None:
    asked = [
        rival.Asked(0.002, 1, -0.001),
        rival.Asked(0.002, 2, 0.0004),
        rival.Asked(0.004, 2, 0.001),
        rival.Asked(0.004, 0, 0),
    ]
    found = rival.summary(asked, (0.2, 0.1), (0.001, 0.003, 0.006))
    assert found["late"] == 0.25 and found["nothing"] == 0.25 and found["stages"] == [0.25, 0.25, 0.5]
    assert found["error"] == pytest.approx((0.2 + 0.1 + 0.1 + 0.9) / 4)
    assert found["strict"] == pytest.approx((0.2 + 0.1 + 0.9 + 0.9) / 4)
    assert [value for _, _, value in found["strict_by_deadline"]] == pytest.approx([0.15, 0.9])
