"""Replicas on Ray Serve under open-loop load: what they answer, what an answer costs, and what a replica that is killed costs.

    python benchmarks/replicas.py --json results/replicas-cpu.json
    python benchmarks/replicas.py --proxy haproxy --json results/replicas-cpu.json

Servers are `nestling serve --on ray` with one and two replicas behind Ray's proxies or HAProxy; clients, proxy and replicas
share this machine. Arrivals are Poisson, latency counts from the time at which a request was meant to be sent. Processor time is
that of the proxy's and the replicas' processes. killed: two replicas, one killed with -9 half-way; clients try again where the
proxy says 5xx or closes. In flight there: whose first try failed.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from load import Clients, Sent, add_run
from serve import NAMES
from serve_figures import summary

from nestling.export.spec import Spec
from nestling.runs.open import stored_sample
from nestling.runs.provenance import provenance
from nestling.runtime.runtime import Runtime

TRIES = 8
KINDS = {  # as Ray names its processes
    "replicas": (b"ray::ServeReplica:nestling",),
    "proxy": (b"ray::ProxyActor", b"ray::HAProxyManager"),
}
HAPROXY = b"/haproxy\0-db\0"


def processes(kind: str, server: int) -> list[int]:
    """Of a kind, those that a server's process has begun, itself or through others: several may serve on one machine."""
    parents, found = dict[int, int](), []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
    for pid in parents:
        above = pid
        while above in parents and above != server:
            above = parents[above]
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if above == server and (line.startswith(KINDS[kind]) or (kind == "proxy" and HAPROXY in line)):
                found.append(pid)
    return sorted(found)


def cpu(pids: Sequence[int]) -> float:
    """Seconds of processor time that processes have taken."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


class OnRay:
    """`nestling serve --on ray` in a process of its own."""

    def __init__(self, replicas: int, proxy: str, most: int = 0) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        words = ["serve", f"net={NAMES['nest']}", "--on", "ray", "--replicas", str(replicas), "--port", str(self.port)]
        words += ["--most-replicas", str(most), "--proxy", proxy]
        self.process = subprocess.Popen([sys.executable, "-m", "nestling", *words], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith("{") and json.loads(line)["event"] == "ready":
                return
        raise SystemExit("the server ended before it was ready")

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=120)


class Trying(Clients):
    """Clients that try again, as ordinary ones do."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.tries: list[int] = []

    async def note(self, image: int, due: float) -> None:
        found = Sent(image, due, due, 0, b"")
        for tries in range(1, TRIES + 1):
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                found = await self.ask(image, due)
            if found.status in (200, 504):
                break
            await asyncio.sleep(0.02 * tries)
        self.sent.append(found)
        self.tries.append(tries)


def measure(
    replicas: int, proxy: str, rates: Sequence[float], seconds: float, deadline: float, sample: Any
) -> dict[str, Any]:
    """Rates one after the other, then as many requests as a few clients get answered in full."""
    images, labels, errors = sample
    server, found = OnRay(replicas, proxy), dict[str, Any]()
    pids = {kind: processes(kind, server.process.pid) for kind in KINDS}
    assert len(pids["replicas"]) == replicas and pids["proxy"]

    async def loads() -> None:
        clients = Trying(server.port, images, deadline, "UINT8")
        await clients.open_loop(min(rates), 2.0, seed=9)  # warm
        for rate in rates:
            before, own = {kind: cpu(each) for kind, each in pids.items()}, time.process_time()
            sent = await clients.open_loop(rate, seconds, seed=int(rate))
            row = summary(sent, deadline, labels, errors, seconds)
            row["cpu_ms"] = {kind: 1e3 * (cpu(each) - before[kind]) / len(sent) for kind, each in pids.items()}
            row["cpu_ms"]["client"] = 1e3 * (time.process_time() - own) / len(sent)
            found[str(rate)] = row
            print(replicas, "replicas", rate, json.dumps(row), flush=True)
        whole = Trying(server.port, images, None, "UINT8")
        before = {kind: cpu(each) for kind, each in pids.items()}
        found["saturated"] = {"rate": await whole.saturate(seconds, 4 * replicas)}
        count = found["saturated"]["rate"] * seconds
        found["saturated"]["cpu_ms"] = {kind: 1e3 * (cpu(each) - before[kind]) / count for kind, each in pids.items()}
        print(replicas, "replicas, all stages", json.dumps(found["saturated"]), flush=True)

    try:
        asyncio.run(loads())
    finally:
        server.end()
    return found


def killed(proxy: str, rate: float, seconds: float, deadline: float, sample: Any) -> dict[str, Any]:
    """Two replicas; one is killed half-way."""
    images, labels, errors = sample
    server = OnRay(2, proxy)
    victim = processes("replicas", server.process.pid)[0]
    clients = Trying(server.port, images, deadline, "UINT8")

    async def load() -> float:
        await clients.open_loop(rate, 2.0, seed=9)
        clients.tries.clear()
        loop, at = asyncio.get_running_loop(), list[float]()

        def kill() -> None:
            at.append(time.perf_counter())
            os.kill(victim, signal.SIGKILL)

        loop.call_later(seconds / 2, kill)
        await clients.open_loop(rate, seconds, seed=1)
        return at[0]

    try:
        when = asyncio.run(load())
        back = processes("replicas", server.process.pid)
    finally:
        server.end()
    assert victim not in back, "it was not killed"
    rows = list(zip(clients.sent, clients.tries, strict=True))
    once = [each for each, tries in rows if tries == 1]
    late = [each for each in once if each.came - each.due > deadline]
    found = {
        "lost": sum(each.status not in (200, 504) for each, _ in rows),
        "tried_again": sum(tries > 1 for _, tries in rows),
        "late_but_those_in_flight_there": len(late),
        "late_before_the_kill": sum(each.due < when for each in late),
        "late_sent_s_after_the_kill_and_ms": [
            (round(each.due - when, 3), round(1e3 * (each.came - each.due), 1)) for each in late
        ],
        "latest_ms": 1e3 * max(each.came - each.due for each in once),
        "no_stage": sum(each.status == 504 for each in once),
        "replicas_at_the_end": len(back),
        **summary(clients.sent, deadline, labels, errors, seconds),
    }
    print("killed", json.dumps(found), flush=True)
    return found


def scaled(proxy: str, rate: float, seconds: float, deadline: float, sample: Any) -> dict[str, Any]:
    """One replica, and too much for it: how long until there are two, and what that changes."""
    images, labels, errors = sample
    server, when = OnRay(1, proxy, 2), list[float]()
    clients = Clients(server.port, images, deadline, "UINT8")

    async def load() -> tuple[list[Sent], list[Sent]]:
        async def look() -> None:
            began = time.perf_counter()
            while len(processes("replicas", server.process.pid)) < 2:
                await asyncio.sleep(0.5)
            when.append(time.perf_counter() - began)

        looking = asyncio.ensure_future(look())
        first = await clients.open_loop(rate, seconds, seed=1)
        while not looking.done():
            await clients.open_loop(rate, 2.0, seed=2)
        await clients.open_loop(rate, seconds, seed=3)  # it starts
        return first, await clients.open_loop(rate, seconds, seed=1)

    try:
        first, then = asyncio.run(asyncio.wait_for(load(), 120))
    finally:
        server.end()
    both = {name: summary(sent, deadline, labels, errors, seconds) for name, sent in (("one", first), ("two", then))}
    found = {"seconds_until_a_second_began": when[0], **both}
    print("scaled", json.dumps(found), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--deadline", type=float, default=0.05)
    parser.add_argument("--rates", type=float, nargs="+", default=[25.0, 50.0, 100.0, 200.0])
    parser.add_argument("--replicas", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--kill-rate", type=float, default=40.0, help="0: nothing is killed")
    parser.add_argument("--kill-deadline", type=float, default=0.2)
    parser.add_argument("--kills", type=int, default=3, help="how often, each with a server of its own")
    parser.add_argument("--proxy", choices=["ray", "haproxy"], default="ray")
    parser.add_argument(
        "--scale-rate", type=float, default=150.0, help="0: nothing is added; behind HAProxy one replica answers 150"
    )
    parser.add_argument("--json", default="", help="a file to which the run is added")
    options = parser.parse_args()
    stored, runtime = stored_sample("cifar10"), Runtime(NAMES["nest"], "cpu")
    spec: Spec = runtime.spec
    runtime.close()
    sample = (np.asarray(stored["images"]), [int(label) for label in stored["labels"]], spec.errors)
    asked = {key: value for key, value in vars(options).items() if key != "json"}
    found: dict[str, Any] = {"conditions": {**asked, "load_average_before": os.getloadavg()[0]}}
    found["replicas"] = {
        str(count): measure(count, options.proxy, options.rates, options.seconds, options.deadline, sample)
        for count in options.replicas
    }
    if options.kill_rate:
        found["killed"] = [
            killed(options.proxy, options.kill_rate, 3 * options.seconds, options.kill_deadline, sample)
            for _ in range(options.kills)
        ]
    if options.scale_rate:
        found["scaled"] = scaled(options.proxy, options.scale_rate, options.seconds, options.deadline, sample)
    found["provenance"] = provenance(" ".join(sys.argv), "cpu", time.time)
    if options.json:
        add_run(Path(options.json), found)


if __name__ == "__main__":
    main()
