"""A nest against its simple rival, live: questions with deadlines, asked of both in turn on this machine.

In: a run or a trained network, and networks to choose from (independent nets of its stages' sizes if none are named). Out: for
every contender the share of late and of missing answers, and errors by range of deadline: those of the stage that answered,
90 % for ten classes where none did; strictly also where it came more than half a millisecond late. Deadlines are drawn from a
range or a trace, and known when a question is asked, or not: then only an interrupt tells. Other processes may want the
processor meanwhile, always or in bursts.
"""

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestling.errors import NestlingError
from nestling.export.spec import Spec
from nestling.nets import NestedNet, build
from nestling.recipes.recipe import NetworkRecipe
from nestling.runs.open import OpenedRun, resolve
from nestling.runtime.chooser import Chooser
from nestling.runtime.engine import Floats
from nestling.runtime.runtime import Runtime

INDEPENDENT_ERRORS = {  # test errors of independent nets, results/cifar10-h200.csv: strategy alone, no changes, seed 0
    "width-resnet42-cifar10": (0.0899, 0.0625, 0.0499),
    "depth-sparse98-cifar10": (0.0879, 0.0692, 0.0613, 0.0582),
    "width-resnet42-kept-cifar10": (0.0899, 0.0625, 0.0473),  # the last: the network that is kept
}
MUCH_TOO_LATE = 0.5e-3  # seconds after a deadline at which an answer is worth nothing, strictly
PAUSE = 2e-3  # seconds before each question
BLOCK = 40  # questions in turn
RANGES = (0.25, 0.5, 0.75, 1.0)  # of the longest deadline: where ranges end
# They end with the process that began them, also where that was killed.
SPIN = """
import os
began = os.getppid()
while os.getppid() == began:
    for _ in range(100_000): pass
"""
BURSTS = """
import os, random, time
began = os.getppid()
while os.getppid() == began:
    end = time.monotonic() + random.uniform(0.01, 0.5)
    while time.monotonic() < end: pass
    time.sleep(random.uniform(0.01, 0.5))
"""
LOADS = {"quiet": "", "busy": SPIN, "bursts": BURSTS}  # what two other processes do
DEADLINES = ("known", "unknown")
LONGEST = 60.0  # seconds: of the deadlines in a trace


@dataclass(frozen=True)
class LiveQuestion:
    """One question: seconds it had, stage that answered (0 = none), seconds the answer came after the deadline."""

    limit: float
    stage: int
    late: float


Contender = Callable[[float], LiveQuestion]


def live(
    source: str,
    against: Sequence[str] = (),
    load: str = "quiet",
    deadlines: str = "known",
    questions: int = 500,
    span: tuple[float, float] | None = None,
    seed: int = 0,
    trace: Sequence[float] = (),
) -> dict[str, Any]:
    """Ask a nest and its rivals in turn, on a CPU with one thread each. `span`: seconds, of the deadlines; `trace`: the deadlines
    themselves, which every contender is given in this order, again and again."""
    for what, found, choices in (("load", load, tuple(LOADS)), ("deadlines", deadlines, DEADLINES)):
        if found not in choices:
            raise NestlingError(f"found {what} {found!r}, expected one of {', '.join(choices)}")
    if questions < 1:
        raise NestlingError(f"found {questions} questions; expected at least 1 for each")
    run = resolve(source)
    with Runtime(run, device="cpu", threads=1) as runtime, open_rivals(run, runtime, against) as chooser:
        if not runtime.spec.errors:
            raise NestlingError(f"{source} has no errors of its stages yet; run: nestling evaluate {source}")
        span = (min(trace), max(trace)) if trace else span or usual_span(runtime, chooser)
        contenders = make_contenders(runtime, chooser, made_up(runtime.spec), deadlines, sum(span) / 2)
        with other_processes(load):
            asked = ask_in_turn(contenders | {"bare timer": timer}, questions, trace or span, seed)
        own = chooser.spec.errors if against else INDEPENDENT_ERRORS.get(source, ())
        nothing = 1 - float(runtime.prior.max())
        edges = [span[0], *(end * span[1] for end in RANGES if end * span[1] > span[0])]

        def summed(errors: Sequence[float]) -> dict[str, Any]:
            return {
                name: summary(each, runtime.spec.errors if name.startswith("nest") else errors, edges, nothing)
                for name, each in asked.items()
            }

        return {
            "run": source, "rivals": list(against) or list(runtime.spec.sizes), "load": load, "deadlines": deadlines,
            "sizes": list(runtime.spec.sizes), "span_ms": [1e3 * end for end in span],
            "errors": list(runtime.spec.errors), "rival_errors": list(own),
            "own_errors": summed(own) if own else {}, "equal_errors": equal(summed, runtime, chooser),
        }  # fmt: skip


def equal(summed: Callable[[Sequence[float]], dict[str, Any]], runtime: Runtime, chooser: Chooser) -> dict[str, Any]:
    """With the nest's errors for both sides, which isolates the runtime; nothing where their sizes differ."""
    return summed(runtime.spec.errors) if chooser.spec.stages == runtime.spec.stages else {}


def open_rivals(run: OpenedRun, runtime: Runtime, against: Sequence[str]) -> Chooser:
    """The runs that were named, or untrained independent nets of each stage's size: they take as long as trained ones."""
    if against:
        return Chooser(list(against), device="cpu", threads=1)
    shape, classes = runtime.spec.shape, len(runtime.spec.classes)
    recipes = [independent(run.recipe.network, stage) for stage in range(1, runtime.spec.stages + 1)]
    nets: list[NestedNet] = [build(recipe, classes, shape).eval() for recipe in recipes]
    return Chooser(nets, device="cpu", threads=1, spec=replace(runtime.spec, errors=()))


def independent(recipe: NetworkRecipe, stage: int) -> NetworkRecipe:
    """A net of a stage's size by itself. Stages before a kept network have widths of their own."""
    plain = replace(recipe.without_early(), ensemble=False)
    if not recipe.early_widths or stage > len(recipe.early):
        return replace(plain, alone=stage)
    share = sum(recipe.early[:stage]) / sum(recipe.early)
    widths = tuple(round(width * share) for width in recipe.early_widths)
    return replace(plain, widths=widths, alone=len(recipe.early) + 1)


def made_up(spec: Spec) -> Any:
    """A picture of noise: what is on it takes no time."""
    chance = np.random.default_rng(0)
    if spec.mean:
        return chance.integers(0, 256, spec.shape, dtype=np.uint8)
    return chance.normal(size=spec.shape).astype(np.float32)


def usual_span(runtime: Runtime, chooser: Chooser) -> tuple[float, float]:
    """From little more than the first network takes to what is enough for the largest."""
    return 1.5 * chooser.usual(1), 1.6 * max(chooser.usual(chooser.spec.stages), sum(runtime.pace.base))


def make_contenders(
    runtime: Runtime, chooser: Chooser, picture: Any, deadlines: str, middle: float
) -> dict[str, Contender]:
    image, numbers = chooser.intake.one(picture), range(1, chooser.spec.stages + 1)
    if deadlines == "known":
        known: dict[str, Contender] = {
            "nest": answering(lambda limit: runtime.answer(picture, deadline=limit).stage),
            "nest, soon": answering(lambda limit: runtime.answer(picture, deadline=limit, late=None).stage),
            "chooser": answering(lambda limit: chooser.answer(picture, deadline=limit).stage),
        }
        return known | {f"always {n}": answering(partial(always, chooser, image, n)) for n in numbers}
    blind: dict[str, Contender] = {
        "nest": interrupted(runtime, picture),
        "nest, loop": stage_by_stage(runtime, picture),
        "one by one": one_by_one(chooser, image),
        "chooser": unaware(chooser, image, lambda: chooser.choose(middle)),
    }
    return blind | {f"always {n}": unaware(chooser, image, partial(int, n)) for n in numbers}


def answering(ask: Callable[[float], int]) -> Contender:
    def asked(limit: float) -> LiveQuestion:
        began = time.monotonic()
        stage = ask(limit)
        return LiveQuestion(limit, stage, time.monotonic() - began - limit)

    return asked


def always(chooser: Chooser, image: Floats, number: int, limit: float) -> int:
    chooser.run(number, image)
    return number


def interrupted(runtime: Runtime, picture: Any) -> Contender:
    """Nobody knows the deadline but the interrupt that comes then. What was done by then counts, not what is done until this
    thread has woken up; late is how long it takes from there to have the answer in hand."""

    def asked(limit: float) -> LiveQuestion:
        began = time.monotonic()
        question = runtime.ask(picture)
        trail = question._waiting.images[0].trail
        time.sleep(max(0.0, began + limit - time.monotonic()))
        woke = time.monotonic()
        question.best()
        late = time.monotonic() - woke
        question.stop()
        return LiveQuestion(limit, sum(at <= limit for at in trail.done) if trail else runtime.spec.stages, late)

    return asked


def stage_by_stage(runtime: Runtime, picture: Any) -> Contender:
    """A loop over the answers that ends when the interrupt comes, which is noticed between two stages."""

    def asked(limit: float) -> LiveQuestion:
        began, done = time.monotonic(), 0
        late = -limit
        for answer in runtime.answers(picture):
            late = time.monotonic() - began - limit
            if late > 0:
                return LiveQuestion(limit, done, 0.0)
            done = answer.stage
        return LiveQuestion(limit, done, late)

    return asked


def unaware(chooser: Chooser, image: Floats, choose: Callable[[], int]) -> Contender:
    """A network that is chosen without knowing the deadline. If it is not done when the interrupt comes, there is no answer;
    that is noticed at once."""

    def asked(limit: float) -> LiveQuestion:
        began, number = time.monotonic(), choose()
        chooser.run(number, image)
        late = time.monotonic() - began - limit
        return LiveQuestion(limit, number if late <= 0 else 0, min(0.0, late))

    return asked


def one_by_one(chooser: Chooser, image: Floats) -> Contender:
    """The networks one after another, each from nothing, until the interrupt comes: the largest that is done by then counts."""

    def asked(limit: float) -> LiveQuestion:
        began, done = time.monotonic(), 0
        for number in range(1, chooser.spec.stages + 1):
            chooser.run(number, image)
            late = time.monotonic() - began - limit
            if late > 0:
                return LiveQuestion(limit, done, 0.0)
            done = number
        return LiveQuestion(limit, done, late)

    return asked


def timer(limit: float) -> LiveQuestion:
    """How late a bare timer is, for comparison."""
    began = time.monotonic()
    time.sleep(limit)
    return LiveQuestion(limit, 0, time.monotonic() - began - limit)


@contextmanager
def other_processes(load: str) -> Iterator[None]:
    """Two of them: none (quiet), always busy, or busy in bursts of 10 to 500 ms."""
    code = LOADS[load]
    others = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2 if code else 0)]
    try:
        time.sleep(0.5 if others else 0.0)
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def ask_in_turn(
    contenders: dict[str, Contender], questions: int, limits: Sequence[float], seed: int
) -> dict[str, list[LiveQuestion]]:
    """Blocks of every contender in turn, in an order that is drawn anew each time: whoever comes after one that only sleeps finds
    a slower machine. Each has deadlines of its own from the same range, or the same if they are given: `limits` is a range, a
    tuple of two, or a list of deadlines."""
    chance, found = random.Random(seed), {name: list[LiveQuestion]() for name in contenders}
    for start in range(0, questions, BLOCK):
        for name, ask in chance.sample(sorted(contenders.items()), len(contenders)):
            for number in range(start, min(start + BLOCK, questions)):
                time.sleep(PAUSE)
                given = isinstance(limits, list)
                found[name].append(ask(limits[number % len(limits)] if given else chance.uniform(*limits)))
    return found


def read_trace(path: Path) -> list[float]:
    """Deadlines as somebody met them: a file of milliseconds, one in a line. In seconds."""
    try:
        found = [float(line) / 1e3 for line in path.read_text(encoding="utf-8").split()]
    except OSError as error:
        raise NestlingError(
            f"cannot read {path}: {error.strerror}; expected deadlines in milliseconds, one in a line"
        ) from error
    except ValueError as error:
        raise NestlingError(f"{path}: {error}; expected deadlines in milliseconds, one in a line") from error
    if not found or not all(0 < limit <= LONGEST for limit in found):
        raise NestlingError(
            f"{path} holds {len(found)} deadlines, expected at least one, all of more than 0 and at most {1e3 * LONGEST:.0f} ms"
        )
    return found


def summary(
    asked: Sequence[LiveQuestion], errors: Sequence[float], edges: Sequence[float], nothing: float = 0.9
) -> dict[str, Any]:
    """Share late and unanswered, share of each stage, and errors: as they are and strictly; also by range of deadline."""
    table = np.array([nothing, *errors])
    limits, late = (np.array([getattr(each, key) for each in asked]) for key in ("limit", "late"))
    stages = np.array([each.stage for each in asked])
    plain = table[stages]
    strict = np.where(late > MUCH_TOO_LATE, nothing, plain)

    def of(part: NDArray[np.bool_]) -> dict[str, Any]:
        counts = np.bincount(stages[part], minlength=len(table)) / part.sum()
        return {
            "n": int(part.sum()),
            "late": float((late[part] > MUCH_TOO_LATE).mean()),
            "nothing": float(counts[0]),
            "error": float(plain[part].mean()),
            "strict": float(strict[part].mean()),
            "stages": [float(share) for share in counts],
        }

    parts = [(low, high, (limits >= low) & (limits <= high)) for low, high in pairwise(edges)]
    ranges = [{"from_ms": 1e3 * low, "to_ms": 1e3 * high, **of(part)} for low, high, part in parts if part.any()]
    return {**of(limits >= 0), "late_p99_ms": 1e3 * float(np.quantile(late, 0.99)), "by_deadline": ranges}
