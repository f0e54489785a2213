"""D_s at once: the same answers as stage by stage, from which later stages go on; and which stage to begin with."""

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from test_export import network
from test_runtime import SHAPE, Timed, image

import nestling
from nestling.export.joined import filled, join, joined, ways
from nestling.nets import NETS, plan
from nestling.recipes.recipe import NetworkRecipe
from nestling.runtime import Anytime, Pace, Spec, Stop
from nestling.runtime.beginning import REMEMBERED, Beginnings
from nestling.runtime.build import build_engine
from nestling.runtime.engine import Floats, warm_jumps
from nestling.runtime.engines.jumps import Begun, JumpEngine, soonest
from nestling.runtime.forecast import Forecast, Recent, straight_to
from nestling.runtime.pace import CAUGHT, FORGET_CAUGHT, KEPT, LENGTHS

# --- the same answers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(NETS))
def test_any_stage_of_any_network_at_once_and_all_that_follow(name: str) -> None:
    net, x = network(name)
    engine = build_engine(net, "cpu", "onnx")
    assert engine.jumps and isinstance(engine, JumpEngine)
    with torch.no_grad():
        expected = [logits.numpy() for logits in net(x)]
    for batch in (x.numpy(), x.numpy()[:1]):
        for first in range(1, engine.stages + 1):
            state = engine.start(batch)
            for stage in range(first, engine.stages + 1):
                logits, state = engine.step(stage, state, Stop())
                wanted = expected[stage - 1][: len(batch)]
                assert np.abs(logits - wanted).max() <= 2e-5 * max(1, np.abs(wanted).max())


@pytest.mark.parametrize("name", sorted(NETS))
def test_every_way_to_join_stages_gives_the_network_s_answers(name: str) -> None:
    net, x = network(name)
    with torch.no_grad():
        expected = net(x)
        for stage in range(1, len(expected) + 1):
            for ends in ways(net.plan, stage):
                found = joined(net, ends, stage).eval()(x)
                assert len(found) == len(expected) - stage + 1
                for mine, theirs in zip(found, expected[stage - 1 :], strict=True):
                    assert (mine - theirs).abs().max() <= 2e-5 * max(1, float(theirs.abs().max()))


def test_joining_leaves_the_network_as_it_was() -> None:
    net, _ = network("width-digits")
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    joined(net.train(), (3,)).eval()
    assert net.training and all(module.training for module in net.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_stripes_are_joined_until_they_fill_a_vector() -> None:
    drawn = plan(NetworkRecipe(name="width-resnet42"))  # stripes of 8, 8 and 16 channels in the first group
    assert filled(drawn, (1, 2, 3)) == (2, 3) and filled(drawn, (1, 2)) == (2,)
    assert ways(drawn, 3) == [(3,), (2, 3), (1, 2, 3)] and ways(drawn, 2) == [(2, 3), (1, 2, 3)]
    assert join(drawn, (3,)).macs(1) == drawn.dense()[1] > join(drawn, (2, 3)).macs(2) > drawn.macs(3)
    deep = plan(NetworkRecipe(name="depth-sparse98"))
    assert [ways(deep, stage) for stage in (2, 4)] == [[(2, 3, 4)], [(4,)]]  # whole blocks: the same work in any way


def test_some_images_of_a_batch_go_on_after_a_jump() -> None:
    net, x = network("width-digits")
    engine = build_engine(net, "cpu", "onnx")
    with torch.no_grad():
        expected = [logits.numpy() for logits in net(x)]
    fresh = engine.take(engine.start(x.numpy()), [2, 0])
    logits, state = engine.step(2, fresh, Stop())
    np.testing.assert_allclose(logits, expected[1][[2, 0]], atol=2e-5)
    logits, _ = engine.step(3, engine.take(state, [1]), Stop())
    np.testing.assert_allclose(logits, expected[2][[0]], atol=2e-5)
    assert isinstance(engine, JumpEngine)
    for begun, one in ((fresh, 2), (state, 3)):  # before the first step, and after it
        both = engine.join([(begun, 1), (begun, 0)])
        np.testing.assert_allclose(engine.step(one, both, Stop())[0], expected[one - 1][[0, 2]], atol=2e-5)
    engine.close()


# --- engines -----------------------------------------------------------------------------------------------------


class Jumping(Timed):
    """Stages of given times that may be begun with: D_s takes `jumps[s - 1]` at once."""

    jumps = True

    def __init__(self, seconds: Sequence[float], jumps: Sequence[float]) -> None:
        super().__init__(seconds)
        self.straight = list(jumps)

    def step(self, stage: int, state: tuple[int, Floats], stop: Stop) -> tuple[Floats, tuple[int, Floats]]:
        done, x = state
        if done or stage == 1:
            return super().step(stage, state, stop)
        steps, self.seconds = (
            self.seconds,
            [*self.seconds[: stage - 1], self.straight[stage - 1], *self.seconds[stage:]],
        )
        try:
            return super().step(stage, (stage - 1, x), stop)
        finally:
            self.seconds = steps


@contextmanager
def jumping(seconds: Sequence[float], jumps: Sequence[float], sure: bool = True) -> Iterator[tuple[Anytime, Jumping]]:
    engine = Jumping(seconds, jumps)
    spec = Spec("jumping", SHAPE, tuple("abcde"), tuple(f"s{i + 1}" for i in range(len(seconds))))
    with Anytime(engine, spec, Pace(seconds, jumps=jumps[1:]) if sure else None) as runtime:
        yield runtime, engine


def test_the_fastest_of_several_engines_is_kept_and_the_others_closed() -> None:
    slow, fast = Timed([0.01]), Timed([0.001])
    assert soonest([slow, fast], SHAPE) is fast and slow.closed and not fast.closed
    assert soonest([slow], SHAPE) is slow


def test_warm_jumps_times_every_beginning_but_the_first() -> None:
    engine = Jumping([0.001, 0.02, 0.02], [0.001, 0.004, 0.012])
    second, third = warm_jumps(engine, SHAPE, 3)
    assert 0.004 <= second < 0.012 <= third
    assert warm_jumps(Timed([0.001, 0.001]), SHAPE) == []


@pytest.mark.parametrize(
    ("deadline", "begun", "stage"),
    [(None, [3], 3), (10.0, [3], 3), (0.35, [2], 2), (0.12, [1], 1), (0.02, [1], 0)],
)
def test_what_fits_is_begun_with(deadline: float | None, begun: list[int], stage: int) -> None:
    with jumping([0.05, 0.5, 0.6], [0.05, 0.2, 0.8]) as (runtime, engine):
        answer = runtime.answer(image(), deadline=deadline)
        assert engine.begun == begun and answer.stage == stage


@pytest.mark.parametrize(("others", "stage"), [(7, 1), (1, 3)])
def test_who_runs_all_at_once_makes_room_for_those_who_come(others: int, stage: int) -> None:
    """There is time for eight first stages. Whoever came first thought itself alone and began with the last; one other could
    still have a first stage after that, seven could not."""
    with jumping([0.1, 0.5, 1.0], [0.1, 0.6, 1.5]) as (runtime, engine), ThreadPoolExecutor(8) as pool:
        first = pool.submit(lambda: runtime.answer(image(), deadline=2.0))
        while not engine.begun:
            time.sleep(0.001)
        found = [pool.submit(lambda: runtime.answer(image(), deadline=2.0)) for _ in range(others)]
        assert all(answer.result() for answer in found) and first.result().stage >= stage and engine.begun[0] == 3


def test_refining_goes_on_from_where_a_jump_ended() -> None:
    with jumping([0.02, 0.4, 0.1], [0.02, 0.06, 1.0]) as (runtime, engine):
        answer = runtime.answer(image(), deadline=0.15)
        assert (answer.stage, engine.begun) == (2, [2])
        assert answer.refine().stage == 3 and engine.begun == [2, 3]


def test_who_looks_in_between_gets_every_stage() -> None:
    with jumping([0.01, 0.01, 0.01], [0.01, 0.01, 0.01]) as (runtime, engine):
        assert [answer.stage for answer in runtime.answers(image())] == [1, 2, 3]
        assert runtime.answer(image(), confident=0.9999).stage == 3  # any stage may be sure enough
        question = runtime.ask(image())
        assert question.result().stage == 3
        assert engine.begun == [1, 2, 3] * 3
        assert len(runtime.timeline(image())) == 3 and engine.begun == [1, 2, 3] * 4


def test_batches_without_a_deadline_go_straight_to_the_end() -> None:
    with jumping([0.01, 0.01, 0.01], [0.01, 0.01, 0.01]) as (runtime, engine):
        answers = runtime.answer_batch(np.stack([image(), image()]))
        assert [answer.stage for answer in answers] == [3, 3] and engine.log == [(3, 2)]
        engine.log.clear()
        runtime.answer_batch(np.stack([image(), image()]), deadline=2.0)
        assert engine.log == [(1, 2), (2, 2), (3, 2)]  # somebody may still come


def test_a_jump_that_cannot_be_done_leaves_no_answer_and_is_not_tried_again() -> None:
    with jumping([0.01, 0.01, 0.01], [0.01, 0.02, 0.03]) as (runtime, engine):
        engine.straight = [0.01, 1.0, 1.0]  # not what was said
        first = runtime.answer(image(), deadline=0.2)
        assert (
            first.stage == 0 and first.elapsed < 0.2 + 4 * 0.03 + 0.25
        )  # four times what it usually takes where it is crowded
        for _ in range(3):
            last = runtime.answer(image(), deadline=0.2)
        assert last.stage == 3 and engine.begun[-3:] == [1, 2, 3]


# --- which stage to begin with -----------------------------------------------------------------------------------


def spread_pace(tail: float) -> Pace:
    """D_1 takes 1, D_2 2, D_3 4; one run of D_3 in eight takes so much more, of D_2 one in 16, and so on."""
    pace = Pace([1.0, 1.5, 2.5], jumps=[2.0, 4.0])
    for timing in (*pace.steps, *pace.jumps[1:]):
        for run in range(64):
            timing.recent.add(1 + (tail / timing.base if run < 2 * timing.base else 0.0))
    return pace


def test_a_quiet_machine_begins_with_the_largest_that_fits() -> None:
    beginnings = Beginnings(spread_pace(0.0), [0.09, 0.07, 0.06], 0.9)
    assert [beginnings.best(left) for left in (0.5, 1.1, 1.9, 2.1, 3.9, 4.1, 100.0)] == [1, 1, 1, 2, 2, 3, 3]
    assert Beginnings(spread_pace(0.0)).best(4.1) == 3  # errors need not be known


def test_a_busy_machine_gets_something_to_fall_back_on() -> None:
    beginnings = Beginnings(spread_pace(4.0), [0.09, 0.07, 0.06], 0.9)
    assert (
        beginnings.best(5.5) == 1 and beginnings.best(7.0) == 2
    )  # D_3 at once would leave nothing in one case of eight
    assert beginnings.best(20.0) == 3


def interrupted_pace(crowded: bool = True) -> Pace:
    """D_1 takes 1, D_2 2, D_3 4; whoever works for 10 is interrupted once, for 4."""
    pace = Pace([1.0, 1.5, 2.5], jumps=[2.0, 4.0])
    pace.crowded = crowded
    for _ in range(6):
        pace.observe(3, 4.0 + 4.0, straight=True, wait=4.0)
        for stage, latency in ((1, 1.0), (2, 2.0), (3, 4.0)):
            pace.observe(stage, latency, straight=True)
    return pace


def test_being_interrupted_is_not_being_slow() -> None:
    pace = interrupted_pace()
    assert pace.slowdown == pytest.approx(1.0) and pace.quantile(3, 0.99, straight=True) == pytest.approx(4.0)
    assert pace.waits[True].rate == pytest.approx(1 / 11) and pace.waits[True].lengths == [4.0] * LENGTHS
    slow = Pace([1.0])
    for _ in range(20):
        slow.observe(1, 8.0)
    assert slow.slowdown > 6 and not slow.waits[False].rate


def test_who_may_be_interrupted_begins_with_what_fits_all_the_same() -> None:
    pace = interrupted_pace()
    beginnings = Beginnings(pace, [0.09, 0.07, 0.06], 0.9)
    found = [beginnings.best(left) for left in (0.5, 1.5, 4.5, 5.5, 6.5, 7.5, 8.5)]
    assert found == [
        1,
        1,
        2,
        1,
        2,
        2,
        3,
    ]  # 4 more than each takes; at 4.5 whoever is interrupted has nothing in either case
    assert beginnings.best(6.5, price=4.0) == 2 and beginnings.best(5.5, price=4.0) == 1
    pace.crowded = False  # there are processors for all: nobody was interrupted then
    assert [beginnings.best(left) for left in (0.5, 1.5, 4.5)] == [1, 1, 3]


def test_nobody_goes_on_who_may_come_late_by_it() -> None:
    pace = interrupted_pace()
    beginnings = Beginnings(pace, [0.09, 0.07, 0.06], 0.9)
    assert not beginnings.goes_on(1, 1.6) and not beginnings.goes_on(1, 5.0) and beginnings.goes_on(1, 6.0)
    pace.crowded = False
    assert beginnings.goes_on(1, 1.6) and not beginnings.goes_on(1, 1.4) and not beginnings.goes_on(3, 100.0)


def test_programs_take_turns_so_that_a_short_stage_is_interrupted_once() -> None:
    pace = interrupted_pace()
    assert pace.overruns(2, 6.1, straight=True) == (0.0, 0.0)
    own, interrupted = pace.overruns(3, 8.1, straight=True)
    assert own == 0.0 and interrupted == 0.0
    for _ in range(64):
        pace.observe(3, 5.0, straight=True, wait=1.0)
    assert 0 < pace.overruns(3, 5.5, straight=True)[1] < 1  # now it is interrupted again after 1


def test_a_slow_machine_needs_more_time_for_the_same() -> None:
    pace = Pace([1.0, 1.5], jumps=[2.0])
    beginnings = Beginnings(pace, [0.09, 0.07], 0.9)
    assert beginnings.best(2.5) == 2
    for _ in range(100):
        pace.observe(1, 2.0)
    assert beginnings.best(2.5) == 1 and beginnings.best(4.5) == 2


def test_what_was_the_best_is_remembered_until_the_machine_changes() -> None:
    pace = Pace([1.0, 1.5], jumps=[2.0])
    beginnings = Beginnings(pace, [0.09, 0.07], 0.9)
    looked: list[float] = []
    best = beginnings.best
    beginnings.best = lambda left, price=1.0: looked.append(left) or best(left, price)  # type: ignore[method-assign,func-returns-value]
    assert [beginnings.first(left) for left in (1.5, 2.5, 4.0, 3.0, 3.9, 2.6, 1.4)] == [1, 2, 2, 2, 2, 2, 1]
    assert looked == [1.5, 2.5, 4.0, 1.4]
    pace.crowded = True
    assert beginnings.first(3.0) == 2 and looked[-1] == 3.0
    while pace.slowdown < 1.2:
        pace.observe(1, 2.0)
    assert beginnings.first(2.1) == 1  # at once, not after some questions
    for _ in range(REMEMBERED):
        beginnings.first(2.1)
    assert looked.count(2.1) == 2


def test_what_is_passed_over_is_tried_again_some_day() -> None:
    pace = Pace([1.0, 1.5], jumps=[2.0])
    for _ in range(KEPT):
        pace.gave_up(2, 8.0, straight=True)
    beginnings = Beginnings(pace, [0.09, 0.07], 0.9)
    assert beginnings.best(3.0) == 1
    asked = 0
    while beginnings.first(3.0) == 1:
        pace.observe(1, 1.0)
        asked += 1
        assert asked < 2000
    assert asked > 100


def test_a_few_interruptions_more_are_no_reason_to_begin_with_less() -> None:
    """One of 64 runs of D_2 was interrupted and none of D_1: by their lengths that is chance, and D_2 is worth more."""
    pace = Pace([1.0, 1.5], jumps=[2.0])
    pace.crowded = True
    beginnings = Beginnings(pace, [0.08, 0.07], 0.9)
    for number in range(64):
        pace.observe(1, 1.0)
        caught = number == 40
        pace.observe(2, 2.0 + 4.0 * caught, straight=True, wait=4.0 * caught)
    assert beginnings.best(4.0) == 2
    for _ in range(64):  # often enough to be none
        pace.observe(2, 6.0, straight=True, wait=4.0)
    assert beginnings.best(4.0) == 1


def test_one_run_that_took_longer_is_no_reason_to_begin_with_less() -> None:
    pace = Pace([1.0, 1.5], jumps=[2.0])
    beginnings = Beginnings(pace, [0.08, 0.066], 0.9)
    for number in range(300):
        pace.observe(1, 1.0)
        pace.observe(2, 4.0 if number == 200 else 2.0, straight=True)
    assert beginnings.best(3.0) == 2


# --- forecasts ---------------------------------------------------------------------------------------------------


def test_the_trace_of_a_beginning() -> None:
    trace = np.array([[1.0, 3.0, 6.0], [1.2, 3.0, 7.0]])
    np.testing.assert_allclose(straight_to(2, trace, 2.0), [[2.0, 2.0, 5.0], [2.0, 2.0, 6.0]])
    np.testing.assert_allclose(straight_to(1, trace, 9.0), trace)


def test_forecasts_look_at_questions_that_began_alike() -> None:
    recent = Recent()
    for _ in range(100):
        recent.add([1.0], 1.5, 1.0, first=1)
        recent.add([], 2.5, 1.0, first=2)  # not done in 2.5
    forecast = Forecast([[1.9, 1.9]], (0.1, 0.05), 0.9, recent, first=2)
    assert forecast.shares(2.0)[0] == pytest.approx(1.0)
    assert Forecast([[1.0, 3.0]], (0.1, 0.05), 0.9, recent).shares(1.2)[1] == pytest.approx(1.0)


def test_a_forecast_of_a_runtime_that_jumps() -> None:
    with jumping([0.01, 0.02, 0.04], [0.01, 0.02, 0.05]) as (runtime, _):
        for deadline, stage in ((0.001, 0), (0.015, 1), (0.027, 2), (10.0, 3), (None, 3), (math.inf, 3)):
            shares, _ = runtime.forecast(deadline)  # type: ignore[arg-type]
            assert shares[stage] == pytest.approx(1.0), (deadline, shares)


def test_begun_states_are_the_engine_s_own_and_closing_closes_all() -> None:
    net, x = network("width-digits")
    engine = build_engine(net, "cpu", "onnx")
    assert isinstance(engine, JumpEngine) and engine.stages == 3
    assert engine.row_bytes == max(each.row_bytes for each in engine.beginnings)
    _, state = engine.step(2, engine.start(x.numpy()), Stop())
    assert isinstance(state, Begun) and state.first == 2 and state.x is None
    engine.close()
    assert not any(each.sessions for each in engine.beginnings)  # type: ignore[attr-defined]


def test_engines_that_do_not_jump_answer_stage_by_stage() -> None:
    with nestling.Runtime("width-resnet42-cifar10", device="cpu", engine="eager") as runtime:
        assert not runtime.engine.jumps and runtime.answer(np.zeros(runtime.spec.shape, np.float32)).stage == 3


def test_a_long_stage_that_is_mostly_interrupted_is_not_begun_though_short_ones_hardly_are() -> None:
    """Who has just got the processor keeps it for a while: the rate of short stages says little of a long one."""
    pace = Pace([1.0, 1.5, 2.5], jumps=[2.0, 4.0])
    pace.crowded = True
    beginnings = Beginnings(pace, [0.09, 0.07, 0.06], 0.9)
    for number in range(200):
        pace.observe(2, 2.0, straight=True)
        if number % 10 == 0:
            caught = number % 20 == 0
            pace.observe(3, 4.0 + 4.0 * caught, straight=True, wait=4.0 * caught)
    assert pace.waits[True].rate * 4.0 < 0.2  # as if one in six were
    assert 0.3 < pace.overruns(3, 7.0, straight=True)[1] < 0.5 and beginnings.best(7.0) == 2
    pace.crowded = False
    assert beginnings.best(7.0) == 3
    pace.crowded = True
    for _ in range(CAUGHT * FORGET_CAUGHT):
        pace.skip(3, straight=True)  # nobody learns that the machine has become quiet
    assert pace.overruns(3, 7.0, straight=True)[1] < 0.03
