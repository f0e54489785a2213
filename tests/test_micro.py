"""Micro-batches: a batch in equal parts. tests/test_ranks_equal.py and test_ranks_lost.py share them between ranks."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nestling.data import load
from nestling.errors import NestlingError
from nestling.gradients import Accumulator
from nestling.gradients.combiners import OSGD
from nestling.recipes import named
from nestling.recipes.recipe import Recipe, override
from nestling.runs.folder import RunDir
from nestling.train import Training
from nestling.train.micro import MicroBatches
from nestling.train.stepping import kind


def digits(*settings: str) -> Recipe:
    small = ("train.epochs=1", "train.batch=32", "data.limit=64", "train.device=cpu", "train.diagnostics=false")
    return override(named("digits-width"), [*small, *settings])


class Norm(nn.Module):
    """Two tasks behind a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.dropout = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.norm(self.first(x)).relu())
        return out


def test_the_mean_of_micro_batches_is_what_each_gives_by_itself() -> None:
    torch.manual_seed(0)
    net, parts = nn.Linear(4, 2), torch.randn(3, 5, 4)

    def losses(x: Tensor) -> list[Tensor]:
        return list(net(x).square().mean(0))

    rows = Accumulator(net, OSGD(), mean=True)
    for part in parts:
        rows.add(losses(part))
    rows.fill()
    found = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    Accumulator(net, OSGD(), mode="rows").backward(losses(parts.flatten(0, 1)))  # one batch of all: no norms here
    for grad, p in zip(found, net.parameters(), strict=True):
        torch.testing.assert_close(grad, p.grad)


@pytest.mark.parametrize("strategy", ["sgd", "osgd", "greedy"])
def test_one_micro_batch_is_the_whole_batch(tmp_path: Path, strategy: str) -> None:
    """The same step, but for how its rows are stored: as close as float32 lets them be."""
    ended = []
    for count in (0, 1):
        training = Training(
            digits(f"strategy.name={strategy}", f"train.micro_batches={count}"), RunDir(tmp_path / str(count))
        )
        training.step.begin(0)
        x, y = next(iter(training.data.train.batches(32, torch.Generator().manual_seed(0), drop_last=True)))
        losses = training.step(x, y)
        ended.append({**training.net.state_dict(), "losses": losses})
    for name, tensor in ended[0].items():
        torch.testing.assert_close(tensor, ended[1][name], rtol=1e-4, atol=1e-6)


def test_statistics_are_the_mean_of_what_each_part_would_leave() -> None:
    torch.manual_seed(0)
    net, x, y = Norm(), torch.randn(12, 4), torch.zeros(12)
    alone = []
    for part in range(3):
        other = copy.deepcopy(net)
        other(x[part::3])
        alone.append(other.norm)
    for images, _ in MicroBatches(net, 3, 0).parts(x, y):
        net(images)
    for name in ("running_mean", "running_var"):
        wanted = torch.stack([getattr(norm, name).double() for norm in alone]).mean(0).float()
        assert torch.equal(getattr(net.norm, name), wanted)
    assert net.norm.num_batches_tracked == 1, "a step is one batch"


def test_random_numbers_follow_from_the_part_and_leave_others_alone() -> None:
    net, x, y = Norm(), torch.ones(8, 4), torch.zeros(8)
    drawn: list[Any] = []
    state = torch.get_rng_state()
    for count in (1, 2):  # of two steps, on one rank of one and of two
        micro = MicroBatches(net, 2, 0)
        micro.ranks, micro.mine = count, 2 // count
        for _ in range(2):
            if count == 1:
                drawn.append([torch.rand(1) for _ in micro.parts(x, y)])
            else:
                micro.mean = lambda sums: sums  # type: ignore[method-assign]  # no other rank is here
                drawn.append([torch.rand(1) for _ in micro.parts(x[::2], y[::2])])
    (first, second), (third, fourth), *others = drawn
    assert others == [[first], [third]] and len({float(each) for each in (first, second, third, fourth)}) == 4
    assert torch.equal(torch.get_rng_state(), state)


def test_what_cannot_be_parted_equally_is_refused() -> None:
    with pytest.raises(NestlingError, match=r"micro_batches=3 with train\.batch=32"):
        digits("train.micro_batches=3")
    with pytest.raises(NestlingError, match=r"leave train\.sync_norms out"):
        digits("train.micro_batches=4", "train.sync_norms=true")
    with pytest.raises(NestlingError, match="drop its last, smaller batch"):
        list(MicroBatches(Norm(), 4, 0).parts(torch.ones(6, 4), torch.zeros(6)))
    recipe = digits("train.micro_batches=4", "train.engine=graph")
    with pytest.raises(NestlingError, match="micro_batches are computed one after another"):
        kind(recipe, torch.device("cuda"), load(recipe.data, torch.device("cpu")).train)
