"""The server under open-loop load: Poisson arrivals, latency from the time at which a request was meant to be sent.

    python benchmarks/serve.py --ray /tmp/ray/bin/python --json results/serve-cpu.json        (17 minutes)
    python benchmarks/serve.py --json results/serve-cpu.json --picture docs/pictures/serve-load.png

Rates are 0.5, 1, 2 and 4 times what the full network alone answers at most behind the same server; deadline 20 ms.
Contenders are `CONTENDERS`. Right: by labels for the nest, for the others 1 - error of the network that answered. Each server
is a process of its own; the clients' process shares the machine, and how late it sends is counted against the server, and told.
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
from pathlib import Path
from typing import Any, Self

from load import Clients, Sent, add_run, cpu_seconds

from nestling.commands.serve import SWITCHING
from nestling.nets import build
from nestling.recipes.recipe import NetworkRecipe
from nestling.runs.open import stored_sample
from nestling.runs.provenance import provenance
from nestling.runtime.runtime import Runtime
from nestling.serve import timers
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
CONTENDERS = {  # which are measured unless others are asked for, and what they are
    "nest": (True, NAME),
    "apart": (False, "the nest, its stages in a process of their own"),
    "chooser": (
        True,
        "three independent nets; each request gets the largest that is expected in time, by the work that waits",
    ),
    "full": (True, "the independent net of the last stage's size"),
    "ray": (True, "that net in Ray Serve; left out where --ray has none"),
}
SHED = (408, 429, 503, 504)  # a server's ways to say that there is no answer by the deadline


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


def made(contender: str, deadline: float) -> Server:
    if contender == "chooser":
        return ChoosingServer(deadline)
    server = Server(named={"net": independent(3) if contender == "full" else NAME}, device="cpu")
    if contender == "apart":
        from apart import EngineApart

        server.model().stages.engine = EngineApart(NAME)
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


# --- figures ---------------------------------------------------------------------------------------------------------


def summary(
    sent: Sequence[Sent], deadline: float, labels: Sequence[int], errors: Sequence[float], true: bool, seconds: float
) -> dict[str, Any]:
    """What the clients got. `true`: labels decide what is right; else what the network errs that answered."""
    stages, right, late, by_sender, problems, took = [0] * (len(errors) + 1), 0.0, 0, 0, 0, []
    for each in sent:
        said = json.loads(each.body) if each.status == 200 else {}
        took.append(each.came - each.due)
        on_time = took[-1] <= deadline
        late += not on_time
        by_sender += not on_time and each.came - each.went <= deadline
        problems += each.status not in (200, *SHED)
        stage = said["parameters"]["stage"] if each.status == 200 else 0
        if each.status == 200 and said["model_name"].isdigit():
            stage = int(said["model_name"])
        elif each.status == 200 and len(errors) == 1:
            stage = 1
        stages[stage] += 1
        if stage and on_time:
            correct = int(said["outputs"][0]["data"][0]) == labels[each.image]
            right += correct if true else 1 - errors[stage - 1]
    n = len(sent)
    return {
        "n": n,
        "rate": n / seconds,
        "other_errors": problems,
        "nothing": stages[0] / n,
        "late": late / n,
        "late_by_sender": by_sender / n,
        "stages": [round(count / n, 4) for count in stages],
        "right_on_time": right / n,
        "goodput": right / seconds,
        "ms": quantiles(took),
        "sent_late_ms": quantiles([each.went - each.due for each in sent]),
    }


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """In milliseconds."""
    order, n = sorted(seconds), len(seconds)
    shares = (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
    return {name: round(1e3 * order[min(n - 1, int(share * n))], 2) for name, share in shares}


def measure(seconds: float, deadline: float, contenders: Sequence[str], ray: str) -> dict[str, Any]:
    sample = stored_sample("cifar10")
    pixels, labels = sample["images"].numpy(), [int(label) for label in sample["labels"]]
    normalised = Runtime(NAME, "cpu")
    floats = normalised.intake.prepare(pixels)
    nested = normalised.spec.errors
    errors = {"nest": nested, "apart": nested, "full": ALONE[2:], "chooser": ALONE, "ray": ALONE[2:]}
    normalised.close()
    found: dict[str, Any] = {}
    with Served("full", deadline) as full:
        saturation = timers.run(Clients(full.port, floats, None, "FP32").saturate(4.0))
    print(f"the full network alone saturates at {saturation:.0f} requests a second", flush=True)
    if "ray" in contenders and not has_ray(ray):
        print(f"no Ray Serve: {ray or 'no interpreter'} has none (--ray PYTHON names one with ray[serve])", flush=True)
        contenders = [contender for contender in contenders if contender != "ray"]
    for contender in contenders:
        found[contender] = {}
        true = contender in ("nest", "apart")

        async def all_loads(server: Served, contender: str = contender, true: bool = true) -> None:
            clients = Clients(server.port, *((pixels, deadline, "UINT8") if true else (floats, deadline, "FP32")))
            await clients.open_loop(saturation / 4, 1.0, seed=9)  # warm
            for load in LOADS:
                cpu, own = server.cpu(), time.process_time()
                sent = await clients.open_loop(load * saturation, seconds, seed=int(8 * load))
                row = summary(sent, deadline, labels, errors[contender], true, seconds)
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


def draw(runs: Sequence[dict[str, Any]], file: str) -> None:
    """Of all requests, how many were answered rightly and in time; one line per contender and run."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    looks = {"nest": ("#aa2c94", "o"), "chooser": ("#0072b2", "s"), "full": ("#4a5463", "D"), "ray": ("#b07a00", "^")}
    for run in runs:
        for contender, rows in run["contenders"].items():
            if contender not in looks:
                continue
            colour, marker = looks[contender]
            shares = [100 * rows[str(load)]["right_on_time"] for load in LOADS]
            axes.plot(range(len(LOADS)), shares, color=colour, marker=marker, alpha=0.8)
    words = {
        "nest": "nest",
        "chooser": "three nets, chosen by load",
        "full": "full net alone",
        "ray": "full net in Ray Serve",
    }
    for contender, text in words.items():
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
    parser.add_argument("--seconds", type=float, default=60.0, help="of each contender at each rate")
    parser.add_argument("--deadline", type=float, default=0.02)
    usual = [name for name, (usual, _) in CONTENDERS.items() if usual]
    names = "; ".join(f"{name}: {text}" for name, (_, text) in CONTENDERS.items())
    parser.add_argument("--contenders", nargs="+", default=usual, choices=CONTENDERS, help=names)
    parser.add_argument(
        "--ray", default=sys.executable, help="an interpreter that has ray[serve] and nestling's packages"
    )
    parser.add_argument("--json", default="", help="a file to which the run is added")
    parser.add_argument("--picture", default="", help="measure nothing, draw the runs of the --json file here")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.deadline)
        return
    if options.picture:
        draw(json.loads(Path(options.json).read_text())["runs"], options.picture)
        return
    found = measure(options.seconds, options.deadline, options.contenders, options.ray)
    if options.json:
        add_run(Path(options.json), found)


if __name__ == "__main__":
    main()
