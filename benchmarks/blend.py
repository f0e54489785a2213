"""Whether a stage is better together with the stages before it: their probabilities added, without any training.

    python benchmarks/blend.py --json results/blend-cpu.json

In: the outputs on the test images that come with the trained networks. The share of the earlier stages' mean is chosen on one
half of the images and judged on the other, for 200 random halves. Out: the error of the stage alone, the mean gain on the halves
that judge, and its deviation over halves; whoever sees both halves would gain more, but would not know it.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from nestling.runs.folder import shipped
from nestling.runs.open import resolve
from nestling.runs.provenance import provenance

SHARES = [share / 20 for share in range(11)]  # of the stages before
HALVES = 200


def blended(name: str) -> list[dict[str, Any]]:
    found = resolve(name).outputs()
    logits, labels, rows = found["logits"].float(), found["labels"], []
    probabilities, chance = logits.softmax(-1), torch.Generator().manual_seed(0)
    for stage in range(2, len(logits) + 1):
        mine, before = probabilities[stage - 1], probabilities[: stage - 1].mean(0)
        wrong = torch.stack(
            [((1 - share) * mine + share * before).argmax(-1) != labels for share in SHARES]
        ).float()  # (shares, images)
        gains, chosen = [], []
        for _ in range(HALVES):
            order = torch.randperm(len(labels), generator=chance)
            choose, judge = order[: len(labels) // 2], order[len(labels) // 2 :]
            best = int(wrong[:, choose].mean(1).argmin())
            gains.append(float(wrong[0, judge].mean() - wrong[best, judge].mean()))
            chosen.append(SHARES[best])
        gain = torch.tensor(gains)
        rows.append(
            {
                "network": name, "stage": stage, "error": float(wrong[0].mean()), "images": len(labels),
                "share": float(torch.tensor(chosen).mean()), "gain": float(gain.mean()), "deviation": float(gain.std()),
            }
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    rows = [row for name in shipped() for row in blended(name)]
    for row in rows:
        print(
            f"{row['network']:28s} stage {row['stage']}: {row['error']:.2%} alone, share {row['share']:.2f} of those before: "
            f"{100 * row['gain']:+.2f} ± {100 * row['deviation']:.2f} points better"
        )
    if options.json:
        said = provenance(" ".join(["python", *sys.argv]), "cpu", time.time)
        options.json.write_text(json.dumps({"halves": HALVES, "rows": rows, "provenance": said}, indent=1) + "\n")


if __name__ == "__main__":
    main()
