"""How far apart two runs are, stage by stage, judged on the same test images: difference of errors and its standard error.

    python benchmarks/paired.py runs/A runs/B runs/C      A with B, A with C, B with C

Both answered the same images, so what counts is where only one of them is wrong: the difference has a smaller standard error
than the two errors apart have. It is that of the images, not of seeds. An independent net is compared at its own stage.
"""

import argparse
import itertools
import json
import sys
import time
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from nestling.provenance import provenance
from nestling.rundir import RunDir


def mistakes(path: str) -> tuple[dict[int, Tensor], Tensor]:
    """Stage -> which answers are wrong; and the labels."""
    run = RunDir.open(path)
    found, first = load_file(run.path / "outputs.safetensors"), run.read_recipe().network.alone or 1
    wrong = found["logits"].argmax(2) != found["labels"]
    return {first + i: each for i, each in enumerate(wrong)}, found["labels"]


def difference(a: str, b: str) -> list[dict[str, Any]]:
    """For every stage that both have: errors of both and a minus b, in points, with a standard error."""
    (of_a, labels), (of_b, others) = mistakes(a), mistakes(b)
    if not torch.equal(labels, others):
        raise SystemExit(f"{a} and {b} were not tested on the same images")
    rows = []
    for stage in sorted(of_a.keys() & of_b.keys()):
        each = 100 * (of_a[stage].double() - of_b[stage].double())
        errors = {
            f"error_{name}": round(100 * of[stage].double().mean().item(), 3) for name, of in (("a", of_a), ("b", of_b))
        }
        spread = round((each.std() / len(each) ** 0.5).item(), 3)
        rows.append(
            {
                "a": a,
                "b": b,
                "stage": stage,
                **errors,
                "difference": round(each.mean().item(), 3),
                "standard_error": spread,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="folders of finished runs")
    parser.add_argument("--json", action="store_true", help="one document for programs")
    options = parser.parse_args()
    rows = [row for a, b in itertools.combinations(options.runs, 2) for row in difference(a, b)]
    if options.json:
        origin = provenance(f"python {' '.join(sys.argv)}", "cpu", time.time)
        print(json.dumps({"rows": rows, "provenance": origin}, indent=1))
        return
    for row in rows:
        print(
            f"{row['a']} - {row['b']}  stage {row['stage']}  {row['error_a']:.2f} - {row['error_b']:.2f} = "
            f"{row['difference']:+.2f} ± {row['standard_error']:.2f}"
        )


if __name__ == "__main__":
    main()
