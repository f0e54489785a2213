"""Do the tasks of finished runs agree? Cosines of their gradients and the weights that the update gave them, over all epochs.

    nestling sweep digits-width --grid train.seed=0,1,2,3,4,5,6,7,8,9 --out runs/cosines
    python benchmarks/cosines.py runs/cosines/* --json results/cosines-digits.json

Reads log.jsonl of runs with `train.diagnostics`, which says both of the last step of every epoch.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    logs = [Path(run) / "log.jsonl" for run in options.runs]
    lines = [[json.loads(line) for line in log.read_text().splitlines()] for log in logs if log.is_file()]
    cosines = np.array([[line["cosines"] for line in run] for run in lines])  # (runs, epochs, tasks, tasks)
    weights = np.array([[np.mean(line["weights"], 0) for line in run] for run in lines])  # (runs, epochs, tasks)
    pairs = cosines[:, :, *np.triu_indices(cosines.shape[-1], 1)]
    by_run = weights.mean(1)
    found = {
        "command": " ".join(["python", *sys.argv[:1], "RUN ..."]),
        "runs": len(lines),
        "epochs": int(pairs.shape[0] * pairs.shape[1]),
        "cosine": {"mean": float(pairs.mean()), "least": float(pairs.min()), "most": float(pairs.max())},
        "epochs_with_a_negative_one": int((pairs < 0).any(-1).sum()),
        "weights": [float(v) for v in by_run.mean(0)],
        "deviation_over_runs": [float(v) for v in by_run.std(0, ddof=1)],
    }
    print(json.dumps(found, indent=1))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
