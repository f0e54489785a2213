"""Very many requests to one server: its memory, threads and files are the same at the end as near the beginning.

    python benchmarks/soak.py                                        (a million; an hour or two on two cores)
    python benchmarks/soak.py --requests 100000 --json results/soak-cpu.json

The server is `nestling serve` in a process of its own. Requests come from a few clients, one after another, in turn as `KINDS`
says: answered by a deadline, streamed, refined, refused, and left by their client. A sample is taken every hundredth of the way.
"""

import argparse
import asyncio
import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from load import Clients

from nestling.runs.open import stored_sample
from nestling.runs.provenance import provenance
from nestling.serve import timers

NAME = "width-resnet42-cifar10"
KINDS = {"plain": 0.80, "stream": 0.06, "refine": 0.06, "refused": 0.06, "left": 0.02}  # shares of all requests
DEADLINE = 0.02
SAMPLES = 100
MORE = 8 * 2**20  # bytes by which the second half may be above the first: pages that the allocator had not touched


class Soaked(Clients):
    """Clients that do what the kinds say."""

    def __init__(self, port: int, images: np.ndarray) -> None:
        super().__init__(port, images, DEADLINE, "UINT8")
        self.found: Counter[str] = Counter()

    async def one(self, kind: str, image: int) -> None:
        if kind == "plain":
            self.found[f"plain {(await self.ask(image, 0.0)).status}"] += 1
        elif kind == "left":
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(self.requests[image])
            await writer.drain()
            writer.close()
            self.found["left"] += 1
        elif kind == "refused":
            status, _ = await self.post(
                {"inputs": [{"name": "input", "shape": [1], "datatype": "FP32", "data": [image]}]}
            )
            self.found[f"refused {status}"] += 1
        elif kind == "stream":
            status, said = await self.post(asked(), "Accept: text/event-stream\r\n")
            self.found[f"stream {status}"] += b"data: " in said
        else:
            status, said = await self.post(asked(refine=True, prior=True, timeout=1))
            token = json.loads(said)["parameters"].get("refine")
            status, _ = await self.post({"parameters": {"refine": token}})
            self.found[f"refine {status}"] += 1

    async def post(self, asked: dict[str, Any], more: str = "") -> tuple[int, bytes]:
        """On a connection of its own, until the server closes it."""
        body = json.dumps(asked).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"POST /v2/models/net/infer HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{more}Content-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        said = await reader.read()
        writer.close()
        return int(said[9:12]), said.partition(b"\r\n\r\n")[2]


def asked(**parameters: Any) -> dict[str, Any]:
    tensor = {"name": "input", "shape": [1, 3, 32, 32], "datatype": "UINT8", "data": [7] * 3072}
    return {"inputs": [tensor], "parameters": parameters}


def sizes(pid: int) -> dict[str, int]:
    """What a process holds now."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "bytes": 1024 * int(status["VmRSS"].split()[0]),
        "threads": int(status["Threads"]),
        "files": len(list(Path(f"/proc/{pid}/fd").iterdir())),
    }


def flat(samples: list[dict[str, int]]) -> dict[str, bool]:
    """Whether the second half holds no more than the first, which began a tenth of the way on."""
    samples = samples[len(samples) // 10 :]
    first, second = samples[: len(samples) // 2], samples[len(samples) // 2 :]

    def most(what: str, of: list[dict[str, int]]) -> int:
        return max(sample[what] for sample in of)

    allowed = {"bytes": MORE, "threads": 0, "files": 4}  # files: connections that are being made
    return {what: most(what, second) <= most(what, first) + more for what, more in allowed.items()}


async def soak(port: int, pid: int, requests: int, at_a_time: int) -> tuple[list[dict[str, int]], Counter[str]]:
    clients, chance, samples, done = Soaked(port, stored_sample("cifar10")["images"].numpy()), random.Random(0), [], 0

    async def client() -> None:
        nonlocal done
        while done < requests:
            done += 1
            if done % max(1, requests // SAMPLES) == 0:
                samples.append({"requests": done, **sizes(pid)})
                print(json.dumps(samples[-1]), flush=True)
            kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
            await clients.one(kind, chance.randrange(len(clients.requests)))

    await asyncio.gather(*(client() for _ in range(at_a_time)))
    clients.close()
    return samples, clients.found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--clients", type=int, default=4, help="that ask at a time")
    parser.add_argument("--json", default="", help="write the samples here")
    options = parser.parse_args()
    command = [sys.executable, "-m", "nestling", "serve", f"net={NAME}", "--port", "0", "--grpc-port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        ready = json.loads(server.stderr.readline())
        began = time.monotonic()
        port = int(ready["http"].rpartition(":")[2])
        samples, found = timers.run(soak(port, server.pid, options.requests, options.clients))
        took = time.monotonic() - began
        server.send_signal(signal.SIGTERM)
        ended = server.wait(30)
    finally:
        with contextlib.suppress(OSError):
            server.kill()
    report = {"requests": options.requests, "seconds": round(took), "flat": flat(samples), "ended": ended,
              "found": dict(sorted(found.items())), "samples": samples}  # fmt: skip
    print(json.dumps({**report, "samples": len(samples)}, indent=1))
    if options.json:
        report["provenance"] = provenance(" ".join(sys.argv), "cpu", time.time)
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(ended or not all(report["flat"].values()))


if __name__ == "__main__":
    main()
