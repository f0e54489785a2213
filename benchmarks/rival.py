"""The live runtime against its simple rival: keep three ordinary networks and run the largest that lately was in time.

    python benchmarks/rival.py                                    # quiet; every contender answers 2,000 questions
    python benchmarks/rival.py --load busy --json results/rival-busy.json
    python benchmarks/rival.py --load bursts --deadlines unknown
    python benchmarks/rival.py --table docs/runtime.md results/live-*.json             # in brief; docs/log/runtime.md: every cell

What `nestling profile NAME --live` does (nestling.studies.live), with the deadlines and the number of questions of the figures
in docs/runtime.md, and with provenance. One process, one thread each, blocks of questions in turn, a pause before each.
`--table` measures nothing and writes the runs into a page.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from nestling.commands.profile import show
from nestling.runs.provenance import provenance
from nestling.studies.live import DEADLINES, INDEPENDENT_ERRORS, LOADS, live, read_trace

BEGIN, END = "<!-- benchmarks/rival.py --table writes from here -->", "<!-- to here -->"
BRIEF = "<!-- benchmarks/rival.py --table writes in brief from here -->"
SHOWN = ("nest", "nest, soon", "nest, loop", "chooser", "one by one", "always 1", "always 2")
ORDER = [("quiet", "known"), ("busy", "known"), ("bursts", "known"), ("quiet", "unknown")]
KEPT = "width-resnet42-kept-cifar10"
MAIN = ("nest", "chooser", "always 2")


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Errors in %, late and nothing in % of the questions; the best of each block in bold."""
    first = runs[0]["own_errors"]["nest"]["by_deadline"]
    ranges = " / ".join(f"{each['from_ms']:g}-{each['to_ms']:g}" for each in first)
    lines = [
        f"| network; load, deadlines | contender | late | nothing | strict, own errors | equal errors | own at {ranges} ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in in_order(runs):
        own, equal = run["own_errors"], run["equal_errors"]
        names = [name for name in SHOWN if name in own]
        least = min(round(100 * own[name]["strict"], 2) for name in names)
        for place, name in enumerate(names):
            row, strict = own[name], f"{100 * own[name]['strict']:.2f}"
            strict = f"**{strict}**" if float(strict) == least else strict
            what = f"{run['run']}; {run['load']}, {run['deadlines']}" if place == 0 else ""
            parts = " / ".join(f"{100 * each['strict']:.1f}" for each in row["by_deadline"])
            shares = " | ".join(f"{100 * row[key]:.1f}" for key in ("late", "nothing"))
            lines.append(f"| {what} | {name} | {shares} | {strict} | {100 * equal[name]['strict']:.2f} | {parts} |")
    return "\n".join(lines)


def brief(runs: Sequence[dict[str, Any]]) -> str:
    """A line for each run: own errors of the nest and what a user would do instead, the best in bold; then equal errors."""
    lines = [
        "| network; load, deadlines | nest | chooser | always the middle one | one by one | nest late "
        "| equal errors: nest / chooser | most behind in a range | n |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for run in in_order(runs):
        own, equal = run["own_errors"], run["equal_errors"]
        found = {
            name: f"{100 * own[name]['strict']:.2f}"
            for name in ("nest", "chooser", "always 2", "one by one")
            if name in own
        }
        least = min(found.values(), key=float)
        cells = [
            f"**{found[name]}**" if found.get(name) == least else found.get(name, "") for name in (*MAIN, "one by one")
        ]
        behind = max(
            ours["strict"] - theirs["strict"]
            for ours, theirs in zip(equal["nest"]["by_deadline"], equal["chooser"]["by_deadline"], strict=True)
        )
        last = (
            f"{100 * own['nest']['late']:.2f} %",
            f"{100 * equal['nest']['strict']:.2f} / {100 * equal['chooser']['strict']:.2f}",
            f"{100 * behind:.2f}",
            f"{own['nest']['n']:,}",
        )
        lines.append(f"| {run['run']}; {run['load']}, {run['deadlines']} | {' | '.join((*cells, *last))} |")
    return "\n".join(lines)


def in_order(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(runs, key=lambda run: (run["run"] != KEPT, ORDER.index((run["load"], run["deadlines"]))))


def with_table(page: str, runs: Sequence[dict[str, Any]]) -> str:
    begin, write = (BRIEF, brief) if BRIEF in page else (BEGIN, table)
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(END)
    return f"{before}{begin}\n\n{write(runs)}\n\n{END}{after}"


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
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="a page, and the runs to write into it")
    options = parser.parse_args()
    if options.table:
        page, *files = options.table
        runs = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        page.write_text(with_table(page.read_text(encoding="utf-8"), runs), encoding="utf-8")
        return
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
