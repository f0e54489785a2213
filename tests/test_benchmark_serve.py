"""The server under load: how requests are counted, and that clients and server of the benchmark understand each other."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("uvicorn")
sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import serve
from load import cpu_seconds, read_body


def reply(stage: int, label: int, name: str = "net") -> bytes:
    said = {"model_name": name, "parameters": {"stage": stage}, "outputs": [{"name": "label", "data": [label]}]}
    return json.dumps(said).encode()


def test_right_and_in_time_is_what_counts() -> None:
    sent = [
        serve.Sent(0, 0.0, 0.010, 200, reply(1, 7)),  # right
        serve.Sent(0, 0.0, 0.010, 200, reply(2, 6)),  # wrong
        serve.Sent(0, 0.0, 0.030, 200, reply(3, 7)),  # right, but late
        serve.Sent(0, 0.0, 0.010, 504, b'{"error": "no stage"}'),
        serve.Sent(0, 0.0, 0.010, 500, b""),
    ]
    held_up = serve.summary(
        [serve.Sent(0, 0.0, 0.030, 200, reply(3, 7), went=0.015)], 0.02, [7], (0.1, 0.08, 0.05), True, 1
    )
    assert held_up["late"] == held_up["late_by_sender"] == 1 and held_up["sent_late_ms"]["p50"] == 15
    found = serve.summary(sent, 0.02, [7], (0.1, 0.08, 0.05), True, 2.0)
    assert found["stages"] == [0.4, 0.2, 0.2, 0.2] and found["late"] == 0.2 and found["other_errors"] == 1
    assert found["late_by_sender"] == 0 and found["sent_late_ms"]["max"] == 0
    assert found["right_on_time"] == 0.2 and found["goodput"] == 0.5 and found["ms"]["max"] == 30


def test_networks_that_are_not_trained_count_by_their_known_errors() -> None:
    sent = [serve.Sent(0, 0.0, 0.01, 200, reply(1, 0, name)) for name in ("1", "2", "3")]
    found = serve.summary(sent, 0.02, [7], (0.1, 0.08, 0.05), False, 1.0)
    assert found["stages"] == [0, 0.3333, 0.3333, 0.3333] and found["goodput"] == pytest.approx(2.77)
    alone = serve.summary([serve.Sent(0, 0.0, 0.01, 200, reply(1, 0))], 0.02, [7], (0.05,), False, 1.0)
    assert alone["stages"] == [0, 1] and alone["goodput"] == pytest.approx(0.95)


@pytest.mark.parametrize("contender", ["nest", "apart"])
def test_clients_are_answered_by_the_servers_process(contender: str) -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 3, 32, 32), dtype=np.uint8)
    with serve.Served(contender, 5.0) as server:
        sent = asyncio.run(serve.Clients(server.port, images, 5.0, "UINT8").open_loop(20, 1.0, seed=0))
    assert len(sent) > 5 and {each.status for each in sent} == {200}


def test_bodies_of_known_length_and_in_chunks() -> None:
    async def read(head: bytes, text: bytes) -> bytes:
        reader = asyncio.StreamReader()
        reader.feed_data(text)
        return await read_body(reader, head)

    assert asyncio.run(read(b"content-length: 3\r\n", b"abcd")) == b"abc"
    assert (
        asyncio.run(read(b"transfer-encoding: chunked\r\n", b"3\r\nabc\r\na\r\n0123456789\r\n0\r\n\r\n"))
        == b"abc0123456789"
    )


def test_processor_time_of_a_process_and_its_children() -> None:
    before = cpu_seconds(os.getpid())
    burn = "import time; t = time.process_time()\nwhile time.process_time() < t + 0.5: pass\nprint('done', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()
        assert cpu_seconds(os.getpid()) - before > 0.4
        child.stdin.write(b"\n")
