"""Who takes the processor from a question beside busy programs, and after how long: by the kernel's own trace.

    sudo python benchmarks/taken.py --pause 2 --questions 3000 --json results/taken-cpu.json
    sudo python benchmarks/taken.py --pause 3

The contenders of rival.py in turn, and the chooser after 70 and 150 us of other work. Linux writes down every switch between
threads (tracefs, which only root may read). Out, for each: late by more than 0.5 ms, strict error with equal errors, milliseconds
of processor time of a question, and how often in a thousand questions it lost the processor for more than 0.3 ms: to a busy
program that took its turn at a tick of the clock, or to whatever woke up on that processor first.
"""

import argparse
import json
import os
import random
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nestling.runs.open import resolve
from nestling.runs.provenance import provenance
from nestling.runtime.chooser import Chooser
from nestling.runtime.runtime import Runtime
from nestling.studies.live import (
    BLOCK,
    MUCH_TOO_LATE,
    Contender,
    LiveQuestion,
    answering,
    made_up,
    make_contenders,
    open_rivals,
    other_processes,
)

TRACE = Path("/sys/kernel/tracing")
BUFFER = 131_072  # KiB for each processor
LONG = 0.3e-3  # seconds
LATER = {"chooser + 70 us": 70e-6, "chooser + 150 us": 150e-6}
SHOWN = ("nest", "nest, soon", "chooser", *LATER, "always 2")
LINE = re.compile(r"\s*.+-(\d+)\s+\[\d+\]\s+\S+\s+([\d.]+): (\w+): (.*)")
SWITCH = re.compile(r"prev_pid=(\d+) .*==> next_comm=(.*) next_pid=(\d+)")


@dataclass
class Gone:
    """Once that a question lost the processor: to whom, for how long, and how long it had had it."""

    whom: str
    seconds: float
    after: float


@dataclass
class Traced:
    """A question, and when it lost the processor."""

    name: str
    question: LiveQuestion
    gone: list[Gone] = field(default_factory=list)

    @property
    def worked(self) -> float:
        return self.question.limit + self.question.late - sum(each.seconds for each in self.gone)


def tell(file: str, text: str) -> None:
    (TRACE / file).write_text(text, encoding="utf-8")


def ask(
    network: str, questions: int, pause: float, span: tuple[float, float], seed: int
) -> tuple[list[Traced], list[float]]:
    """Every contender in blocks; questions begin and end with a mark in the trace. Also the errors of none and of each stage."""
    chance, run, asked = random.Random(seed), resolve(network), list[Traced]()
    tell("trace_clock", "mono")
    tell("buffer_size_kb", str(BUFFER))
    with Runtime(run, device="cpu", threads=1) as runtime, open_rivals(run, runtime, ()) as chooser:
        picture = made_up(runtime.spec)
        contenders = make_contenders(runtime, chooser, picture, "known", sum(span) / 2)
        contenders |= {name: later(chooser, picture, seconds) for name, seconds in LATER.items()}
        mark = os.open(TRACE / "trace_marker", os.O_WRONLY)
        tell("trace", "")
        tell("events/sched/sched_switch/enable", "1")
        tell("tracing_on", "1")
        try:
            with other_processes("busy"):
                for _ in range(0, questions, BLOCK):
                    for name in chance.sample(SHOWN, len(SHOWN)):
                        for _ in range(BLOCK):
                            time.sleep(pause)
                            limit = chance.uniform(*span)
                            os.write(mark, b"question")
                            found = contenders[name](limit)
                            os.write(mark, b"answer")
                            asked.append(Traced(name, found))
        finally:
            tell("tracing_on", "0")
            tell("events/sched/sched_switch/enable", "0")
            os.close(mark)
        return asked, [1 - float(runtime.prior.max()), *runtime.spec.errors]


def later(chooser: Chooser, picture: Any, seconds: float) -> Contender:
    """As if asking the chooser took so much longer."""

    def asked(limit: float) -> int:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
        return chooser.answer(picture, deadline=limit).stage

    return answering(asked)


def read(lines: Iterable[str], thread: int, asked: list[Traced]) -> None:
    """What the trace says of this thread, written to the questions in order."""
    number, inside, since, out = -1, False, 0.0, None
    for line in lines:
        if (found := LINE.match(line)) is None:
            continue
        who, when, event, rest = int(found[1]), float(found[2]), found[3], found[4]
        if event == "tracing_mark_write" and who == thread:
            inside = rest.strip() == "question"
            number += inside
        elif event == "sched_switch" and (switch := SWITCH.search(rest)) is not None:
            if int(switch[1]) == thread and inside:
                out = when, switch[2]
            elif int(switch[3]) == thread:
                if out is not None and inside:
                    asked[number].gone.append(Gone(out[1], when - out[0], out[0] - since))
                out, since = None, when
    if number + 1 != len(asked):
        raise SystemExit(f"the trace has {number + 1} of {len(asked)} questions: ask fewer, or give it a larger buffer")


def row(name: str, asked: list[Traced], errors: list[float]) -> dict[str, Any]:
    late = [each.question.late > MUCH_TOO_LATE for each in asked]
    strict = [errors[0] if gone else errors[each.question.stage] for each, gone in zip(asked, late, strict=True)]
    lost = [gone for each in asked for gone in each.gone if gone.seconds > LONG]
    program = Path(os.path.realpath(sys.executable)).name[:15]  # as the kernel calls the busy programs
    ticks = [gone for gone in lost if gone.whom.startswith("python") or gone.whom == program]
    return {
        "contender": name, "n": len(asked), "late": float(np.mean(late)), "strict": float(np.mean(strict)),
        "worked_ms": [float(v) for v in 1e3 * np.quantile([each.worked for each in asked], (0.1, 0.5, 0.9, 0.98))],
        "lost_to_a_busy_program_in_1000": 1e3 * len(ticks) / len(asked),
        "lost_otherwise_in_1000": 1e3 * (len(lost) - len(ticks)) / len(asked),
        "after_ms": sorted(round(1e3 * gone.after, 2) for gone in ticks),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", nargs="?", default="width-resnet42-cifar10")
    parser.add_argument("--questions", type=int, default=2000, help="of each contender")
    parser.add_argument("--pause", type=float, default=2.0, metavar="MS", help="before each question")
    parser.add_argument("--span", type=float, nargs=2, default=(0.75, 6.0), metavar="MS", help="of deadlines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="add all figures to this file")
    options = parser.parse_args()
    if not os.access(TRACE / "trace", os.R_OK):
        raise SystemExit(f"{TRACE} cannot be read: run as root, after mount -t tracefs nodev {TRACE}")
    low, high = (ms / 1e3 for ms in options.span)
    asked, errors = ask(options.network, options.questions, options.pause / 1e3, (low, high), options.seed)
    with (TRACE / "trace").open(encoding="utf-8", errors="replace") as lines:
        read(lines, os.getpid(), asked)
    tell("trace", "")
    rows = [row(name, [each for each in asked if each.name == name], errors) for name in SHOWN]
    print(f"{options.network}, busy, {options.pause:g} ms before each question")
    for each in rows:
        worked = " / ".join(f"{v:.2f}" for v in each["worked_ms"])
        taken = f"{each['lost_to_a_busy_program_in_1000']:.1f} + {each['lost_otherwise_in_1000']:.1f}"
        print(f"{each['contender']:16s} n={each['n']} late {each['late']:.2%} strict {each['strict']:.2%}")
        print(f"                 worked {worked} ms (10, 50, 90, 98 %), lost in 1,000: {taken} (ticks, others)")
    if options.json:
        runs = json.loads(options.json.read_text())["runs"] if options.json.is_file() else []
        said = provenance(" ".join(["python", *sys.argv]), "cpu", time.time)
        runs.append({"run": options.network, "pause_ms": options.pause, "contenders": rows, "provenance": said})
        options.json.write_text(json.dumps({"runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
