"""The server under open-loop load: Poisson arrivals, latency from the time at which a request was meant to be sent.

    python benchmarks/serve.py --ray PYTHON_WITH_RAY --json results/serve-cpu.json        (22 minutes)
    python benchmarks/serve.py --json results/serve-cpu.json --picture docs/pictures/serve-load.png
    python benchmarks/serve.py --json results/serve-cpu.json --table docs/serving.md docs/log/serving.md

Rates are 0.5, 1, 2 and 4 times what the full network alone answers at most behind the same server; deadline 20 ms.
Contenders are `CONTENDERS`. What is counted, and the table: serve_figures.py. Each server is a process of its own; the clients'
process shares the machine, and how late it sends is counted against the server, and told.
"""

import argparse
import asyncio
import gc
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from load import Clients, add_run, cpu_seconds
from serve_figures import CONTENDERS, LOADS, draw, summary, table, with_table

from nestling.commands.serve import SWITCHING
from nestling.nets import build
from nestling.recipes.recipe import NetworkRecipe
from nestling.runs.open import resolve, stored_sample
from nestling.runs.provenance import provenance
from nestling.runtime.runtime import Runtime, bare_spec, spec_of
from nestling.serve import timers
from nestling.serve.http import application
from nestling.serve.listen import Place, Sockets
from nestling.serve.model import Model
from nestling.serve.scheduler import CAUTION
from nestling.serve.server import Server
from nestling.serve.service import Service
from nestling.serve.way import Way

NAMES = {"nest": "width-resnet42-cifar10", "kept": "width-resnet42-kept-cifar10", "apart": "width-resnet42-cifar10"}
ALONE = (0.0899, 0.0625, 0.0499)  # test errors of independent nets, results/cifar10-h200.csv: strategy alone, seed 0


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
    """An untrained network of a stage's size, for pixels: times do not depend on weights."""
    net = build(NetworkRecipe(name="width-resnet42", alone=stage), classes=10, shape=(3, 32, 32)).eval()
    return Runtime(net, "cpu", spec=replace(bare_spec(net), mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)))


def made(contender: str, deadline: float) -> Server:
    if contender == "chooser":
        return ChoosingServer(deadline)
    server = Server(named={"net": independent(3) if contender == "full" else NAMES[contender]}, device="cpu")
    if contender == "apart":
        from apart import EngineApart

        server.model().stages.engine = EngineApart(NAMES[contender])
    return server


def serve(contender: str, deadline: float) -> None:
    """As `nestling serve` does."""
    server = made(contender, deadline)
    sys.setswitchinterval(SWITCHING)
    service = Service(server)
    if isinstance(server, ChoosingServer):
        server.way = service.way
    sockets = Sockets(service, application(service), Place(http=0))
    gc.collect()
    gc.freeze()

    async def live() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, sockets.end)
        await sockets.run(lambda started: print(started.ports["http"], flush=True))

    timers.run(live())
    server.close()


class Served:
    """A server in a process of its own."""

    def __init__(self, contender: str, deadline: float, ray: str = "") -> None:
        command = [sys.executable, __file__, "--serve", contender, "--deadline", str(deadline)]
        if contender == "ray":
            command = [ray, str(Path(__file__).with_name("serve_ray.py")), str(deadline)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def cpu(self) -> float:
        return cpu_seconds(self.process.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def has_ray(python: str) -> bool:
    return bool(python) and not subprocess.run([python, "-c", "import ray.serve"], capture_output=True).returncode


# --- clients ---------------------------------------------------------------------------------------------------------


def known_errors(name: str) -> tuple[float, ...]:
    """Of each stage, on the whole test set."""
    return spec_of(run := resolve(name), run.net()).errors


def measure(seconds: float, deadline: float, contenders: Sequence[str], ray: str) -> dict[str, Any]:
    sample = stored_sample("cifar10")
    pixels, labels = sample["images"].numpy(), [int(label) for label in sample["labels"]]
    errors = {"full": ALONE[2:], "chooser": ALONE, "ray": ALONE[2:]}
    errors |= {contender: known_errors(name) for contender, name in NAMES.items()}
    found: dict[str, Any] = {}
    with Served("full", deadline) as full:
        saturation = timers.run(Clients(full.port, pixels, None, "UINT8").saturate(4.0))
    print(f"the full network alone saturates at {saturation:.0f} requests a second", flush=True)
    if "ray" in contenders and not has_ray(ray):
        print(f"no Ray Serve: {ray or 'no interpreter'} has none (--ray PYTHON names one with ray[serve])", flush=True)
        contenders = [contender for contender in contenders if contender != "ray"]
    for contender in contenders:
        found[contender] = {}

        async def all_loads(server: Served, contender: str = contender) -> None:
            clients = Clients(server.port, pixels, deadline, "UINT8")
            await clients.open_loop(saturation / 4, 1.0, seed=9)  # warm
            for load in LOADS:
                cpu, own = server.cpu(), time.process_time()
                sent = await clients.open_loop(load * saturation, seconds, seed=int(8 * load))
                row = summary(sent, deadline, labels if contender in NAMES else (), errors[contender], seconds)
                row |= {
                    "server_cores": (server.cpu() - cpu) / seconds,
                    "client_cores": (time.process_time() - own) / seconds,
                }
                found[contender][str(load)] = row
                print(contender, load, json.dumps(row), flush=True)

        with Served(contender, deadline, ray) as server:
            timers.run(all_loads(server))
    conditions = {"seconds": seconds, "deadline": deadline, "saturation": saturation, "errors": errors}
    return {
        "conditions": conditions,
        "contenders": found,
        "provenance": provenance(" ".join(sys.argv), "cpu", time.time),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", default="", help="be the server of this contender")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each contender at each rate")
    parser.add_argument("--deadline", type=float, default=0.02)
    usual = [name for name, (usual, _) in CONTENDERS.items() if usual]
    names = "; ".join(f"{name}: {text}" for name, (_, text) in CONTENDERS.items())
    parser.add_argument("--contenders", nargs="+", default=usual, choices=CONTENDERS, help=names)
    parser.add_argument(
        "--ray", default=sys.executable, help="an interpreter that has ray[serve] and nestling's packages"
    )
    parser.add_argument("--json", default="", help="a file to which the run is added")
    parser.add_argument("--picture", default="", help="measure nothing, draw the last run of the --json file here")
    parser.add_argument("--table", nargs="+", default=[], help="measure nothing, write its table into these pages")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.deadline)
        return
    if options.picture or options.table:
        run = json.loads(Path(options.json).read_text())["runs"][-1]
        if options.picture:
            draw(run, options.picture)
        for page in map(Path, options.table):
            page.write_text(with_table(page.read_text(encoding="utf-8"), run), encoding="utf-8")
        return
    found = measure(options.seconds, options.deadline, options.contenders, options.ray)
    if options.json:
        add_run(Path(options.json), found)
    print(table(found))


if __name__ == "__main__":
    main()
