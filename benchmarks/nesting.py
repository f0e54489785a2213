"""What nesting costs in training: a whole-mode step of width-resnet42 against the un-nested net of the same dense size.

    python benchmarks/nesting.py                          CPU, batch 32
    python benchmarks/nesting.py --device cuda            GPU, batch 128
    python benchmarks/nesting.py --json                   one line for programs

A step is forward, the mean of the stages' losses, backward, SGD with momentum. Both nets step in turn in one process on
the same random images; the ratio is the median over pairs of neighbouring steps. Target: at most 1.10.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.nets import build, plan
from nestling.recipes.recipe import NetworkRecipe

TARGET = 1.10


def stepper(recipe: NetworkRecipe, x: Tensor, y: Tensor, layout: torch.memory_format) -> Callable[[], None]:
    """One training step of a network, as a function."""
    net = build(recipe).to(device=x.device, memory_format=layout).train()
    steps = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)

    def step() -> None:
        steps.zero_grad()
        torch.stack([F.cross_entropy(logits, y) for logits in net(x)]).mean().backward()
        steps.step()

    return step


def seconds(step: Callable[[], None], device: torch.device) -> float:
    synchronise(device)
    start = time.perf_counter()
    step()
    synchronise(device)
    return time.perf_counter() - start


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def graphed(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The step recorded once and replayed: what is left is the GPU's own time, without Python and launches."""
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def compare(name: str, device: torch.device, batch: int, repeats: int, replay: bool, last: bool) -> dict[str, Any]:
    layout = torch.channels_last if last else torch.contiguous_format
    recipe = NetworkRecipe(name=name)
    stages = plan(recipe).stages
    shape = plan(recipe).input
    x = torch.randn(batch, shape.channels, *shape.size, device=device).to(memory_format=layout)
    y = torch.randint(10, (batch,), device=device)
    nested = stepper(recipe, x, y, layout)
    plain = stepper(NetworkRecipe(name=name, alone=stages), x, y, layout)
    if replay:
        nested, plain = graphed(nested, device), graphed(plain, device)
    for _ in range(3):
        seconds(nested, device), seconds(plain, device)
    pairs = [(seconds(nested, device), seconds(plain, device)) for _ in range(repeats)]
    ratios = sorted(a / b for a, b in pairs)
    quarter = len(ratios) // 4
    return {
        "network": name,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "mode": "graph" if replay else "eager",
        "channels_last": last,
        "batch": batch,
        "pairs": repeats,
        "nested_ms": 1000 * statistics.median(a for a, _ in pairs),
        "plain_ms": 1000 * statistics.median(b for _, b in pairs),
        "ratio": statistics.median(ratios),
        "quartiles": [ratios[quarter], ratios[-1 - quarter]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--network", default="width-resnet42")
    parser.add_argument("--batch", type=int, default=0, help="0: 32 on a CPU, 128 on a GPU")
    parser.add_argument("--repeats", type=int, default=0, help="0: 15 on a CPU, 100 on a GPU")
    parser.add_argument("--json", action="store_true", help="one line for programs")
    options = parser.parse_args()
    device = torch.device(options.device)
    gpu = device.type == "cuda"
    batch, repeats = options.batch or (128 if gpu else 32), options.repeats or (100 if gpu else 15)
    modes = [(replay, last) for replay in ([False, True] if gpu else [False]) for last in (False, True)]
    rows = [compare(options.network, device, batch, repeats, replay, last) for replay, last in modes]
    if options.json:
        found = {"torch": torch.__version__, "threads": torch.get_num_threads(), "target": TARGET, "rows": rows}
        print(json.dumps(found))
        return
    print(f"{options.network}, batch {batch}, torch {torch.__version__}, {rows[0]['device']}, {repeats} pairs")
    print(f"{'mode':8}{'layout':15}{'nested ms':>11}{'plain ms':>10}{'ratio':>8}   quartiles      target {TARGET}")
    for row in rows:
        layout = "channels last" if row["channels_last"] else "contiguous"
        low, high = row["quartiles"]
        verdict = "met" if row["ratio"] <= TARGET else "missed"
        times = f"{row['nested_ms']:11.1f}{row['plain_ms']:10.1f}{row['ratio']:8.3f}"
        print(f"{row['mode']:8}{layout:15}{times}   {low:.3f}-{high:.3f}    {verdict}")


if __name__ == "__main__":
    main()
