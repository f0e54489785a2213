"""The deadline study: hand-computed cases, and equal to a plain loop over inputs, deadlines and networks."""

from math import inf, isinf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestling.errors import NestlingError
from nestling.studies import deadline
from nestling.studies.deadline import BASE, NEST, ORACLE_ALL, ORACLE_EACH, SchemeResult, Timed, by_scheme

Table = list[list[float]]


def make(correct: list[list[int]], latency: Table, name: str = "net") -> Timed:
    return Timed(name, np.array(correct, dtype=bool), np.array(latency, dtype=float))


# Four inputs, two stages, ten classes; stage 1 is right on inputs 0 and 1, stage 2 on 0, 1 and 2.
NEST_CASE = make([[1, 1, 0, 0], [1, 1, 1, 0]], [[1, 3], [1, 3], [2, 4], [2, 5]])


def test_an_anytime_network_gives_its_latest_ready_answer() -> None:
    rows = deadline.anytime(NEST, NEST_CASE, (0.5, 1.0, 3.0, inf), classes=10)
    # 0.5: all guess. 1.0: inputs 0, 1 by stage 1 (right), 2, 3 guess. 3.0: 0, 1 by stage 2, 2, 3 by stage 1 (wrong).
    expected = [(0.9, (0, 0), 1), ((0 + 0 + 0.9 + 0.9) / 4, (0.5, 0), 0.5), (0.5, (0.5, 0.5), 0), (0.25, (0, 1), 0)]
    assert [(row.error, row.answered, row.guessed) for row in rows] == [
        (pytest.approx(error), shares, guessed) for error, shares, guessed in expected
    ]


# Independent nets: the small one is right on inputs 0 and 1 and always quick; the big one is right on 0, 1, 2.
SMALL = make([[1, 1, 0, 0]], [[1], [1], [1], [1]], "small")
BIG = make([[1, 1, 1, 0]], [[2], [2], [4], [4]], "big")


def test_oracle_all_uses_one_network_for_all_inputs() -> None:
    rows = deadline.oracle_all([SMALL, BIG], (0.5, 2.0, inf), classes=2)
    # 2.0: small leaves 2/4 wrong, big leaves (0 + 0 + 0.5 + 0.5)/4 = 0.25, with guesses for the two it is late for.
    assert [row.error for row in rows] == [0.5, 0.25, 0.25]
    assert rows[1].answered == (0, 0.5)
    assert rows[1].guessed == 0.5
    assert rows[2].answered == (0, 1)


def test_oracle_each_takes_the_most_accurate_network_that_is_in_time_for_the_input() -> None:
    rows = deadline.oracle_each([SMALL, BIG], (0.5, 1.0, 2.0, inf), classes=2)
    # 2.0: inputs 0, 1 by big, 2, 3 by small, which is wrong on both: foresight of latency, not of answers.
    assert [row.error for row in rows] == [0.5, 0.5, 0.5, 0.25]
    assert rows[2].answered == (0.5, 0.5)
    assert rows[2].guessed == 0


def test_the_papers_deadlines_are_seven_and_none() -> None:
    found = deadline.deadlines(make([[1, 1]], [[10], [14]]))
    assert found == (*(pytest.approx(12 * (0.5 + k / 12)) for k in range(7)), inf)


def test_the_study_takes_its_deadlines_from_the_largest_independent_network() -> None:
    rows = by_scheme(deadline.study(NEST_CASE, [BIG, SMALL], classes=10, base=NEST_CASE))
    assert list(rows) == [BASE, NEST, ORACLE_ALL, ORACLE_EACH]
    assert all(len(each) == 8 for each in rows.values())
    assert rows[NEST][0].deadline == pytest.approx(1.5)
    assert rows[NEST][6].deadline == pytest.approx(3.0)
    assert [row.error for row in rows[BASE]] == [row.error for row in rows[NEST]]


def test_without_independent_networks_the_nest_sets_the_deadlines() -> None:
    rows = deadline.study(NEST_CASE, [], classes=10)
    assert {row.scheme for row in rows} == {NEST}
    assert rows[6].deadline == pytest.approx((3 + 3 + 4 + 5) / 4)


def test_a_row_without_a_deadline_is_null_in_json() -> None:
    assert SchemeResult(NEST, inf, 0.1, (1.0,), 0.0).to_dict()["deadline_ms"] is None
    assert SchemeResult(NEST, 2.5, 0.1, (1.0,), 0.0).to_dict()["deadline_ms"] == 2.5


def test_timed_reads_what_a_run_folder_holds() -> None:
    logits = np.array([[[2, 1], [0, 1], [3, 0]], [[2, 1], [1, 0], [0, 3]]], dtype=np.float32)  # (2 stages, 3, 2)
    found = deadline.timed("net", logits, np.array([0, 1, 1]), [[1, 2], [3, 4]])
    assert found.correct.tolist() == [[True, True, False], [True, False, True]]
    assert found.latency.tolist() == [[1, 2], [3, 4], [1, 2]]  # the trace begins anew


def test_the_mean_over_seeds_by_hand() -> None:
    one = [SchemeResult(NEST, 1.0, 0.2, (0.5, 0.0), 0.5)]
    two = [SchemeResult(NEST, 1.0, 0.4, (1.0, 0.0), 0.0)]
    [found] = deadline.mean_rows([one, two])
    assert (found.error, found.answered, found.guessed) == (pytest.approx(0.3), (0.75, 0.0), 0.25)


def test_latencies_that_do_not_fit_are_refused() -> None:
    with pytest.raises(NestlingError, match=r"shape \(2, 1\)"):
        make([[1, 0]], [[1]])
    with pytest.raises(NestlingError, match="cumulative"):
        make([[1], [1]], [[3, 1]])
    with pytest.raises(NestlingError, match="same inputs"):
        deadline.oracle_all([SMALL, make([[1]], [[1]])], (1.0,), classes=2)
    with pytest.raises(NestlingError, match="repeats, stages"):
        deadline.spread([], 3)


# The brute force: the paper's words, one input at a time.


def plain_anytime(network: Timed, limit: float, classes: int) -> float:
    total = 0.0
    for i in range(network.correct.shape[1]):
        error = 1 - 1 / classes
        for stage in range(len(network.correct)):
            if network.latency[i, stage] <= limit:
                error = 0.0 if network.correct[stage, i] else 1.0
        total += error
    return total / network.correct.shape[1]


def plain_oracle_all(networks: list[Timed], limit: float, classes: int) -> float:
    return min(plain_anytime(network, limit, classes) for network in networks)


def plain_oracle_each(networks: list[Timed], limit: float, classes: int) -> float:
    n = networks[0].correct.shape[1]
    accuracy = [sum(bool(c) for c in network.correct[0]) for network in networks]
    total = 0.0
    for i in range(n):
        best = None
        for k, network in enumerate(networks):
            if network.latency[i, 0] <= limit and (best is None or accuracy[k] >= accuracy[best]):
                best = k
        total += 1 - 1 / classes if best is None else float(not networks[best].correct[0, i])
    return total / n


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Timed, list[Timed], int]:
    """A nest and independent networks on the same inputs, with few distinct times so that ties happen."""
    n, stages, classes = draw(st.integers(1, 7)), draw(st.integers(1, 4)), draw(st.integers(2, 10))

    def network(stages: int, name: str) -> Timed:
        right = draw(st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=stages, max_size=stages))
        steps = draw(st.lists(st.lists(st.integers(0, 4), min_size=stages, max_size=stages), min_size=n, max_size=n))
        return Timed(name, np.array(right), np.cumsum(np.array(steps, dtype=float), axis=1))

    return network(stages, "nest"), [network(1, f"alone {s}") for s in range(stages)], classes


@given(worlds())
def test_the_study_equals_the_brute_force(world: tuple[Timed, list[Timed], int]) -> None:
    nest, alone, classes = world
    for row in deadline.study(nest, alone, classes, base=nest):
        plain = {
            BASE: lambda limit: plain_anytime(nest, limit, classes),
            NEST: lambda limit: plain_anytime(nest, limit, classes),
            ORACLE_ALL: lambda limit: plain_oracle_all(alone, limit, classes),
            ORACLE_EACH: lambda limit: plain_oracle_each(alone, limit, classes),
        }[row.scheme]
        assert row.error == pytest.approx(plain(row.deadline), abs=1e-12)
        assert sum(row.answered) + row.guessed == pytest.approx(1)
        assert not isinf(row.deadline) or row.guessed == 0


@given(worlds())
def test_without_a_deadline_the_nest_gives_its_last_answer(world: tuple[Timed, list[Timed], int]) -> None:
    nest, alone, classes = world
    rows = by_scheme(deadline.study(nest, alone, classes))
    assert rows[NEST][-1].error == pytest.approx(1 - nest.correct[-1].mean())
    assert rows[ORACLE_ALL][-1].error == pytest.approx(min(1 - each.correct[0].mean() for each in alone))
    assert rows[ORACLE_EACH][-1].error == pytest.approx(rows[ORACLE_ALL][-1].error)
