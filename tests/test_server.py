"""Server in Python: many threads and coroutines, one scheduler; what is answered is what the network says."""

import asyncio
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nestling
from nestling.errors import NestlingError
from nestling.nets import NestedNet, build
from nestling.runs.folder import SHIPPED
from nestling.runtime.engine import Stop
from nestling.runtime.promise import Margin
from nestling.serve import model as model_room
from nestling.serve.model import KeptAnswers, Model
from nestling.serve.scheduler import Full, Ticket
from nestling.serve.server import Server
from nestling.serve.service import Asked, Service, properties
from nestling.serve.way import Way

NAME = "width-resnet42-cifar10"


def digits() -> NestedNet:
    torch.manual_seed(0)
    return build(nestling.NetworkRecipe(name="width-digits")).eval()


@pytest.fixture(scope="module")
def net() -> NestedNet:
    return digits()


@pytest.fixture(scope="module")
def server(net: NestedNet) -> Iterator[Server]:
    with Server(named={"digits": net}, device="cpu") as started:
        yield started


def images(count: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(count, 1, 8, 8)).astype(np.float32)


def expected(net: NestedNet, x: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return np.stack([logits.softmax(1).numpy() for logits in net.answers(torch.from_numpy(x))])


def test_the_answers_are_the_networks(server: Server, net: NestedNet) -> None:
    x = images(4)
    right = expected(net, x)
    for index, image in enumerate(x):
        seen = list(server.answers(image))
        assert [answer.stage for answer in seen] == [1, 2, 3] and [answer.final for answer in seen] == [
            False,
            False,
            True,
        ]
        for stage, answer in enumerate(seen):
            np.testing.assert_allclose(answer.probabilities, right[stage, index], atol=1e-4)
    assert server.answer(x[0]).stage == 3


@pytest.mark.parametrize("engine", ["onnx", "eager"])
def test_images_of_several_requests_go_together_and_get_their_own_answers(net: NestedNet, engine: str) -> None:
    x, right = images(13), expected(net, images(13))
    with nestling.Runtime(net, "cpu", engine) as runtime:
        model = Model("digits", runtime)
        for timing in model.pace.steps:
            timing.more = 0.0  # so that the scheduler joins whatever it can
        requests = [model.ask(part, inf) for part in (x[:1], x[1:5], x[5:6], x[6:])]
        with model.stages.lock:  # nobody begins before all are there
            threads = [threading.Thread(target=request.submit) for request in requests]
            for thread in threads:
                thread.start()
        for thread in threads:
            thread.join()
        found = [answer for request in requests for answer in request.wait()]
        assert [answer.stage for answer in found] == [3] * 13
        np.testing.assert_allclose([answer.probabilities for answer in found], right[2], atol=1e-4)
        model.close()


@pytest.mark.parametrize("engine", ["onnx", "eager"])
def test_states_of_several_images_joined_are_what_they_were(net: NestedNet, engine: str) -> None:
    x, right = images(4), expected(net, images(4))
    with nestling.Runtime(net, "cpu", engine) as runtime:
        run = runtime.engine
        states = [run.step(1, run.start(part), Stop())[1] for part in (x[:1], x[1:])]
        joined = run.join([(states[1], 2), (states[0], 0), (states[1], 0)])  # type: ignore[attr-defined]
        logits, joined = run.step(2, joined, Stop())
        np.testing.assert_allclose(torch.from_numpy(logits).softmax(1), right[1][[3, 0, 1]], atol=1e-4)
        logits, _ = run.step(3, run.join([(joined, 1)]), Stop())  # type: ignore[attr-defined]
        np.testing.assert_allclose(torch.from_numpy(logits).softmax(1), right[2][[0]], atol=1e-4)


def test_a_hundred_threads_are_all_answered_rightly(server: Server, net: NestedNet) -> None:
    x = images(100)
    right = expected(net, x)
    found: dict[int, nestling.Answer] = {}

    def ask(index: int) -> None:
        found[index] = server.answer(x[index], deadline=[None, 0.5, 0.05][index % 3])

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 100
    for index, answer in found.items():
        if answer:
            np.testing.assert_allclose(answer.probabilities, right[answer.stage - 1, index], atol=1e-4)
        assert answer.final or index % 3 > 0


def test_coroutines_wait_without_a_thread(server: Server) -> None:
    async def many() -> list[nestling.Answer]:
        return await asyncio.gather(*(server.answer_async(image) for image in images(50)))

    before = threading.active_count()
    answers = asyncio.run(many())
    assert all(answer.final for answer in answers) and threading.active_count() <= before + 1


def test_without_time_there_is_no_answer_and_refining_goes_on(server: Server, net: NestedNet) -> None:
    image = images(1)[0]
    none = server.answer(image, deadline=0)
    assert not none and none.stage == 0 and none.name == "" and not none.final
    done = none.refine(deadline=None)
    assert done.final and done.stage == 3
    np.testing.assert_allclose(done.probabilities, expected(net, images(1))[2, 0], atol=1e-4)
    assert done.refine() is done


def test_a_sure_answer_is_final(server: Server) -> None:
    answer = server.answer(images(1)[0], confident=0.0)
    assert answer.stage == 1 and answer.final


def test_a_full_server_refuses_and_says_so(net: NestedNet) -> None:
    with Server(net, device="cpu", room=2) as small:
        model = small.model()
        with model.stages.lock:
            model.stages.scheduler.add([Ticket(None, inf), Ticket(None, inf)])
        with pytest.raises(NestlingError, match="no room"):
            small.answer(images(1)[0])
        with pytest.raises(NestlingError, match="at most 2"):
            model.ask(images(3), inf)


def test_bad_images_and_names_are_refused(server: Server, net: NestedNet) -> None:
    for wrong in (images(1), images(1)[0, 0], images(1)[0].astype(np.float64), np.zeros((1, 8, 8), np.uint8), "x"):
        with pytest.raises(NestlingError):
            server.answer(wrong)
    with pytest.raises(NestlingError, match="did you mean digits"):
        server.answer(images(1)[0], model="digit")
    with pytest.raises(NestlingError, match="two networks are called"):
        Server(net, named={net.plan.name: net}, device="cpu")
    with pytest.raises(NestlingError, match="no network was named"):
        Server()


def test_what_is_no_picture_is_served_alike() -> None:
    """Sequences (C,L): one has as many sides as a batch of images less two."""
    layers = [nn.Sequential(nn.Conv1d(i, 16, 3), nn.BatchNorm1d(16), nn.ReLU()) for i in (2, 16)]
    module = nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 5)).eval()
    sequences = nestling.nest(module, shape=(2, 20)).eval()
    x = torch.randn(3, 2, 20, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = sequences(x)[-1].softmax(1).numpy()
    with Server(sequences, device="cpu") as one:
        np.testing.assert_allclose(one.answer(x[0]).probabilities, expected[0], atol=1e-5)
        with pytest.raises(NestlingError, match="found a batch"):
            one.answer(x)
        model, service = one.model(), Service(one)
        for given in (x.numpy(), x[0].numpy()):
            request = service.begin(model, Asked(given), one.clock())
            for _ in request.each_stage():
                pass
            found = {wanted.name: array for wanted, array in service.reply(model, Asked(given), request).outputs}
            np.testing.assert_allclose(found["probabilities"], expected[: 3 if given.ndim == 3 else 1], atol=1e-5)


def test_class_names_with_commas_are_told_apart(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    model = server.model()
    names = ("bow, arrow", 'a "quoted" one', "Süßwasser", *model.spec.classes[3:])
    monkeypatch.setattr(model, "spec", replace(model.spec, classes=names))
    told = {name: json.loads(text) for name, text in properties(model).items()}
    assert told == {"sizes": list(model.spec.sizes), "classes": list(names)}


def test_a_stage_that_fails_is_told_to_whom_it_failed_and_to_nobody_else(
    net: NestedNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Server(net, device="cpu") as one:
        model = one.model()
        step, broken = model.stages.engine.step, images(1)[0] * 0 + 1.5

        def sometimes(stage: int, state: object, stop: Stop) -> object:
            if stage >= 2 and failing.is_set():
                raise MemoryError("no memory")
            return step(stage, state, stop)

        failing = threading.Event()
        monkeypatch.setattr(model.stages.engine, "step", sometimes)
        failing.set()
        with pytest.raises(NestlingError, match=r"stage 2 of .* failed: no memory"):
            one.answer(broken, confident=1.0)  # stage by stage
        with pytest.raises(NestlingError, match=r"stage 3 of .* failed: no memory"):
            one.answer(broken)  # the last one at once
        failing.clear()
        assert one.answer(broken).stage == 3


def test_closing_lets_nobody_wait(net: NestedNet, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Server(net, device="cpu")
    engine = one.model().stages.engine
    step, slow = engine.step, threading.Event()

    def slowly(stage: int, state: object, stop: Stop) -> object:
        if stage == 2:
            slow.set()
            time.sleep(0.2)
        return step(stage, state, stop)

    monkeypatch.setattr(engine, "step", slowly)
    found: list[nestling.Answer] = []
    threads = [threading.Thread(target=lambda: found.append(one.answer(images(1)[0], confident=1.0))) for _ in range(5)]
    for thread in threads:
        thread.start()
    assert slow.wait(30)
    until = time.monotonic() + 30
    while one.model().stages.scheduler.open < 5 and time.monotonic() < until:
        time.sleep(0.001)
    one.close()
    for thread in threads:
        thread.join(5)
    assert len(found) == 5
    with pytest.raises(NestlingError, match="is closed"):
        one.answer(images(1)[0])


def test_a_network_is_opened_anew_while_others_ask(net: NestedNet) -> None:
    with Server(named={"net": net}, device="cpu") as one:
        stop = threading.Event()
        answered, failed = [0], []

        def ask() -> None:
            while not stop.is_set():
                try:
                    answered[0] += one.answer(images(1)[0]).final
                except NestlingError as error:
                    failed.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        old = one.model("net")
        one.reload("net")
        assert one.model("net") is not old
        deadline = time.monotonic() + 5
        while old.stages.thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        stop.set()
        asking.join()
        assert answered[0] > 0 and not failed and not old.stages.thread.is_alive()


def test_who_was_being_read_when_a_network_was_opened_anew_is_answered_by_the_old_one(net: NestedNet) -> None:
    with Server(named={"net": net}, device="cpu") as one:
        old = one.model("net")
        one.reload("net")
        time.sleep(0.2)
        assert old.ask(images(1), inf).submit().wait()[0].final


def test_what_is_written_while_a_network_is_opened_is_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(SHIPPED / "width-resnet42-cifar10", folder)
    as_ever = model_room.opened

    def written_meanwhile(*words: Any) -> Any:
        found = as_ever(*words)
        os.utime(folder / "weights.safetensors", ns=(1, 1))
        return found

    monkeypatch.setattr(model_room, "opened", written_meanwhile)
    with Server(folder, device="cpu") as one:
        assert one.model().files != one.model().stamp()


def test_tokens_hold_for_a_time_and_up_to_a_size() -> None:
    now = [0.0]
    kept = KeptAnswers(row_bytes=10, clock=lambda: now[0], most_bytes=25, seconds=5)
    tickets = [Ticket(np.zeros(1, np.float32), inf, state=object()) for _ in range(4)]
    tokens = [kept.put([ticket]) for ticket in tickets[:3]]
    with pytest.raises(NestlingError, match="nothing is kept"):
        kept.take(tokens[0])
    assert kept.take(tokens[1]) == [tickets[1]] and kept.bytes == 10
    with pytest.raises(NestlingError, match="nothing is kept"):
        kept.take(tokens[1])
    now[0] = 6
    with pytest.raises(NestlingError, match="older than 5 s"):
        kept.take(tokens[2])
    assert kept.bytes == 0 and kept.put(tickets) == "", "too large to be kept"
    assert kept.put([Ticket(tickets[0].x, inf, final=True)]) == "", "nothing to refine"
    kept.put([Ticket(np.zeros(1, np.float32), inf, running=True)])
    assert kept.bytes == 10, "it will have a state in a moment"
    for wrong in (None, 7, "", ["a"]):
        with pytest.raises(NestlingError):
            kept.take(wrong)


def test_a_token_goes_on_where_the_work_stands(server: Server, net: NestedNet) -> None:
    model = server.model()
    request = model.ask(images(3), 0.0).submit()
    assert [answer.stage for answer in request.wait()] == [0, 0, 0]
    token = model.kept.put(request.tickets)
    more = model.more(token, inf).submit()
    found = more.wait()
    assert all(answer.final for answer in found)
    np.testing.assert_allclose([each.probabilities for each in found], expected(net, images(3))[2], atol=1e-4)


def test_a_margin_is_taken_off_the_deadline(server: Server) -> None:
    margin = Margin()
    margin.value = 0.002
    request = server.model().ask(images(1), 0.02, margin=margin)
    assert 0.017 < request.due - request.began < 0.018 < request.deadline - request.began


class Hasty(Margin):
    """Answers are due at once; who has none waits until the deadline."""

    def before(self, deadline: float) -> float:
        return 0.0

    def latest(self, deadline: float) -> float:
        return deadline


def test_who_has_no_answer_when_it_is_due_waits_for_the_first_one(server: Server) -> None:
    async def waited() -> int:
        request = server.model().ask(images(1), 60.0, margin=Hasty()).submit()
        return [stage async for stage in request.each_stage_async()][-1]

    request = server.model().ask(images(1), 60.0, margin=(margin := Hasty())).submit()
    value = margin.value
    assert request.wait()[0].stage == asyncio.run(waited()) == 1
    assert margin.value <= value, "waiting longer on purpose is not being late"


def test_the_way_gives_less_time_away_where_there_is_no_answer_yet() -> None:
    way = Way()
    for count in range(801):
        way.beaten(4e-3 if count % 50 == 0 else 0.1e-3)
    assert way.before(0.02) < 0.0161 and 0.0197 < way.latest(0.02) < 0.02
    for _ in range(801):
        way.beaten(1.0)
    assert way.before(0.02) == way.latest(0.02) == 0.01, "half of a deadline at most"


def test_many_models_of_their_own_shapes(net: NestedNet) -> None:
    with Server(NAME, named={"digits": net}, device="cpu") as both:
        assert both.answer(images(1)[0], model="digits").final
        answer = both.answer(np.zeros((3, 32, 32), np.uint8), model=NAME)
        assert answer.final and answer.name in both.model(NAME).spec.classes
        with pytest.raises(NestlingError, match="takes images"):
            both.answer(images(1)[0], model=NAME)


def test_full_is_all_or_none(server: Server) -> None:
    model = server.model()
    request = model.ask(images(model.stages.scheduler.room), inf)
    other = model.ask(images(2), inf)
    with model.stages.lock:
        model.stages.scheduler.add([Ticket(None, inf)])
        with pytest.raises(Full):
            model.stages.scheduler.add(request.tickets)
        assert model.stages.scheduler.open == 1
        [ticket] = model.stages.scheduler.clear()
    assert ticket.over
    assert all(answer.final for answer in other.submit().wait())
