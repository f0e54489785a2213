"""Many callers of one runtime: first stages beside what runs, first stages together, and that nobody's answer is another's."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from nestling.errors import NestlingError
from nestling.nets import build
from nestling.recipes.recipe import NetworkRecipe
from nestling.runtime import Anytime, Pace, Runtime, Spec, Stop
from nestling.runtime import processor as processors
from nestling.runtime.beginning import Beginnings
from nestling.runtime.engine import Abandoned, Floats
from nestling.runtime.processor import Processor
from nestling.runtime.turns import LITTLE

SHAPE = (1, 2, 2)
LONG = 30.0  # seconds that nobody waits for
State = tuple[int, Floats]


class Gated:
    """Stages that take no time, but for one image, `HELD`, whose last stage goes on until the gate opens."""

    name, row_bytes, most, stops, jumps = "gated", 1000, 0, False, False
    HELD = 9.0

    def __init__(self, beside: bool, stages: int = 2) -> None:
        self.beside, self.stages = beside, stages
        self.gate, self.held = threading.Event(), threading.Event()
        self.log: list[tuple[int, int]] = []  # (stage, images)

    def start(self, x: Floats) -> State:
        return 0, x

    def step(self, stage: int, state: State, stop: Stop) -> tuple[Floats, State]:
        x = state[1]
        self.log.append((stage, len(x)))
        if stage == self.stages and self.HELD in x:
            self.held.set()
            while not self.gate.wait(0.002):
                if stop.asked:
                    raise Abandoned
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
    return Anytime(engine, spec, pace)


def test_who_comes_while_a_long_stage_runs_has_a_first_stage_where_the_engine_serves_two() -> None:
    for beside, stage in ((True, 1), (False, 0)):
        engine = Gated(beside)
        with runtime_of(engine) as runtime, ThreadPoolExecutor(1) as pool:
            first = pool.submit(runtime.answer, image(Gated.HELD))
            assert engine.held.wait(LONG)
            answer = runtime.answer(image(0.5), deadline=1.0)
            assert answer.stage == stage and not answer.final
            engine.gate.set()
            assert first.result(LONG).final and answer.refine().final


@pytest.mark.parametrize("beside", [True, False])
def test_who_makes_room_goes_on_afterwards(beside: bool) -> None:
    """Its last stage would keep out whoever comes, so it stops; it has all the time it wants, and gets that stage in the end."""
    engine = Gated(beside)
    with runtime_of(engine, Pace([0.001, 20.0])) as runtime, ThreadPoolExecutor(1) as pool:
        first = pool.submit(runtime.answer, image(Gated.HELD))
        assert engine.held.wait(LONG)
        assert runtime.answer(image(0.5), deadline=2.0)
        engine.gate.set()
        assert first.result(LONG).final


def test_coroutines_and_questions_have_one_as_well() -> None:
    engine = Gated(beside=True)
    with runtime_of(engine) as runtime, ThreadPoolExecutor(1) as pool:
        first = pool.submit(runtime.answer, image(Gated.HELD))
        assert engine.held.wait(LONG)
        questions = [runtime.ask(image(value)) for value in (0.25, 0.5, 0.75)]
        until = time.monotonic() + LONG
        while not all(question.best() for question in questions) and time.monotonic() < until:
            time.sleep(0.001)
        found = [question.best().output for question in questions]
        assert [float(output[1]) for output in found if output is not None] == [1.25, 1.5, 1.75]
        engine.gate.set()
        assert first.result(LONG).final and all(question.result().final for question in questions)


def test_closing_ends_what_runs_beside_and_whoever_waits_comes_back() -> None:
    engine = Gated(beside=True, stages=1)  # the first stage is the last, and both go on until they are told
    runtime = runtime_of(engine)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(runtime.answer, image(Gated.HELD)) for _ in range(2)]
        until = time.monotonic() + LONG
        while len(engine.log) < 2 and time.monotonic() < until:
            time.sleep(0.001)
        assert len(engine.log) == 2
        runtime.close()
        assert [each.result(LONG).stage for each in waiting] == [0, 0]
    names = {thread.name for thread in threading.enumerate() if thread.is_alive()}
    assert runtime.worker.second is not None and not runtime.worker.second.thread.is_alive(), names


def test_a_first_stage_that_fails_beside_another_is_told_to_its_caller_alone() -> None:
    class Failing(Gated):
        def step(self, stage: int, state: State, stop: Stop) -> tuple[Floats, State]:
            if 7.0 in state[1]:
                raise ValueError("no sevens")
            return super().step(stage, state, stop)

    engine = Failing(beside=True)
    with runtime_of(engine) as runtime, ThreadPoolExecutor(1) as pool:
        first = pool.submit(runtime.answer, image(Gated.HELD))
        assert engine.held.wait(LONG)
        with pytest.raises(NestlingError, match="no sevens"):
            runtime.answer(image(7.0), deadline=LONG)
        engine.gate.set()
        assert first.result(LONG).final and runtime.answer(image()).final


@pytest.mark.parametrize(("takes", "together"), [(LITTLE / 1000, True), (10 * LITTLE, False)])
def test_first_stages_of_little_work_are_run_together(takes: float, together: bool) -> None:
    """Seven come while another has the engine; each gets its own answer, and may be refined by itself."""
    engine = Gated(beside=False)
    with runtime_of(engine, Pace([takes, takes])) as runtime, ThreadPoolExecutor(1) as pool:
        first = pool.submit(runtime.answer, image(Gated.HELD))
        assert engine.held.wait(LONG)
        del engine.log[:]
        questions = [runtime.ask(image(value / 8)) for value in range(7)]
        engine.gate.set()
        answers = [question.result() for question in questions]
        assert first.result(LONG).final and all(answer.final for answer in answers)
        assert [float(answer.output[2]) for answer in answers if answer.output is not None] == [
            1 + value / 8 for value in range(7)
        ]
    firsts = [images for stage, images in engine.log if stage == 1]
    assert firsts == ([7] if together else [1] * 7)


def test_who_was_run_together_with_others_is_refined_alone() -> None:
    engine = Gated(beside=False, stages=3)
    with runtime_of(engine, Pace([LITTLE / 1000] * 3)) as runtime, ThreadPoolExecutor(8) as pool:
        first = pool.submit(runtime.answer, image(Gated.HELD))
        assert engine.held.wait(LONG)
        del engine.log[:]
        sure = [pool.submit(runtime.answer, image(v / 8), confident=[0.9 * (v > 3), 1, 1]) for v in range(6)]
        until = time.monotonic() + LONG
        while len(runtime.worker.turns.fresh) < 6 and time.monotonic() < until:
            time.sleep(0.001)
        engine.gate.set()
        answers = [each.result(LONG) for each in sure]
        assert first.result(LONG).final and (1, 6) in engine.log
        assert [answer.stage for answer in answers] == [1] * 4 + [3] * 2
        assert all(answer.final for answer in answers)


def test_two_threads_in_one_engine_never_share_an_answer() -> None:
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


def test_a_stage_that_errs_more_than_one_before_it_is_not_begun_with() -> None:
    pace = Pace([1.0, 1.0, 1.0], jumps=[2.0, 3.0])
    assert [Beginnings(pace, errors).best(100.0) for errors in ([0.1, 0.2, 0.3], [0.3, 0.1, 0.2], [0.3, 0.2, 0.1])] == [
        1,
        2,
        3,
    ]


def test_waiting_is_known_without_reading_while_a_thread_keeps_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []

    class Told:
        def read(self) -> list[bytes]:
            read.append(b"")
            return [b"1", b"%d" % (len(read) * 10**9), b"%d" % len(read)]

    left = [5]
    monkeypatch.setattr(processors, "switches", lambda: left[0])
    processor = Processor()
    processor.own.times = Told()
    assert [processor.waited() for _ in range(3)] == [(1.0, 1)] * 3 and len(read) == 1
    left[0] = 6  # another thread was let in
    assert processor.since((1.0, 1)) == (1.0, 1)
    left[0] = -1  # nobody tells
    assert [processor.waited()[1] for _ in range(3)] == [3, 4, 5]
    processor.close()
