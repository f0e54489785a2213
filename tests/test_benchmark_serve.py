"""The server under load: how requests are counted, and that clients and server of the benchmark understand each other."""

import asyncio
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("uvicorn")
sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import serve
from load import Clients, Sent, cpu_seconds, read_body
from serve_figures import BEGIN, BRIEF, END, LOADS, brief, draw, summary, table, with_table


def reply(stage: int, label: int, name: str = "net") -> bytes:
    said = {"model_name": name, "parameters": {"stage": stage}, "outputs": [{"name": "label", "data": [label]}]}
    return json.dumps(said).encode()


ERRORS = (0.1, 0.08, 0.05)


def test_right_and_in_time_is_what_counts() -> None:
    sent = [
        Sent(0, 0.0, 0.010, 200, reply(1, 7)),  # right, by its label
        Sent(0, 0.0, 0.010, 200, reply(2, 6)),  # wrong
        Sent(0, 0.0, 0.030, 200, reply(3, 7)),  # right, but late
        Sent(0, 0.0, 0.010, 504, b'{"error": "no stage"}'),
        Sent(0, 0.0, 0.010, 500, b""),
    ]
    held_up = summary([Sent(0, 0.0, 0.030, 200, reply(3, 7), went=0.015)], 0.02, [7], ERRORS, 1)
    assert held_up["late"] == held_up["late_by_sender"] == 1 and held_up["sent_late_ms"]["p50"] == 15
    found = summary(sent, 0.02, [7], ERRORS, 2.0)
    assert found["stages"] == [0.4, 0.2, 0.2, 0.2] and found["late"] == 0.2 and found["other_errors"] == 1
    assert found["late_by_sender"] == 0 and found["sent_late_ms"]["max"] == 0
    assert found["right_on_time"] == pytest.approx((0.9 + 0.92) / 5) and found["goodput"] == pytest.approx(0.91)
    assert found["right_by_labels"] == 0.2 and found["ms"]["max"] == 30


def test_networks_that_are_not_trained_count_by_their_known_errors() -> None:
    sent = [Sent(0, 0.0, 0.01, 200, reply(1, 0, name)) for name in ("1", "2", "3")]
    found = summary(sent, 0.02, (), ERRORS, 1.0)
    assert found["stages"] == [0, 0.33333, 0.33333, 0.33333] and found["goodput"] == pytest.approx(2.77)
    alone = summary([Sent(0, 0.0, 0.01, 200, reply(1, 0))], 0.02, (), (0.05,), 1.0)
    assert alone["stages"] == [0, 1] and alone["goodput"] == pytest.approx(0.95) and "right_by_labels" not in alone


def test_the_table_says_who_is_best_and_how_few_got_nothing(tmp_path: Path) -> None:
    def rows(stage: int, late: float) -> dict[str, Any]:
        sent = [Sent(0, 0.0, 0.01 + late, 200, reply(stage, 0))] * 99 + [Sent(0, 0.0, 0.01, 504, b"")]
        row = summary(sent, 0.02, (), ERRORS, 1.0) | {"client_cores": 0.1 * stage}
        return {str(load): row for load in LOADS}

    conditions = {"seconds": 1.0, "deadline": 0.02, "saturation": 130.0}
    run = {"conditions": conditions, "contenders": {"nest": rows(3, 0), "kept": rows(2, 0), "full": rows(1, 0.02)}}
    text = table(run)
    assert text.count("| 0.5x |") == 1 and "| | kept network | 91.1 | 91 | 1 (1) | 0 | 0 / 99 / 0 |" in text
    assert "| 2x | nest | **94.1** |" in text and "| | full net alone | 0.0 | 0 | 1 (1) | 99.0 |" in text
    assert "The clients took 0.10 to 0.30 of a core" in text and "100 to 100 requests" in text
    page = with_table(f"a\n{BEGIN}old\n{END}z\n", run)
    assert page == with_table(page, run) == f"a\n{BEGIN}\n{text}\n\n{END}z\n"
    with pytest.raises(SystemExit, match="no place"):
        with_table("a", run)
    text = brief(run)
    assert "| nest | **94.1** | **94.1** | **94.1** | **94.1** | 1 (1) | 0 | 94 |" in text and "100 to 100" in text
    assert with_table(f"a\n{BRIEF}old\n{END}z\n", run) == f"a\n{BRIEF}\n{brief(run)}\n\n{END}z\n"
    pytest.importorskip("matplotlib")
    draw(run, str(tmp_path / "load.png"))
    assert (tmp_path / "load.png").stat().st_size > 1000


def test_the_page_shows_the_last_run_and_no_figure_copied_by_hand() -> None:
    root = Path(__file__).parent.parent
    run = json.loads((root / "results" / "serve-cpu.json").read_text(encoding="utf-8"))["runs"][-1]
    for name in ("docs/serving.md", "docs/log/serving.md"):
        page = (root / name).read_text(encoding="utf-8")
        assert with_table(page, run) == page, f"run: python benchmarks/serve.py --json ... --table {name}"


@pytest.mark.parametrize("contender", ["nest", "kept", "apart"])
def test_clients_are_answered_by_the_servers_process(contender: str) -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 3, 32, 32), dtype=np.uint8)
    with serve.Served(contender, 5.0) as server:
        sent = asyncio.run(Clients(server.port, images, 5.0, "UINT8").open_loop(20, 1.0, seed=0))
    assert len(sent) > 5 and {each.status for each in sent} == {200}


def test_clients_send_without_pauses_for_garbage() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(gc.isenabled())
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        writer.close()

    async def ask() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        images = np.zeros((1, 1, 2, 2), np.uint8)
        await Clients(server.sockets[0].getsockname()[1], images, 1.0, "UINT8").open_loop(50, 0.2, seed=0)
        server.close()

    seen: list[bool] = []
    asyncio.run(ask())
    assert len(seen) > 2 and not any(seen) and gc.isenabled()


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
