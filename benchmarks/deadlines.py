"""Are answers on time, as good as predicted, and better than waiting?

    python benchmarks/deadlines.py ontime runs/NAME --json results/ontime.json    # 10,000 answers while both cores are busy
    python benchmarks/deadlines.py curve runs/NEST --alone runs/W1 runs/W2 runs/W4 --json results/curve.json
    python benchmarks/deadlines.py pictures runs/NAME --pictures test.npz         # then, with torch not importable:
    python benchmarks/deadlines.py ontime runs/NAME/export-onnx --portable --pictures test.npz

`ontime` takes a run's folder or a network's name, and with --portable a folder that `nestling export` wrote: images in random
order, each with a random deadline of 0.2 to 1.5 times the full latency; short ones come more often (half of them below 0.36),
because chance is largest where the prior answers some of them. What the runtime foretells before each question learns from
questions with a deadline alone. Among the questions are bare timers of the same lengths, and questions without a deadline,
whose stage times are a profile under load, for comparison. Errors are compared twice: as they were, and as the stages that
answered make them on average over the same images, which leaves out how lucky each was with its image. curve: the latencies of
all networks are measured in turns while 0, 1 and 2 cores are busy.
"""

import argparse
import itertools
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from load import no_pauses
from numpy.typing import NDArray

BINS = 7
TOGETHER = 50  # images, where time does not matter
RANGE = (0.2, 1.5)  # of deadlines, in full latencies
SHORT = 3  # deadlines are spread as the third power of what is spread evenly: 52 % of them in the first of seven ranges
TIMERS = PROFILED = 0.15  # shares of the turns that are bare timers, and questions without a deadline
PAUSE = 0.003  # seconds between questions: frames do not come back to back


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Other processes that never sleep."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        time.sleep(0.3)
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def percentiles(values: Sequence[float]) -> dict[str, float]:
    names = ("p50", "p90", "p99", "p99.9", "max")
    return dict(zip(names, (float(v) * 1e3 for v in np.percentile(values, [50, 90, 99, 99.9, 100])), strict=True))


class Subject:
    """What is asked: a runtime, images for it, their labels and which stages are right where that is known."""

    def __init__(self, source: str, portable: bool, threads: int, pictures: str = "") -> None:
        self.images: NDArray[Any]
        self.wrong: NDArray[np.float64] | None = None  # (1 + stages, N): the prior, then each stage
        if portable:
            from nestling.runtime.portable import Portable

            self.runtime: Any = Portable(source, threads)
            if pictures:
                self.look(pictures)
        else:
            self.runtime = self.open(source, threads)
        if not hasattr(self, "images"):
            shape = (512, *self.runtime.spec.shape)
            self.images = np.random.default_rng(0).normal(size=shape).astype(np.float32)

    def open(self, source: str, threads: int) -> Any:
        from nestling.errors import NestlingError
        from nestling.nets import NETS, build
        from nestling.recipes.recipe import NetworkRecipe
        from nestling.runs.open import resolve
        from nestling.runtime import Runtime

        if source in NETS:
            return Runtime(build(NetworkRecipe(name=source)), device="cpu", threads=threads)
        run = resolve(source)
        runtime = Runtime(run, device="cpu", threads=threads)
        tensors = run.outputs()
        try:
            data = run.data()
        except NestlingError:  # it is not here: the first test images come with the trained networks
            data = run.data(sample=True)
        labels = tensors["labels"].numpy()[: len(data.test)]
        self.images = data.test.pictures(tensors["labels"].new_tensor(range(len(labels)))).numpy()
        right = tensors["logits"].argmax(2).numpy()[:, : len(labels)] == labels
        self.wrong = 1.0 - np.vstack([labels == int(runtime.prior.argmax()), right])
        self.labels = labels
        return runtime

    def look(self, pictures: str) -> None:
        """Images and labels from a file that `pictures` wrote; what each stage says of them, it says now."""
        with np.load(pictures) as found:
            self.images, labels = found["images"], found["labels"]
        said: list[list[NDArray[Any]]] = [[] for _ in self.runtime.spec.sizes]
        for start in range(0, len(labels), TOGETHER):
            for stage, answers in enumerate(self.runtime.answers_batch(self.images[start : start + TOGETHER])):
                said[stage].append(np.array([answer.label for answer in answers]))
        right = [np.concatenate(each) == labels for each in said]
        self.wrong = 1.0 - np.vstack([labels == int(self.runtime.prior.argmax()), right])


def pictures(options: argparse.Namespace) -> dict[str, Any]:
    """A run's test images and labels as one file, for who cannot import torch."""
    subject = Subject(options.source, False, options.threads)
    subject.runtime.close()
    np.savez(options.pictures, images=subject.images, labels=subject.labels)
    return {"what": "pictures", "file": options.pictures, "images": len(subject.images)}


# --- on time -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Known:
    """What a forecast is made of. It is made later, so that making it does not keep the machine busy between questions."""

    looks: list[float]
    slowdown: float
    questions: int  # that had been answered

    def shares(self, trace: Any, trails: list[Any]) -> NDArray[np.float64]:
        from nestling.runtime.forecast import KEPT, Forecast, Recent

        recent = Recent(trails[max(0, self.questions - KEPT) : self.questions])
        return Forecast(trace, recent=recent).shares(self.looks, self.slowdown)


@dataclass(frozen=True)
class Asked:
    """One question with a deadline, and what the runtime knew just before it."""

    image: int
    limit: float  # seconds
    known: "Known"
    stage: int  # that answered
    late: float


def ontime(options: argparse.Namespace) -> dict[str, Any]:
    subject = Subject(options.source, options.portable, options.threads, options.pictures)
    runtime, images, chance = subject.runtime, subject.images, random.Random(0)
    quiet = np.array([runtime.timeline(images[i % len(images)]) for i in range(200)])
    order = np.random.default_rng(0).permutation(max(options.answers, len(images))) % len(images)
    asked: list[Asked] = []
    trails = keep_all(runtime)
    bare: list[float] = []
    trace: list[list[float]] = []
    with busy(options.busy), no_pauses():
        full = float(np.median([warm_question(runtime, images[i % len(images)])[-1] for i in range(200)]))
        while len(asked) < options.answers:
            # Timers, questions and profile come in random turns, so that each finds the machine as the others do.
            limit = full * (RANGE[0] + (RANGE[1] - RANGE[0]) * chance.random() ** options.short)
            image = images[order[len(asked)]]
            time.sleep(PAUSE)
            turn = chance.random()
            began = time.monotonic()
            if turn < TIMERS:
                time.sleep(limit)
                bare.append(time.monotonic() - began - limit)
            elif turn < TIMERS + PROFILED:
                trace.append(runtime.timeline(image))
            else:
                known = Known(runtime._promise(0.01).timer.looks(limit), runtime.pace.slowdown, len(trails))
                began = time.monotonic()
                answer = runtime.answer(image, deadline=limit)
                late = time.monotonic() - began - limit
                asked.append(Asked(int(order[len(asked)]), limit, known, answer.stage, late))
    runtime.close()
    lateness, timers = percentiles([each.late for each in asked]), percentiles(bare)
    result = {
        "what": "ontime", "network": runtime.spec.name, "engine": runtime.engine.name, "threads": options.threads,
        "busy_processes": options.busy, "short": options.short, "answers": len(asked), "lost": options.answers - len(asked),
        "timers": len(bare), "profiled": len(trace), "full_ms": full * 1e3,
        "quiet_ms": [float(v) * 1e3 for v in np.median(quiet, axis=0)],
        "late_share": float(np.mean([each.late > 0 for each in asked])),  # came back after their deadline, by whatever little
        "lateness_ms": lateness, "bare_timer_ms": timers, "p99_over_bare_ms": lateness["p99"] - timers["p99"],
        "deadlines": by_deadline(asked, trails, np.array(trace), known_trace(runtime), full, subject.wrong),
    }  # fmt: skip
    for name, key in (("forecast", "predicted_error"), ("profile_under_load", "profile_error")):
        for by, found in (("", "error"), ("_by_shares", "shares_error")):
            off = [100 * abs(row[found] - row[key]) for row in result["deadlines"] if "error" in row]
            result[f"points_off_{name}{by}"] = max(off, default=None)
    return result


def keep_all(runtime: Any) -> list[Any]:
    """A list of how every question went, from now on; the runtime itself forgets the old ones."""
    trails: list[Any] = []
    add = runtime.worker.recent.add

    def remember(done: Sequence[float], ended: float, slowdown: float) -> None:
        add(done, ended, slowdown)
        trails.append((tuple(done), ended, slowdown))

    runtime.worker.recent.add = remember
    return trails


def known_trace(runtime: Any) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.cumsum(runtime.pace.base)[None] if runtime.trace is None else runtime.trace
    return found


def warm_question(runtime: Any, image: NDArray[Any]) -> list[float]:
    time.sleep(PAUSE)
    found: list[float] = runtime.timeline(image)
    return found


def by_deadline(
    asked: Sequence[Asked],
    trails: list[Any],
    trace: NDArray[np.float64],
    quiet: NDArray[np.float64],
    full: float,
    wrong: NDArray[np.float64] | None,
) -> list[dict[str, Any]]:
    """Who answered, how well, and what was foretold: by the runtime, and by the profile taken under the same load."""
    from nestling.runtime.forecast import Forecast

    profile = Forecast(trace)
    edges = np.linspace(*RANGE, BINS + 1) * full
    rows = []
    for low, high in itertools.pairwise(edges):
        inside = [each for each in asked if low <= each.limit < high]
        if not inside:
            continue
        foretold = np.array([each.known.shares(quiet, trails) for each in inside])
        profiled = np.array([profile.shares(each.known.looks) for each in inside])
        stages = np.array([each.stage for each in inside])
        row: dict[str, Any] = {
            "deadline_ms": [low * 1e3, high * 1e3], "n": len(inside),
            "shares": [float((stages == s).mean()) for s in range(trace.shape[1] + 1)],
            "predicted_shares": [float(v) for v in foretold.mean(axis=0)],
            "profile_shares": [float(v) for v in profiled.mean(axis=0)],
        }  # fmt: skip
        if wrong is not None:
            faults = wrong[:, [each.image for each in inside]]  # (1 + stages, n), the very images that were asked
            row["error"] = float(faults[stages, np.arange(len(inside))].mean())
            chances = (foretold.T * faults).sum(axis=0)  # that this image is answered wrongly, whoever answers
            row["predicted_error"] = float(chances.mean())
            # one standard deviation of the error, and of what the shares make of it
            row["chance_error"] = float(np.sqrt((chances * (1 - chances)).sum()) / len(inside))
            means = faults.mean(axis=1)
            row["shares_error"] = float(means @ row["shares"])
            spread = foretold @ means**2 - (foretold @ means) ** 2
            row["chance_shares"] = float(np.sqrt(spread.sum()) / len(inside))
            row["profile_error"] = float((profiled.T * faults).sum(axis=0).mean())
        rows.append(row)
    return rows


# --- better than waiting -----------------------------------------------------------------------------------------


def curve(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from nestling.files import CURVE
    from nestling.runs.open import resolve
    from nestling.runtime.build import build_engine
    from nestling.runtime.engine import Stop
    from nestling.runtime.runtime import spec_of
    from nestling.studies.deadline import NEST, ORACLE_ALL, anytime, oracle_all, timed

    torch.set_num_threads(1)
    folders = [options.source, *options.alone]
    engines, outputs, names = [], [], []
    for folder in folders:
        run = resolve(folder)
        net = run.net()
        spec = spec_of(run, net)
        engines.append(build_engine(net, "cpu", "auto", options.threads))
        outputs.append(run.outputs())
        names.append(f"{spec.name} {'-'.join(spec.sizes)}")
    x = np.random.default_rng(0).normal(size=(1, *spec.shape)).astype(np.float32)
    traces: list[list[list[float]]] = [[] for _ in engines]
    for load in range(3):
        with busy(load):
            for repeat in range(options.repeats // 3):
                for engine, trace in zip(engines, traces, strict=True):
                    began, done = time.perf_counter(), []
                    state = engine.start(x)
                    for stage in range(1, engine.stages + 1):
                        _, state = engine.step(stage, state, Stop())
                        done.append((time.perf_counter() - began) * 1e3)
                    if repeat >= 10:
                        trace.append(done)
    shuffled = [np.random.default_rng(1).permutation(trace) for trace in traces]  # the same turns for all networks
    nest, *alone = (
        timed(name, out["logits"].numpy(), out["labels"].numpy(), trace)
        for name, out, trace in zip(names, outputs, shuffled, strict=True)
    )
    classes = outputs[0]["logits"].shape[2]
    largest = max(float(each.latency[:, -1].mean()) for each in alone)
    limits = [float(f) * largest for f in np.linspace(0.2, 1.5, 27)]
    ours, theirs = anytime(NEST, nest, limits, classes), oracle_all(alone, limits, classes)
    differences = [100 * (b.error - a.error) for a, b in zip(ours, theirs, strict=True)]  # points of accuracy
    found = {
        "what": "curve", "nest": folders[0], "alone": options.alone, "threads": options.threads,
        "mean_ms": {name: [float(v) for v in np.mean(t, axis=0)] for name, t in zip(names, shuffled, strict=True)},
        "repeats": len(traces[0]), "deadlines_ms": limits, "engine": engines[0].name,
        "nest_error": [row.error for row in ours], "oracle_all_error": [row.error for row in theirs],
        "nest_answered": [row.answered for row in ours], "schemes": [NEST, ORACLE_ALL],
        "mean_points_above_oracle_all": float(np.mean(differences)), "worst_points_below": float(-min(differences)),
    }  # fmt: skip
    nested = resolve(folders[0])
    if not nested.comes_with_us:
        nested.write_json(CURVE, found)  # reports draw it
    return found


def resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


# --- the command line --------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=PARTS)
    parser.add_argument("source", nargs="?", default="", help="a run's folder, a network's name, or an exported folder")
    parser.add_argument(
        "--portable", action="store_true", help="the source is an exported folder; torch is not imported"
    )
    parser.add_argument(
        "--pictures", default="", help="with --portable: test images, from a file that `pictures` wrote"
    )
    parser.add_argument("--alone", nargs="*", default=[], help="curve: runs of independent networks")
    parser.add_argument("--answers", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=1500, help="curve: measurements of every network")
    parser.add_argument("--busy", type=int, default=2, help="ontime: other processes that never sleep")
    parser.add_argument(
        "--short", type=float, default=SHORT, help="ontime: 1 = deadlines spread evenly; more = shorter ones"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of the engine")
    parser.add_argument("--json", nargs="?", const="-", help="a file, or stdout")
    options = parser.parse_args()
    if options.portable:
        sys.modules["torch"] = None  # type: ignore[assignment]  # importing it fails from here on
    if options.what == "ontime":
        options.answers, options.source = options.answers or 10_000, options.source or "width-resnet42"
    result = PARTS[options.what](options)
    result |= {"provenance": where(options.portable)}
    if options.json and options.json != "-":
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    if options.json == "-":
        print(json.dumps(result, indent=2))
    else:
        report(result)


def where(portable: bool) -> dict[str, Any]:
    """Command, versions and machine; without torch only what the standard library tells."""
    command = " ".join(sys.argv)
    if not portable:
        from nestling.runs.provenance import provenance

        return provenance(command, "cpu", time.time) | {"onnxruntime": version("onnxruntime")}
    versions = {name: version(name) for name in ("nestling", "numpy", "onnxruntime")}
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {
        "command": command, "started": started, "versions": {"python": platform.python_version()} | versions,
        "platform": platform.platform(), "cores": os.cpu_count(), "torch": "not importable",
    }  # fmt: skip


PARTS = {"ontime": ontime, "curve": curve, "pictures": pictures}


def report(result: dict[str, Any]) -> None:
    """The figures, for people."""
    for key, value in result.items():
        if key == "deadlines":
            print("deadline ms      n  answered by (prior, stages)   predicted", end=" " * 22)
            print("error  predicted +-chance  by profile  of shares +-chance")
            for row in value:
                shares = " ".join(f"{v:5.3f}" for v in row["shares"])
                expected = " ".join(f"{v:5.3f}" for v in row["predicted_shares"])
                low, high = row["deadline_ms"]
                errors = f"{100 * row['error']:6.2f} {100 * row['predicted_error']:6.2f}" if "error" in row else ""
                errors += f" ±{100 * row['chance_error']:4.2f}    {100 * row['profile_error']:6.2f}" if errors else ""
                errors += f"     {100 * row['shares_error']:6.2f} ±{100 * row['chance_shares']:4.2f}" if errors else ""
                print(f"{low:5.1f}-{high:5.1f} {row['n']:6}  {shares}   {expected}   {errors}")
        elif key != "provenance":
            print(f"{key}: {value}")


if __name__ == "__main__":
    main()
