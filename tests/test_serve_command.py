"""`nestling serve` as people run it: ready soon, several networks, TLS, a token, opened anew, ended, killed: nothing is lost."""

import contextlib
import http.client
import json
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_serve_clients import NAME, infer_json
from test_sweep import wait_until

from nestling.runs.folder import SHIPPED

pytest.importorskip("uvicorn")


class Process:
    """A server in a process of its own, and what it said."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-m", "nestling", "serve", *words]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.said: list[dict[str, Any]] = []
        self.reading = threading.Thread(target=self.read, daemon=True)
        self.reading.start()
        self.ready = self.event("ready")
        self.address = self.ready["http"].split("//")[1]

    def read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(json.loads(line) if line.startswith("{") else {"event": "text", "text": line})

    def event(self, name: str, seconds: float = 120) -> dict[str, Any]:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for each in self.said:
                if each.get("event") == name:
                    return each
            if self.process.poll() is not None and not self.reading.is_alive():
                break
            time.sleep(0.01)
        raise AssertionError(f"it never said {name}: {self.said}")

    def ask(self, body: bytes, headers: dict[str, str] | None = None, name: str = NAME) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self.address, timeout=20)
        connection.request("POST", f"/v2/models/{name}/infer", body, headers or {})
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    made: list[Process] = []

    def begin(*words: str) -> Process:
        made.append(Process("--port", "0", "--grpc-port", "0", *words))
        return made[-1]

    yield begin
    for each in made:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()


def test_it_is_ready_soon_answers_and_ends_by_sigterm(start: Callable[..., Process]) -> None:
    server = start(NAME, f"second={SHIPPED / 'depth-sparse98-cifar10'}", "--log-requests")
    assert server.ready["networks"] == [NAME, "second"] and server.ready["http"].startswith("http://127.0.0.1:")
    assert server.ready["cpu_seconds"] < 10, "a machine that does nothing else is ready in under 5 s"
    for name, stages in ((NAME, 3), ("second", 4)):
        status, said = server.ask(infer_json(), name=name)
        assert status == 200 and said["parameters"]["stage"] == stages
    assert server.end() == 0
    assert server.event("ended") and sum(each.get("status") == 200 for each in server.said) == 2


def test_curls_lines_of_the_documentation_work(start: Callable[..., Process], tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    pages = [(root / name).read_text(encoding="utf-8") for name in ("README.md", "docs/serving.md")]
    lines = [line for page in pages for line in re.findall(r"^\$ (curl .*)$", page, flags=re.MULTILINE)]
    assert len(lines) == 5
    Image.fromarray(np.full((64, 48, 3), 200, np.uint8)).save(tmp_path / "photo.jpg")
    server = start(NAME)
    for line in lines:
        words = shlex.split(
            line.replace("localhost:8000", server.address)
            .replace("Deadline-Ms: 20", "Deadline-Ms: 9000")
            .replace("timeout=20000", "timeout=9000000")
        )
        done = subprocess.run([*words, "--fail-with-body"], capture_output=True, text=True, cwd=tmp_path, timeout=30)
        assert done.returncode == 0, done.stdout
        assert done.stdout.count("data: ") == (3 if "event-stream" in line else 0)


def test_tls_and_a_token(start: Callable[..., Process], tmp_path: Path) -> None:
    key, certificate, token = tmp_path / "key.pem", tmp_path / "cert.pem", tmp_path / "token"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
            "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]  # fmt: skip
    subprocess.run(made, check=True, capture_output=True)
    token.write_text("secret\n")
    server = start(NAME, "--certificate", str(certificate), "--key", str(key), "--token-file", str(token))
    context = ssl.create_default_context(cafile=str(certificate))
    for header, expected in (({}, 401), ({"Authorization": "Bearer secret"}, 200)):
        connection = http.client.HTTPSConnection(server.address, timeout=20, context=context)
        connection.request("POST", f"/v2/models/{NAME}/infer", infer_json(), header)
        assert connection.getresponse().status == expected
    import tritonclient.grpc as triton

    with triton.InferenceServerClient(server.ready["grpc"], ssl=True, root_certificates=str(certificate)) as client:
        assert client.is_server_live(headers={"authorization": "Bearer secret"})


def test_a_folder_that_changes_is_opened_anew_and_a_spoilt_one_is_not(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    run = tmp_path / "mine"
    shutil.copytree(SHIPPED / NAME, run)
    server = start(f"net={run}", "--reload", "0.1")
    before = server.ask(infer_json(), name="net")[1]["outputs"][0]["data"]
    weights = run / "weights.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    assert server.event("not reloaded")["network"] == "net"
    assert server.ask(infer_json(), name="net")[0] == 200, "the old one goes on"
    results = run / "results.json"
    right = results.read_text(encoding="utf-8")
    results.write_text('{"classes": 3, "prior": "x", "stages": [1]}', encoding="utf-8")
    weights.write_bytes(whole)
    wait_until(lambda: [each["event"] for each in server.said].count("not reloaded") > 1, server.process)
    results.write_text(right, encoding="utf-8")
    server.event("reloaded")
    # the last stage at once, or after the others: the same but for rounding
    assert server.ask(infer_json(), name="net")[1]["outputs"][0]["data"] == pytest.approx(before, abs=1e-4)


def test_killed_and_restarted_clients_that_ask_again_lose_nothing(start: Callable[..., Process]) -> None:
    first = start(NAME)
    port = first.address.split(":")[1]
    answered: list[int] = []

    def client(count: int) -> None:
        for _ in range(count):
            until = time.monotonic() + 60
            while time.monotonic() < until:
                try:
                    connection = http.client.HTTPConnection(f"127.0.0.1:{port}", timeout=10)
                    connection.request("POST", f"/v2/models/{NAME}/infer", infer_json())
                    answered.append(connection.getresponse().status)
                    break
                except (OSError, http.client.HTTPException):
                    time.sleep(0.1)

    clients = [threading.Thread(target=client, args=(30,)) for _ in range(3)]
    for each in clients:
        each.start()
    wait_until(lambda: len(answered) >= 10, first.process)
    first.process.kill()
    first.process.wait()
    start(NAME, "--port", port)
    for each in clients:
        each.join(90)
    assert answered == [200] * 90


def test_sigterm_under_load_answers_everybody_and_ends_within_the_longest_deadline(
    start: Callable[..., Process],
) -> None:
    server = start(NAME, "--longest", "3")
    answered: list[int] = []

    def client() -> None:
        with contextlib.suppress(OSError):  # the port is closed: nothing was asked
            while True:
                connection = http.client.HTTPConnection(server.address, timeout=30)
                connection.connect()
                connection.request("POST", f"/v2/models/{NAME}/infer", infer_json())
                answered.append(connection.getresponse().status)

    clients = [threading.Thread(target=client) for _ in range(8)]
    for each in clients:
        each.start()
    wait_until(lambda: len(answered) >= 20, server.process)
    assert server.end() == 0
    for each in clients:
        each.join(60)
    assert set(answered) <= {200, 503, 504}, "answered, or told to ask another one"
    assert server.event("ended")["time"] - server.event("ending")["time"] < 3 + 2


def slow_reader(address: str) -> socket.socket:
    """Asks for very many streams on one connection, and reads nothing."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((address.split(":")[0], int(address.split(":")[1])))
    connection.sendall(
        (request_head(f"Accept: text/event-stream\r\nContent-Length: {len(infer_json())}") + infer_json()) * 20
    )
    return connection


def request_head(more: str) -> bytes:
    return f"POST /v2/models/{NAME}/infer HTTP/1.1\r\nHost: x\r\n{more}\r\n\r\n".encode()


def test_sigterm_ends_within_the_longest_deadline_whoever_is_slow(start: Callable[..., Process]) -> None:
    """Half a head, half a body, streams that nobody reads, gRPC streams that are open, idle and not read, and load."""
    import grpc
    from test_serve_memory import message

    server = start(NAME, "--longest", "3")
    host, port = server.address.split(":")
    half_sent = [request_head("Content-Length: 9000") + b"{", request_head("Content-Length: 9000")[:40]]
    slow = [slow_reader(server.address) for _ in range(3)]
    for sent in half_sent:
        slow.append(socket.create_connection((host, int(port))))
        slow[-1].sendall(sent)
    asking = threading.Event()

    def idle() -> Iterator[bytes]:
        yield message()
        asking.wait(60)

    channel = grpc.insecure_channel(server.ready["grpc"])
    stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
    calls = [stream(idle()), stream(message() for _ in range(200))]
    next(calls[0])
    answered: list[int] = []

    def client() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            while True:
                answered.append(server.ask(infer_json())[0])

    clients = [threading.Thread(target=client) for _ in range(3)]
    for each in clients:
        each.start()
    wait_until(lambda: len(answered) >= 5, server.process)
    assert server.end() == 0
    asking.set()
    for each in clients:
        each.join(60)
    for connection in slow:
        connection.close()
    channel.close()
    assert set(answered) <= {200, 503, 504} and not any(each["event"] == "forced" for each in server.said)
    assert server.event("ended")["time"] - server.event("ending")["time"] < 3 + 2


def test_nobody_reads_what_it_says_and_it_answers_and_ends() -> None:
    command = [sys.executable, "-m", "nestling", "serve", NAME, "--port", "0", "--grpc-port", "-1", "--log-requests"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stderr is not None
        address = json.loads(process.stderr.readline())["http"].split("//")[1]
        connection = http.client.HTTPConnection(address, timeout=20)
        for _ in range(1000):  # 150 bytes each; a pipe holds 64 KiB
            connection.request("POST", f"/v2/models/{NAME}/infer", infer_json(parameters={"timeout": 1}))
            reply = connection.getresponse()
            assert reply.read() and reply.status in (200, 504)
        process.terminate()
        assert process.wait(30) == 0


HANGS = """
import sys, time, asyncio
from nestling.serve.ending import LastResort, told_to_end
with LastResort(0.2, lambda event: print(event["event"], flush=True)) as last, told_to_end(last.begin):
    async def hang():
        print("ready", flush=True)
        time.sleep(60)
    asyncio.run(hang())
"""


def test_a_loop_that_hangs_is_ended_by_sigterm() -> None:
    with subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(20) == 1 and process.stdout.read() == "forced\n"


@pytest.mark.parametrize(
    "words",
    [
        ("nobody",),
        (NAME, "--certificate", "none.pem"),
        (NAME, NAME),
        ("=x",),
        (NAME, "--room", "0"),
        (NAME, "--token-file", "none"),
        (NAME, "--token-file", "bytes"),
        (NAME, "--port", "99999"),
    ],
)
def test_what_cannot_be_served_is_refused_in_words(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\x89")
    command = [sys.executable, "-m", "nestling", "serve", "--port", "0", "--grpc-port", "-1", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("nestling: ") and "Traceback" not in done.stderr
    assert "unexpected" not in done.stderr and "nestling: [Errno" not in done.stderr


def test_a_port_that_is_taken_is_named(start: Callable[..., Process]) -> None:
    port = start(NAME).address.split(":")[1]
    command = [sys.executable, "-m", "nestling", "serve", NAME, "--port", port, "--grpc-port", "-1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and f"127.0.0.1:{port}; is the port taken?" in done.stderr
