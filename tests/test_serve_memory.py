"""Memory: nothing of ours outlives its request, whatever was asked and however it ended, even where no garbage is collected.

States are megabytes each: kept by a cycle until a collection comes, they were hundreds of them, and what they took was never
given back. So objects are counted, which is exact, and not bytes.
"""

import gc
import io
import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from PIL import Image
from test_serve_clients import NAME, PIXELS, Running, infer_json

pytest.importorskip("grpc")

import grpc
from tritonclient.grpc import service_pb2

from nestling.serve.server import Server
from nestling.serve.service import Service

PATH = f"/v2/models/{NAME}/infer"
COUNT = 30  # requests of a kind
SHORT = {"timeout": 12_000}  # microseconds: hardly enough for all stages, so that states are left over
Ask = Callable[[Running, int], None]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with Server(NAME, device="cpu") as server:
        made = Running(Service(server))
        yield made
        made.end()


def post(body: bytes, headers: dict[str, str] | None = None, wanted: tuple[int, ...] = (200, 504)) -> Ask:
    def ask(running: Running, number: int) -> None:
        assert running.post(PATH, body, headers)[0] in wanted

    return ask


def picture() -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((64, 48, 3), 200, np.uint8)).save(file, "JPEG")
    return file.getvalue()


def refined(running: Running, number: int) -> None:
    _, said, _ = running.post(PATH, infer_json(parameters={"refine": True, "prior": True, "timeout": 4000}))
    if "refine" in said["parameters"]:
        assert (
            running.post(PATH, json.dumps({"parameters": {"refine": said["parameters"]["refine"]}}).encode())[0] == 200
        )


def left(running: Running, number: int) -> None:
    """At once, or while it is worked for."""
    host, port = running.http.split(":")
    body = infer_json()
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(0.001 * (number % 5))


def message(**parameters: int) -> bytes:
    found = service_pb2.ModelInferRequest(model_name=NAME, raw_input_contents=[PIXELS[:1].tobytes()])
    found.inputs.add(name="input", datatype="UINT8", shape=[1, 3, 32, 32])
    for name, value in parameters.items():
        found.parameters[name].int64_param = value
    return bytes(found.SerializeToString())


def grpc_call(body: bytes, stream: bool = False) -> Ask:
    def ask(running: Running, number: int) -> None:
        with grpc.insecure_channel(running.grpc) as channel:
            try:
                if stream:
                    list(channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(iter([body])))
                else:
                    channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(body)
            except grpc.RpcError as error:
                assert error.code().name in ("DEADLINE_EXCEEDED", "INVALID_ARGUMENT")

    return ask


KINDS: dict[str, Ask] = {
    "json": post(infer_json()),
    "by a deadline": post(infer_json(parameters=SHORT)),
    "no time": post(infer_json(parameters={"timeout": 1}), wanted=(504,)),
    "sure": post(infer_json(parameters={"confident": 0.1})),
    "picture": post(picture(), {"Content-Type": "image/jpeg", "Nestling-Deadline-Ms": "12"}),
    "events": post(infer_json(), {"Accept": "text/event-stream"}),
    "events by a deadline": post(infer_json(parameters=SHORT), {"Accept": "text/event-stream"}),
    "refined": refined,
    "refused": post(b'{"inputs": 1}', wanted=(400,)),
    "left": left,
    "grpc": grpc_call(message()),
    "grpc by a deadline": grpc_call(message(**SHORT)),
    "grpc, no time": grpc_call(message(timeout=1)),
    "grpc stream": grpc_call(message(**SHORT), stream=True),
    "grpc refused": grpc_call(b"\x01\x02"),
}


def objects() -> Counter[str]:
    """How many there are of each class."""
    kinds = Counter(type(each) for each in gc.get_objects())
    return Counter({f"{kind.__module__}.{kind.__qualname__}": count for kind, count in kinds.items()})


def calm(running: Running) -> None:
    """Everything has been answered, and every connection closed."""
    until = time.monotonic() + 20
    scheduler, http_server = running.service.server.model(NAME).stages.scheduler, running.listener.http
    while (scheduler.open or http_server.server_state.connections) and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.05)  # tasks that are cancelled go with the next turn of the loop


def outlived(running: Running, ask: Ask) -> dict[str, int]:
    """After some requests: which of our objects only a collection of garbage would free, and whatever not even that did."""

    def more(least: int) -> dict[str, int]:
        return {name: count for name, count in (objects() - before).items() if count >= least}

    gc.collect()
    before = objects()
    gc.disable()
    try:
        for number in range(COUNT):
            ask(running, number)
        calm(running)
        found = {name: count for name, count in more(COUNT // 5).items() if name.startswith("nestling.")}
    finally:
        gc.enable()
    gc.collect()
    return found | more(COUNT)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_outlives_its_request(running: Running, kind: str) -> None:
    if outlived(running, KINDS[kind]):  # something may be made once and for all
        assert outlived(running, KINDS[kind]) == {}, f"after {COUNT} requests"
