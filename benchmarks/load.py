"""Clients of a server: binary tensors over HTTP/1.1 on kept connections, in an open loop or one after another.

Open loop: Poisson arrivals, whatever the replies do; `due` is when a request was meant to be sent, `went` when it was. In: a port
and images. Out: what was sent and what came, for serve.py and soak.py to count.
"""

import asyncio
import contextlib
import gc
import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nestling.runtime import prompt

TICK = os.sysconf("SC_CLK_TCK")


@dataclass
class Sent:
    """One request: which image, when it was meant to be sent and when its reply was here, the reply, and when it was sent."""

    image: int
    due: float
    came: float
    status: int
    body: bytes
    went: float = 0.0


def request(image: np.ndarray, deadline: float | None, dtype: str) -> bytes:
    """POST /v2/models/net/infer, whole."""
    raw = image.tobytes()
    sizes = {"binary_data_size": len(raw)}
    tensor = {"name": "input", "shape": [1, *image.shape], "datatype": dtype, "parameters": sizes}
    asked: dict[str, Any] = {"inputs": [tensor], "outputs": [{"name": "label"}]}
    if deadline is not None:
        asked["parameters"] = {"timeout": int(1e6 * deadline)}
    text = json.dumps(asked).encode()
    head = f"POST /v2/models/net/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text) + len(raw)}\r\n"
    return f"{head}Inference-Header-Content-Length: {len(text)}\r\n\r\n".encode() + text + raw


async def read_body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
    if length:
        return await reader.readexactly(int(length))
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):  # chunks, as Ray Serve refuses
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
    return body


@contextlib.contextmanager
def no_pauses() -> Iterator[None]:
    """Garbage is collected before and after, not meanwhile: with torch imported, or much that a benchmark keeps, that holds
    everybody up; clients would send nothing, and then everything at once."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Clients:
    """Keep-alive connections, as many as it takes."""

    def __init__(self, port: int, images: np.ndarray, deadline: float | None, dtype: str) -> None:
        self.port, self.free, self.sent = port, list[tuple[Any, Any]](), list[Sent]()
        self.requests = [request(image, deadline, dtype) for image in images]

    async def ask(self, image: int, due: float) -> Sent:
        kept = bool(self.free)
        reader, writer = self.free.pop() if kept else await asyncio.open_connection("127.0.0.1", self.port)
        went = time.perf_counter()
        try:
            writer.write(self.requests[image])
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            body = await read_body(reader, head)
        except (asyncio.IncompleteReadError, OSError):
            writer.close()
            if not kept:
                raise
            return await self.ask(image, due)  # the server had closed a connection on which nothing came for a while
        found = Sent(image, due, time.perf_counter(), int(head[9:12]), body, went)
        if b"connection: close" in head:
            writer.close()
        else:
            self.free.append((reader, writer))
        return found

    async def note(self, image: int, due: float) -> None:
        self.sent.append(await self.ask(image, due))

    async def open_loop(self, rate: float, seconds: float, seed: int) -> list[Sent]:
        """Poisson arrivals, whatever the replies do."""
        with no_pauses():
            return await self.arrivals(rate, seconds, seed)

    async def arrivals(self, rate: float, seconds: float, seed: int) -> list[Sent]:
        chance, tasks, self.sent = random.Random(seed), set[asyncio.Task[None]](), []
        prompt.Promptly().__enter__()  # for good: who measures must not be late himself
        due = begin = time.perf_counter()
        while (due := due + chance.expovariate(rate)) < begin + seconds:
            if (left := due - time.perf_counter()) > 0:
                await asyncio.sleep(left)
            task = asyncio.ensure_future(self.note(chance.randrange(len(self.requests)), due))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.wait_for(asyncio.gather(*tasks), 30)
        return self.sent

    async def saturate(self, seconds: float, at_a_time: int = 4) -> float:
        """Requests a second that a few clients get answered who ask again at once."""
        end = time.perf_counter() + seconds

        async def client(number: int) -> int:
            count = 0
            while time.perf_counter() < end:
                await self.ask((number + count) % len(self.requests), 0.0)
                count += 1
            return count

        return sum(await asyncio.gather(*(client(number) for number in range(at_a_time)))) / seconds

    def close(self) -> None:
        for _, writer in self.free:
            writer.close()
        self.free.clear()


def cpu_seconds(root: int) -> float:
    """Processor time that a process and those it has started have taken."""
    parents, taken = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            parents[int(folder.name)] = int(fields[1])
            taken[int(folder.name)] = (int(fields[11]) + int(fields[12])) / TICK
    family, total = {root}, 0.0
    for number in sorted(
        taken
    ):  # children have larger numbers than their parents, but for the few after a turn of the counter
        if number in family or parents[number] in family:
            family.add(number)
            total += taken[number]
    return total


def add_run(file: Path, found: dict[str, Any]) -> None:
    """One more run in a file of results."""
    runs = json.loads(file.read_text())["runs"] if file.is_file() else []
    file.write_text(json.dumps({"runs": [*runs, found]}, indent=1) + "\n")
