"""The server under load: how requests are counted, and that clients and server of the benchmark understand each other."""

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("uvicorn")
sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import serve


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
    found = serve.summary(sent, 0.02, [7], (0.1, 0.08, 0.05), True, 2.0)
    assert found["stages"] == [0.4, 0.2, 0.2, 0.2] and found["late"] == 0.2 and found["other_errors"] == 1
    assert found["right_on_time"] == 0.2 and found["goodput"] == 0.5 and found["ms"]["max"] == 30


def test_networks_that_are_not_trained_count_by_their_known_errors() -> None:
    sent = [serve.Sent(0, 0.0, 0.01, 200, reply(1, 0, name)) for name in ("1", "2", "3")]
    found = serve.summary(sent, 0.02, [7], (0.1, 0.08, 0.05), False, 1.0)
    assert found["stages"] == [0, 0.3333, 0.3333, 0.3333] and found["goodput"] == pytest.approx(2.77)
    alone = serve.summary([serve.Sent(0, 0.0, 0.01, 200, reply(1, 0))], 0.02, [7], (0.05,), False, 1.0)
    assert alone["stages"] == [0, 1] and alone["goodput"] == pytest.approx(0.95)


def test_clients_are_answered_by_the_servers_process() -> None:
    server = serve.Served("nest", 5.0)
    images = np.random.default_rng(0).integers(0, 256, (3, 3, 32, 32), dtype=np.uint8)
    sent = asyncio.run(serve.Clients(server.port, images, 5.0, "UINT8").open_loop(20, 1.0, seed=0))
    server.end()
    assert len(sent) > 5 and {each.status for each in sent} == {200}
