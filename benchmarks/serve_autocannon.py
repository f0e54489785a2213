"""A second opinion on benchmarks/serve.py: autocannon (npm) at a constant rate, and in turn our own clients, against one server.

    npm install autocannon
    python benchmarks/serve_autocannon.py --autocannon node_modules/.bin/autocannon --json results/serve-autocannon-cpu.json

Both send the same request and count from when it was meant to be sent. Ours come at Poisson times. autocannon's -R is a quota:
every second its few connections send theirs as fast as replies come, all beginning together, and pause. It reads bodies as text:
so the image's bytes are below 128.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from load import Clients, request
from serve import Served
from serve_figures import quantiles

from nestling.runs.open import stored_sample
from nestling.runs.provenance import provenance
from nestling.serve import timers

RATES = (65, 130, 260, 520)  # a second: 0.5 to 4 times what the full network alone answers
CONNECTIONS = 8  # as many requests as are open at a time where 520 a second take 16 ms each
LENGTH = "Inference-Header-Content-Length"


def theirs(command: str, port: int, image: np.ndarray, deadline: float, rate: float, seconds: int) -> dict[str, Any]:
    """What autocannon says."""
    head, _, body = request(image, deadline, "UINT8").partition(b"\r\n\r\n")
    length = head.decode().partition(f"{LENGTH}: ")[2]
    with tempfile.NamedTemporaryFile() as file:
        file.write(body)
        file.flush()
        words = [*shlex.split(command), "-R", str(rate), "-c", str(CONNECTIONS), "-d", str(seconds), "-m", "POST"]
        words += ["-i", file.name, "-H", f"{LENGTH}={length}", "-j", f"http://127.0.0.1:{port}/v2/models/net/infer"]
        said = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    statuses = {code: each["count"] for code, each in said["statusCodeStats"].items()}
    times = {name: said["latency"][name] for name in ("p50", "p97_5", "p99", "max")}
    return {"n": said["requests"]["total"], "statuses": statuses, "errors": said["errors"], "ms": times}


async def ours(port: int, image: np.ndarray, deadline: float, rate: float, seconds: float) -> dict[str, Any]:
    clients = Clients(port, image[None], deadline, "UINT8")
    sent = await clients.open_loop(rate, seconds, seed=1)
    clients.close()
    statuses: dict[str, int] = {}
    for each in sent:
        statuses[str(each.status)] = statuses.get(str(each.status), 0) + 1
    late = sum(each.came - each.due > deadline for each in sent) / len(sent)
    return {
        "n": len(sent),
        "statuses": statuses,
        "late": late,
        "ms": quantiles([each.came - each.due for each in sent]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--autocannon", default="npx autocannon", help="the command that runs it")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="requests a second")
    parser.add_argument("--seconds", type=int, default=60, help="for each of the two, at each rate")
    parser.add_argument("--deadline", type=float, default=0.02)
    parser.add_argument("--json", default="", help="write the figures here")
    options = parser.parse_args()
    image, found = stored_sample("cifar10")["images"].numpy()[0] // 2, []
    with Served("nest", options.deadline) as server:
        timers.run(ours(server.port, image, options.deadline, 50, 1.0))  # warm
        for rate in options.rates:
            row = {
                "rate": rate,
                "autocannon": theirs(options.autocannon, server.port, image, options.deadline, rate, options.seconds),
                "ours": timers.run(ours(server.port, image, options.deadline, rate, options.seconds)),
            }
            found.append(row)
            print(json.dumps(row), flush=True)
    if options.json:
        conditions = {"seconds": options.seconds, "deadline": options.deadline, "connections": CONNECTIONS}
        report = {
            "conditions": conditions,
            "rows": found,
            "provenance": provenance(" ".join(sys.argv), "cpu", time.time),
        }
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
