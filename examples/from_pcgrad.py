"""From a PCGrad loop (pytorch_optimizer) to nestling: the same net trained by both, one after the other.

The wrapper around the optimizer goes, `pc_backward` becomes `nestling.backward`, and the optimizer, its scheduler and
its checkpoints are plain torch again. `python examples/from_pcgrad.py [steps]`, after `pip install pytorch_optimizer`
"""

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from two_task import TwoTask, data

import nestling

Losses = Callable[[TwoTask], list[torch.Tensor]]


def before(net: TwoTask, losses: Losses, steps: int) -> None:
    from pytorch_optimizer import PCGrad

    optimizer = PCGrad(torch.optim.Adam(net.parameters(), lr=0.003), reduction="sum")
    for _ in range(steps):
        optimizer.zero_grad()
        optimizer.pc_backward(losses(net))  # type: ignore[arg-type]
        optimizer.step()


def after(net: TwoTask, losses: Losses, steps: int) -> None:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.003)
    combine = nestling.PCGrad()  # or nestling.OSGD(order=[0, 1]), if one task matters more
    for _ in range(steps):
        optimizer.zero_grad()
        nestling.backward(losses(net), net, combine)
        optimizer.step()


def main(steps: int = 200) -> None:
    x, digit, lean = data()

    def losses(net: TwoTask) -> list[torch.Tensor]:
        digits, leans = net(x)
        return [F.cross_entropy(digits, digit), F.mse_loss(leans, lean)]

    for name, loop in (("pytorch_optimizer", before), ("nestling", after)):
        torch.manual_seed(0)
        net = TwoTask()
        loop(net, losses, steps)
        print(f"{name:18s}", *(f"{loss.item():.4f}" for loss in losses(net)))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
