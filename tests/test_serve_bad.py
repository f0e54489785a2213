"""Bad requests: only 4xx with a reason (or 504 for no time), nothing crashes, hangs or grows; good clients are still answered.

`NESTLING_BAD=10000 pytest tests/test_serve_bad.py` sends as many of each kind as you like.
"""

import asyncio
import contextlib
import gc
import io
import json
import os
import random
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_serve_clients import NAME, PIXELS, Running, infer_json

pytest.importorskip("grpc")

import grpc
from tritonclient.grpc import service_pb2

from nestling.serve import listen
from nestling.serve.grpc import AT_A_TIME, Inference
from nestling.serve.openapi import document
from nestling.serve.server import Server
from nestling.serve.service import Service

COUNT = int(os.environ.get("NESTLING_BAD", "150"))
PATH = f"/v2/models/{NAME}/infer"
REFUSED = (400, 404, 405, 408, 413, 415)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with Server(NAME, device="cpu") as server:
        made = Running(Service(server, most_bytes=2**20))
        yield made
        made.end()


@pytest.mark.parametrize("name", ["timeout_ms", "deadline", "Confident", "nonsense"])
def test_parameters_that_mean_nothing_are_refused(running: Running, name: str) -> None:
    status, said, _ = running.post(PATH, infer_json(parameters={name: 5}))
    assert status == 400 and name in said["error"] and "timeout, confident, prior, refine" in said["error"]
    status, _, _ = running.post(
        PATH, infer_json(parameters={"priority": 1, "triton_enable_empty_final_response": True})
    )
    assert status == 200


@pytest.fixture(autouse=True)
def still_well(running: Running) -> Iterator[None]:
    """After every test the server answers, and holds nothing of what it refused."""
    yield
    status, said, _ = running.post(PATH, infer_json())
    assert status == 200 and said["parameters"]["stage"] == 3
    model = running.service.server.model(NAME)
    assert model.stages.scheduler.open == model.stages.scheduler.holding == 0 and model.stages.thread.is_alive()


def broken_json(chance: random.Random) -> bytes:
    """A good request with something changed that must not be."""
    good = json.loads(infer_json())
    things: list[Any] = [None, -1, 1.5, "x", [], {}, [[]], 10**30, True, "NaN", [1, 2], {"a": 1}, "\0", "🐦" * 50]
    thing = chance.choice(things)
    place = chance.choice(["inputs", "tensor", "parameters", "outputs", "bytes"])
    if place == "inputs":
        good["inputs"] = thing
    elif place == "tensor":
        good["inputs"][0][chance.choice(["name", "shape", "datatype", "data"])] = thing
    elif place == "parameters":
        good["parameters"] = {
            chance.choice(["timeout", "confident", "prior", "refine"]): chance.choice([None, [], {}, -5, "x"])
        }
    elif place == "outputs":
        good["outputs"] = [
            chance.choice([thing or 1, {"name": thing}, {"name": "label", "parameters": {"classification": -1}}])
        ]
    text = bytearray(json.dumps(good).encode())
    if place == "bytes":
        text[chance.randrange(40)] = chance.choice(b'\xff\x00}{"')
    return bytes(text)


def test_json_that_is_wrong_somewhere(running: Running) -> None:
    chance = random.Random(0)
    for _ in range(COUNT):
        body = broken_json(chance)
        status, said, _ = running.post(PATH, body)
        assert status in (*REFUSED, 200), (status, said, body[:300])
        assert status == 200 or said["error"]
        if status == 200:  # what is right nevertheless, such as other outputs or a timeout of text that is a number
            assert said["parameters"]["stage"] > 0


@pytest.mark.parametrize(
    "body",
    [b"", b"null", b"[]", b"1", b'"x"', b"{", b"[" * 100_000, b'{"inputs":' * 10_000, b"\xff\xfe",
     b'{"inputs":[' + b"1," * 1000 + b"1]}",
     b'{"inputs":[{"name":"input","shape":[99999999999,3,32,32],"datatype":"UINT8","data":[]}]}',
     b'{"inputs":[{"name":"input","shape":[0,3,32,32],"datatype":"UINT8","data":[]}]}',
     b'{"inputs":[{"name":"input","shape":[0,99999999999,99999999999],"datatype":"UINT8","data":[]}]}',
     b'{"inputs":[{"name":"input","shape":[1,3,32,32],"datatype":"FP32","data":[' + b"1e39," * 3071 + b"1]}]}",
     b'{"inputs":[{"name":"input","shape":[1,3,32,32],"datatype":"FP32","data":[' + b"NaN," * 3071 + b"1]}]}",
     b'{"id":' + b"9" * 5000 + b"}"],
    ids=range(16),
)  # fmt: skip
def test_json_that_is_wrong_altogether(running: Running, body: bytes) -> None:
    status, said, _ = running.post(PATH, body)
    assert status in REFUSED and said["error"]


def test_pixels_nested_in_another_order_than_the_shape_says_are_refused(running: Running) -> None:
    """Taken as if they were flat, channels and columns would be mixed up, and answered."""
    good = json.loads(infer_json())
    [tensor] = good["inputs"]
    pixels = np.array(tensor["data"]).reshape(tensor["shape"])
    for data, status in (
        (pixels.transpose(0, 2, 3, 1), 400),
        (pixels.reshape(len(pixels), -1), 400),
        (pixels, 200),
        (pixels.ravel(), 200),
    ):
        tensor["data"] = data.tolist()
        found, said, _ = running.post(PATH, json.dumps(good).encode())
        assert found == status and (status == 200 or "found data nested as" in said["error"])
    head = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": pixels.size}}]}).encode()
    body = head + pixels.astype(np.uint8).tobytes()
    found, said, _ = running.post(PATH, body, {"Inference-Header-Content-Length": str(len(head))})
    assert found == 400 and "send the one or the other" in said["error"]


def test_words_of_a_pictures_query_that_mean_nothing_are_refused(running: Running) -> None:
    """A timeout that is misspelt would be none."""
    file = io.BytesIO()
    Image.fromarray(PIXELS[0].transpose(1, 2, 0)).save(file, "PNG")
    status, said, _ = running.post(f"{PATH}?timout=20000", file.getvalue(), {"Content-Type": "image/png"})
    assert status == 400 and "found 'timout' in the query; expected some of id, timeout, " in said["error"]


def test_binary_tensors_at_random(running: Running) -> None:
    chance = random.Random(1)
    for _ in range(COUNT):
        shape = [chance.choice([0, 1, 2, 3, 32, 33, 2**40]) for _ in range(chance.randrange(6))]
        raw = chance.randbytes(chance.choice([0, 1, 3071, 3072, 12288, 5000]))
        tensor = {"name": "input", "shape": shape, "datatype": chance.choice(["UINT8", "FP32", "BYTES", "FP64"]),
                  "parameters": {"binary_data_size": chance.choice([0, len(raw), len(raw) + 1, -1, "x", 3072])}}  # fmt: skip
        text = json.dumps({"inputs": [tensor]}).encode()
        length = chance.choice([str(len(text)), "0", "-1", "x", "9" * 30, str(len(text) + 5)])
        status, said, _ = running.post(PATH, text + raw, {"Inference-Header-Content-Length": length})
        assert status == 200 or (status in REFUSED and said["error"]), (status, said)


def test_bodies_that_are_too_large_packed_or_of_another_form(running: Running) -> None:
    import gzip

    for body, headers, expected in (
        (b"x" * (2**20 + 1), {}, 413),
        (gzip.compress(b"x" * 2**24), {"Content-Encoding": "gzip"}, 413),
        (b"no gzip", {"Content-Encoding": "gzip"}, 400),
        (gzip.compress(infer_json())[:-9], {"Content-Encoding": "gzip"}, 400),
        (b"x", {"Content-Encoding": "br"}, 415),
        (b"\x89PNG\r\n\x1a\n" + b"x" * 100, {"Content-Type": "image/png"}, 400),
        (infer_json(), {"Nestling-Deadline-Ms": "soon"}, 400),
        (infer_json(), {"Nestling-Deadline-Ms": "nan"}, 400),
    ):
        status, said, _ = running.post(PATH, body, headers)
        assert status == expected and said["error"]


@pytest.mark.parametrize("form", ["TIFF", "GIF", "BMP", "WEBP", "PPM"])
def test_pictures_of_other_forms_are_refused(running: Running, form: str) -> None:
    """Some readers raise what they like at spoilt files, and write to stderr, where lines are JSON."""
    file = io.BytesIO()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(file, form)
    status, said, _ = running.post(PATH, file.getvalue(), {"Content-Type": "image/png"})
    assert status == 400 and "cannot be read as a picture" in said["error"]


def test_a_small_file_with_very_many_pixels_is_refused(running: Running) -> None:
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 8000, 8000, 8, 2, 0, 0, 0)
    body = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )
    status, said, _ = running.post(PATH, io.BytesIO(body).read(), {"Content-Type": "image/png"})
    assert status == 400 and "8000 x 8000 pixels, more than" in said["error"]


@pytest.mark.parametrize(
    "path",
    ["/v2/models/../../etc/passwd/infer", "/v2/models/%2e%2e%2f%2e%2e/infer", "/v2/models/nobody/infer", "/v2/models//infer",
     f"{PATH}/x",
     f"/v2/models/{NAME}/versions/2/infer", "/v2/models/" + "x" * 5000 + "/infer", "/v2/models/%00/infer",
     "/static/..%2f..%2fserver.py"],
)  # fmt: skip
def test_tricks_in_paths(running: Running, path: str) -> None:
    status, said, _ = running.post(path, infer_json())
    assert status in (404, 405) and said["error"]


def raw(running: Running) -> socket.socket:
    host, port = running.http.split(":")
    return socket.create_connection((host, int(port)), timeout=20)


@pytest.mark.parametrize(
    "garbage", [b"\0" * 100, b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", os.urandom(500), b"A: b\r\n" * 5000]
)
def test_what_is_no_http(running: Running, garbage: bytes) -> None:
    with raw(running) as connection, contextlib.suppress(OSError):
        connection.sendall(garbage)
        connection.shutdown(socket.SHUT_WR)
        found = b""
        while part := connection.recv(4096):
            found += part
        assert not found or found.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4"))


def test_slow_writers_are_let_go_and_keep_nobody_waiting(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    import nestling.serve.http as protocol

    monkeypatch.setattr(protocol, "BODY_SECONDS", 0.3)
    monkeypatch.setattr(listen, "IDLE", 0.3)
    body = infer_json()
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    slow = [raw(running) for _ in range(20)]
    for number, connection in enumerate(slow):
        connection.sendall(head[:20] if number % 2 else head + body[:100])
    assert running.post(PATH, body)[0] == 200
    for number, connection in enumerate(slow):
        found = connection.recv(4096)
        assert found == b"" if number % 2 else found.startswith(b"HTTP/1.1 408")
        connection.close()


def test_slow_readers_hold_nothing_up(running: Running) -> None:
    body = infer_json()
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    )
    slow = [raw(running) for _ in range(10)]
    for connection in slow:
        for _ in range(5):
            connection.sendall(head + body)
    assert running.post(PATH, body)[0] == 200
    time.sleep(0.5)
    for connection in slow:
        connection.close()
    until = time.monotonic() + 30
    while running.service.server.model(NAME).stages.scheduler.open and time.monotonic() < until:
        time.sleep(0.05)


def test_a_stream_that_nobody_reads_is_not_answered_for_ever(running: Running) -> None:
    """Replies wait to be read, up to a number; what comes after them is not even looked at."""
    infer, asked, count = Inference(running.service), [], 20 * AT_A_TIME

    class Call:
        def invocation_metadata(self) -> tuple[()]:
            return ()

    async def messages() -> AsyncIterator[bytes]:
        for number in range(count):
            asked.append(number)
            yield b"\x01\x02"

    async def read() -> int:
        stream = infer.stream(messages(), Call())
        await anext(stream)
        await asyncio.sleep(0.5)
        assert len(asked) < 4 * AT_A_TIME, "it goes on although nobody reads"
        return 1 + len([reply async for reply in stream])

    assert asyncio.run(read()) == count


def call(running: Running, method: str) -> Callable[[bytes], bytes]:
    channel = grpc.insecure_channel(running.grpc)
    return channel.unary_unary(f"/inference.GRPCInferenceService/{method}")


def test_grpc_bodies_at_random(running: Running) -> None:
    chance, infer = random.Random(2), call(running, "ModelInfer")
    good = service_pb2.ModelInferRequest(model_name=NAME, raw_input_contents=[PIXELS[:1].tobytes()])
    good.inputs.add(name="input", datatype="UINT8", shape=[1, 3, 32, 32])
    message = good.SerializeToString()
    codes = set()
    for number in range(COUNT):
        body = bytearray(message[: chance.randrange(len(message))] if number % 3 == 0 else message)
        if number % 3 == 1:
            body = bytearray(chance.randbytes(chance.randrange(200)))
        elif number % 3 == 2:
            body[chance.randrange(60)] ^= 1 << chance.randrange(8)
        try:
            infer(bytes(body))
            codes.add("OK")
        except grpc.RpcError as error:
            codes.add(error.code().name)
            assert error.details()
    assert codes <= {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}, codes


def test_grpc_bodies_that_are_too_large_and_unknown_methods(running: Running) -> None:
    for method, body, expected in (
        ("ModelInfer", b"x" * 2**21, "RESOURCE_EXHAUSTED"),
        ("Nothing", b"", "UNIMPLEMENTED"),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            call(running, method)(body)
        assert refused.value.code().name == expected


def test_paths_and_bodies_as_the_openapi_document_describes_them(running: Running) -> None:
    schemathesis = pytest.importorskip("schemathesis", reason="no schemathesis: pip install schemathesis tries this")
    from hypothesis import HealthCheck, given, settings

    schema = schemathesis.openapi.from_dict(document())
    for operation in schema.get_all_operations():
        found = operation.ok()

        @settings(max_examples=min(COUNT, 300), deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(case=found.as_strategy())
        def ask(case: Any) -> None:
            reply = case.call(base_url=f"http://{running.http}")
            assert reply.status_code in (200, 504, *REFUSED), reply.text
            assert reply.status_code in (200, 405) or reply.json()["error"]

        ask()


def test_the_openapi_document_names_every_path(running: Running) -> None:
    import http.client

    connection = http.client.HTTPConnection(running.http, timeout=20)
    connection.request("GET", "/openapi.json")
    found = json.loads(connection.getresponse().read())
    assert found == document()
    for path in found["paths"]:
        if "infer" not in path:
            connection.request("GET", path.replace("{name}", NAME))
            reply = connection.getresponse()
            assert reply.status == 200 and reply.read() is not None


def test_memory_stays_flat(running: Running) -> None:
    """Good and bad requests in turn: after some of them, many more take no memory that the process had not."""

    def size() -> int:
        gc.collect()
        return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def many(count: int) -> None:
        chance = random.Random(3)

        def client() -> None:
            for _ in range(count // 4):
                running.post(
                    PATH,
                    chance.choice([infer_json(), b"{", infer_json(parameters={"timeout": 1}), broken_json(chance)]),
                )

        threads = [threading.Thread(target=client) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    grown = []
    many(4 * COUNT)
    for _ in range(4):  # the allocator may take a page now and then; what leaks grows every time
        before = size()
        many(4 * COUNT)
        grown.append(size() - before)
        if grown[-1] < 2**20:
            return
    raise AssertionError(f"larger after every {4 * COUNT} requests, by {grown} bytes")


def test_a_shape_of_no_values_with_enormous_sides(running: Running) -> None:
    tensor = {"name": "input", "shape": [0, 2**40, 2**40], "datatype": "UINT8", "parameters": {"binary_data_size": 0}}
    text = json.dumps({"inputs": [tensor]}).encode()
    status, said, _ = running.post(PATH, text, {"Inference-Header-Content-Length": str(len(text))})
    assert status == 400 and "from 1" in said["error"]
