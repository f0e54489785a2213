"""Several threads that ask one runtime: how right and how late their answers are, beside one thread that asks alone.

    python benchmarks/callers.py --json results/callers-cpu.json                # 1, 2, 3, 4 and 8 threads, width-resnet42-cifar10
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", nargs="?", default="width-resnet42-cifar10")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 3, 4, 8])
    parser.add_argument("--questions", type=int, default=800, help="of each thread")
    parser.add_argument(
        "--span", type=float, nargs=2, default=(0.75, 6.0), metavar="MS", help="of deadlines, and most pause"
    )
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    low, high = (ms / 1e3 for ms in options.span)
    rows = []
    with Runtime(options.network, device="cpu") as runtime:
        for threads in options.threads:
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
