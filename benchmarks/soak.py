"""Very many requests to one server: its memory, threads and files are the same at the end as near the beginning.

    python benchmarks/soak.py --json results/soak-cpu.json          (a million)
    python benchmarks/soak.py --requests 100000
    python benchmarks/soak.py runs/digits --json results/soak-cpu.json     (a run's folder: pixels at random)

The server is `nestling serve` in a process of its own. Requests come from a few clients, one after another, in turn as `KINDS`
says: answered by deadlines that mostly cut stages off, over HTTP and gRPC, as pictures, streamed, refined, refused, and left by
their client. A sample is taken every hundredth of the way.
"""

import argparse
import asyncio
import contextlib
import functools
import io
import json
import math
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from load import Clients, request
from PIL import Image

from nestling.runs.open import resolve, stored_sample
from nestling.runs.provenance import provenance
from nestling.serve import timers
from nestling.serve.messages import CLASSES

NAME = "width-resnet42-cifar10"
KINDS = {
    "plain": 0.72, "grpc": 0.06, "picture": 0.04, "stream": 0.04, "refine": 0.06, "refused": 0.06, "left": 0.02,
}  # fmt: skip  # shares of all requests
DEADLINES = (0.004, 0.006, 0.02)  # seconds: for stage 1, for two stages, for all
INFER = "/inference.GRPCInferenceService/ModelInfer"
REFUSED = b'{"inputs": [{"name": "input", "shape": [1], "datatype": "FP32", "data": [7]}]}'
SAMPLES = 100
MORE = 8 * 2**20  # bytes by which the second half may be above the first: pages that the allocator had not touched


class Soaked(Clients):
    """Clients that do what the kinds say."""

    def __init__(self, port: int, grpc_port: int, images: np.ndarray) -> None:
        super().__init__(port, images, None, "UINT8")
        self.requests = [
            request(image, DEADLINES[number % len(DEADLINES)], "UINT8") for number, image in enumerate(images)
        ]
        self.message, file, self.found = message(images[0]), io.BytesIO(), Counter[str]()
        self.shape = images.shape[1:]
        Image.fromarray(images[0].transpose(1, 2, 0).squeeze()).resize((160, 120)).save(file, "JPEG")
        self.picture, self.channel = file.getvalue(), grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}")
        self.infer = self.channel.unary_unary(INFER)

    async def one(self, kind: str, image: int) -> None:
        self.found[f"{kind} {await getattr(self, f'ask_{kind}')(image)}"] += 1

    async def ask_plain(self, image: int) -> int:
        return (await self.ask(image, 0.0)).status

    async def ask_grpc(self, image: int) -> str:
        try:
            await self.infer(self.message, timeout=DEADLINES[image % len(DEADLINES)])
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"

    async def ask_picture(self, image: int) -> int:
        return (await self.post(self.picture, "Content-Type: image/jpeg\r\nNestling-Deadline-Ms: 20\r\n"))[0]

    async def ask_left(self, image: int) -> str:
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(self.requests[image])
        await writer.drain()
        writer.close()
        return "by its client"

    async def ask_refused(self, image: int) -> int:
        return (await self.post(REFUSED))[0]

    async def ask_stream(self, image: int) -> str:
        status, said = await self.post(asked(self.shape), "Accept: text/event-stream\r\n")
        return f"{status}, {said.count(b'data: ')} stages"

    async def ask_refine(self, image: int) -> int | str:
        _, said = await self.post(asked(self.shape, refine=True, prior=True, timeout=1))
        token = json.loads(said)["parameters"].get("refine")
        if not token:
            return "nothing: final at once"
        return (await self.post(json.dumps({"parameters": {"refine": token}}).encode()))[0]

    async def post(self, body: bytes, more: str = "") -> tuple[int, bytes]:
        """On a connection of its own, until the server closes it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"POST /v2/models/net/infer HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{more}Content-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        said = await reader.read()
        writer.close()
        return int(said[9:12]), said.partition(b"\r\n\r\n")[2]


@functools.cache
def asked(shape: tuple[int, ...], **parameters: Any) -> bytes:
    tensor = {"name": "input", "shape": [1, *shape], "datatype": "UINT8", "data": [7] * math.prod(shape)}
    return json.dumps({"inputs": [tensor], "parameters": parameters}).encode()


def pictures(network: str) -> np.ndarray:
    """Test images of the network that comes with us; for any other, pixels at random."""
    if network == NAME:
        return np.asarray(stored_sample("cifar10")["images"])
    shape = resolve(network).known["shape"]
    return np.random.default_rng(0).integers(0, 256, (64, *shape), dtype=np.uint8)


def message(image: np.ndarray) -> bytes:
    """The same over gRPC."""
    tensor = CLASSES["InferInputTensor"](name="input", datatype="UINT8", shape=[1, *image.shape])
    found = CLASSES["ModelInferRequest"](model_name="net", inputs=[tensor], raw_input_contents=[image.tobytes()])
    return bytes(found.SerializeToString())


def sizes(pid: int) -> dict[str, int]:
    """What a process holds now."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "bytes": 1024 * sum(int(status[name].split()[0]) for name in ("RssAnon", "VmSwap")),  # not pages of files
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


async def soak(
    ports: tuple[int, int], pid: int, images: np.ndarray, requests: int, at_a_time: int
) -> tuple[list[dict[str, int]], Counter[str]]:
    clients, chance, samples, done = Soaked(*ports, images), random.Random(0), [], 0

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
    await clients.channel.close()
    return samples, clients.found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", nargs="?", default=NAME, help="one that comes with us, or a run's folder")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--clients", type=int, default=8, help="that ask at a time")
    parser.add_argument("--json", default="", help="write the samples here")
    options = parser.parse_args()
    images = pictures(options.network)
    command = [sys.executable, "-m", "nestling", "serve", f"net={options.network}", "--port", "0", "--grpc-port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        ready = json.loads(server.stderr.readline())
        began = time.monotonic()
        ports = int(ready["http"].rpartition(":")[2]), int(ready["grpc"].rpartition(":")[2])
        samples, found = timers.run(soak(ports, server.pid, images, options.requests, options.clients))
        took = time.monotonic() - began
        server.send_signal(signal.SIGTERM)
        ended = server.wait(30)
    finally:
        with contextlib.suppress(OSError):
            server.kill()
    speed = {"seconds": round(took), "a_second": round(options.requests / took)}
    report = {"network": options.network, "requests": options.requests, **speed, "flat": flat(samples), "ended": ended,
              "found": dict(sorted(found.items())), "samples": samples}  # fmt: skip
    print(json.dumps({**report, "samples": len(samples)}, indent=1))
    if options.json:
        report["provenance"] = provenance(" ".join(sys.argv), "cpu", time.time)
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(ended or not all(report["flat"].values()))


if __name__ == "__main__":
    main()
