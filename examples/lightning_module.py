"""OSGD in a Lightning module, with manual optimisation. `python examples/lightning_module.py [epochs] [strategy]`

It needs `pip install lightning`. The strategy: auto (one process), ddp, or fully_shard (FSDP2, by Lightning's
ModelParallelStrategy); the last two with two processes. Lightning's own `fsdp` is the older FSDP, which nestling refuses.
"""

import sys
import tempfile
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from two_task import TwoTask, data

import nestling


class Digits(lightning.LightningModule):
    """Two tasks; the digit comes first."""

    def __init__(self, sharded: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False  # we call backward ourselves
        self.sharded = sharded
        self.net = TwoTask()
        self.combine = nestling.OSGD(order=[0, 1])

    def configure_model(self) -> None:
        if self.sharded:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]

    def training_step(self, batch: list[Tensor], index: int) -> None:
        x, digit, lean = batch
        digits, leans = self.net(x)
        losses = [F.cross_entropy(digits, digit), F.mse_loss(leans, lean)]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        report = nestling.backward(losses, self.net, self.combine)  # instead of self.manual_backward(sum(losses))
        optimizer.step()
        self.log_dict({"digit": losses[0], "lean": losses[1]}, on_step=False, on_epoch=True, sync_dist=True)
        self.log("kept", report.kept[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.003)


def main(epochs: int = 10, strategy: str = "auto") -> None:
    lightning.seed_everything(0, verbose=False)
    loader = DataLoader(TensorDataset(*data()), batch_size=128 if strategy == "auto" else 64, shuffle=True)
    sharded = strategy == "fully_shard"
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            devices=1 if strategy == "auto" else 2,
            strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1) if sharded else strategy,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Digits(sharded), loader)
    print("  ".join(f"{name} {value:.4f}" for name, value in trainer.callback_metrics.items()))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:])
