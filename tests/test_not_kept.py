"""Modules whose answers a network could not keep, or that torch itself cannot train: refused, with the true reason."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nestling
from nestling import NestlingError


class Depends(nn.Module):
    """An ordinary module, and something that exits cannot keep."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.one, self.two, self.head, self.kind = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3),
            nn.Linear(8, 10),
            kind,
        )
        self.norm = nn.BatchNorm2d(8, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        if self.kind == "mean":
            y = y - y.mean(0, keepdim=True)
        elif self.kind == "size":
            y = y / x.size(0)
        elif self.kind == "norm":
            y = self.norm(y)
        elif self.kind == "dropout":
            y = F.dropout(y, 0.5)
        elif self.kind == "noise":
            y = y + torch.randn_like(y)
        elif self.kind == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                y = self.one(x)
            y = y.float()
        logits: Tensor = self.head(F.relu(self.two(y)).mean((2, 3)))
        return logits


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("mean", "depends on the other images of the batch"),
        ("size", "depends on the other images of the batch"),
        ("norm", "depends on the other images of the batch"),
        ("dropout", "otherwise each time"),
        ("noise", "otherwise each time"),
        ("autocast", "put them around it"),
    ],
)
def test_exits_refuse_answers_that_could_not_stay_and_say_why(kind: str, why: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(NestlingError, match=why):
        nestling.exits(Depends(kind).eval(), (0.4,), (3, 8, 8))
    assert nestling.exits(Depends("").eval(), (0.4,), (3, 8, 8)).plan.stages == 2


def test_a_module_that_torch_itself_cannot_train_is_refused_in_words() -> None:
    """It overwrites what its own convolution needs for its gradient."""

    class Overwrites(Depends):
        def forward(self, x: Tensor) -> Tensor:
            y = F.relu(self.one(x))
            z = self.two(y)
            y.mul_(2)
            logits: Tensor = self.head(z.mean((2, 3)) + y.mean((2, 3)))
            return logits

    for way in (nestling.nest, nestling.keep):
        with pytest.raises(NestlingError, match="torch cannot run the module itself"):
            way(Overwrites("").eval(), shape=(3, 8, 8))
