"""Several callers of one runtime at a time: each has a place in the engine while there are any, and its own answer."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from nestling.errors import NestlingError
from nestling.nets import build
from nestling.recipes.recipe import NetworkRecipe
from nestling.runtime import Answer, Anytime, Pace, Runtime, Spec, Stop
from nestling.runtime.engine import Abandoned, Floats

SHAPE = (1, 2, 2)
LONG = 30.0  # seconds that nobody waits for
State = tuple[int, Floats]


class Gated:
    """Stages that take no time, but for one image, `HELD`, whose last stage goes on until the gate opens."""

    name, row_bytes, most, stops, jumps = "gated", 1000, 0, True, False
    HELD = 9.0

    def __init__(self, places: int = 2, stages: int = 2) -> None:
        self.places, self.stages = places, stages
        self.gate, self.held = threading.Event(), threading.Event()
        self.log: list[tuple[int, float, int]] = []  # (stage, pixel of the image, thread)

    def start(self, x: Floats) -> State:
        return 0, x

    def step(self, stage: int, state: State, stop: Stop) -> tuple[Floats, State]:
        x = state[1]
        self.log.append((stage, float(x[0, 0, 0, 0]), threading.get_ident()))
        if stage == self.stages and self.HELD in x:
            self.held.set()
            until = time.monotonic() + LONG
            while not self.gate.wait(0.002):
                if stop.asked:
                    raise Abandoned
                assert time.monotonic() < until, "nobody has opened the gate"
        logits = np.zeros((len(x), 3), np.float32)
        logits[:, stage % 3] = 1 + x[:, 0, 0, 0]
        return logits, (stage, x)

    def take(self, state: State, rows: Sequence[int]) -> State:
        return state[0], state[1][list(rows)]

    def close(self) -> None: ...


def image(value: float = 0.0) -> Floats:
    return np.full(SHAPE, value, np.float32)


def runtime_of(engine: Gated, pace: Pace | None = None) -> Anytime:
    spec = Spec("gated", SHAPE, tuple("abc"), tuple(f"s{i + 1}" for i in range(engine.stages)))
    return Anytime(engine, spec, pace or Pace([1e-4] * engine.stages))


def wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < until, "half a minute, and nothing"
        time.sleep(0.001)


@pytest.mark.parametrize("places", [1, 2])
def test_two_who_ask_at_the_same_time_do_not_wait_for_each_other_where_the_engine_serves_two(places: int) -> None:
    engine = Gated(places)
    with runtime_of(engine) as runtime, ThreadPoolExecutor(1) as pool:
        first = pool.submit(runtime.answer, image(Gated.HELD))
        assert engine.held.wait(LONG)
        answer = runtime.answer(image(0.5), deadline=1.0)
        assert answer.final if places == 2 else not answer
        engine.gate.set()
        assert first.result(LONG).final and answer.refine().final


def held(engine: Gated, runtime: Anytime, pool: ThreadPoolExecutor) -> Future[Answer]:
    """Somebody whose last stage goes on until the gate opens."""
    first = pool.submit(runtime.answer, image(Gated.HELD))
    assert engine.held.wait(LONG)
    return first


def test_each_runs_in_its_callers_own_thread() -> None:
    engine = Gated()
    with runtime_of(engine) as runtime, ThreadPoolExecutor(1) as pool:
        first = held(engine, runtime, pool)
        assert runtime.answer(image(0.5), deadline=1.0).final
        assert engine.log[-2:] == [(stage, 0.5, threading.get_ident()) for stage in (1, 2)]
        engine.gate.set()
        assert first.result(LONG).final


def test_who_finds_no_place_is_answered_by_the_thread_and_ends_with_its_time() -> None:
    engine = Gated(stages=1)
    with runtime_of(engine, Pace([1e-3])) as runtime, ThreadPoolExecutor(2) as pool:
        running = [pool.submit(runtime.answer, image(Gated.HELD)) for _ in range(2)]
        wait_until(lambda: len(engine.log) == 2)
        began = time.monotonic()
        assert not runtime.answer(image(0.5), deadline=0.3)
        assert 0.2 < time.monotonic() - began < LONG / 2
        engine.gate.set()
        assert all(each.result(LONG).final for each in running) and runtime.answer(image(0.5)).final


def test_one_of_two_makes_room_for_those_who_could_have_nothing_otherwise() -> None:
    engine = Gated()
    with runtime_of(engine, Pace([1e-3, 20.0])) as runtime, ThreadPoolExecutor(2) as pool:
        running = [pool.submit(runtime.answer, image(Gated.HELD)) for _ in range(2)]
        wait_until(lambda: len(engine.log) == 4)
        assert runtime.answer(image(0.5), deadline=2.0)
        engine.gate.set()
        assert all(each.result(LONG).final for each in running)


def test_who_made_room_goes_on_also_where_nobody_waits_any_more() -> None:
    """Told to end for others, whom somebody else has served by then; it has no deadline, so its last stage must come."""
    engine = Gated()
    with runtime_of(engine) as runtime, ThreadPoolExecutor(1) as pool:
        first = held(engine, runtime, pool)
        runtime.worker.lanes[0].end()
        wait_until(lambda: [stage for stage, _, _ in engine.log].count(2) == 2)
        engine.gate.set()
        assert first.result(LONG).final


def test_closing_ends_what_runs_and_whoever_waits_comes_back() -> None:
    engine = Gated(stages=1)  # the first stage is the last, and both go on until they are told
    runtime = runtime_of(engine)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(runtime.answer, image(Gated.HELD)) for _ in range(2)]
        wait_until(lambda: len(engine.log) == 2)
        runtime.close()
        assert [each.result(LONG).stage for each in waiting] == [0, 0]


def test_what_fails_beside_another_is_told_to_its_caller_alone() -> None:
    class Failing(Gated):
        def step(self, stage: int, state: State, stop: Stop) -> tuple[Floats, State]:
            if 7.0 in state[1]:
                raise ValueError("no sevens")
            return super().step(stage, state, stop)

    engine = Failing()
    with runtime_of(engine) as runtime, ThreadPoolExecutor(1) as pool:
        first = pool.submit(runtime.answer, image(Gated.HELD))
        assert engine.held.wait(LONG)
        with pytest.raises(NestlingError, match="no sevens"):
            runtime.answer(image(7.0), deadline=LONG)
        engine.gate.set()
        assert first.result(LONG).final and runtime.answer(image()).final


def test_threads_in_one_engine_never_share_an_answer() -> None:
    """Eight threads ask ONNX Runtime's engine about images of their own, and are answered about those."""
    pytest.importorskip("onnxruntime")
    net = build(NetworkRecipe(name="width-digits")).eval()
    chance = np.random.default_rng(0)
    images = chance.normal(size=(8, net.plan.input.channels, *net.plan.input.size)).astype(np.float32)
    with Runtime(net) as runtime, ThreadPoolExecutor(8) as pool:
        expected = [[answer.output for answer in runtime.answers(each)] for each in images]

        def ask(caller: int) -> int:
            for turn in range(60):
                answer = runtime.answer(images[caller], deadline=(0.001, LONG)[turn % 2])
                if answer:
                    right = expected[caller][answer.stage - 1]
                    assert answer.output is not None and right is not None
                    np.testing.assert_allclose(answer.output, right, rtol=1e-4, atol=1e-4)
                assert answer or turn % 2 == 0, "half a minute, and nothing"
            return caller

        assert sorted(pool.map(ask, range(8))) == list(range(8))


# --- threads of the runtime's own --------------------------------------------------------------------------------


def ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "nestling-stages"]


@pytest.mark.parametrize("places", [1, 2, 3])
def test_parts_of_a_batch_are_run_at_the_same_time_where_the_engine_serves_several(places: int) -> None:
    """As many stages wait at a gate as there are places; one thread serves a single question, and all end with the runtime."""
    engine, before = Gated(places), len(ours())
    spec = Spec("gated", SHAPE, tuple("abc"), ("s1", "s2"))
    with Anytime(engine, spec, Pace([1e-4] * 2), memory=2 * engine.row_bytes) as runtime:
        assert runtime.ask(image()).result().final and len(ours()) == before + 1
        asked = ThreadPoolExecutor(1).submit(runtime.answer_batch, np.stack([image(Gated.HELD)] * 8))
        wait_until(lambda: sum(stage == 2 for stage, pixel, _ in engine.log if pixel == Gated.HELD) == places)
        assert len({thread for stage, pixel, thread in engine.log if stage == 2 and pixel == Gated.HELD}) == places
        engine.gate.set()
        assert all(answer.final for answer in asked.result(LONG))
    assert len(ours()) == before


def test_first_answers_go_before_states_where_there_is_a_deadline() -> None:
    """Eight images and memory for the states of two: with a deadline everybody gets stage 1 before anybody gets stage 2."""
    engine = Gated(1)
    spec = Spec("gated", SHAPE, tuple("abc"), ("s1", "s2"))
    with Anytime(engine, spec, Pace([1e-4] * 2), memory=2 * engine.row_bytes) as runtime:
        held = ThreadPoolExecutor(1).submit(runtime.answer, image(Gated.HELD))
        assert engine.held.wait(LONG)
        asked = ThreadPoolExecutor(1).submit(runtime.answer_batch, np.stack([image()] * 8), deadline=LONG)
        wait_until(lambda: len(runtime.worker.queues.fresh) >= 4)
        engine.log.clear()
        engine.gate.set()
        assert all(answer.final for answer in asked.result(LONG)) and held.result(LONG).final
        stages = [stage for stage, pixel, _ in engine.log if pixel == 0.0]
    assert stages[:4] == [1, 1, 1, 1] and stages.count(2) == 4 and runtime.worker.queues.begun_images == 0
