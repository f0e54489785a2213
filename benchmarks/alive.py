"""How much of each stage a training has kept alive: batch-norm scales near zero switch their channels off.

    python benchmarks/alive.py runs/A runs/B

Weight decay draws every scale towards zero, and a stage whose loss is small already has little to set against it. Counted per
stage are the channels that it adds and that are followed by a batch norm, and those of them whose scale is smaller than --below.
"""

import argparse
import json
import sys
import time
from typing import Any

import nestling
from nestling.nets.layers import NestedBatchNorm2d
from nestling.runs.provenance import provenance


def count(run: str, below: float) -> list[dict[str, Any]]:
    """For every stage: how many scales it adds, and how many of them are off."""
    net = nestling.load(run)
    owners = net.owners()
    stages = [
        {"run": run, "stage": stage, "size": size, "scales": 0, "off": 0} for stage, size in enumerate(net.sizes, 1)
    ]
    for name, module in net.named_modules():
        if not isinstance(module, NestedBatchNorm2d):
            continue
        scales, owned = module.weight.detach().abs(), owners[f"{name}.weight"]
        for row in stages:
            mine = (owned & -owned) == 1 << (row["stage"] - 1)  # the first task that depends on it
            row["scales"] += int(mine.sum())
            row["off"] += int((mine & (scales < below)).sum())
    return stages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="run folders, or networks that come with nestling")
    parser.add_argument("--below", type=float, default=1e-3)
    parser.add_argument("--json", action="store_true", help="one document for programs")
    options = parser.parse_args()
    rows = [row for run in options.runs for row in count(run, options.below)]
    if options.json:
        origin = provenance(f"python {' '.join(sys.argv)}", "cpu", time.time)
        print(json.dumps({"below": options.below, "rows": rows, "provenance": origin}, indent=1))
        return
    for row in rows:
        print(
            f"{row['run']}  {row['size']:>6}  {row['off']:5} of {row['scales']:5} off  {row['off'] / max(row['scales'], 1):6.1%}"
        )


if __name__ == "__main__":
    main()
