"""OSGD in a Lightning module, with manual optimisation. `python examples/lightning_module.py [epochs]`

It needs `pip install lightning`. Lightning's `ddp` strategy needs no change: nestling averages each task's gradient over the
ranks itself, beside the wrapper's hooks.
"""

import sys
import tempfile
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from two_task import TwoTask, data

import nestling


class Digits(lightning.LightningModule):
    """Two tasks; the digit comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False  # we call backward ourselves
        self.net = TwoTask()
        self.combine = nestling.OSGD(order=[0, 1])

    def training_step(self, batch: list[Tensor], index: int) -> None:
        x, digit, lean = batch
        digits, leans = self.net(x)
        losses = [F.cross_entropy(digits, digit), F.mse_loss(leans, lean)]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        nestling.backward(losses, self.net, self.combine)  # instead of self.manual_backward(sum(losses))
        optimizer.step()
        self.log_dict({"digit": losses[0], "lean": losses[1]}, on_step=False, on_epoch=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.003)


def main(epochs: int = 10) -> None:
    lightning.seed_everything(0, verbose=False)
    loader = DataLoader(TensorDataset(*data()), batch_size=128, shuffle=True)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Digits(), loader)
    print("  ".join(f"{name} {value:.4f}" for name, value in trainer.callback_metrics.items()))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
