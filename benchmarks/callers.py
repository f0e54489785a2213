"""Several threads that ask one runtime, or one that asks for batches: how right and how late their answers are.

    python benchmarks/callers.py --json results/callers-cpu.json                # 1, 2, 3, 4 and 8 threads, width-resnet42-cifar10
    python benchmarks/callers.py --batches --json results/batches-cpu.json      # images with an answer by a batch's deadline
    PYTHONPATH=OTHER_TREE/src python benchmarks/callers.py                      # the same of other code, to compare in turn

Every thread asks, waits, and pauses as long as an answer may take, at random. Strict error: that of the stage that answered,
90 % for ten classes where none did or it came more than half a millisecond late.
"""

import argparse
import json
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from nestling.runs.provenance import provenance
from nestling.runtime import Runtime
from nestling.studies.live import MUCH_TOO_LATE, made_up

PAUSE = 5e-3  # seconds before each batch
BATCHES = [(4, 3e-3), (16, 5e-3), (64, 10e-3), (64, 30e-3), (256, 50e-3), (256, None)]  # images, seconds


def ask_from(runtime: Runtime, threads: int, questions: int, span: tuple[float, float]) -> dict[str, Any]:
    picture, found = made_up(runtime.spec), list[tuple[int, float]]()

    def caller(number: int) -> None:
        chance = random.Random(number)
        for _ in range(questions):
            time.sleep(chance.uniform(0, span[1]))
            limit, began = chance.uniform(*span), time.monotonic()
            answer = runtime.answer(picture, deadline=limit)
            found.append(
                (answer.stage, time.monotonic() - began - limit)
            )  # one thread at a time: the interpreter's lock

    callers = [threading.Thread(target=caller, args=(number,)) for number in range(threads)]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    stages, late = np.array([stage for stage, _ in found]), np.array([after for _, after in found]) > MUCH_TOO_LATE
    nothing = 1 - float(runtime.prior.max())
    errors = np.array([nothing, *runtime.spec.errors])[stages]
    return {
        "threads": threads, "n": len(found), "strict": float(np.where(late, nothing, errors).mean()), "late": float(late.mean()),
        "stages": [float((stages == stage).mean()) for stage in range(runtime.spec.stages + 1)],
    }  # fmt: skip


def ask_batches(runtime: Runtime, images: int, limit: float | None, repeats: int) -> dict[str, Any]:
    """One batch after another, with a pause: which share of the images has each stage, and when the call is back."""
    batch, seen, took = np.stack([made_up(runtime.spec)] * images), [], []
    for _ in range(repeats):
        time.sleep(PAUSE)
        began = time.monotonic()
        answers = runtime.answer_batch(batch, deadline=limit)
        took.append(time.monotonic() - began)
        seen += [answer.stage for answer in answers]
    late = np.array(took) - (limit or np.inf)
    return {
        "images": images, "deadline_ms": limit and 1e3 * limit, "n": repeats, "took_ms": 1e3 * float(np.median(took)),
        "late": float((late > MUCH_TOO_LATE).mean()),
        "stages": [float(np.mean(np.array(seen) == stage)) for stage in range(runtime.spec.stages + 1)],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", nargs="?", default="width-resnet42-cifar10")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 3, 4, 8])
    parser.add_argument("--questions", type=int, default=800, help="of each thread")
    parser.add_argument(
        "--span", type=float, nargs=2, default=(0.75, 6.0), metavar="MS", help="of deadlines, and most pause"
    )
    parser.add_argument("--batches", action="store_true", help="one thread, batches of several sizes")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    low, high = (ms / 1e3 for ms in options.span)
    rows = []
    with Runtime(options.network, device="cpu") as runtime:
        for images, limit in BATCHES if options.batches else ():
            row = ask_batches(runtime, images, limit, 40 if limit else 8)
            rows.append(row)
            shares = " ".join(f"{100 * share:5.1f}" for share in row["stages"])
            by = f"in {1e3 * limit:g} ms" if limit else "without a deadline"
            print(
                f"{images} images {by}: back after {row['took_ms']:.1f} ms, late {100 * row['late']:.1f} %, stages {shares} %"
            )
        for threads in () if options.batches else options.threads:
            row = ask_from(runtime, threads, options.questions, (low, high))
            rows.append(row)
            shares = " ".join(f"{100 * share:5.1f}" for share in row["stages"])
            print(
                f"{threads} threads: strict error {100 * row['strict']:5.2f} %, late {100 * row['late']:.2f} %, stages {shares} %"
            )
    if options.json:
        about = provenance(" ".join(["python", *sys.argv]), "cpu", time.time)
        result = {"network": options.network, "span_ms": list(options.span), "rows": rows, "provenance": about}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
