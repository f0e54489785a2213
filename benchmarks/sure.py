"""Stopping where it is sure: error and cost of the networks that come with nestling, as a table for docs/runtime.md.

    python benchmarks/sure.py --json results/sure-cpu.json

Thresholds are chosen on the first half of the CIFAR-10 test set and judged on the second (Runtime.stop_when_sure). Errors
depend on the networks' outputs alone, costs on how long each stage takes here: the mean time of an answer as a share of all
stages one after another, and in brackets of the last stage at once, which is what one would do who always wants that.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from nestling.runs.folder import shipped
from nestling.runs.provenance import provenance
from nestling.runtime import Runtime

LOSSES = (0.0, 0.002, 0.005)


def row(name: str) -> dict[str, Any]:
    with Runtime(name, device="cpu") as runtime:
        found = [runtime.stop_when_sure(loss).to_dict() for loss in LOSSES]
        ms, at_once = [1e3 * base for base in runtime.pace.base], 1e3 * runtime.pace.jumps[-1].base
        return {"sizes": list(runtime.spec.sizes), "ms": ms, "last_at_once_ms": at_once, "found": found}


def table(rows: dict[str, dict[str, Any]]) -> str:
    """A column per network: error, cost, and the share that stopped at each stage."""
    heads = [f"{name}: error, cost, stopped at {' / '.join(each['sizes'])}" for name, each in rows.items()]
    lines = ["| loss allowed, points | " + " | ".join(heads) + " |", "|---|" + "---|" * len(rows)]
    last = [
        f"{100 * each['found'][0]['last_error']:.2f} %, 1 ({sum(each['ms']) / each['last_at_once_ms']:.2f})"
        for each in rows.values()
    ]
    lines.append("| none stops early | " + " | ".join(last) + " |")
    for place, loss in enumerate(LOSSES):
        cells = []
        for each in rows.values():
            found = each["found"][place]
            shares = " / ".join(f"{100 * share:.0f}" for share in found["stopped"])
            at_once = found["cost"] * sum(each["ms"]) / each["last_at_once_ms"]
            cells.append(f"{100 * found['error']:.2f} %, {found['cost']:.2f} ({at_once:.2f}), {shares} %")
        lines.append(f"| {100 * loss:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(shipped()), help="run folders or trained networks")
    parser.add_argument("--json", nargs="?", const="-", help="a file, or stdout")
    options = parser.parse_args()
    rows = {name: row(name) for name in options.names}
    print(table(rows))
    if options.json:
        result = {"rows": rows, "provenance": provenance(" ".join(sys.argv), "cpu", time.time)}
        text = json.dumps(result, indent=2)
        print(text) if options.json == "-" else Path(options.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
