"""Channels in order of importance, and norms calibrated anew: the same network before it is cut, better stages after."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from test_keep import MODULES
from test_nest import GOOD, stirred
from torch import Tensor, nn

import nestling
from nestling.errors import NestlingError
from nestling.nets.births import grow
from nestling.nets.calibrate import calibrate
from nestling.nets.nest import nest
from nestling.nets.reading.assemble import assemble
from nestling.nets.reading.ordered import ordered
from nestling.nets.reading.read import read

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from untrained import trained

ZOO = {**{f"nest: {name}": (make, (3, 8, 8)) for name, make in GOOD.items()},
       **{f"keep: {name}": (make, (3, 16, 16)) for name, make in MODULES.items()}}  # fmt: skip


@pytest.mark.parametrize("what", ZOO)
def test_a_network_in_order_computes_the_same(what: str) -> None:
    make, shape = ZOO[what]
    torch.manual_seed(0)
    module = stirred(make()).eval()
    x = torch.randn(3, *shape, dtype=torch.float64)
    sketch = read(module, shape, "it")
    before = {key: value.clone() for key, value in module.state_dict().items()}
    net = assemble(ordered(sketch), grow(""), True, "it", False).net.double().eval()
    assert torch.allclose(net(x)[0], module(x), rtol=1e-9, atol=1e-10)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items()), "copies were moved"


@pytest.mark.parametrize("what", MODULES)
def test_the_plan_does_not_depend_on_the_weights(what: str) -> None:
    """So that weights of a nest of one module fit into the nest of another of the same kind."""
    plans = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        plans.append(nest(MODULES[what](), "w", (3, 16, 16), uneven=True).plan)
    assert plans[0] == plans[1]


class Stream(nn.Module):
    """A residual stream of four channels, of which the third and the first are used."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.fc = nn.Conv2d(1, 4, 1, bias=False), nn.Conv2d(4, 4, 1, bias=False), nn.Linear(4, 3)
        with torch.no_grad():
            self.stem.weight.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]).view(4, 1, 1, 1))
            used = torch.tensor([2.0, 0.1, 5.0, 0.5])
            self.block.weight.copy_((torch.eye(4) * used).view(4, 4, 1, 1))
            self.fc.weight.copy_(used.expand(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        y = y + self.block(y)
        logits: Tensor = self.fc(y.mean((2, 3)))
        return logits


def test_a_residual_stream_has_one_order_and_its_most_used_channels_come_first() -> None:
    net = nest(Stream(), "w", (1, 4, 4))
    assert net.layer("stem").weight.flatten().tolist() == [3.0, 1.0, 4.0, 2.0]
    assert torch.diagonal(net.layer("block").weight[:, :, 0, 0]).tolist() == pytest.approx([5.0, 2.0, 0.5, 0.1])
    assert net.layer("head1.fc").weight[0].tolist() == pytest.approx([5.0, 2.0])
    plain = nest(Stream(), "w", (1, 4, 4), order=False)
    assert plain.layer("stem").weight.flatten().tolist() == [1.0, 2.0, 3.0, 4.0]


# --- real digits ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> tuple[nn.Module, Tensor, Tensor]:
    """A trained network, all images (the first 1,437 are those it was trained on) and their labels."""
    found = load_digits()
    x, y = torch.tensor(found.images[:, None], dtype=torch.float32) / 8 - 1, torch.tensor(found.target)
    return trained(x, y, seed=0), x, y


def right(net: nn.Module, x: Tensor, y: Tensor) -> list[float]:
    """The share of the last 360 images that each stage gets right, or a module."""
    with torch.no_grad():
        found = net.eval()(x[1437:])
    answers = found if isinstance(found, tuple) else (found,)
    return [float((answer.argmax(1) == y[1437:]).float().mean()) for answer in answers]


def batches(x: Tensor) -> list[Tensor]:
    return list(x[:1280].split(128))


def test_a_trained_network_starts_well(digits: tuple[nn.Module, Tensor, Tensor]) -> None:
    module, x, y = digits
    assert right(module, x, y)[0] > 0.93
    untouched = right(nest(module, "w,w", (1, 8, 8), order=False), x, y)
    cut = right(calibrate(nest(module, "w,w", (1, 8, 8), order=False), batches(x)), x, y)
    found = right(calibrate(nest(module, "w,w", (1, 8, 8)), batches(x)), x, y)
    assert sum(untouched) < 1.0 < sum(cut), "norms must be calibrated"
    assert found[0] > cut[0] and sum(found[:2]) > sum(cut[:2]) + 0.1, "and the important channels come first"


def test_a_kept_network_starts_well_and_stays(digits: tuple[nn.Module, Tensor, Tensor]) -> None:
    module, x, y = digits
    net = nestling.keep(module, (1 / 4, 1 / 4), (1, 8, 8))
    before = {key: value.clone() for key, value in net.state_dict().items() if not key.startswith("early.")}
    found = right(nestling.calibrate(net, batches(x)), x, y)
    assert found[0] > 0.2 and found[1] > 0.3 and found[2] == right(module, x, y)[0]
    assert all(torch.equal(net.state_dict()[key], value) for key, value in before.items()), "its norms too"


# --- calibrating ------------------------------------------------------------------------------------------------------


def test_all_batches_count_alike() -> None:
    net = nest(nn.Sequential(nn.BatchNorm2d(2), nn.Conv2d(2, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
               "w", (2, 4, 4)).train()  # fmt: skip
    weights = {key: value.clone() for key, value in net.named_parameters()}
    images = [torch.randn(8, 2, 4, 4) + shift for shift in (0.0, 1.0, 5.0)]
    assert calibrate(net, [(x, torch.zeros(8)) for x in images]) is net
    norm = net.layer("0")
    assert torch.allclose(norm.running_mean, torch.stack([x.mean((0, 2, 3)) for x in images]).mean(0), atol=1e-5)
    assert norm.momentum == 0.1 and net.training and norm.training
    assert all(torch.equal(value, weights[key]) for key, value in net.named_parameters())


def test_calibrating_on_nothing_is_refused() -> None:
    net = nest(nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)), "w")
    with pytest.raises(NestlingError, match="no batches"):
        calibrate(net, [])


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"x": torch.zeros(2, 3, 32, 32)}, "of type dict"),
        (torch.zeros(0, 3, 32, 32), "no images"),
        (torch.zeros(2, 1, 8, 8), "takes images of shape"),
    ],
)
def test_a_batch_that_does_not_fit_leaves_the_norms_pace(wrong: Any, match: str) -> None:
    layers = (nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    net = nest(nn.Sequential(*layers), "w")
    with pytest.raises(NestlingError, match=match):
        calibrate(net, [torch.randn(2, 3, 32, 32), wrong])
    assert net.layer("1").momentum == 0.1
