"""OSGD with Accelerate: `accelerator.prepare` as ever, one line instead of `accelerator.backward(loss)`.

`python examples/accelerate_loop.py [epochs]`, or in several processes
`torchrun --nproc-per-node 2 examples/accelerate_loop.py [epochs]`. It needs `pip install accelerate`.
"""

import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from two_task import TwoTask, data

import nestling


def main(epochs: int = 10) -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    net = TwoTask()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.003)
    loader = DataLoader(TensorDataset(*data()), batch_size=128 // accelerator.num_processes, shuffle=True)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)  # the net may be wrapped now
    rows = nestling.Accumulator(net, nestling.OSGD(order=[0, 1]), scaler=accelerator.scaler)
    for epoch in range(epochs):
        for x, digit, lean in loader:
            digits, leans = net(x)
            losses = {"digit": F.cross_entropy(digits, digit), "lean": F.mse_loss(leans, lean)}
            optimizer.zero_grad()
            rows.backward(losses)  # instead of accelerator.backward(sum(losses.values()))
            optimizer.step()
        means = {name: accelerator.reduce(loss.detach(), "mean").item() for name, loss in losses.items()}
        accelerator.print(f"epoch {epoch}  " + "  ".join(f"{name} {mean:.4f}" for name, mean in means.items()))
    weights = sum(p.detach().double().sum().item() for p in net.parameters())
    print(f"rank {accelerator.process_index} weights {weights!r}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
