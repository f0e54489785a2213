"""OSGD in a plain PyTorch loop, for a net that is not an anytime net: digits, what they are and how they lean.

The three lines that differ from an ordinary loop are marked. `python examples/two_task.py [steps]`
"""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import nestling


class TwoTask(nn.Module):
    """One encoder, two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.digit = nn.Linear(32, 10)
        self.lean = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.encoder(x)
        return self.digit(features), self.lean(features)[:, 0]


def data() -> tuple[Tensor, Tensor, Tensor]:
    """Images, digits, and where the ink's centre of mass lies from left (-1) to right (1)."""
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32) / 16
    columns = torch.linspace(-1, 1, 8)
    lean = (x.sum(1) * columns).sum(1) / x.sum((1, 2))
    return x.flatten(1), torch.tensor(digits.target), lean


def main(steps: int = 300) -> None:
    torch.manual_seed(0)
    x, digit, lean = data()
    net = TwoTask()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.003)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    combine = nestling.OSGD(order=[0, 1])  # the digit matters most: the other task may not get in its way
    for step in range(steps):
        batch = torch.randint(len(x), (128,))
        digits, leans = net(x[batch])
        losses = [F.cross_entropy(digits, digit[batch]), F.mse_loss(leans, lean[batch])]  # a list, not a sum
        optimizer.zero_grad()
        report = nestling.backward(losses, net, combine)  # instead of sum(losses).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        optimizer.step()
        scheduler.step()
        if step % 100 == 0 or step == steps - 1:
            first, second = (loss.item() for loss in losses)
            cosine, kept = report.cosines[0, 1].item(), report.kept[1].item()
            print(f"step {step:3d}  digit {first:.3f}  lean {second:.4f}  cosine {cosine:+.2f}  kept {kept:.2f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
