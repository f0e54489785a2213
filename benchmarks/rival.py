"""The live runtime against its simple rival: keep three ordinary networks and run the largest that lately was in time.

    python benchmarks/rival.py                                    # quiet; every contender answers 2,000 questions
    python benchmarks/rival.py --load busy --json results/rival-busy.json
    python benchmarks/rival.py --load bursts --deadlines unknown

What `nestling profile NAME --live` does (nestling.studies.live), with the deadlines and the number of questions of the figures
in docs/runtime.md, and with provenance. One process, one thread each, blocks of questions in turn, a pause before each.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from rich.console import Console

from nestling.commands.profile import show
from nestling.runs.provenance import provenance
from nestling.studies.live import DEADLINES, INDEPENDENT_ERRORS, LOADS, live, read_trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", nargs="?", default="width-resnet42-cifar10", choices=INDEPENDENT_ERRORS)
    parser.add_argument("--questions", type=int, default=2000, help="of each contender")
    parser.add_argument("--load", choices=LOADS, default="quiet")
    parser.add_argument("--deadlines", choices=DEADLINES, default="known")
    parser.add_argument("--span", type=float, nargs=2, default=(1.5, 12.0), metavar="MS", help="of deadlines")
    parser.add_argument(
        "--trace", type=Path, help="a file of deadlines in milliseconds, one in a line, instead of a span"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    low, high = (ms / 1e3 for ms in options.span)
    trace = read_trace(options.trace) if options.trace else ()
    result = live(
        options.network, (), options.load, options.deadlines, options.questions, (low, high), options.seed, trace
    )
    Console(width=160).print(show(result))
    if options.json:
        result["provenance"] = provenance(" ".join(["python", *sys.argv]), "cpu", time.time)
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
