"""The live runtime against its simple rival: keep three ordinary networks and run the largest that lately was in time.

    python benchmarks/rival.py                                    # quiet; every contender answers 2,000 questions
    python benchmarks/rival.py --load busy --json results/rival-busy.json
    python benchmarks/rival.py --load bursts --deadlines unknown

One process, blocks of questions in turn, a pause before each. nest: `Runtime.answer` in one thread. chooser: the dense
independent nets of the same sizes, the last 60 times of each, the largest whose 90 % quantile fits, in the caller's own
thread. fixed: one of them always. Errors are those of the stage that answered (90 % if none did); strict: also 90 % if it
came more than 0.5 ms late; with every network's own errors, and with the nest's for both, which isolates the runtime.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from nestling import Runtime
from nestling.nets import build
from nestling.recipes.recipe import NetworkRecipe
from nestling.runs.provenance import provenance
from nestling.runtime.build import build_engine
from nestling.runtime.engine import Engine, Floats, Stop, warm_up

ALONE = {  # test errors of independent nets, results/cifar10-h200.csv: strategy alone, no changes, seed 0
    "width-resnet42": (0.0899, 0.0625, 0.0499),
    "depth-sparse98": (0.0879, 0.0692, 0.0613, 0.0582),
}
NOTHING = 0.9  # the error of ten classes where nothing was answered
LATE = 0.5e-3  # seconds after a deadline at which an answer is worth nothing, strictly
PAUSE = 2e-3
KEPT = 60  # times of each net that the chooser remembers
BLOCK = 40  # questions in turn
SPIN = "while True: pass"
BURSTS = """
import random, time
while True:
    end = time.monotonic() + random.uniform(0.01, 0.5)
    while time.monotonic() < end: pass
    time.sleep(random.uniform(0.01, 0.5))
"""


@dataclass(frozen=True)
class Asked:
    """One question: seconds it had, stage that answered (0 = none), seconds the answer came after the deadline."""

    limit: float
    stage: int
    late: float


Contender = Callable[[float], Asked]


class Alone:
    """One independent network in the caller's own thread."""

    def __init__(self, engine: Engine, image: Floats) -> None:
        self.engine, self.image = engine, image
        self.times: deque[float] = deque(warm_up(engine, image.shape[1:], 10), maxlen=KEPT)

    def run(self) -> float:
        began = time.monotonic()
        self.engine.step(1, self.engine.start(self.image), Stop())
        taken = time.monotonic() - began
        self.times.append(taken)
        return taken

    def usual(self) -> float:
        return sorted(self.times)[int(0.9 * len(self.times))]


def choose(nets: Sequence[Alone], limit: float) -> int:
    """The largest net whose recent 90 % quantile fits, the smallest if none does; counted from 1."""
    fitting = [number for number, net in enumerate(nets, start=1) if net.usual() <= limit]
    return max(fitting, default=1)


def chooser(nets: Sequence[Alone]) -> Contender:
    def ask(limit: float) -> Asked:
        number = choose(nets, limit)
        return Asked(limit, number, nets[number - 1].run() - limit)

    return ask


def fixed(nets: Sequence[Alone], number: int) -> Contender:
    return lambda limit: Asked(limit, number, nets[number - 1].run() - limit)


def nest(runtime: Runtime, picture: Any) -> Contender:
    def ask(limit: float) -> Asked:
        began = time.monotonic()
        answer = runtime.answer(picture, deadline=limit)
        return Asked(limit, answer.stage, time.monotonic() - began - limit)

    return ask


def interrupted(runtime: Runtime, picture: Any) -> Contender:
    """Nobody knows the deadline but the interrupt that comes then. What was done by then counts, not what is done until this
    thread has woken up; late is how long it takes from there to have the answer in hand."""

    def ask(limit: float) -> Asked:
        began = time.monotonic()
        question = runtime.ask(picture)
        trail = question._waiting.images[0].trail
        time.sleep(max(0.0, began + limit - time.monotonic()))
        woke = time.monotonic()
        question.best()
        late = time.monotonic() - woke
        question.stop()
        return Asked(limit, sum(at <= limit for at in trail.done) if trail else runtime.spec.stages, late)

    return ask


def blind(nets: Sequence[Alone], number: int | None, expected: float) -> Contender:
    """A net that is chosen without knowing the deadline: always the same, or what usually fits the middle one. If it is not done
    when the interrupt comes, there is no answer; that is noticed at once."""

    def ask(limit: float) -> Asked:
        chosen = choose(nets, expected) if number is None else number
        taken = nets[chosen - 1].run()
        return Asked(limit, chosen if taken <= limit else 0, min(0.0, taken - limit))

    return ask


def timer(limit: float) -> Asked:
    """How late a bare timer is, for comparison."""
    began = time.monotonic()
    time.sleep(limit)
    return Asked(limit, 0, time.monotonic() - began - limit)


@contextmanager
def load(kind: str) -> Iterator[None]:
    """Two other processes: none (quiet), always busy, or busy in bursts of 10 to 500 ms."""
    code = {"quiet": "", "busy": SPIN, "bursts": BURSTS}[kind]
    others = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2 if code else 0)]
    try:
        time.sleep(0.5 if others else 0.0)
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def ask_in_turn(
    contenders: dict[str, Contender], questions: int, span: tuple[float, float], seed: int
) -> dict[str, list[Asked]]:
    """Blocks of every contender in turn, each with deadlines of its own from the same range."""
    chance, found = random.Random(seed), {name: list[Asked]() for name in contenders}
    for start in range(0, questions, BLOCK):
        for name, ask in contenders.items():
            for _ in range(min(BLOCK, questions - start)):
                time.sleep(PAUSE)
                found[name].append(ask(chance.uniform(*span)))
    return found


def summary(asked: Sequence[Asked], errors: Sequence[float], edges: Sequence[float]) -> dict[str, Any]:
    """Share late and unanswered, and errors: as they are, strictly, and strictly by range of deadline."""
    table = np.array([NOTHING, *errors])
    limits, late = (np.array([getattr(each, key) for each in asked]) for key in ("limit", "late"))
    plain = table[[each.stage for each in asked]]
    strict = np.where(late > LATE, NOTHING, plain)
    ranges = [(low, high, (limits >= low) & (limits < high)) for low, high in pairwise(edges)]
    return {
        "n": len(asked),
        "late": float((late > LATE).mean()),
        "late_p99_ms": 1e3 * float(np.quantile(late, 0.99)),
        "nothing": float(np.mean([each.stage == 0 for each in asked])),
        "error": float(plain.mean()),
        "strict": float(strict.mean()),
        "strict_by_deadline": [
            [1e3 * low, 1e3 * high, float(strict[inside].mean()) if inside.any() else None]
            for low, high, inside in ranges
        ],
        "stages": [float(np.mean([each.stage == stage for each in asked])) for stage in range(len(table))],
    }


def ranges_of(row: dict[str, Any]) -> str:
    shown = (
        (low, high, "-" if value is None else f"{100 * value:.1f}") for low, high, value in row["strict_by_deadline"]
    )
    return "  ".join(f"{low:g}-{high:g}: {text}" for low, high, text in shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", nargs="?", default="width-resnet42-cifar10", choices=[f"{n}-cifar10" for n in ALONE])
    parser.add_argument("--questions", type=int, default=2000, help="of each contender")
    parser.add_argument("--load", choices=("quiet", "busy", "bursts"), default="quiet")
    parser.add_argument("--deadlines", choices=("known", "unknown"), default="known")
    parser.add_argument(
        "--span", type=float, nargs=2, default=(1.5, 12.0), metavar="MS", help="of deadlines, milliseconds"
    )
    parser.add_argument("--edges", type=float, nargs="+", default=(1.5, 3.0, 6.0, 9.0, 12.0), metavar="MS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    base = options.network.removesuffix("-cifar10")
    span, edges = tuple(ms / 1e3 for ms in options.span), [ms / 1e3 for ms in options.edges]
    picture = np.random.default_rng(0).integers(0, 256, (3, 32, 32), dtype=np.uint8)
    with Runtime(options.network, device="cpu", engine="onnx") as runtime:
        image = runtime.intake.one(picture)
        sizes = range(1, runtime.spec.stages + 1)
        nets = [Alone(build_engine(build(NetworkRecipe(name=base, alone=s)), "cpu", "onnx"), image) for s in sizes]
        if options.deadlines == "known":
            contenders = {"nest": nest(runtime, picture), "chooser": chooser(nets)}
            contenders |= {f"fixed {s}": fixed(nets, s) for s in sizes}
        else:
            contenders = {"nest": interrupted(runtime, picture), "chooser": blind(nets, None, sum(span) / 2)}
            contenders |= {f"fixed {s}": blind(nets, s, 0.0) for s in sizes}
        with load(options.load):
            found = ask_in_turn(contenders | {"bare timer": timer}, options.questions, span, options.seed)
        own = {name: runtime.spec.errors if name == "nest" else ALONE[base] for name in found}
        result = {
            "network": options.network,
            "load": options.load,
            "deadlines": options.deadlines,
            "own_errors": {name: summary(asked, own[name], edges) for name, asked in found.items()},
            "equal_errors": {name: summary(asked, runtime.spec.errors, edges) for name, asked in found.items()},
            "provenance": provenance(" ".join(["python", *sys.argv]), "cpu", time.time),
        }
    for kind in ("own_errors", "equal_errors"):
        print(f"{kind.replace('_', ' ')}, {options.load}, deadlines {options.deadlines}")
        print(f"{'':12}{'n':>7}{'late %':>8}{'nothing %':>11}{'strict %':>10}   strict % by deadline (ms)")
        for name, row in result[kind].items():
            shares = f"{100 * row['late']:8.1f}{100 * row['nothing']:11.1f}{100 * row['strict']:10.2f}"
            print(f"{name:12}{row['n']:7}{shares}   {ranges_of(row)}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
