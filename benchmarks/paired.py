"""How far apart two runs are, stage by stage, and two stages of one run, judged on the same test images.

    python benchmarks/paired.py runs/A runs/B runs/C      A with B, A with C, B with C

Both answered the same images, so what counts is where only one of them is wrong: the difference has a smaller standard error
than the two errors apart have. It is that of the images, not of seeds. An independent net is compared at its own stage. Of each
run: the wrong answers of the stage before that a stage mends, the right ones that it breaks, and its last training loss.
"""

import argparse
import itertools
import json
import sys
import time
from typing import Any

import torch
from torch import Tensor

from nestling.runs.open import resolve
from nestling.runs.provenance import provenance


def mistakes(path: str) -> tuple[dict[int, Tensor], Tensor]:
    """Stage -> which answers are wrong; and the labels."""
    run = resolve(path)
    found, first = run.outputs(), run.recipe.network.alone or 1
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
        rows.append(
            {
                "a": a, "b": b, "stage": stage,
                "error_a": percent(of_a[stage]), "error_b": percent(of_b[stage]),
                "difference": round(each.mean().item(), 3),
                "standard_error": round((each.std() / len(each) ** 0.5).item(), 3),
            }
        )  # fmt: skip
    return rows


def stages(path: str) -> list[dict[str, Any]]:
    wrong, _ = mistakes(path)
    losses = resolve(path).read_log()[-1]["train_loss"]
    rows, before = [], None
    for (stage, now), loss in zip(wrong.items(), losses, strict=True):
        row = {"run": path, "stage": stage, "error": percent(now), "train_loss": loss}
        if before is not None:
            row |= {"mended": int((before & ~now).sum()), "broken": int((~before & now).sum())}
        rows.append(row)
        before = now
    return rows


def percent(wrong: Tensor) -> float:
    return round(100 * wrong.double().mean().item(), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="folders of finished runs")
    parser.add_argument("--json", action="store_true", help="one document for programs")
    options = parser.parse_args()
    rows = [row for a, b in itertools.combinations(options.runs, 2) for row in difference(a, b)]
    inside = [row for run in options.runs for row in stages(run)]
    if options.json:
        origin = provenance(f"python {' '.join(sys.argv)}", "cpu", time.time)
        print(json.dumps({"rows": rows, "stages": inside, "provenance": origin}, indent=1))
        return
    for row in rows:
        print(
            f"{row['a']} - {row['b']}  stage {row['stage']}  {row['error_a']:.2f} - {row['error_b']:.2f} = "
            f"{row['difference']:+.2f} ± {row['standard_error']:.2f}"
        )
    for row in inside:
        moved = f"  mends {row['mended']}, breaks {row['broken']}" if "mended" in row else ""
        print(f"{row['run']}  stage {row['stage']}  {row['error']:.2f}  training loss {row['train_loss']:.4f}{moved}")


if __name__ == "__main__":
    main()
