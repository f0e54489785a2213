"""What the stages of a trained network are worth before they are trained: cut as they stand, calibrated, and in order.

    python benchmarks/untrained.py --json results/untrained-digits.json

Small ResNets for the digits, trained by themselves with several seeds, then nested by `nest(module, "w,w")`: the share of the
360 test images that each stage gets right. Half a minute on a CPU; calibrating sees training images without labels.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from nestling import calibrate, nest
from nestling.runs.provenance import provenance

TRAINED = 1437  # images; the others are the test's


class Digits(nn.Module):
    """Three convolutions, of which the last is residual."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm1 = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.two, self.norm2 = nn.Conv2d(16, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32)
        self.three, self.norm3 = nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm2(self.two(F.relu(self.norm1(self.one(x))))))
        logits: Tensor = self.fc((y + F.relu(self.norm3(self.three(y)))).mean((2, 3)))
        return logits


def trained(x: Tensor, y: Tensor, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    module = Digits()
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, 200)
    for batch in torch.randint(0, TRAINED, (200, 64)):
        optimizer.zero_grad()
        F.cross_entropy(module(x[batch]), y[batch]).backward()
        optimizer.step()
        rates.step()
    return module.eval()


@torch.no_grad()
def right(net: nn.Module, x: Tensor, y: Tensor) -> list[float]:
    """Per cent of the test images that each stage gets right, or a module."""
    found = net.eval()(x[TRAINED:])
    answers = found if isinstance(found, tuple) else (found,)
    return [round(100 * float((answer.argmax(1) == y[TRAINED:]).float().mean()), 2) for answer in answers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    known = load_digits()
    x, y = torch.tensor(known.images[:, None], dtype=torch.float32) / 8 - 1, torch.tensor(known.target)
    seen = list(x[:1280].split(128))
    found: dict[str, list[list[float]]] = {}
    for seed in range(options.seeds):
        module = trained(x, y, seed)
        for way, net in (
            ("the module", module),
            ("as it stands", nest(module, "w,w", (1, 8, 8), order=False)),
            ("in order", nest(module, "w,w", (1, 8, 8))),
            ("as it stands, calibrated", calibrate(nest(module, "w,w", (1, 8, 8), order=False), seen)),
            ("in order, calibrated", calibrate(nest(module, "w,w", (1, 8, 8)), seen)),
        ):
            found.setdefault(way, []).append(right(net, x, y))
    for way, rows in found.items():
        table = torch.tensor(rows)
        means, spread = table.mean(0).tolist(), table.std(0).tolist()
        print(f"{way:26}", " / ".join(f"{m:.0f} ± {s:.0f}" for m, s in zip(means, spread, strict=True)))
    if options.json:
        origin = provenance(" ".join(["python", *sys.argv]), "cpu", time.time)
        Path(options.json).write_text(json.dumps({"right_percent": found, "provenance": origin}, indent=1) + "\n")


if __name__ == "__main__":
    main()
