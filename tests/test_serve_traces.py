"""Traces: a span per request, under the client's own, its wait and its stages below it; and the trace's number in the log."""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from test_serve_clients import NAME, PIXELS, Running, infer_json, triton_grpc, triton_input
from test_serve_command import Process

from nestling.serve.server import Server
from nestling.serve.service import Service
from nestling.serve.traces import Traces, trace_of

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
PATH = f"/v2/models/{NAME}/infer"


@pytest.mark.parametrize(
    ("text", "found"), [(PARENT, TRACE), ("", ""), ("00-x", ""), (PARENT + "0", ""), (PARENT.upper(), "")]
)
def test_the_traces_number_is_read_from_traceparent(text: str, found: str) -> None:
    assert trace_of(text) == found


def test_the_log_names_the_trace_without_opentelemetry() -> None:
    lines: list[dict[str, Any]] = []
    with Server(NAME, device="cpu") as server:
        running = Running(Service(server, log=lines.append))
        running.post(PATH, infer_json(), {"traceparent": PARENT})
        running.post(PATH, infer_json())
        running.end()
    assert [line.get("trace") for line in lines] == [TRACE, None]


@pytest.fixture(scope="module")
def traced() -> Iterator[tuple[Running, Any]]:
    pytest.importorskip("opentelemetry.sdk", reason="no opentelemetry: pip install 'nestling[traces]' tries this")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    with Server(NAME, device="cpu") as server:
        running = Running(Service(server, traces=Traces(provider, server.clock)))
        yield running, memory
        running.end()


def spans(memory: Any) -> tuple[Any, list[Any]]:
    """The request's, and those below it in the order in which they began."""
    until = time.monotonic() + 20  # it is made after the reply has left
    while not any(span.name == f"infer {NAME}" for span in memory.get_finished_spans()) and time.monotonic() < until:
        time.sleep(0.01)
    found = memory.get_finished_spans()
    memory.clear()
    (request,) = (span for span in found if span.name == f"infer {NAME}")
    below = [span for span in found if span.parent is not None and span.parent.span_id == request.context.span_id]
    assert len(below) == len(found) - 1
    return request, sorted(below, key=lambda span: span.start_time)


def test_a_span_over_http_has_its_parent_its_wait_and_its_stages(traced: tuple[Running, Any]) -> None:
    running, memory = traced
    running.post(PATH, infer_json(parameters={"confident": 1.0}), {"traceparent": PARENT})
    request, below = spans(memory)
    assert f"{request.context.trace_id:032x}" == TRACE and f"{request.parent.span_id:016x}" == SPAN
    assert request.kind.name == "SERVER" and request.attributes["http.response.status_code"] == 200
    assert request.attributes["nestling.stage"] == 3 and request.attributes["nestling.late"] is False
    assert [span.name for span in below] == ["queue", "stage 1", "stage 2", "stage 3"]
    assert all(span.start_time <= span.end_time for span in (request, *below))
    assert request.start_time == below[0].start_time and below[-1].end_time <= request.end_time


def test_a_span_over_grpc(traced: tuple[Running, Any]) -> None:
    running, memory = traced
    with triton_grpc.InferenceServerClient(running.grpc) as client:
        client.infer(NAME, [triton_input(triton_grpc, PIXELS)], headers={"traceparent": PARENT})
    request, below = spans(memory)
    assert f"{request.context.trace_id:032x}" == TRACE and request.attributes["nestling.images"] == 2
    assert below[0].name == "queue" and below[-1].name == "stage 3", "at once, or after the others"


def test_no_answer_by_the_deadline_is_an_error_and_a_wrong_parent_begins_a_trace(traced: tuple[Running, Any]) -> None:
    running, memory = traced
    running.post(PATH, infer_json(parameters={"timeout": 1}), {"traceparent": "nonsense"})
    request, below = spans(memory)
    assert request.parent is None and request.status.status_code.name == "ERROR"
    assert request.attributes["http.response.status_code"] == 504 and below == []


def test_refining_has_only_what_it_ran_itself(traced: tuple[Running, Any]) -> None:
    running, memory = traced
    said = running.post(PATH, infer_json(parameters={"prior": True, "refine": True, "timeout": 1}))[1]
    spans(memory)
    running.post(PATH, json.dumps({"parameters": {"refine": said["parameters"]["refine"]}}).encode())
    request, below = spans(memory)
    assert below[0].name == "queue" and below[0].start_time == request.start_time


def test_the_command_sends_them_to_a_collector() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="no opentelemetry exporter")
    got: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words: Any) -> None:
            pass

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    server = Process("--port", "0", "--grpc-port", "-1", NAME, "--traces", url)
    assert server.ask(infer_json(), {"traceparent": PARENT})[0] == 200
    assert server.end() == 0
    collector.shutdown()
    assert any(bytes.fromhex(TRACE) in each and b"stage 3" in each for each in got)


def test_without_opentelemetry_the_command_says_what_to_install() -> None:
    hidden = "import sys; sys.modules['opentelemetry'] = None; from nestling.__main__ import entry; entry()"
    words = ["serve", NAME, "--port", "0", "--grpc-port", "-1", "--traces", "http://127.0.0.1:9/v1/traces"]
    done = subprocess.run([sys.executable, "-c", hidden, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and re.search(r"pip install 'nestling\[serve,traces\]'", done.stderr), done.stderr[
        -500:
    ]
