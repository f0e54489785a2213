"""The server over real sockets, asked by tritonclient, http.client and raw sockets: protocols, deadlines, streams, leaving."""

import asyncio
import http.client
import io
import json
import queue
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import nestling
from nestling.nets import build

pytest.importorskip("uvicorn")
pytest.importorskip("tritonclient")

import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from nestling.serve import timers
from nestling.serve.http import application
from nestling.serve.listen import Place, Sockets
from nestling.serve.messages import CLASSES
from nestling.serve.server import Server
from nestling.serve.service import Service

NAME = "width-resnet42-cifar10"
SLOW = 20_000_000  # microseconds: more than any test takes
PIXELS = np.random.default_rng(0).integers(0, 256, (2, 3, 32, 32), dtype=np.uint8)


class Running:
    """A server in a thread of its own."""

    def __init__(self, service: Service, **place: Any) -> None:
        self.service, self.loop = service, timers.loop()
        self.listener = Sockets(service, application(service), Place(**{"http": 0, "grpc": 0, **place}))
        started = threading.Event()
        self.thread = threading.Thread(target=self.live, args=(started,))
        self.thread.start()
        assert started.wait(20)
        self.http, self.grpc = (f"127.0.0.1:{self.listener.ports[name]}" for name in ("http", "grpc"))

    def live(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self.listener.run(lambda _: started.set()))

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.listener.end)
        self.thread.join(20)
        assert not self.thread.is_alive()

    def post(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any], Any]:
        connection = http.client.HTTPConnection(self.http, timeout=20)
        connection.request("POST", path, body, headers or {})
        reply = connection.getresponse()
        found = reply.read()
        connection.close()
        return reply.status, json.loads(found) if found.startswith(b"{") else {"raw": found}, reply.headers

    def metric(self, name: str, **labels: str) -> float:
        return self.service.metrics.registry.get_sample_value(name, labels) or 0.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    torch.manual_seed(0)
    with Server(
        NAME, named={"digits": build(nestling.NetworkRecipe(name="width-digits")).eval()}, device="cpu"
    ) as made:
        yield made


@pytest.fixture(scope="module")
def running(server: Server) -> Iterator[Running]:
    made = Running(Service(server))
    yield made
    made.end()


@pytest.fixture(scope="module")
def right(server: Server) -> np.ndarray:
    with torch.no_grad():
        x = torch.from_numpy(server.model(NAME).intake.prepare(PIXELS))
        return np.stack([logits.softmax(1).numpy() for logits in nestling.load(NAME).answers(x)])


def infer_json(**more: Any) -> bytes:
    data = {"name": "input", "shape": [1, 3, 32, 32], "datatype": "UINT8", "data": PIXELS[0].ravel().tolist()}
    return json.dumps({"inputs": [data], **more}).encode()


def triton_input(kind: Any, x: np.ndarray) -> Any:
    found = kind.InferInput("input", list(x.shape), "UINT8" if x.dtype == np.uint8 else "FP32")
    found.set_data_from_numpy(x)
    return found


# --- tritonclient, unchanged -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("binary", [True, False])
def test_tritonclient_over_http(running: Running, right: np.ndarray, binary: bool) -> None:
    with triton_http.InferenceServerClient(running.http) as client:
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(NAME)
        assert client.get_server_metadata()["name"] == "nestling"
        about = client.get_model_metadata(NAME, "1")
        assert about["inputs"] == [{"name": "input", "datatype": "UINT8", "shape": [-1, 3, 32, 32]}]
        given = triton_http.InferInput("input", [2, 3, 32, 32], "UINT8")
        given.set_data_from_numpy(PIXELS, binary_data=binary)
        wanted = [
            triton_http.InferRequestedOutput(name, binary_data=binary) for name in ("probabilities", "class", "stage")
        ]
        for outputs in (wanted, None):
            found = client.infer(NAME, [given], outputs=outputs, request_id="7", timeout=SLOW)
            np.testing.assert_allclose(found.as_numpy("probabilities"), right[2], atol=1e-4)
            assert found.as_numpy("stage").tolist() == [3, 3]
            said = found.get_response()
            assert said["id"] == "7" and said["parameters"]["stage"] == 3 and said["parameters"]["final"] is True
        best = client.infer(NAME, [given], outputs=[triton_http.InferRequestedOutput("probabilities", class_count=2)])
        label = int(right[2][0].argmax())
        assert best.as_numpy("probabilities")[0, 0].decode().split(":")[1] == str(label)
        packed = client.infer(NAME, [given], request_compression_algorithm="gzip", timeout=SLOW)
        assert packed.as_numpy("stage").tolist() == [3, 3]
        with pytest.raises(InferenceServerException, match="did you mean"):
            client.infer("width", [given])


def test_tritonclient_over_grpc(running: Running, right: np.ndarray) -> None:
    with triton_grpc.InferenceServerClient(running.grpc) as client:
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(NAME)
        assert client.get_server_metadata().name == "nestling"
        about = client.get_model_metadata(NAME, as_json=True)
        assert about["inputs"] == [{"name": "input", "datatype": "UINT8", "shape": ["-1", "3", "32", "32"]}]
        found = client.infer(NAME, [triton_input(triton_grpc, PIXELS)], request_id="7", timeout=SLOW)
        np.testing.assert_allclose(found.as_numpy("probabilities"), right[2], atol=1e-4)
        said = found.get_response()
        assert said.id == "7" and said.parameters["stage"].int64_param == 3 and said.parameters["final"].bool_param
        labels = [each.decode() for each in found.as_numpy("class")]
        assert labels == [running.service.server.model(NAME).spec.classes[i] for i in right[2].argmax(1)]
        outputs = [triton_grpc.InferRequestedOutput("probabilities", class_count=3)]
        best = client.infer(NAME, [triton_input(triton_grpc, PIXELS)], outputs=outputs)
        assert best.as_numpy("probabilities").shape == (2, 3)
        with pytest.raises(InferenceServerException, match="did you mean") as refused:
            client.infer("width", [triton_input(triton_grpc, PIXELS)])
        assert "NOT_FOUND" in refused.value.status()


def test_tritonclient_in_coroutines(running: Running) -> None:
    async def many() -> list[int]:
        async with triton_http_aio.InferenceServerClient(running.http) as client:
            given = [triton_input(triton_http, PIXELS[:1])]
            over_http = await asyncio.gather(*(client.infer(NAME, given, timeout=SLOW) for _ in range(8)))
        async with triton_grpc_aio.InferenceServerClient(running.grpc) as other:
            given = [triton_input(triton_grpc, PIXELS[:1])]
            over_grpc = await asyncio.gather(*(other.infer(NAME, given, timeout=SLOW) for _ in range(8)))
        return [int(found.as_numpy("stage")[0]) for found in (*over_http, *over_grpc)]

    assert asyncio.run(many()) == [3] * 16


def test_tritonclients_stream_has_a_message_for_every_stage(running: Running, right: np.ndarray) -> None:
    with triton_grpc.InferenceServerClient(running.grpc) as client:
        said: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: said.put((result, error)))
        for name in ("a", "b"):
            client.async_stream_infer(NAME, [triton_input(triton_grpc, PIXELS[:1])], request_id=name, timeout=SLOW)
        client.async_stream_infer("nobody", [triton_input(triton_grpc, PIXELS[:1])], request_id="c")
        found = [said.get(timeout=20) for _ in range(7)]
        client.stop_stream()
    assert next(str(error) for _, error in found if error is not None).startswith("there is no network 'nobody'")
    for name in ("a", "b"):
        mine = [result for result, _ in found if result is not None and result.get_response().id == name]
        assert [int(each.as_numpy("stage")[0]) for each in mine] == [1, 2, 3]
        ends = [each.get_response().parameters["triton_final_response"].bool_param for each in mine]
        assert ends == [False, False, True]
        for stage, each in enumerate(mine):
            np.testing.assert_allclose(each.as_numpy("probabilities")[0], right[stage, 0], atol=1e-4)


def test_every_message_is_tritons() -> None:
    for name, kind in CLASSES.items():
        theirs = getattr(service_pb2, name, None) or next(
            getattr(outer, name)
            for outer in (
                service_pb2.ModelInferRequest,
                service_pb2.ModelInferResponse,
                service_pb2.ModelMetadataResponse,
            )
            if hasattr(outer, name)
        )
        expected = {field.name: (field.number, field.type) for field in theirs.DESCRIPTOR.fields}
        for field in kind.DESCRIPTOR.fields:
            if field.name != "properties":  # is in the protocol's own text only
                assert expected[field.name] == (field.number, field.type), (name, field.name)


# --- deadlines -------------------------------------------------------------------------------------------------------


def test_without_time_it_is_504_unless_the_prior_was_asked_for(running: Running) -> None:
    path = f"/v2/models/{NAME}/infer"
    status, said, _ = running.post(path, infer_json(), {"Nestling-Deadline-Ms": "0"})
    assert status == 504 and "no stage" in said["error"]
    status, said, _ = running.post(path, infer_json(parameters={"timeout": 1}))
    assert status == 504
    status, said, _ = running.post(path, infer_json(parameters={"prior": True, "timeout": 1}))
    assert status == 200 and said["parameters"]["stage"] == 0 and said["parameters"]["final"] is False
    outputs = {each["name"]: each["data"] for each in said["outputs"]}
    assert outputs["class"] == [""] and sum(outputs["probabilities"]) == pytest.approx(1, abs=1e-3)
    with triton_grpc.InferenceServerClient(running.grpc) as client:
        with pytest.raises(InferenceServerException) as refused:
            client.infer(NAME, [triton_input(triton_grpc, PIXELS)], timeout=1)
        assert "DEADLINE_EXCEEDED" in refused.value.status()


@pytest.mark.skipif(not hasattr(select, "epoll"), reason="no epoll here")
def test_waiting_to_be_read_counts(running: Running) -> None:
    """What a request waits while the event loop is busy with others is part of its time."""
    connection = http.client.HTTPConnection(running.http, timeout=20)
    held, sent = threading.Event(), threading.Event()

    def busy() -> None:
        held.set()
        sent.wait(10)
        time.sleep(0.2)

    for each in ("before", "while it is busy"):
        if each != "before":
            running.loop.call_soon_threadsafe(busy)
            assert held.wait(10)
        connection.request("POST", f"/v2/models/{NAME}/infer", infer_json())
        sent.set()
        found = json.loads(connection.getresponse().read())
    connection.close()
    assert found["parameters"]["elapsed_ms"] >= 200


def test_grpcs_own_deadline_counts(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages are made slow: the answer of the first comes before the client's deadline.

    Some answers leave too late, fewer than not where nothing else runs: twelve questions may be asked. If the deadline
    did not count, none of them would be answered, for a later stage takes twice as long.
    """
    engine = running.service.server.model(NAME).stages.engine
    step = engine.step

    def slowly(stage: int, state: Any, stop: Any) -> Any:
        until = time.monotonic() + 2
        while stage > 1 and time.monotonic() < until and not stop.asked:
            time.sleep(0.001)
        return step(stage, state, stop)

    monkeypatch.setattr(engine, "step", slowly)
    with triton_grpc.InferenceServerClient(running.grpc) as client:
        for left in reversed(range(12)):
            try:
                found = client.infer(NAME, [triton_input(triton_grpc, PIXELS[:1])], client_timeout=1.0)
                break
            except InferenceServerException as late:
                assert left and "DEADLINE_EXCEEDED" in late.status()
    assert found.as_numpy("stage").tolist() == [1]


def test_a_token_goes_on_from_the_work_done(running: Running, right: np.ndarray) -> None:
    path = f"/v2/models/{NAME}/infer"
    status, said, _ = running.post(path, infer_json(parameters={"prior": True, "refine": True, "timeout": 1}))
    token = said["parameters"]["refine"]
    body = json.dumps({"inputs": [], "parameters": {"refine": token}}).encode()
    status, said, _ = running.post(path, body)
    assert status == 200 and said["parameters"]["stage"] == 3 and "refine" not in said["parameters"]
    np.testing.assert_allclose(said["outputs"][0]["data"], right[2, 0], atol=1e-4)
    status, said, _ = running.post(path, body)
    assert status == 400 and "send the images again" in said["error"]


def test_who_is_to_come_back_may_come_with_the_same_token(
    running: Running, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, scheduler = f"/v2/models/{NAME}/infer", server.model(NAME).stages.scheduler
    _, said, _ = running.post(path, infer_json(parameters={"prior": True, "refine": True, "timeout": 1}))
    body = json.dumps({"parameters": {"refine": said["parameters"]["refine"]}}).encode()
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "room", 0)
        assert [running.post(path, body)[0] for _ in range(2)] == [429, 429]
    status, said, _ = running.post(path, body)
    assert status == 200 and said["parameters"]["stage"] == 3


def test_events_that_end_at_the_deadline_end_with_a_token(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = running.service.server.model(NAME).stages.engine
    step = engine.step

    def slowly(stage: int, state: Any, stop: Any) -> Any:
        if stage > 1:
            time.sleep(2)
        return step(stage, state, stop)

    body = infer_json(parameters={"refine": True, "timeout": 1_500_000})
    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", slowly)
        _, said, _ = running.post(f"/v2/models/{NAME}/infer", body, {"Accept": "text/event-stream"})
    messages = [json.loads(part.removeprefix(b"data: "))["parameters"] for part in said["raw"].split(b"\n\n") if part]
    assert [message["stage"] for message in messages] == [1, 1]
    assert "refine" not in messages[0]
    more = json.dumps({"parameters": {"refine": messages[1]["refine"]}}).encode()
    status, said, _ = running.post(f"/v2/models/{NAME}/infer", more)
    assert status == 200 and said["parameters"]["stage"] == 3


def test_a_sure_answer_stops_early(running: Running) -> None:
    status, said, _ = running.post(f"/v2/models/{NAME}/infer", infer_json(parameters={"confident": 0.0}))
    assert status == 200 and said["parameters"]["stage"] == 1 and said["parameters"]["final"] is True


def test_a_full_server_says_429_and_when_to_come_back(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.model(NAME).stages.scheduler, "room", 0)
    full = Running(Service(server))
    status, said, headers = full.post(f"/v2/models/{NAME}/infer", infer_json())
    assert status == 413 and "at most 0" in said["error"]
    monkeypatch.setattr(server.model(NAME).stages.scheduler, "room", 1)
    monkeypatch.setattr(server.model(NAME).stages.scheduler, "open", 1)
    status, said, headers = full.post(f"/v2/models/{NAME}/infer", infer_json())
    assert status == 429 and headers["retry-after"] == "1" and "no room" in said["error"]
    monkeypatch.setattr(server.model(NAME).stages.scheduler, "open", 0)
    full.end()


# --- pictures and events ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_pictures_are_bodies_too(running: Running, form: str) -> None:
    file = io.BytesIO()
    Image.fromarray(PIXELS[0].transpose(1, 2, 0)).save(file, form)
    kind = {"Content-Type": f"image/{form.lower()}"}
    status, said, _ = running.post(f"/v2/models/{NAME}/infer?timeout={SLOW}&id=p", file.getvalue(), kind)
    assert status == 200 and said["parameters"]["stage"] == 3 and said["id"] == "p"
    status, said, _ = running.post("/v2/models/digits/infer", file.getvalue(), kind)
    assert status == 400 and "uint8" in said["error"], "this network does not say how to normalise pictures"
    status, said, _ = running.post(f"/v2/models/{NAME}/infer", b"no picture", kind)
    assert status == 400 and "cannot be read as a picture" in said["error"]
    status, said, _ = running.post(f"/v2/models/{NAME}/infer", b"", kind)
    assert status == 400 and "it is empty" in said["error"]
    forms = {"Content-Type": "application/x-www-form-urlencoded"}  # as curl says, unless it is told
    status, said, _ = running.post(f"/v2/models/{NAME}/infer", file.getvalue(), forms)
    assert status == 400 and "expected image/jpeg or image/png" in said["error"]


def test_the_first_picture_need_not_wait_for_pillow() -> None:
    code = "import sys; from nestling.serve.http import Infer; Infer(None); print('PIL.JpegImagePlugin' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"


def test_events_have_a_message_for_every_stage(running: Running, right: np.ndarray) -> None:
    status, said, headers = running.post(f"/v2/models/{NAME}/infer", infer_json(), {"Accept": "text/event-stream"})
    assert status == 200 and headers["content-type"] == "text/event-stream"
    messages = [json.loads(part.removeprefix(b"data: ")) for part in said["raw"].split(b"\n\n") if part]
    assert [message["parameters"]["stage"] for message in messages] == [1, 2, 3]
    assert [message["parameters"]["final"] for message in messages] == [False, False, True]
    times = [message["parameters"]["elapsed_ms"] for message in messages]
    assert times == sorted(times)
    for stage, message in enumerate(messages):
        np.testing.assert_allclose(message["outputs"][0]["data"], right[stage, 0], atol=1e-4)
    status, said, _ = running.post(
        f"/v2/models/{NAME}/infer", infer_json(parameters={"timeout": 1}), {"Accept": "text/event-stream"}
    )
    assert said["raw"].startswith(b"event: error\ndata: ") and b"no stage" in said["raw"]


def post(running: Running, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(running.http, timeout=30)
    try:
        connection.request("POST", path, body, headers or {})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def test_parameters_in_the_query_of_tensors_are_not_ignored_in_silence(running: Running) -> None:
    path, body = f"/v2/models/{NAME}/infer", infer_json()
    assert post(running, path, body)[0] == post(running, f"{path}?client=7", body)[0] == 200
    status, said = post(running, f"{path}?timeout=20000&prior=true", body)
    assert status == 400 and "found prior, timeout in the query" in said and "the body's parameters" in said


@pytest.mark.parametrize("kind", ["json", "events", "grpc", "grpc stream"])
def test_a_client_that_leaves_is_not_worked_for(running: Running, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    model = running.service.server.model(NAME)
    step, begun = model.stages.engine.step, threading.Event()
    steps: list[int] = []

    def slowly(stage: int, state: Any, stop: Any) -> Any:
        steps.append(stage)
        begun.set()
        time.sleep(0.3)
        return step(stage, state, stop)

    monkeypatch.setattr(model.stages.engine, "step", slowly)
    stage_by_stage = {"confident": 1.0}
    if kind.startswith("grpc"):
        with triton_grpc.InferenceServerClient(running.grpc) as client:
            inputs = [triton_input(triton_grpc, PIXELS[:1])]
            if kind == "grpc":
                call = client.async_infer(NAME, inputs, lambda result, error: None, parameters=stage_by_stage)
            else:
                client.start_stream(lambda result, error: None)
                client.async_stream_infer(NAME, inputs, parameters=stage_by_stage)
            assert begun.wait(10)
            call.cancel() if kind == "grpc" else client.stop_stream(cancel_requests=True)
    else:
        accept = "application/json" if kind == "json" else "text/event-stream"
        host, port = running.http.split(":")
        body = infer_json(parameters=stage_by_stage)
        head = f"POST /v2/models/{NAME}/infer HTTP/1.1\r\nHost: x\r\nAccept: {accept}\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + body)
            assert begun.wait(10)
    deadline = time.monotonic() + 5
    while model.stages.scheduler.open and time.monotonic() < deadline:
        time.sleep(0.01)
    assert model.stages.scheduler.open == 0 and steps[0] == 1 and len(steps) < 3


def test_a_stream_that_is_cut_leaves_no_task_behind(running: Running) -> None:
    """Such a task is told as an error, once the collector finds it."""

    def waiting() -> int:
        return sum("Queue.get" in repr(task) for task in asyncio.all_tasks(running.loop))

    for _ in range(5):
        with triton_grpc.InferenceServerClient(running.grpc) as client:
            answered = threading.Event()
            client.start_stream(lambda result, error, seen=answered: seen.set())
            client.async_stream_infer(NAME, [triton_input(triton_grpc, PIXELS[:1])])
            assert answered.wait(20)
            client.stop_stream(cancel_requests=True)
    deadline = time.monotonic() + 5
    while waiting() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not waiting()


def test_nothing_is_kept_and_nothing_missed_for_who_left(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    model, begun = running.service.server.model(NAME), threading.Event()
    step = model.stages.engine.step

    def slowly(stage: int, state: Any, stop: Any) -> Any:
        begun.set()
        time.sleep(0.3)
        return step(stage, state, stop)

    def counted() -> list[float]:
        answers = [running.metric("nestling_answers_total", model=NAME, stage=str(stage)) for stage in range(4)]
        names = ("deadline_missed_total", "request_duration_seconds_count")
        return [*answers, *(running.metric(f"nestling_{name}", model=NAME) for name in names)]

    time.sleep(0.1)  # for what was asked before
    kept, before = len(model.kept.found), counted()
    monkeypatch.setattr(model.stages.engine, "step", slowly)
    for parameters in ({"refine": True, "prior": True}, {"refine": True, "confident": 1.0}):
        begun.clear()
        host, port = running.http.split(":")
        body = infer_json(parameters=parameters)
        head = f"POST /v2/models/{NAME}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + body)
            assert begun.wait(10)
        time.sleep(0.5)
    with triton_grpc.InferenceServerClient(running.grpc) as client:
        begun.clear()
        call = client.async_infer(NAME, [triton_input(triton_grpc, PIXELS[:1])], lambda result, error: None)
        assert begun.wait(10)
        call.cancel()
        time.sleep(0.5)
    assert len(model.kept.found) == kept and counted() == before


# --- operations ------------------------------------------------------------------------------------------------------


def test_metrics_have_the_names_and_count(running: Running) -> None:
    before = running.metric("nestling_answers_total", model=NAME, stage="3")
    running.post(f"/v2/models/{NAME}/infer", infer_json())
    time.sleep(0.1)
    assert running.metric("nestling_answers_total", model=NAME, stage="3") == before + 1
    connection = http.client.HTTPConnection(running.http, timeout=20)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    for name in ("request_duration_seconds_bucket", "queue_seconds_count", "deadline_missed_total", "answers_total"):
        assert f"nestling_{name}" in text


def test_whoever_is_refused_is_counted_and_logged(server: Server) -> None:
    lines: list[dict[str, Any]] = []
    told = Running(Service(server, log=lines.append))
    path = f"/v2/models/{NAME}/infer"
    wrong = {"name": "input", "shape": [1, 3, 8, 8], "datatype": "UINT8", "data": [0] * 192}
    for body in (b"{", json.dumps({"inputs": [wrong]}).encode()):
        assert told.post(path, body)[0] == 400
    assert told.post("/v2/models/nobody/infer", infer_json())[0] == 404
    with triton_grpc.InferenceServerClient(told.grpc) as client, pytest.raises(InferenceServerException):
        client.infer(NAME, [triton_input(triton_grpc, np.zeros((1, 3, 8, 8), np.uint8))])
    told.end()
    assert told.metric("nestling_refused_total", model=NAME) == 3
    assert [line["status"] for line in lines] == [400, 400, 404, 400] and all(line["error"] for line in lines)


def test_what_is_gone_on_with_has_waited_only_since_it_came(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"/v2/models/{NAME}/infer"
    server = running.service.server
    step = server.model(NAME).stages.engine.step

    def slowly(stage: int, state: Any, stop: Any) -> Any:
        time.sleep(0.3)
        return step(stage, state, stop)

    monkeypatch.setattr(server.model(NAME).stages.engine, "step", slowly)
    request = server.model(NAME).ask(PIXELS[:1], 5.0).submit(every=True)
    next(request.each_stage())  # and left: it has one stage, or two, not all
    time.sleep(0.8)
    token, before = (
        server.model(NAME).kept.put(request.tickets),
        running.metric("nestling_queue_seconds_sum", model=NAME),
    )
    other = server.model(NAME).ask(PIXELS[:1], 5.0).submit(every=True)
    time.sleep(0.1)
    assert running.post(path, json.dumps({"parameters": {"refine": token}}).encode())[0] == 200
    other.wait()
    time.sleep(0.1)
    assert running.metric("nestling_queue_seconds_sum", model=NAME) > before + 0.1


def test_a_token_keeps_others_out(server: Server) -> None:
    locked = Running(Service(server, token="secret"))
    path = f"/v2/models/{NAME}/infer"
    for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        status, said, headers = locked.post(path, infer_json(), header)
        assert status == 401 and headers["www-authenticate"] == "Bearer" and "token" in said["error"]
    assert locked.post(path, infer_json(), {"Authorization": "Bearer secret"})[0] == 200
    with triton_grpc.InferenceServerClient(locked.grpc) as client:
        with pytest.raises(InferenceServerException, match="token"):
            client.get_model_metadata(NAME)
        assert client.is_server_live() and client.is_server_ready(), "probes need no token"
        assert client.get_model_metadata(NAME, headers={"authorization": "Bearer secret"}).name == NAME
    locked.end()


def test_ending_answers_those_it_has_and_takes_no_others(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    ending = Running(Service(server))
    engine = server.model(NAME).stages.engine
    step, begun = engine.step, threading.Event()

    def slowly(stage: int, state: Any, stop: Any) -> Any:
        begun.set()
        time.sleep(0.2)
        return step(stage, state, stop)

    monkeypatch.setattr(engine, "step", slowly)
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.append(ending.post(f"/v2/models/{NAME}/infer", infer_json())))
    asking.start()
    assert begun.wait(10)
    ending.end()
    asking.join(10)
    assert found[0][0] == 200 and found[0][1]["parameters"]["stage"] == 3
    with pytest.raises(OSError):
        ending.post(f"/v2/models/{NAME}/infer", infer_json())
