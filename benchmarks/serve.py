"""The server under open-loop load: Poisson arrivals, latency from the time at which a request was meant to be sent.

    python benchmarks/serve.py --seconds 8 --json results/serve-cpu.json
    python benchmarks/serve.py --json results/serve-cpu.json --picture docs/pictures/serve-load.png

Rates are 0.5, 1, 2 and 4 times what the full network alone answers at most behind the same server; deadline 20 ms.
nest: width-resnet42-cifar10. full: the independent network of its last stage's size. chooser: three independent networks, of
which each request gets the largest that is expected in time, by the work that waits. Right: by labels for the nest, for the
others 1 - error of the network that answered. Each server is a process of its own; the clients' process shares the machine.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nestling.nets import build
from nestling.recipes.recipe import NetworkRecipe
from nestling.runs.open import stored_sample
from nestling.runs.provenance import provenance
from nestling.runtime import prompt
from nestling.runtime.runtime import Runtime
from nestling.serve.http import application
from nestling.serve.listen import Place, Sockets
from nestling.serve.model import Model
from nestling.serve.scheduler import CAUTION
from nestling.serve.server import Server
from nestling.serve.service import Service
from nestling.serve.way import Way

NAME = "width-resnet42-cifar10"
ALONE = (0.0899, 0.0625, 0.0499)  # test errors of independent nets, results/cifar10-h200.csv: strategy alone, seed 0
LOADS = (0.5, 1.0, 2.0, 4.0)
CONTENDERS = ("nest", "full", "chooser")


# --- servers ---------------------------------------------------------------------------------------------------------


class ChoosingServer(Server):
    """Three networks behind one name; one engine runs at a time."""

    def __init__(self, deadline: float) -> None:
        super().__init__(named={str(stage): independent(stage) for stage in (1, 2, 3)}, device="cpu")
        self.deadline, turn = deadline, threading.Lock()
        self.way: Way | None = None  # what a deadline leaves after the way there and back, as the service knows it
        for model in self.models.values():
            step = model.stages.engine.step

            def one_at_a_time(stage: int, state: Any, stop: Any, step: Any = step) -> Any:
                with turn:
                    return step(stage, state, stop)

            model.stages.engine.step = one_at_a_time  # type: ignore[method-assign]

    def model(self, name: str = "") -> Model:
        models = list(self.models.values())
        waits = sum(model.stages.scheduler.open * model.pace.predict(1) for model in models)
        left = self.way.before(self.deadline) if self.way else self.deadline
        fits = [model for model in models if CAUTION * (waits + model.pace.predict(1)) <= left]
        return fits[-1] if fits else models[0]


def independent(stage: int) -> Runtime:
    """An untrained network of a stage's size: times do not depend on weights."""
    return Runtime(
        build(NetworkRecipe(name="width-resnet42", alone=stage), classes=10, shape=(3, 32, 32)).eval(), "cpu"
    )


def serve(contender: str, deadline: float) -> None:
    server = Server(named={"net": NAME}, device="cpu") if contender == "nest" else None
    if server is None:
        server = ChoosingServer(deadline) if contender == "chooser" else Server(named={"net": independent(3)})
    sys.setswitchinterval(0.0005)
    service = Service(server)
    if isinstance(server, ChoosingServer):
        server.way = service.way
    sockets = Sockets(service, application(service), Place(http=0))

    async def live() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, sockets.end)
        await sockets.run(lambda started: print(started.ports["http"], flush=True))

    asyncio.run(live())
    server.close()


class Served:
    """A server in a process of its own."""

    def __init__(self, contender: str, deadline: float) -> None:
        command = [sys.executable, __file__, "--serve", contender, "--deadline", str(deadline)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def cpu(self) -> float:
        """Seconds of processor time it has taken."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)


# --- clients ---------------------------------------------------------------------------------------------------------


@dataclass
class Sent:
    """One request: which image, when it was meant to be sent and when its reply was here, and the reply."""

    image: int
    due: float
    came: float
    status: int
    body: bytes


class Clients:
    """Keep-alive connections, as many as it takes."""

    def __init__(self, port: int, images: np.ndarray, deadline: float | None, dtype: str) -> None:
        self.port, self.free, self.sent = port, list[tuple[Any, Any]](), list[Sent]()
        self.requests = [self.request(image, deadline, dtype) for image in images]

    def request(self, image: np.ndarray, deadline: float | None, dtype: str) -> bytes:
        raw = image.tobytes()
        tensor = {
            "name": "input",
            "shape": [1, *image.shape],
            "datatype": dtype,
            "parameters": {"binary_data_size": len(raw)},
        }
        asked: dict[str, Any] = {"inputs": [tensor], "outputs": [{"name": "label"}]}
        if deadline is not None:
            asked["parameters"] = {"timeout": int(1e6 * deadline)}
        text = json.dumps(asked).encode()
        head = f"POST /v2/models/net/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text) + len(raw)}\r\n"
        return f"{head}Inference-Header-Content-Length: {len(text)}\r\n\r\n".encode() + text + raw

    async def ask(self, image: int, due: float) -> None:
        reader, writer = self.free.pop() if self.free else await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(self.requests[image])
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        body = await reader.readexactly(length)
        self.sent.append(Sent(image, due, time.perf_counter(), int(head[9:12]), body))
        self.free.append((reader, writer))

    async def open_loop(self, rate: float, seconds: float, seed: int) -> list[Sent]:
        """Poisson arrivals, whatever the replies do."""
        chance, tasks, self.sent = random.Random(seed), set[asyncio.Task[None]](), []
        prompt.Promptly().__enter__()  # for good: who measures must not be late himself
        due = begin = time.perf_counter()
        while (due := due + chance.expovariate(rate)) < begin + seconds:
            if (left := due - time.perf_counter()) > 0:
                await asyncio.sleep(left)
            task = asyncio.ensure_future(self.ask(chance.randrange(len(self.requests)), due))
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


# --- figures ---------------------------------------------------------------------------------------------------------


def summary(
    sent: Sequence[Sent], deadline: float, labels: Sequence[int], errors: Sequence[float], true: bool, seconds: float
) -> dict[str, Any]:
    """What the clients got. `true`: labels decide what is right; else what the network errs that answered."""
    stages, right, late, problems, took = [0] * (len(errors) + 1), 0.0, 0, 0, []
    for each in sent:
        said = json.loads(each.body) if each.status in (200, 504) else {}
        took.append(each.came - each.due)
        on_time = took[-1] <= deadline
        late += not on_time
        problems += each.status not in (200, 504)
        stage = said["parameters"]["stage"] if each.status == 200 else 0
        if each.status == 200 and said["model_name"].isdigit():
            stage = int(said["model_name"])
        elif each.status == 200 and len(errors) == 1:
            stage = 1
        stages[stage] += 1
        if stage and on_time:
            correct = int(said["outputs"][0]["data"][0]) == labels[each.image]
            right += correct if true else 1 - errors[stage - 1]
    took.sort()
    n = len(sent)
    return {
        "n": n,
        "rate": n / seconds,
        "other_errors": problems,
        "nothing": stages[0] / n,
        "late": late / n,
        "stages": [round(count / n, 4) for count in stages],
        "right_on_time": right / n,
        "goodput": right / seconds,
        "ms": {
            name: round(1e3 * took[min(n - 1, int(q * n))], 2)
            for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
        },
    }


def measure(seconds: float, deadline: float, contenders: Sequence[str]) -> dict[str, Any]:
    sample = stored_sample("cifar10")
    pixels, labels = sample["images"].numpy(), [int(label) for label in sample["labels"]]
    normalised = Runtime(NAME, "cpu")
    floats = normalised.intake.prepare(pixels)
    errors = {"nest": normalised.spec.errors, "full": ALONE[2:], "chooser": ALONE}
    normalised.close()
    given = {"nest": (pixels, "UINT8"), "full": (floats, "FP32"), "chooser": (floats, "FP32")}
    found: dict[str, Any] = {}
    full = Served("full", deadline)
    saturation = asyncio.run(Clients(full.port, floats, None, "FP32").saturate(4.0))
    full.end()
    print(f"the full network alone saturates at {saturation:.0f} requests a second", flush=True)
    for contender in contenders:
        server = Served(contender, deadline)
        found[contender] = {}

        async def all_loads(contender: str = contender, server: Served = server) -> None:
            clients = Clients(server.port, given[contender][0], deadline, given[contender][1])
            await clients.open_loop(saturation / 4, 1.0, seed=9)  # warm
            for load in LOADS:
                cpu, own = server.cpu(), time.process_time()
                sent = await clients.open_loop(load * saturation, seconds, seed=int(8 * load))
                row = summary(sent, deadline, labels, errors[contender], contender == "nest", seconds)
                row |= {
                    "server_cores": (server.cpu() - cpu) / seconds,
                    "client_cores": (time.process_time() - own) / seconds,
                }
                found[contender][str(load)] = row
                print(contender, load, json.dumps(row), flush=True)

        asyncio.run(all_loads())
        server.end()
    conditions = {"seconds": seconds, "deadline": deadline, "saturation": saturation, "errors": errors}
    return {
        "conditions": conditions,
        "contenders": found,
        "provenance": provenance(" ".join(sys.argv), "cpu", time.time),
    }


def draw(runs: Sequence[dict[str, Any]], file: str) -> None:
    """Of all requests, how many were answered rightly and in time; one line per contender and run."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    looks = {"nest": ("#aa2c94", "o"), "chooser": ("#0072b2", "s"), "full": ("#4a5463", "D")}
    for run in runs:
        for contender, rows in run["contenders"].items():
            colour, marker = looks[contender]
            shares = [100 * rows[str(load)]["right_on_time"] for load in LOADS]
            axes.plot(range(len(LOADS)), shares, color=colour, marker=marker, alpha=0.8)
    for contender, text in (("nest", "nest"), ("chooser", "three nets, chosen by load"), ("full", "full net alone")):
        axes.plot([], [], color=looks[contender][0], marker=looks[contender][1], label=text)
    axes.set_xticks(range(len(LOADS)), [f"{load:g}x" for load in LOADS])
    axes.set(
        xlabel="requests, as multiples of what the full net alone can answer",
        ylabel="right and in time, %",
        ylim=(0, 100),
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", default="", help="be the server of this contender")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--deadline", type=float, default=0.02)
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--json", default="", help="a file to which the run is added")
    parser.add_argument("--picture", default="", help="measure nothing, draw the runs of the --json file here")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.deadline)
        return
    if options.picture:
        draw(json.loads(Path(options.json).read_text())["runs"], options.picture)
        return
    found = measure(options.seconds, options.deadline, options.contenders)
    if options.json:
        file = Path(options.json)
        runs = json.loads(file.read_text())["runs"] if file.is_file() else []
        file.write_text(json.dumps({"runs": [*runs, found]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
