"""What a step with one exact gradient per task must multiply, for the trunks of docs/log/gradients.md, beside what was measured.

    python benchmarks/trunk_counts.py                  counts, and the figures of results/gradients-cpu.json

Of a layer with r samples (times tokens or pixels), `in` entries of a weight's row and `out` outputs a forward pass makes r in out
products, and so does the gradient of its input and that of its weight, for every task. The Gram matrix needs either all n
tasks' weight gradients, or one and r^2 / 2 (in + n out) products beside it (of a convolution of stride 1 `in` is its channels):
whichever is less. All at one rate, and nothing else counted: no norms, no activations, no sums.
"""

import json
from math import prod
from pathlib import Path

import torch
from gradients import OURS, PLAINLY, RESULTS
from torch import Tensor, nn
from trunks import TRUNKS, Shared


def layers(net: Shared, x: Tensor) -> list[tuple[nn.Module, int]]:
    """Every linear layer and convolution of the trunk, in order, with its r."""
    found: list[tuple[nn.Module, int]] = []

    def see(layer: nn.Module, given: object, gave: Tensor) -> None:
        found.append((layer, gave.numel() // int(layer.get_parameter("weight").shape[0])))

    hooks = [
        layer.register_forward_hook(see) for layer in net.trunk.modules() if isinstance(layer, nn.Linear | nn.Conv2d)
    ]
    with torch.no_grad():
        net.trunk(x)
    for hook in hooks:
        hook.remove()
    return found


def counted(net: Shared, x: Tensor) -> dict[str, float]:
    """Products over those of the summed loss: by the rule (n + 2) / 3, by rows, and the least."""
    tasks = len(net.heads)
    summed = rows = least = rule = 0.0
    for place, (layer, r) in enumerate(layers(net, x)):
        weight = layer.get_parameter("weight")
        out, into = weight.shape[0], prod(weight.shape[1:])
        once, back = r * into * out, 0 if place == 0 else r * into * out
        plain = isinstance(layer, nn.Conv2d) and set(layer.stride) == {1}
        without = r * r / 2 * ((weight.shape[1] if plain else into) + tasks * out)
        summed += 2 * once + back
        rule += 2 * once + tasks * back
        rows += once + tasks * (back + once)
        least += once + tasks * back + min(tasks * once, once + without)
    return {"free Gram matrix": rule / summed, "rows": rows / summed, "least": least / summed}


def main() -> None:
    measured = {(row["case"], row["method"]): row["ratio"] for row in json.loads(Path(RESULTS).read_text())["rows"]}
    print("| | asked | free Gram matrix | least | rows | measured | by torch's own products | TorchJD's best |")
    print("|---|---|---|---|---|---|---|---|")
    for case, make in TRUNKS.items():
        net, x = make()
        count = counted(net, x)
        asked = 1.15 * (len(net.heads) + 2) / 3
        best = min(ratio for (name, method), ratio in measured.items() if name == case and "torchjd" in method)
        own = [measured[case, method] for method in (OURS, PLAINLY)]
        cells = [asked, count["free Gram matrix"], count["least"], count["rows"], *own, best]
        print(f"| {case} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")


if __name__ == "__main__":
    main()
