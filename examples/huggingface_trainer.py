"""OSGD in HuggingFace's Trainer: a mixin, and a method that gives one loss per task.

`python examples/huggingface_trainer.py [steps]`, or in several processes
`torchrun --nproc-per-node 2 examples/huggingface_trainer.py [steps]`. It needs `pip install "transformers[torch]"`.
"""

import sys
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments
from two_task import TwoTask, data

import nestling
from nestling.gradients.huggingface import PerTask


class Digits(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.columns = dict(zip(("x", "digit", "lean"), data(), strict=True))

    def __len__(self) -> int:
        return len(self.columns["x"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


class PerTaskTrainer(PerTask, Trainer):
    """Two tasks; the digit comes first."""

    combine = nestling.OSGD(order=["digit", "lean"])

    def compute_losses(self, model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
        digits, leans = model(inputs["x"])
        return {"digit": F.cross_entropy(digits, inputs["digit"]), "lean": F.mse_loss(leans, inputs["lean"])}


def main(steps: int = 150) -> None:
    torch.manual_seed(0)
    net = TwoTask()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=64,
            gradient_accumulation_steps=2,
            learning_rate=0.003,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            remove_unused_columns=False,
        )
        trainer = PerTaskTrainer(net, arguments, train_dataset=Digits())
        trainer.train()
    weights = sum(p.detach().double().sum().item() for p in net.parameters())
    told = "  ".join(f"{name} {value:.4f}" for name, value in trainer.reported.items())
    print(f"rank {arguments.process_index}  {told}  weights {weights!r}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
