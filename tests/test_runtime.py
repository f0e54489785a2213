"""Answers by a deadline: what is answered and when, refining, batches, cancelling, bounded memory, bad input.

Times come from an engine whose stages last as long as they are told; what is computed is checked on real networks.
"""

import asyncio
import copy
import ctypes
import gc
import math
import os
import pickle
import re
import signal
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nestling
from nestling.errors import NestlingError
from nestling.export.spec import from_dict
from nestling.nets import NETS, NestedNet, build
from nestling.recipes.recipe import NetworkRecipe
from nestling.runtime import Abandoned, Answer, Anytime, Pace, Runtime, Spec, Stop, alarm, bell, inputs, prompt
from nestling.runtime.answer import softmax
from nestling.runtime.build import ENGINES
from nestling.runtime.engine import Floats
from nestling.runtime.guard import Guard
from nestling.runtime.mailbox import Mailbox
from nestling.runtime.pace import ENDED, FORGET, KEPT, Recently
from nestling.runtime.processor import Processor
from nestling.runtime.promise import LATE, Margin, Price, Promise
from nestling.runtime.question import Ring

SHAPE = (1, 2, 2)
SLACK = 0.25  # seconds a loaded test machine may be late


class Timed:
    """Stages that take as long as they are told. Stage s answers class s; what runs is written down."""

    name = "timed"
    row_bytes = 1000
    most = 0
    stops = True
    jumps = False
    places = 1

    def __init__(self, seconds: Sequence[float], classes: int = 5) -> None:
        self.seconds, self.classes = list(seconds), classes
        self.log: list[tuple[int, int]] = []  # (stage, images) of every stage finished
        self.begun: list[int] = []
        self.closed = False

    @property
    def stages(self) -> int:
        return len(self.seconds)

    def start(self, x: Floats) -> tuple[int, Floats]:
        return 0, x

    def step(self, stage: int, state: tuple[int, Floats], stop: Stop) -> tuple[Floats, tuple[int, Floats]]:
        done, x = state
        assert done == stage - 1, "stages go in order, on the state of the stage before"
        self.begun.append(stage)
        end = time.monotonic() + self.seconds[stage - 1]
        while (left := end - time.monotonic()) > 0:
            stop.check()
            time.sleep(min(left, 0.002))
        self.log.append((stage, len(x)))
        logits = np.zeros((len(x), self.classes), np.float32)
        logits[:, stage] = 1.0 + x[:, 0, 0, 0]
        return logits, (stage, x)

    def take(self, state: tuple[int, Floats], rows: Sequence[int]) -> tuple[int, Floats]:
        return state[0], state[1][list(rows)]

    def close(self) -> None:
        self.closed = True


def timed(*seconds: float, memory: int = 64_000, pace: Pace | None = None) -> tuple[Anytime, Timed]:
    engine = Timed(seconds)
    spec = Spec(
        "timed", SHAPE, tuple("abcde"), tuple(f"s{i + 1}" for i in range(len(seconds))), prior=(0.1, 0.2, 0.4, 0.2, 0.1)
    )
    return Anytime(engine, spec, pace, memory), engine


def image(value: float = 0.0) -> Floats:
    return np.full(SHAPE, value, np.float32)


def threads_of_ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "nestling-stages"]


# --- deadlines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("deadline", "stage"), [(0.1, 0), (0.3, 1), (0.5, 2), (5.0, 3), (None, 3), (math.inf, 3)])
def test_the_best_stage_done_by_the_deadline_and_on_time(deadline: float | None, stage: int) -> None:
    runtime, _ = timed(0.2, 0.2, 0.2)
    with runtime:
        answer = runtime.answer(image(), deadline=deadline)
        assert (answer.stage, answer.final) == (stage, stage == 3)
        assert answer.elapsed <= min(deadline or 5.0, 0.6) + SLACK
        assert answer.label == (stage or 2) and answer.name == ("abcde"[stage] if stage else "")
        assert bool(answer) == (stage > 0)
        assert answer.size == ("" if stage == 0 else f"s{stage}")
        np.testing.assert_allclose(answer.probabilities.sum(), 1, rtol=1e-6)


@pytest.mark.parametrize("deadline", [0, 0.0, -1, -math.inf, np.float32(0), 1e-9])
def test_zero_and_past_deadlines_answer_with_the_prior(deadline: float) -> None:
    runtime, engine = timed(0.01, 0.01)
    with runtime:
        answer = runtime.answer(image(), deadline=deadline)
        assert (answer.stage, answer.label, answer.final) == (0, 2, False)
        np.testing.assert_allclose(answer.probabilities, (0.1, 0.2, 0.4, 0.2, 0.1), rtol=1e-6)
        assert answer.elapsed < SLACK
        assert answer.refine().stage == 2
    assert [stage for stage, _ in engine.log] == [1, 2]


def test_refining_goes_on_where_the_answer_stopped() -> None:
    runtime, engine = timed(0.1, 0.1, 0.1, 0.1)
    with runtime:
        first = runtime.answer(image(), deadline=0.15)
        time.sleep(0.15)  # the stage that was running may finish meanwhile
        second = first.refine(deadline=0.12)
        last = second.refine()
        assert first.stage <= second.stage < last.stage == 4 and last.final
        assert last.refine() is last
        assert [stage for stage, _ in engine.log] == [1, 2, 3, 4]  # each stage once


def test_refining_misses_no_stage_however_fast_it_is() -> None:
    """The worker is woken before the caller has said where it waits."""
    runtime, _ = timed(0.0, 0.0)
    with runtime:
        for _ in range(500):
            prior = runtime.answer(image(), deadline=0)
            assert prior.stage == 0 and prior.refine(deadline=5.0).final


def test_probabilities_are_worked_out_once_and_are_the_callers_own() -> None:
    runtime, _ = timed(0.0)
    with runtime:
        for answer in (runtime.answer(image(), deadline=0), runtime.answer(image(1.0))):
            assert answer.probabilities is answer.probabilities
            assert answer.label == answer.probabilities.argmax() and answer.confidence == answer.probabilities.max()
            answer.probabilities[:] = 0  # spoils nobody else's
        np.testing.assert_allclose(
            runtime.answer(image(), deadline=0).probabilities, (0.1, 0.2, 0.4, 0.2, 0.1), rtol=1e-6
        )


def test_an_answer_is_shown_in_short() -> None:
    runtime, _ = timed(0.001)
    with runtime:
        shown = repr(runtime.answer(image(), deadline=0.0))
    assert re.fullmatch(
        r"Answer\(label=2, name='', confidence=0\.400, stage=0, size='', elapsed=\d\.\d{6}, final=False\)", shown
    )


def test_a_forecast_has_no_negative_zeros() -> None:
    runtime, _ = timed(0.001, 0.001)
    with runtime:
        shares, _ = runtime.forecast(5.0)
    assert shares == [0.0, 0.0, 1.0] and not any(math.copysign(1, share) < 0 for share in shares)


def test_a_running_stage_finishes_for_a_later_refine_when_nobody_else_waits() -> None:
    runtime, engine = timed(0.02, 0.2)
    with runtime:
        first = runtime.ask(image(), deadline=0.1).result()
        assert first.stage == 1
        time.sleep(0.2 + SLACK)
        second = first.refine(deadline=0)  # no more time, but it is done already
        assert second.stage == 2 and second.final
        assert engine.begun == [1, 2]


def test_a_stage_whose_time_is_up_ends_when_somebody_comes() -> None:
    runtime, engine = timed(0.01, 2.0)
    with runtime:
        first = runtime.ask(image(), deadline=0.1).result()
        assert first.stage == 1
        began = time.monotonic()
        second = runtime.answer(image(), deadline=0.5)
        assert second.stage == 1 and time.monotonic() - began < 0.5 + SLACK
        assert engine.log == [(1, 1), (1, 1)] and engine.begun[:2] == [1, 2]


def test_a_stage_ends_once_its_caller_has_looked_when_others_want_the_processor() -> None:
    """Callers look a margin before the deadline; from then on the stage is for nobody."""
    runtime, engine = timed(0.02, 2.0, 0.01)
    with runtime:
        runtime._promise(LATE).timer.value = 0.05
        runtime.pace._log_drag = 3.0  # as on a machine where stages take twenty times as long as the fastest ones
        assert runtime.ask(image(), deadline=0.5).result().stage == 1
        due = time.monotonic() + 0.5
        while runtime.worker.lanes[0].running is not None and time.monotonic() < due:
            time.sleep(0.005)
        assert runtime.worker.lanes[0].running is None  # not two seconds later
    assert engine.begun == [1, 2] and engine.log == [(1, 1)]


def test_answers_yields_every_stage_in_order_and_may_be_stopped() -> None:
    runtime, _ = timed(0.02, 0.02, 0.02)
    with runtime:
        seen = list(runtime.answers(image()))
        assert [(a.stage, a.final) for a in seen] == [(1, False), (2, False), (3, True)]
        assert [a.label for a in seen] == [1, 2, 3]
        answers = runtime.answers(image())
        first = next(answers)
        answers.close()
        assert first.stage == 1
        assert first.refine().stage == 3


def test_who_looks_at_every_answer_runs_the_stages_itself_unless_others_ask_too() -> None:
    runtime, engine = where(0.01, 0.01, 0.01)
    with runtime:
        assert [answer.stage for answer in runtime.answers(image())] == [1, 2, 3]
        assert set(engine.ran) == {threading.current_thread().name}
        seen: list[int] = []
        lane = runtime.worker.free_lane()
        assert lane is not None  # somebody else is there
        answers = runtime.answers(image())
        thread = threading.Thread(target=lambda: seen.extend(answer.stage for answer in answers))
        thread.start()
        time.sleep(0.05)
        assert not seen
        runtime.worker.release(lane)
        thread.join(10.0)
        assert seen == [1, 2, 3] and set(engine.ran[3:]) == {"nestling-stages"}


def test_a_slow_reader_still_sees_every_stage() -> None:
    runtime, _ = timed(0.001, 0.001, 0.001)
    with runtime:
        seen = []
        for answer in runtime.answers(image()):
            time.sleep(0.03)
            seen.append(answer.label)
        assert seen == [1, 2, 3]


def test_stopping_the_loop_abandons_the_stage() -> None:
    runtime, engine = timed(0.01, 5.0)
    with runtime:
        for _ in runtime.answers(image()):
            break
        assert runtime.answer(image(), deadline=1.0).stage == 1  # would be the prior if stage 2 still ran
    assert engine.log == [(1, 1), (1, 1)]


def test_answers_with_a_deadline_end_on_time() -> None:
    runtime, _ = timed(0.05, 0.05, 5.0)
    with runtime:
        began = time.monotonic()
        seen = [answer.stage for answer in runtime.answers(image(), deadline=0.3)]
        assert seen == [1, 2] and time.monotonic() - began < 0.3 + SLACK
        assert list(runtime.answers(image(), deadline=0)) == []


def test_the_timeline_is_when_each_stage_was_done() -> None:
    runtime, _ = timed(0.05, 0.1)
    with runtime:
        first, second = runtime.timeline(image())
        assert 0.05 <= first < 0.05 + SLACK and 0.1 <= second - first < 0.1 + SLACK
        with pytest.raises(NestlingError, match="found a batch"):
            runtime.timeline(np.stack([image()] * 2))


# --- in the caller's thread ----------------------------------------------------------------------------------------


class Where(Timed):
    """Writes down which thread ran each stage."""

    def __init__(self, seconds: Sequence[float], stops: bool = True) -> None:
        super().__init__(seconds)
        self.stops, self.ran = stops, list[str]()

    def step(self, stage: int, state: tuple[int, Floats], stop: Stop) -> tuple[Floats, tuple[int, Floats]]:
        self.ran.append(threading.current_thread().name)
        return super().step(stage, state, stop)


def where(*seconds: float, stops: bool = True, pace: Pace | None = None) -> tuple[Anytime, Where]:
    engine = Where(seconds, stops)
    spec = Spec("where", SHAPE, tuple("abcde"), tuple(f"s{i + 1}" for i in range(len(seconds))))
    return Anytime(engine, spec, pace), engine


def guards() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "nestling-guard"]


def test_who_asks_alone_runs_the_stages_itself() -> None:
    runtime, engine = where(0.001, 0.001, pace=Pace([0.001, 0.001]))
    mine = threading.current_thread().name
    with runtime:
        first = runtime.answer(image(), deadline=0.19)
        assert first.final and engine.ran == [mine, mine]
        for answer in (runtime.answer(image()), runtime.answer(image(), deadline=0).refine(), runtime.answer(image())):
            assert answer.final
        assert set(engine.ran) == {mine}


def test_a_stage_that_may_overrun_is_stopped_at_the_deadline() -> None:
    runtime, engine = where(0.01, 3.0, pace=Pace([0.01, 0.01]))  # stage 2 usually takes no time, they say
    with runtime:
        for _ in range(3):  # a surprise the first time, then it is known
            began = time.monotonic()
            assert runtime.answer(image(), deadline=0.3).stage == 1
            assert time.monotonic() - began < 0.3 + SLACK
        assert {*engine.ran} == {threading.current_thread().name}


class SlowToEnd(Where):
    """What is told to end needs a while for that."""

    ENDS = 0.04

    def step(self, stage: int, state: tuple[int, Floats], stop: Stop) -> tuple[Floats, tuple[int, Floats]]:
        try:
            return super().step(stage, state, stop)
        except Abandoned:
            time.sleep(self.ENDS)
            raise


def by_ourselves(runtime: Anytime) -> None:
    """As on a machine where no other program wants a processor."""
    runtime.worker.processor.crowded = lambda: False  # type: ignore[method-assign]
    runtime.worker.processor.waited = lambda: 0.0  # type: ignore[method-assign]


def test_who_is_told_to_end_is_told_as_much_sooner_as_that_takes() -> None:
    runtime, engine = where(0.1, 3.0, pace=Pace([0.1, 0.01]))
    engine = runtime.engine = runtime.worker.engine = SlowToEnd(engine.seconds)
    by_ourselves(runtime)
    with runtime:
        late = []
        for _ in range(24):
            runtime.pace.steps[1].recent = Recently(8)  # usually it takes no time, they say
            began = time.monotonic()
            assert runtime.answer(image(), deadline=0.15).stage == 1
            late.append(time.monotonic() - began - 0.15)
        assert runtime.pace.ending >= engine.ENDS and late[0] > engine.ENDS / 2
        assert np.median(late[16:]) < engine.ENDS / 2


def test_stages_that_are_sure_to_be_in_time_are_begun_where_they_could_not_be_ended_any_more() -> None:
    runtime, _ = where(0.005, 0.005, 0.005, pace=Pace([0.005, 0.005, 0.005]))
    by_ourselves(runtime)
    with runtime:
        runtime.pace.endings[False] = 0.2  # longer than the whole deadline
        for late in (0.01, None):
            assert runtime.answer(image(), deadline=0.15, late=late).stage == 3


def test_where_ending_is_no_sooner_than_finishing_the_first_stage_goes_on() -> None:
    """Told to end at the deadline it would come later than by itself, and with nothing."""
    runtime, engine = where(0.1, pace=Pace([0.1]))
    engine = runtime.engine = runtime.worker.engine = SlowToEnd(engine.seconds)
    by_ourselves(runtime)
    with runtime:
        promise = runtime._promise(LATE)
        for _ in range(12):
            runtime.pace.ended(engine.ENDS)
        for _ in range(6):
            promise.budget.left = -1.0  # more were late than was promised
            assert runtime.answer(image(), deadline=0.12).stage == 1
        runtime.pace.steps[0].recent = Recently(0)
        for _ in range(64):
            runtime.pace.steps[0].recent.add(1.3)  # it will be late, as ever
        promise.budget.left = -1.0
        began = time.monotonic()
        assert runtime.answer(image(), deadline=0.12).stage == 0 and time.monotonic() - began < 0.13


def test_how_long_ending_takes_on_a_crowded_machine_is_kept_apart_once_it_is_known() -> None:
    pace = Pace([1e-3])
    for _ in range(ENDED):
        pace.ended(0.2e-3)
    pace.crowded = True
    assert pace.ending == 0.3e-3  # most of what is known, a guess among it
    for _ in range(16):
        pace.ended(0.8e-3)
    assert pace.ending == 0.8e-3
    pace.ended(0.5)  # another program ran meanwhile
    assert pace.ending <= 1e-3
    pace.crowded = False
    assert pace.ending <= 0.3e-3


def test_a_stage_that_was_ended_counts_as_what_was_not_done_by_then() -> None:
    pace = Pace([1.0])
    for takes in (1.0, 1.0, 1.0, 2.0, 3.0, 4.0):
        pace.timing(1, False).recent.add(takes)
    before = pace.quantile(1, 0.5)
    for _ in range(20):
        pace.gave_up(1, 0.5)  # too soon to be news
    assert pace.quantile(1, 0.5) == before == 1.0
    pace.gave_up(1, 1.5)
    assert 3.0 in pace.timing(1, False).recent.seen
    pace.gave_up(1, 6.0)  # longer than any
    assert max(pace.timing(1, False).recent.seen) == 9.0


def test_a_stage_that_can_hardly_be_in_time_is_not_begun_and_the_answer_comes_at_once() -> None:
    runtime, engine = where(0.01, 3.0, pace=Pace([0.01, 3.0]))
    with runtime:
        answer = runtime.answer(image(), deadline=1.0)
        assert answer.stage == 1 and answer.elapsed < 0.5 and engine.begun == [1]


def test_the_first_stage_is_always_tried() -> None:
    runtime, engine = where(0.02, 0.02, pace=Pace([5.0, 5.0]))
    with runtime:
        assert runtime.answer(image(), deadline=0.3).stage == 1 and engine.begun == [1]


def test_a_stage_that_cannot_be_stopped_is_left_to_the_workers_thread() -> None:
    runtime, engine = where(0.01, 1.0, stops=False, pace=Pace([0.01, 0.13]))
    with runtime:
        runtime._promise(LATE).caution.value = 1.5  # likely in time, not surely
        began = time.monotonic()
        assert runtime.answer(image(), deadline=0.19).stage == 1
        assert time.monotonic() - began < 0.19 + SLACK
    assert engine.ran == [threading.current_thread().name, "nestling-stages"]


def test_without_a_promise_what_is_usually_in_time_is_begun_and_bounded() -> None:
    """Who has an answer already has it in time; who has none waits as long again as the stage usually takes."""
    runtime, engine = where(0.01, 1.0, pace=Pace([0.01, 0.15]))
    with runtime:
        first = runtime.answer(image(), deadline=0.3, late=None)
        assert first.stage == 1 and engine.begun == [1, 2] and first.elapsed < 0.3 + SLACK
    runtime, engine = where(0.3, pace=Pace([0.2]))
    with runtime:
        first = runtime.answer(image(), deadline=0.25, late=None)
        assert first.stage == 1 and first.elapsed > 0.3  # late, but there
    runtime, engine = where(5.0, pace=Pace([0.15]))
    with runtime:
        first = runtime.answer(image(), deadline=0.2, late=None)
        assert (
            first.stage == 0 and 0.3 < first.elapsed < 0.8 + SLACK
        )  # where others want the processor, four times as long
        for wrong in (0, 1, 2, -0.1, True, "soon", math.nan, [0.1]):
            with pytest.raises(NestlingError, match="late="):
                runtime.answer(image(), late=wrong)  # type: ignore[arg-type]


def test_who_runs_stages_itself_takes_turns_with_those_who_come() -> None:
    runtime, engine = where(0.1, 0.1, 0.1)
    with runtime:
        others: list[Answer] = []
        thread = threading.Thread(target=lambda: others.append(runtime.answer(image())))
        threading.Timer(0.05, thread.start).start()
        assert runtime.answer(image()).final
        thread.join()
        assert others[0].final
    assert [stage for stage, _ in engine.log] == [1, 1, 2, 2, 3, 3]


def test_closing_while_a_caller_runs_stages_itself() -> None:
    runtime, engine = where(0.05, 10.0)
    closing = threading.Timer(0.3, runtime.close)
    closing.start()
    began = time.monotonic()
    assert runtime.answer(image()).stage == 1 and time.monotonic() - began < 0.3 + SLACK
    closing.join()
    assert engine.closed and not threads_of_ours() and not guards()
    with pytest.raises(NestlingError, match="closed"):
        runtime.answer(image())


def test_a_stage_that_is_not_run_follows_those_that_are_and_is_tried_again() -> None:
    pace = Pace([0.001, 0.005])
    for _ in range(64):  # a busy hour
        pace.observe(1, 0.004)
        pace.observe(2, 0.020)
    assert 0.018 < pace.quantile(2, 0.5) < 0.022
    for _ in range(20):  # it is over, but time is too short for stage 2 to be run
        pace.observe(1, 0.001)
    assert pace.quantile(2, 0.5) < 0.006
    for _ in range(KEPT):
        pace.gave_up(2, 0.050)
    assert pace.quantile(2, 0.5) > 0.04
    for _ in range(KEPT * FORGET):
        pace.skip(2)
    assert pace.quantile(2, 0.5) < 0.006


@pytest.mark.parametrize("late", [0.01, 0.05])
@pytest.mark.parametrize("load", [1.0, 3.0])
def test_feedback_keeps_the_promise_whatever_the_load(late: float, load: float) -> None:
    """A stage is begun while caution times its 90 % quantile fits; the deadline is such that it often just does not."""
    chance, pace, promise = np.random.default_rng(0), Pace([1.0]), Promise(late)
    was_late = []
    for _ in range(6000):
        takes, limit = load * float(chance.lognormal(0, 0.3)), load * float(chance.uniform(0.5, 5))
        if pace.quantile(1, 0.9) * promise.caution.value > limit:
            continue
        pace.observe(1, takes)
        was_late.append(takes > limit)
        promise.caution.observe(takes > limit)
    assert np.mean(was_late[len(was_late) // 2 :]) < 1.5 * late


# --- any moment, any thread, coroutines -----------------------------------------------------------------------------


def test_the_best_so_far_can_be_had_at_any_moment_from_any_thread() -> None:
    runtime, _ = timed(0.1, 0.1, 30.0)
    with runtime:
        question, seen = runtime.ask(image()), list[Answer]()
        assert not question.best() and question.best().stage == 0
        for _ in range(20):
            thread = threading.Thread(target=lambda: seen.append(question.best()))
            thread.start()
            thread.join()
            time.sleep(0.02)
        stages = [answer.stage for answer in seen]
        assert stages == sorted(stages) and stages[0] == 0 and stages[-1] == 2
        question.stop()
        assert question.result().stage == 2 and not question.best().final
        began = time.monotonic()
        assert runtime.answer(image(), deadline=0.25).stage >= 1 and time.monotonic() - began < 1  # nobody in the way


def test_coroutines_are_answered_without_a_thread_each() -> None:
    runtime, _ = timed(0.01, 0.01, 5.0)

    async def many() -> tuple[list[Answer], int, int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.005)
                ticks += 1

        ticking = asyncio.create_task(tick())
        before = threading.active_count()
        found = await asyncio.gather(*(runtime.answer_async(image(), deadline=0.8) for _ in range(20)))
        ticking.cancel()
        return found, threading.active_count() - before, ticks

    with runtime:
        found, threads, ticks = asyncio.run(many())
        assert [answer.stage for answer in found] == [2] * 20 and max(a.elapsed for a in found) < 0.8 + SLACK
        assert threads <= 0 and ticks > 20, "and the loop goes on meanwhile"
        assert asyncio.run(runtime.answer_async(image(), confident=0.0)).final
        assert not asyncio.run(runtime.answer_async(image(), deadline=0))


def test_news_for_a_loop_that_has_ended_meanwhile_harms_nobody() -> None:
    """The worker may have read who listens just before a coroutine had its answer, and its loop was closed."""

    async def listen() -> Ring:
        return Ring(asyncio.get_running_loop(), asyncio.Event())

    runtime, _ = timed(0.05, 0.05)
    with runtime:
        question, gone = runtime.ask(image()), asyncio.run(listen())
        known = question._waiting.images[0]
        known.listeners = (*known.listeners, (gone, True))
        assert question.result().final and runtime.answer(image()).final


def test_a_cancelled_coroutine_stops_the_work() -> None:
    runtime, engine = timed(0.01, 30.0)

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(runtime.answer_async(image()), 0.2)

    with runtime:
        asyncio.run(give_up())
        assert runtime.answer(image(), deadline=0.3).stage == 1
    assert engine.log == [(1, 1), (1, 1)]


# --- many callers ------------------------------------------------------------------------------------------------


def test_everybody_gets_stage_1_before_anybody_gets_stage_2() -> None:
    runtime, engine = timed(0.03, 0.03, 0.03)
    with runtime:
        pending = [runtime.ask(image(), deadline=5.0) for _ in range(6)]
        answers = [each.result() for each in pending]
    assert all(answer.final for answer in answers)
    stages = [stage for stage, _ in engine.log]
    assert stages[-12:] == [2] * 6 + [3] * 6 and stages.count(1) == 6


def test_eight_threads_at_once_all_get_an_answer_where_the_first_stage_fits_eight_times() -> None:
    runtime, _ = timed(0.02, 0.3, pace=Pace([0.02, 0.3]))
    with runtime:
        found: list[Answer] = []
        threads = [
            threading.Thread(target=lambda: found.append(runtime.answer(image(), deadline=8 * 0.02 + SLACK)))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8 and all(found)


def test_whoever_has_nothing_when_its_timer_rings_early_waits_on_for_a_first_stage() -> None:
    runtime, _ = timed(0.9, 50.0, pace=Pace([0.9, 50.0]))
    with runtime:
        runtime._promise(
            LATE
        ).timer.value = 1.0  # of which at most a fifth of the deadline is taken: it rings after 1.6 s
        other = threading.Thread(target=lambda: runtime.answer(image(), deadline=2.0))
        other.start()
        while not runtime.worker.lanes[0].here:
            time.sleep(0.001)
        answer = runtime.answer(image(), deadline=2.0)
        other.join()
        assert answer.stage == 1 and 1.6 < answer.elapsed < 2.0 + SLACK


def test_a_stage_that_cannot_be_in_time_is_not_started_while_others_wait() -> None:
    runtime, engine = timed(0.05, 1.0, pace=Pace([0.05, 1.0]))
    with runtime:
        pending = [runtime.ask(image(), deadline=limit) for limit in (0.6, 0.7, 0.8)]
        assert [each.result().stage for each in pending] == [1, 1, 1]
    # Stage 2 is begun only once nobody waits for a first stage, and never finishes.
    assert engine.begun[:3] == [1, 1, 1] and engine.log == [(1, 1)] * 3


def test_works_given_up_do_not_pile_up_while_there_is_always_other_work() -> None:
    runtime, _ = timed(0.001, 0.2, pace=Pace([0.001, 0.2]))
    with runtime:
        for _ in range(60):
            pending = [runtime.ask(image(), deadline=0.01) for _ in range(3)]
            assert len(runtime.worker.queues.late) <= 6
            for each in pending:
                each.result()


def test_eight_threads_with_mixed_deadlines_and_cancellations() -> None:
    runtime, _ = timed(0.001, 0.001, 0.001)
    found: list[Answer] = []
    problems: list[BaseException] = []

    def ask(seed: int) -> None:
        chance = np.random.default_rng(seed)
        try:
            for _ in range(40):
                deadline = float(chance.uniform(-0.001, 0.02))
                pending = runtime.ask(image(), deadline=deadline)
                if chance.random() < 0.2:
                    pending.stop()
                answer = pending.result()
                if chance.random() < 0.3:
                    answer = answer.refine(deadline=0.01)
                found.append(answer)
        except BaseException as error:
            problems.append(error)

    with runtime:
        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not problems and len(found) == 320
    assert not threads_of_ours()


def test_cancelling_from_another_thread_returns_the_best_so_far_at_once() -> None:
    runtime, engine = timed(0.05, 30.0)
    with runtime:
        pending = runtime.ask(image())
        threading.Timer(0.3, pending.stop).start()
        began = time.monotonic()
        answer = pending.result()
        assert (answer.stage, answer.final) == (1, False) and time.monotonic() - began < 0.3 + 2 * SLACK
    assert engine.log == [(1, 1)]


# --- batches -----------------------------------------------------------------------------------------------------


def test_a_batch_stops_early_only_for_those_whose_time_is_up() -> None:
    runtime, engine = timed(0.1, 0.1, 0.1)
    with runtime:
        x = np.stack([image(0.1 * i) for i in range(4)])
        answers = runtime.answer_batch(x, deadline=[0.15, 5.0, 0.0, 5.0])
        assert [answer.stage for answer in answers] == [1, 3, 0, 3]
        assert engine.log == [(1, 3), (2, 3), (3, 2)] or engine.log == [(1, 3), (2, 2), (3, 2)]
        refined = [answer.refine() for answer in answers]
        assert [answer.stage for answer in refined] == [3] * 4
        for i, answer in enumerate(refined):  # each went on with its own pixels
            expected = np.zeros(5, np.float32)
            expected[3] = 1 + 0.1 * i
            np.testing.assert_allclose(answer.probabilities, softmax(expected), rtol=1e-6)


def test_a_batch_without_a_deadline_is_answered_to_the_last_stage_however_fast_it_is() -> None:
    runtime, _ = timed(0.0, 0.0, 0.0)
    with runtime:
        for _ in range(40):
            answers = runtime.answer_batch(np.zeros((150, *SHAPE), np.float32))
            assert {answer.stage for answer in answers} == {3}


def test_each_hands_every_image_over_by_its_own_deadline() -> None:
    runtime, _ = timed(0.1, 0.1)
    with runtime:
        began = time.monotonic()
        seen = [
            (i, time.monotonic() - began, a.stage)
            for i, a in runtime.each(np.stack([image()] * 3), deadline=[None, 0.0, 0.15])
        ]
    assert [i for i, _, _ in seen] == [1, 2, 0] and [s for _, _, s in seen] == [0, 1, 2]
    assert seen[0][1] < SLACK and seen[1][1] < 0.15 + SLACK


def test_a_large_batch_goes_in_parts() -> None:
    runtime, engine = timed(0.0, 0.0, memory=10_000)  # room for ten states
    with runtime:
        answers = runtime.answer_batch(np.zeros((25, *SHAPE), np.float32))
        assert len(answers) == 25 and all(answer.final for answer in answers)
    assert max(images for _, images in engine.log) == 10


class Slow(Timed):
    """So many seconds for every image of a batch."""

    def step(self, stage: int, state: tuple[int, Floats], stop: Stop) -> tuple[Floats, tuple[int, Floats]]:
        end = time.monotonic() + self.seconds[stage - 1] * len(state[1])
        while time.monotonic() < end:
            stop.check()
            time.sleep(0.001)
        seconds, self.seconds = self.seconds, [0.0] * self.stages
        try:
            return super().step(stage, state, stop)
        finally:
            self.seconds = seconds


def test_as_many_images_of_a_batch_as_possible_get_an_answer() -> None:
    engine = Slow([0.02, 0.02])
    with Anytime(engine, Spec("slow", SHAPE, tuple("abcde"), ("s1", "s2")), Pace([0.02, 0.02])) as runtime:
        answers = runtime.answer_batch(np.stack([image()] * 64), deadline=0.5)  # would take 1.3 seconds
        answered = [index for index, answer in enumerate(answers) if answer]
        assert len(answered) >= 12 and answered == list(range(len(answered))), "those who came first"
        assert {answer.stage for answer in answers} == {0, 1}
        assert answers[-1].refine().final


def test_the_pixels_of_a_large_batch_are_looked_at_when_their_turn_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "AT_ONCE", 1)
    runtime, _ = timed(0.0, 0.0, memory=4000)
    with runtime:
        x = np.zeros((12, *SHAPE), np.float32)
        x[9] = np.nan
        with pytest.raises(NestlingError, match="image 9 has pixels that are not numbers"):
            runtime.answer_batch(x)
        assert len(runtime.answer_batch(x[:9])) == 9
    spec = Spec("timed", SHAPE, tuple("abcde"), ("s1",), mean=(0.5,), std=(0.25,))
    with Anytime(Timed([0.0]), spec) as runtime:
        pixels = np.full((3, *SHAPE), 255, np.uint8)
        answers = runtime.answer_batch(pixels)
        pixels[:] = 0  # the caller's memory may be reused at once
        np.testing.assert_allclose(
            answers[0].probabilities, runtime.answer(np.full(SHAPE, 255, np.uint8)).probabilities
        )


# --- memory and the end ------------------------------------------------------------------------------------------


def test_only_the_newest_states_are_kept_and_older_ones_begin_anew() -> None:
    runtime, engine = timed(0.002, 0.05, memory=3_000)  # three images
    with runtime:
        answers = [runtime.answer(image(), deadline=0.03) for _ in range(6)]
        assert {answer.stage for answer in answers} == {1}
        engine.log.clear()
        assert answers[5].refine().stage == 2
        assert (1, 1) not in engine.log  # still known
        engine.log.clear()
        assert answers[0].refine().stage == 2
        assert engine.log == [(1, 1), (2, 1)]  # forgotten, so again from the image


def test_states_go_with_their_answers() -> None:
    runtime, _ = timed(0.0, 0.02)
    with runtime:
        answer = runtime.answer(image(), deadline=0.01)
        [work] = [each() for each, _ in runtime.worker.parked] if runtime.worker.parked else [None]
        if work is not None:
            assert work.state is not None
            del work
        del answer
        runtime.answer(image(), deadline=1.0)
        assert sum(each() is not None for each, _ in runtime.worker.parked) == 0  # freed without the cycle collector


def test_closing_ends_the_thread_and_wakes_the_waiting() -> None:
    runtime, engine = timed(0.01, 60.0)
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(runtime.answer(image())))
    waiting.start()
    time.sleep(0.2)
    runtime.close()
    waiting.join(5)
    assert not waiting.is_alive() and found[0].stage == 1 and not found[0].final
    assert engine.closed and not threads_of_ours()
    runtime.close()
    with pytest.raises(NestlingError, match="closed"):
        runtime.answer(image())
    with pytest.raises(NestlingError, match="closed"):
        found[0].refine()


def test_a_forgotten_runtime_ends_its_thread() -> None:
    runtime, engine = timed(0.0)
    runtime.answer(image())
    assert len(threads_of_ours()) == 1
    del runtime
    gc.collect()
    assert engine.closed and not threads_of_ours()


def test_a_failing_stage_is_an_error_and_the_runtime_lives_on() -> None:
    runtime, engine = timed(0.0, 0.0)
    engine.seconds[1] = float("nan")  # time.sleep refuses it

    class Broken(Timed):
        def step(self, stage: int, state: Any, stop: Stop) -> tuple[Floats, Any]:
            if stage == 2 and state[1][0, 0, 0, 0] > 0:
                raise ValueError("no luck")
            return super().step(stage, state, stop)

    with runtime, Anytime(Broken([0.0, 0.0]), runtime.spec) as fragile:
        with pytest.raises(NestlingError, match="no luck"):
            fragile.answer(image(1.0))
        with pytest.raises(NestlingError, match="no luck"):
            list(fragile.answers(image(1.0)))
        assert fragile.answer(image(0.0)).final


# --- confidence --------------------------------------------------------------------------------------------------


def test_sure_enough_answers_are_final_and_save_the_work() -> None:
    runtime, engine = timed(0.0, 0.0, 0.0)
    with runtime:
        x = np.stack([image(0.0), image(20.0), image(0.0), image(20.0)])
        answers = runtime.answer_batch(x, confident=[0.9, 0.9])
        assert [(a.stage, a.final) for a in answers] == [(3, True), (1, True), (3, True), (1, True)]
        assert engine.log == [(1, 4), (2, 2), (3, 2)]  # no work for those that were sure
        assert [a.stage for a in runtime.answers(image(20.0), confident=[0.9, 0.9])] == [1]
        assert runtime.answer(image(20.0), confident=0.9).stage == 1  # one number is for all stages
        for wrong in ("0.9", object(), math.nan, [0.9, None]):
            with pytest.raises(NestlingError, match="a probability from 0 to 1 for all stages"):
                runtime.answer(image(), confident=wrong)  # type: ignore[arg-type]
        with pytest.raises(NestlingError, match="one number per stage"):
            runtime.answer_batch(x, confident=[0.9])


# --- pace --------------------------------------------------------------------------------------------------------


@given(st.floats(0.2, 5), st.lists(st.floats(0.001, 1), min_size=1, max_size=5))
def test_the_slowdown_is_found_and_predictions_follow_it(factor: float, base: list[float]) -> None:
    pace = Pace(base)
    for _ in range(60):
        for stage, latency in enumerate(base, start=1):
            pace.observe(stage, latency * factor)
    assert pace.slowdown == pytest.approx(factor, rel=1e-3)
    for stage, latency in enumerate(base, start=1):
        assert pace.predict(stage) == pytest.approx(latency * factor, rel=1e-3)


def test_one_stall_hardly_moves_the_slowdown() -> None:
    pace = Pace([0.01])
    pace.observe(1, 10.0)
    assert pace.slowdown < 1.4


@settings(max_examples=10)
@given(st.integers(0, 100), st.floats(1e-4, 1e-2))
def test_the_margin_covers_nineteen_wakeups_of_twenty(seed: int, scale: float) -> None:
    margin, chance = Margin(), np.random.default_rng(seed)
    late = chance.exponential(scale, 6000)
    covered = []
    for value in late:
        covered.append(value <= margin.value)
        margin.observe(value)
    assert 0.9 < np.mean(covered[2000:]) < 0.99
    assert margin.before(0.001) >= 0.0008


def test_the_margin_covers_the_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, _ = timed(0.5)
    form = runtime._form

    def slowly(*given: Any) -> Any:
        time.sleep(0.004)
        return form(*given)

    monkeypatch.setattr(runtime, "_form", slowly)
    with runtime:
        timer = runtime._promise(LATE).timer
        for _ in range(40):
            runtime.ask(image(), deadline=0.05).result()
        assert timer.value > 0.004
        assert min(timer.recent) < 0.004  # of forecasts: when callers looked, not when they were back


def test_the_clock_starts_with_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt.Promptly, "__enter__", lambda self: time.sleep(0.05))
    monkeypatch.setattr(prompt.Promptly, "__exit__", lambda self, *error: None)
    runtime, _ = timed(0.001)
    with runtime:
        unseen = []
        for _ in range(5):
            began = time.monotonic()
            answer = runtime.answer(image())
            unseen.append(time.monotonic() - began - answer.elapsed)
        assert min(unseen) < 0.03


# --- waiting -----------------------------------------------------------------------------------------------------


def test_a_mailbox_never_sleeps_longer_than_told() -> None:
    for timeout in [0.0, -1.0, *(i * 1e-7 for i in range(200))]:
        with pytest.raises(TimeoutError):
            Mailbox[int]().get(timeout)
    box: Mailbox[int] = Mailbox()
    for item in (1, 2, 3):
        box.put(item)
    assert [box.get(0), box.get(1e-6), box.get(1)] == [1, 2, 3]
    with pytest.raises(TimeoutError):  # rung, but empty
        box.get(0.001)
    threading.Timer(0.05, box.put, [4]).start()
    assert box.get(10) == 4


def test_no_letter_is_lost_between_threads() -> None:
    box: Mailbox[int] = Mailbox()

    def send() -> None:
        for _ in range(500):
            box.put(1)

    senders = [threading.Thread(target=send) for _ in range(4)]
    for sender in senders:
        sender.start()
    assert sum(box.get(5) for _ in range(2000)) == 2000
    with pytest.raises(TimeoutError):
        box.get(0)


BELLS = [bell.LockBell, *([bell.SemaphoreBell] if bell.LIBRARY else [])]


@pytest.mark.parametrize("kind", BELLS)
def test_a_bell_wakes_whoever_waits_and_keeps_time(kind: Any) -> None:
    rung = kind()
    began = time.monotonic()
    assert not rung.wait(began - 1) and not rung.wait(began + 0.02) and time.monotonic() - began >= 0.02
    rung.ring()
    assert rung.wait(began - 1) and not rung.wait(began - 1)  # a ring is kept for who comes later, once
    for until in (math.inf, time.monotonic() + 5):
        timer = threading.Timer(0.02, rung.ring)
        timer.start()
        began = time.monotonic()
        assert rung.wait(until) and time.monotonic() - began < 0.02 + SLACK
        timer.join()


def test_a_thread_stopped_before_it_waits_does_not_wait_the_longer() -> None:
    """The kernel may stop a thread between working out how long to sleep and sleeping; only a point in time is safe."""
    began = time.monotonic()
    stops = iter([0.0, 0.1])

    def clock() -> float:
        time.sleep(next(stops, 0.0))
        return time.monotonic()

    box: Mailbox[int] = Mailbox()
    clock()
    with pytest.raises(TimeoutError):
        box.wait(began + 0.15, clock)
    assert 0.15 <= time.monotonic() - began < 0.15 + min(SLACK, 0.08)


def test_a_waiting_thread_gets_its_own_scheduling_back() -> None:
    def attributes() -> bytes:
        buffer = ctypes.create_string_buffer(prompt.SIZE)
        if prompt.SYSCALL is None:
            pytest.skip("this system has no slices to ask for")
        prompt.SYSCALL(prompt.GET, 0, buffer, prompt.SIZE, 0)
        return buffer.raw

    before = attributes()
    with prompt.Promptly():
        with prompt.Promptly():
            pass
        inside = attributes()  # what the inner one found is not put back before the outer one ends
    assert attributes() == before and os.getpriority(os.PRIO_PROCESS, 0) == struct.unpack(prompt.LAYOUT, before)[3]
    assert struct.unpack(prompt.LAYOUT, inside)[5] in (prompt.SLICE, struct.unpack(prompt.LAYOUT, before)[5])


# --- real networks -----------------------------------------------------------------------------------------------

DIGITS = sorted(name for name in NETS if name.endswith("digits"))
CPU_ENGINES = sorted(set(ENGINES) - {"graph", "openvino"})  # that one is optional, and rounds: test_openvino.py


def trained_a_little(name: str) -> NestedNet:
    """A network whose batch norms have seen something."""
    net = build(NetworkRecipe(name=name))
    net.train()
    with torch.no_grad():
        for _ in range(3):
            net(torch.randn(16, net.plan.input.channels, *net.plan.input.size))
    return net.eval()


@pytest.mark.parametrize("engine", CPU_ENGINES)
@pytest.mark.parametrize("name", DIGITS)
def test_every_stage_answers_as_the_network_does(name: str, engine: str) -> None:
    net = trained_a_little(name)
    x = torch.randn(7, 1, 8, 8)
    with torch.no_grad():
        expected = [logits.softmax(1).numpy() for logits in net(x)]
    with Runtime(net, device="cpu", engine=engine) as runtime:
        for stage, answers in enumerate(runtime.answers_batch(x)):
            found = np.stack([answer.probabilities for answer in answers])
            np.testing.assert_allclose(found, expected[stage], atol=1e-5)
        for stage, answer in enumerate(runtime.answers(x[0])):
            np.testing.assert_allclose(answer.probabilities, expected[stage][0], atol=1e-5)
        assert runtime.engine.name == {"onnx": "onnxruntime", "eager": "torch eager"}[engine]


@pytest.mark.parametrize("engine", ["onnx", "eager"])
@settings(max_examples=15)
@given(data=st.data())
def test_whatever_the_deadlines_an_answer_is_what_its_stage_says(engine: str, data: st.DataObject) -> None:
    net, runtime = SHARED[engine]
    n = data.draw(st.integers(1, 9))
    limits = data.draw(st.lists(st.floats(0, 0.004), min_size=n, max_size=n))
    x = torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(n))
    with torch.no_grad():
        expected = [torch.full((n, 10), 0.1).numpy(), *(logits.softmax(1).numpy() for logits in net(x))]
    answers = runtime.answer_batch(x, deadline=limits)
    for _ in range(3):
        for i, answer in enumerate(answers):
            np.testing.assert_allclose(answer.probabilities, expected[answer.stage][i], atol=1e-5)
        answers = [answer.refine(deadline=0.001) for answer in answers]


class Shared(dict[str, tuple[NestedNet, Runtime]]):
    """One runtime per engine for all examples of a property."""

    def __missing__(self, engine: str) -> tuple[NestedNet, Runtime]:
        net = trained_a_little("alternate-digits")
        self[engine] = net, Runtime(net, device="cpu", engine=engine)
        return self[engine]


SHARED = Shared()


@pytest.fixture(scope="module", autouse=True)
def close_shared() -> Any:
    yield
    for _, runtime in SHARED.values():
        runtime.close()


@pytest.mark.parametrize("engine", ["onnx", "eager"])
def test_a_stage_is_abandoned_between_layers_and_its_state_stays_good(engine: str) -> None:
    net, runtime = SHARED[engine]
    x = np.random.default_rng(0).normal(size=(1, 1, 8, 8)).astype(np.float32)
    state = runtime.engine.start(x)
    _, state = runtime.engine.step(1, state, Stop())
    stop = Stop()
    stop.set()
    with pytest.raises(Abandoned):
        runtime.engine.step(2, state, stop)
    second, _ = runtime.engine.step(2, state, Stop())
    with torch.no_grad():
        np.testing.assert_allclose(second, net(torch.from_numpy(x))[1].numpy(), atol=1e-5)


@pytest.mark.parametrize("recipe", [{"alone": 2}, {"ensemble": True}, {"name": "cascade-digits", "alone": 2}])
def test_networks_alone_and_ensembles(recipe: dict[str, Any]) -> None:
    net = build(NetworkRecipe(**{"name": "width-digits", **recipe})).eval()
    x = torch.randn(1, 8, 8)
    with Runtime(net, device="cpu") as runtime, torch.no_grad():
        found = [answer.probabilities for answer in runtime.answers(x)]
        np.testing.assert_allclose(found, [logits.softmax(1)[0].numpy() for logits in net(x[None])], atol=1e-5)


def test_a_subnetwork_is_answered_by_its_one_stage() -> None:
    net = trained_a_little("alternate-digits").subnet(3).net
    x = torch.randn(1, 8, 8)
    with Runtime(net, device="cpu") as runtime, torch.no_grad():
        answer = runtime.answer(x)
        assert answer.final and answer.size == net.sizes[0]
        np.testing.assert_allclose(answer.probabilities, net(x[None])[0].softmax(1)[0].numpy(), atol=1e-5)


def test_a_network_in_training_mode_is_answered_in_evaluation_mode_and_left_as_it_is() -> None:
    net = trained_a_little("width-digits").train()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    with Runtime(net, device="cpu") as runtime:
        answer = runtime.answer(torch.randn(1, 8, 8))
    assert net.training and all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert answer.final


def test_runtimes_leave_no_threads_and_no_files_behind() -> None:
    net = trained_a_little("width-digits")
    Runtime(net, device="cpu").close()
    time.sleep(0.1)  # a thread that has been joined may still be on its way out of the kernel
    before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    for _ in range(3):
        with Runtime(net, device="cpu") as runtime:
            for _ in range(50):
                runtime.answer(np.zeros((1, 8, 8), np.float32), deadline=0.0005)
    time.sleep(0.1)
    assert (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))) == before


# --- ONNX Runtime ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["width-digits", "depth-digits", "alternate-digits", "width-resnet42"])
def test_optimising_stages_together_moves_no_layer_from_one_to_another(name: str) -> None:
    onnx = pytest.importorskip("onnx")
    from nestling.export.fold import fold, merge, split
    from nestling.export.freeze import freeze, shapes
    from nestling.runtime.engines.native import native_graphs

    net = build(NetworkRecipe(name=name))
    stages = split(merge(fold(freeze(net))))
    graphs, passed = native_graphs(stages, shapes(net, stages), threads=1) or ([], {})
    for stage, graph in zip(stages, graphs, strict=True):
        found = onnx.load_from_string(graph.model).graph
        # what is optimised away are batch norms, sums and activations; convolutions by ones and zeros (pads) stay
        written = sum(op.kind in ("conv", "affine", "pad", "linear") for op in stage.ops)
        layers = sum(op.kind in ("conv", "linear") for op in stage.ops)
        assert (
            layers <= sum(node.op_type in ("Conv", "FusedConv", "Gemm", "FusedGemm") for node in found.node) <= written
        )
        assert {each.name for each in found.input} == set(graph.takes) <= set(passed)
        assert {each.name for each in found.output} == {"logits", *graph.gives}
    assert graphs[-1].gives == ()


def test_one_process_may_ask_for_one_thread_and_for_more() -> None:
    program = """
import numpy as np
from nestling.nets import build
from nestling.recipes.recipe import NetworkRecipe
from nestling.runtime import Runtime
net, x = build(NetworkRecipe(name="width-digits")), np.ones((1, 8, 8), np.float32)
said = []
for threads in (2, 1, 3, 0):
    with Runtime(net, device="cpu", engine="onnx", threads=threads) as runtime:
        said.append(runtime.answer(x).probabilities)
        assert all(engine.threads == 2 for engine in runtime.engine.beginnings)
assert np.ptp(said, axis=0).max() < 1e-5
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize("name", ["width-digits", "depth-digits", "alternate-digits"])
def test_cuda_graphs_answer_as_the_network_does(name: str, side_by_side: bool) -> None:
    net = trained_a_little(name)
    x = torch.randn(5, 1, 8, 8)
    with torch.no_grad():
        expected = [logits.softmax(1).numpy() for logits in net(x)]
    with Runtime(net, device="cuda") as runtime:
        assert runtime.engine.name == "cuda graphs"
        runtime.engine.side_by_side = side_by_side  # type: ignore[attr-defined]
        for image_number in range(5):  # one at a time: in slots
            for stage, answer in enumerate(runtime.answers(x[image_number])):
                np.testing.assert_allclose(answer.probabilities, expected[stage][image_number], atol=1e-4)
        for stage, answers in enumerate(runtime.answers_batch(x)):  # together: layer by layer
            np.testing.assert_allclose(np.stack([a.probabilities for a in answers]), expected[stage], atol=1e-4)


@pytest.mark.cuda
def test_more_questions_than_slots_on_a_gpu() -> None:
    net = trained_a_little("width-digits")
    x = torch.randn(40, 1, 8, 8)
    with torch.no_grad():
        expected = net(x)[-1].softmax(1).numpy()
    with Runtime(net, device="cuda") as runtime:
        kept = [runtime.answer(each, deadline=1e-4) for each in x]
        for answer, truth in zip([answer.refine() for answer in kept], expected, strict=True):
            np.testing.assert_allclose(answer.probabilities, truth, atol=1e-4)
        pending = [runtime.ask(each) for each in x]
        for each, truth in zip(pending, expected, strict=True):
            np.testing.assert_allclose(each.result().probabilities, truth, atol=1e-4)


@pytest.mark.cuda
def test_deadlines_are_kept_on_a_gpu() -> None:
    with Runtime(trained_a_little("width-digits"), device="cuda") as runtime:
        x = np.zeros((1, 8, 8), np.float32)
        for limit in np.random.default_rng(0).uniform(0, 0.003, 200):
            assert runtime.answer(x, deadline=float(limit)).elapsed < limit + 0.01
        assert runtime.answer(x, deadline=0).stage == 0


# --- logits that are no numbers, answers on their way, forks ------------------------------------------------------


class Spoilt(Timed):
    """From one stage on, some images have logits that are no numbers."""

    value, since = math.nan, 2

    def step(self, stage: int, state: tuple[int, Floats], stop: Stop) -> tuple[Floats, tuple[int, Floats]]:
        logits, after = super().step(stage, state, stop)
        if stage >= self.since:
            logits[state[1][:, 0, 0, 0] > 0, 1] = self.value
        return logits, after


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("since", [1, 2])
def test_logits_that_are_not_numbers_are_no_answer(value: float, since: int) -> None:
    engine = Spoilt([0.0, 0.0])
    engine.value, engine.since = value, since
    with Anytime(engine, Spec("spoilt", SHAPE, tuple("abcde"), ("s1", "s2"))) as runtime:
        with pytest.raises(NestlingError, match=f"stage {since} of spoilt failed: its logits are not numbers"):
            runtime.answer(image(1.0), confident=0.5 if since == 1 else None)
        assert runtime.answer(image(0.0)).final
        with pytest.raises(NestlingError, match="not numbers"):
            runtime.answer_batch(np.stack([image(0.0), image(1.0)]))


def test_a_class_that_is_ruled_out_is_no_fault() -> None:
    engine = Spoilt([0.0, 0.0])
    engine.value = -math.inf
    with Anytime(engine, Spec("spoilt", SHAPE, tuple("abcde"), ("s1", "s2"))) as runtime:
        assert runtime.answer(image(1.0)).probabilities[1] == 0


def test_answers_can_be_copied_and_pickled() -> None:
    runtime, _ = timed(0.0, 0.0)
    with runtime:
        for answer in (runtime.answer(image(), deadline=0), next(runtime.answers(image())), runtime.answer(image(1.0))):
            for same in (copy.copy(answer), copy.deepcopy(answer), pickle.loads(pickle.dumps(answer))):  # noqa: S301
                assert repr(same) == repr(answer) and same is not answer
                np.testing.assert_array_equal(same.probabilities, answer.probabilities)
                assert same.probabilities is not answer.probabilities
            assert copy.deepcopy(answer).refine().final
            far = pickle.loads(pickle.dumps(answer))  # noqa: S301
            if answer.final:
                assert far.refine() is far
            else:
                with pytest.raises(NestlingError, match="another process"):
                    far.refine()


def test_a_forked_runtime_refuses_in_words_and_ends() -> None:
    """Its thread has stayed behind: answers would all be the prior, and without a deadline they would never come."""
    runtime, _ = timed(0.0, 0.0)
    with runtime:
        known, pending = runtime.answer(image(), deadline=0), runtime.ask(image(), deadline=10.0)
        for ask in (
            lambda: runtime.answer(image()),
            lambda: runtime.answer(image(), deadline=0.001),
            lambda: known.refine(),
            lambda: runtime.timeline(image()),
            lambda: list(runtime.answers(image())),
        ):
            assert in_a_fork(ask).startswith("NestlingError: this runtime was made by process")
        assert in_a_fork(runtime.close) == "none"
        with runtime.worker.lock:  # as the thread may have held it
            assert in_a_fork(runtime.close) == "none"
        assert runtime.answer(image()).final and pending.result().final


def in_a_fork(ask: Callable[[], Any]) -> str:
    """What a function raises in a forked process; killed if it hangs."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(20)
        try:
            ask()
            said = "none"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader) as pipe:
        return pipe.read()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"classes": tuple("012345678")}, "class names: 9, but the network .* has 10"),
        ({"shape": (3, 8, 8)}, r"images of \(3, 8, 8\), but"),
        ({"sizes": ("w1",)}, "stages: 1, but"),
    ],
)
def test_a_spec_that_is_not_the_networks_is_refused(change: dict[str, Any], complaint: str) -> None:
    net = trained_a_little("width-digits")
    spec = replace(Spec("digits", (1, 8, 8), tuple("0123456789"), net.sizes), **change)
    with pytest.raises(NestlingError, match=complaint):
        Runtime(net, device="cpu", spec=spec)


GOOD = {"name": "net", "shape": [1, 8, 8], "classes": ["a", "b"], "sizes": ["s"], "mean": [0.5], "std": [0.2]}


@pytest.mark.parametrize(
    "change",
    [
        *({key: [value]} for key in ("mean", "std", "errors") for value in (math.nan, math.inf, -math.inf)),
        *({"std": [value]} for value in (0.0, -1.0, 1e-40, 1e-320)),
        {"mean": [1e300]}, {"prior": [math.nan, math.nan]}, {"prior": [math.nan, 1.0]}, {"prior": [2.0, -1.0]},
        {"errors": [1.5]}, {"errors": [-0.1]}, {"std": [10**400]}, {"std": [[]]}, {"mean": []},
        {"shape": [1, 100_000, 100_000]}, {"shape": [1, 10**30, 8]}, {"shape": []}, {"shape": [1, 8, 0]},
        {"shape": [1, 8, 8.5]}, {"shape": [True, 8, 8]}, {"shape": "188"}, {"classes": []}, {"sizes": []},
        {"name": "a\0b"}, {"classes": ["a", "\0"]}, {"classes": ["a", 5]}, {"name": None}, {"sizes": 5},
        {"classes": "ab"}, {"mean": "5"}, {"mean": ["0.5"]}, {"std": [None]}, {"errors": [1j]}, {"prior": [True, False]},
        {"output": "88"}, {"mean": {}},
    ],
    ids=repr,
)  # fmt: skip
def test_what_describes_no_network_is_refused(change: dict[str, Any]) -> None:
    assert from_dict(GOOD).stages == 1
    with pytest.raises(NestlingError):
        from_dict({**GOOD, **change})
    made = {key: tuple(value) if isinstance(value, list) else value for key, value in {**GOOD, **change}.items()}
    with pytest.raises(NestlingError):
        Spec(**made)  # type: ignore[arg-type]


# --- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "complaint"),
    [
        (np.zeros((3, 8, 8), np.float32), "takes images"),
        (np.zeros((1, 8), np.float32), "takes images"),
        (np.zeros((1, 1, 1, 8, 8), np.float32), "takes images"),
        (np.zeros((0, 1, 8, 8), np.float32), "empty"),
        (np.zeros((1, 8, 8), np.float64), "float64"),
        (np.zeros((1, 8, 8), np.int64), "int64"),
        (np.zeros((1, 8, 8), np.uint8), r"spec=nestling.Spec\(..., mean=..., std=...\)"),
        (np.full((1, 8, 8), np.nan, np.float32), "not numbers"),
        (np.array([np.zeros((1, 8, 8)), np.full((1, 8, 8), np.inf)], np.float32), "image 1"),
        ([[0.0]], "expected an array"),
        (torch.zeros(1, 8, 8, dtype=torch.float16), "float16"),
    ],
)
def test_bad_images_are_refused_with_what_to_do(x: Any, complaint: str) -> None:
    _, runtime = SHARED["onnx"]
    ask = runtime.answer_batch if getattr(x, "ndim", 3) == 4 else runtime.answer
    with pytest.raises(NestlingError, match=complaint):
        ask(x, deadline=0.01)


def test_one_image_and_a_batch_are_not_mixed_up() -> None:
    _, runtime = SHARED["onnx"]
    with pytest.raises(
        NestlingError, match=r"found a batch, shape \(2, 1, 8, 8\); answer, answers and ask take one image"
    ):
        runtime.answer(np.zeros((2, 1, 8, 8), np.float32))
    with pytest.raises(NestlingError, match=r"found one image, shape \(1, 8, 8\); answer_batch"):
        runtime.answer_batch(np.zeros((1, 8, 8), np.float32))
    for name in ("answer", "answer_batch", "ask", "each", "answers", "answers_batch", "answer_async"):
        with pytest.raises(TypeError, match="positional"):
            getattr(runtime, name)(np.zeros((1, 8, 8), np.float32), 0.005)


@pytest.mark.parametrize(
    "deadline",
    [math.nan, "5ms", True, [0.1, 0.2], object(), 10**400, -(10**400), [10**5000], b"1", b"\x01", ["1"], {1: 2}],
    ids=lambda deadline: type(deadline).__name__,
)
def test_bad_deadlines_are_refused(deadline: Any) -> None:
    _, runtime = SHARED["onnx"]
    with pytest.raises(NestlingError, match="deadline"):
        runtime.answer(np.zeros((1, 8, 8), np.float32), deadline=deadline)


@pytest.mark.parametrize("confident", [2, -0.1, math.nan, math.inf, True, "09", b"\x00\x01", [2.0] * 4, [0.5], 10**400])
def test_what_is_no_probability_is_refused(confident: Any) -> None:
    _, runtime = SHARED["onnx"]
    with pytest.raises(NestlingError, match="confident="):
        runtime.answer(np.zeros((1, 8, 8), np.float32), confident=confident)


def test_a_stage_may_be_told_never_to_be_sure_enough() -> None:
    runtime, _ = timed(0.0, 0.0, 0.0)
    with runtime:
        assert runtime.answer(image(), confident=[math.inf, 0.0]).stage == 2


def test_a_deadline_that_may_have_meant_milliseconds_is_warned_of_once() -> None:
    runtime, _ = timed(0.001, 0.001, pace=Pace([0.001, 0.001]))
    with runtime:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            runtime.answer(image(), deadline=0.4)  # nobody means 0.4 ms
        with pytest.warns(UserWarning, match=r"deadline of 5 seconds .* 2 ms .* write 0.005 for 5 ms") as warned:
            runtime.answer(image(), deadline=5)
        assert warned[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for deadline in (5, 0.19, None, math.inf):
                runtime.answer(image(), deadline=deadline)
            runtime.answer_batch(image()[None], deadline=[5])


def test_uint8_images_are_normalised_exactly_as_in_training() -> None:
    from nestling.data.augment import normalise

    net = trained_a_little("width-digits")
    spec = Spec("digits", (1, 8, 8), tuple("0123456789"), net.sizes, (0.31,), (0.37,))
    pixels = np.random.default_rng(0).integers(0, 256, (3, 1, 8, 8), dtype=np.uint8)
    with Runtime(net, device="cpu", spec=spec) as runtime:
        found = runtime.intake.prepare(pixels)
        expected = normalise(torch.from_numpy(pixels), torch.tensor([0.31]), torch.tensor([0.37])).numpy()
        np.testing.assert_array_equal(found, expected)
        assert len(runtime.answer_batch(pixels)) == 3


def test_float_pixels_that_were_never_normalised_are_refused() -> None:
    spec = Spec("timed", SHAPE, tuple("abcde"), ("s1",), mean=(0.5,), std=(0.25,))
    with Anytime(Timed([0.001]), spec) as runtime:
        assert runtime.answer(image(2.0)).final and runtime.answer(image(-2.0)).final
        with pytest.raises(NestlingError, match=r"up to 200.*uint8.*\(x / 255 - mean\) / std"):
            runtime.answer(image(200.0))


def test_the_callers_memory_may_be_reused_at_once() -> None:
    runtime, _ = timed(0.05, 0.05)
    with runtime:
        x = image(0.0)
        pending = runtime.ask(x, deadline=5.0)
        x[:] = 100.0
        np.testing.assert_allclose(
            pending.result().probabilities.max(), softmax(np.array([0, 0, 1, 0, 0], np.float32)).max()
        )


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"device": "tpu"}, "device=tpu is no device; expected auto, cpu or cuda"),
        ({"device": "cuda:99"}, "device=cuda:99, but .*; use device=auto or cpu"),
        ({"engine": "onyx"}, "did you mean onnx"),
        ({"device": "cpu", "engine": "graph"}, "CUDA"),
        ({"device": "cpu", "threads": -1}, "threads=-1.* 0 for all cores"),
        ({"device": "cpu", "threads": 1.5}, "threads=1.5"),
        ({"device": "cpu", "threads": 100_000}, "threads=100000; expected .*1,024"),
        ({"device": "cpu", "engine": "eager", "memory": math.nan}, "memory=nan; expected the bytes"),
        ({"device": "cpu", "engine": "eager", "memory": -1}, "memory=-1"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(NestlingError, match=complaint):
        Runtime(build(NetworkRecipe()), **options)


def test_a_network_that_takes_sequences_answers_them() -> None:
    layers = (
        torch.nn.Conv1d(4, 8, 3, padding=1),
        torch.nn.AdaptiveAvgPool1d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 5),
    )
    net = nestling.nest(torch.nn.Sequential(*layers), "w,w", (4, 16)).eval()
    x = torch.randn(3, 4, 16)
    with Runtime(net, device="cpu") as runtime:
        answers = runtime.answer_batch(x)
        assert runtime.answer(x[0]).label == answers[0].label
        with pytest.raises(NestlingError, match="found a batch"):
            runtime.answer(x)
    assert [answer.label for answer in answers] == net(x)[-1].argmax(1).tolist()


def test_a_trained_network_by_name() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 32, 32), dtype=np.uint8)
    with Runtime("width-resnet42-cifar10", device="cpu") as runtime:
        answer = runtime.answer(pixels)
    assert answer.final and answer.name in (
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    )
    assert len(runtime.spec.errors) == 3 and max(runtime.spec.errors) < 0.15


def test_a_folder_that_is_no_run_is_refused(tmp_path: Any) -> None:
    with pytest.raises(NestlingError, match="not a run folder"):
        nestling.Runtime(tmp_path)


# --- the guard and its alarm -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [alarm.BellAlarm, alarm.KernelAlarm])
def test_an_alarm_wakes_at_the_last_time_it_was_set_for(kind: Any) -> None:
    if kind is alarm.KernelAlarm and alarm.TIMERS is None:
        pytest.skip("needs Linux")
    made, woken = kind(time.monotonic), list[float]()

    def sleeper() -> None:
        for _ in range(3):
            made.sleep()
            woken.append(time.monotonic())

    thread = threading.Thread(target=sleeper)
    thread.start()
    began = time.monotonic()
    for after in (5.0, math.inf, 0.3):  # only the last one counts
        time.sleep(0.02)
        made.set(began + after)
    time.sleep(0.5)
    assert len(woken) == 1 and 0.3 <= woken[0] - began < 0.3 + SLACK
    made.set(began)  # the past: at once
    time.sleep(0.1)
    assert len(woken) == 2
    made.set(time.monotonic() + 0.1)
    thread.join(5)
    assert len(woken) == 3
    made.close()
    made.set(time.monotonic())  # does nothing


def test_a_guard_that_is_closed_while_others_set_it_goes() -> None:
    for _ in range(50):
        guard = Guard(time.monotonic)
        guard.until(time.monotonic() + 60, Stop())
        busy = threading.Thread(target=lambda guard=guard: [f() for f in (guard.off, guard.off) * 20])
        busy.start()
        guard.close()
        busy.join()
        assert guard.thread is not None and not guard.thread.is_alive()


def test_a_guard_stops_what_overruns_and_nothing_else() -> None:
    guard, first, second = Guard(time.monotonic), Stop(), Stop()
    guard.until(time.monotonic() + 0.05, first)
    guard.off()
    guard.until(time.monotonic() + 0.2, second)
    time.sleep(0.1)
    assert not second.asked
    time.sleep(0.3)
    assert second.asked and not first.asked
    guard.close()


@pytest.mark.parametrize("late", [0.01, 0.1])
def test_stages_at_once_are_late_as_often_as_was_promised(late: float) -> None:
    """The time D_s takes is drawn anew each time; it is begun with if it is usually done so early."""
    chance, promise, found = np.random.default_rng(0), Promise(late), []
    for _ in range(40_000):
        takes, limit = 1e-3 + chance.exponential(0.2e-3), chance.uniform(0.5e-3, 5e-3)
        jump = limit - promise.early.value >= 1.2e-3
        after = takes - limit if jump else -1.0
        found.append(after > 0)
        promise.observe(after, "jump" if jump else "sure")
    many = float(np.mean(found[10_000:]))
    assert many == pytest.approx(late, rel=0.35) or (many < late and promise.early.value < 1.5 * Margin.LEAST)


def test_no_margin_grows_while_fewer_are_late_than_was_promised() -> None:
    promise = Promise(0.01)
    before = promise.early.value
    for number in range(2000):
        promise.observe(1e-4 if number % 150 == 149 else -1e-3, "jump")
    assert promise.early.value < before
    for _ in range(5):  # a load that comes is noticed soon
        promise.observe(1e-4, "jump")
    assert promise.early.value > Margin.LEAST * 2


def test_late_first_stages_are_ended_sooner_and_nothing_else_moves() -> None:
    calm, wild = Promise(0.01), Promise(0.01)
    for _ in range(5000):
        calm.observe(-1.0, "first")
        wild.observe(1e-4, "first")
    assert calm.price.value == Price.LEAST and wild.price.value == Price.MOST
    assert wild.early.value == calm.early.value  # nothing else could have been begun with
    assert wild.caution.value == calm.caution.value


def test_whoever_was_interrupted_learns_nothing_about_margins() -> None:
    promise = Promise(0.01)
    before = promise.early.value, promise.caution.value
    for tried in ("jump", "sure", "guarded"):
        promise.observe(4e-3, tried, interrupted=True)
    after = promise.early.value, promise.caution.value
    assert all(b <= a for a, b in zip(before, after, strict=True)) and promise.price.value > 1.2
    for _ in range(5000):
        promise.observe(-1e-3, "jump")
        promise.observe(4e-3, "first", interrupted=True)  # nothing less could have been begun with
    assert promise.price.value == promise.price.LEAST


def test_a_thread_that_sleeps_does_not_wait_for_a_processor() -> None:
    processor = Processor()
    before = processor.waited()
    time.sleep(0.5)
    assert 0 <= processor.waited() - before < 0.4
    assert isinstance(processor.crowded(), bool)
    processor.close()
    assert processor.crowded() is False and processor.waited() >= before  # opened again by whoever asks
    processor.close()


def test_where_the_kernel_tells_nothing_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nestling.runtime.processor.os.open", lambda *_: (_ for _ in ()).throw(FileNotFoundError()))
    processor = Processor()
    assert processor.waited() == 0.0 and not processor.crowded()


def test_a_thread_that_works_while_others_do_waits_for_a_processor() -> None:
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        time.sleep(0.5)
        processor = Processor()
        before, crowded = processor.waited(), processor.crowded()
        end = time.thread_time() + 0.2
        while time.thread_time() < end:
            pass
        seconds = processor.waited() - before
    finally:
        for other in others:
            other.kill()
            other.wait()
    if not Path("/proc/thread-self/schedstat").exists():
        pytest.skip("this kernel does not tell")
    assert crowded and seconds > 0.02
