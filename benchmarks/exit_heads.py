"""Which head an early exit needs, linear or convolutional: trained by themselves on frozen features of a CIFAR-10 network.

    python benchmarks/exit_heads.py --json results/exit-heads-cpu.json      (minutes on one core; after `nestling data cifar10`)

The network is the last stage of width-resnet42-kept-cifar10, which comes with us: an ordinary ResNet. What it computes after a
quarter and half of its work is kept for some training and test images, as they are; the heads are those of `nestling.exits`. ± is
the standard deviation over seeds of the heads.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from own_cifar import ResNet, shipped
from torch import Tensor

import nestling
from nestling.data import load
from nestling.nets import NestedNet
from nestling.recipes.recipe import DataRecipe
from nestling.runs.provenance import provenance

NETWORK, PLACES, BATCH = "width-resnet42-kept-cifar10", ("group1.block5", "group2.block3"), 100
EPOCHS = {"linear": 8, "conv": 4}


@torch.no_grad()
def features(net: ResNet, images: Tensor) -> list[Tensor]:
    """What each exit reads."""
    kept: dict[str, list[Tensor]] = {place: [] for place in PLACES}
    hooks = [
        net.get_submodule(place).register_forward_hook(lambda m, x, y, to=kept[place]: to.append(y.half()))
        for place in PLACES
    ]
    for part in images.split(BATCH):
        net(part)
    for hook in hooks:
        hook.remove()
    return [torch.cat(kept[place]) for place in PLACES]


def answer(net: NestedNet, stage: int, x: Tensor) -> Tensor:
    """A head's logits of what it reads."""
    for node in net.plan.nodes:
        if node.name.startswith(f"exit{stage}."):
            x = net.compute(node, [x])
    return x


def error(net: NestedNet, stage: int, head: str, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> float:
    """A head after its training, in percent."""
    mine = [p for name, p in net.named_parameters() if name.startswith(f"exit{stage}.")]
    steps = EPOCHS[head] * (len(train[1]) // BATCH)
    optimizer = torch.optim.SGD(mine, 0.1, 0.9, nesterov=True, weight_decay=5e-4)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    net.train()
    for _ in range(EPOCHS[head]):
        for batch in torch.randperm(len(train[1])).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(answer(net, stage, train[0][batch].float()), train[1][batch]).backward()
            optimizer.step()
            rate.step()
    net.eval()
    with torch.no_grad():
        found = torch.cat([answer(net, stage, part.float()) for part in test[0].split(BATCH)])
    return 100 * float((found.argmax(1) != test[1]).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=6000, help="for training")
    parser.add_argument("--tests", type=int, default=2000, help="for testing")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", default="")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    module, data = shipped(), load(DataRecipe(name="cifar10", augment=False, limit=asked.images))
    x, y = next(iter(data.train.batches(asked.images)))
    there, labels = next(iter(data.test.batches(asked.tests)))
    train, test = features(module, x), features(module, there)
    rows = []
    for head in EPOCHS:
        for stage in (1, 2):
            errors = []
            for seed in range(asked.seeds):
                torch.manual_seed(seed)
                net = nestling.exits(module, PLACES, head=head, generator=torch.Generator().manual_seed(seed))
                errors.append(error(net, stage, head, (train[stage - 1], y), (test[stage - 1], labels)))
            mean, spread = statistics.mean(errors), statistics.stdev(errors) if len(errors) > 1 else 0.0
            rows.append({"head": head, "after": PLACES[stage - 1], "errors": [round(each, 2) for each in errors]})
            print(f"{head:8}{PLACES[stage - 1]:16}{mean:6.1f} ± {spread:.1f} %", flush=True)
    if asked.json:
        words = f"python benchmarks/exit_heads.py --images {asked.images} --tests {asked.tests} --seeds {asked.seeds}"
        about = {"network": NETWORK, "images": asked.images, "tests": asked.tests, "epochs": EPOCHS, "rows": rows}
        Path(asked.json).write_text(
            json.dumps({**about, "provenance": provenance(words, "cpu", time.time)}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
