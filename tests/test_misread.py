"""Nothing is misread in silence: each case here once came out of `nest`, or of a nested network, as something else."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nestling
from nestling.errors import NestlingError
from nestling.nets.layers import NestedBatchNorm2d
from nestling.nets.nest import nest
from nestling.nets.net import NestedNet
from nestling.nets.registry import build
from nestling.recipes.recipe import NetworkRecipe

IMAGE = (3, 8, 8)


class Does(nn.Module):
    """A convolution, any function of its output, and a classifier."""

    def __init__(self, function: Callable[["Does", Tensor], Tensor], width: int = 8) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(width, 5)
        self.w = nn.Parameter(torch.randn(8, 8, 3, 3) / 10)
        self.b = nn.Parameter(torch.randn(8))
        self.drop = nn.Dropout(0.5)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.function(self, self.conv(x)).mean((2, 3)))
        return logits


def one_stage(module: nn.Module) -> NestedNet:
    return nest(module, "", shape=IMAGE)


def plain(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *middle, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


# --- nested networks ----------------------------------------------------------------------------------------------


def dilated(m: Does, y: Tensor) -> Tensor:
    return F.conv2d(y, m.w, None, 1, 1, 1) + F.conv2d(y, m.w, None, 1, 2, 2) + F.conv2d(y, m.w, None, 1, 3, 3)


@pytest.mark.parametrize("growth", ["", "w,w"])
def test_one_weight_with_several_dilations_and_strides(growth: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
            self.c = nn.Conv2d(8, 8, 3, stride=2, padding=2, dilation=2)
            self.c.weight, self.c.bias = self.b.weight, self.b.bias
            self.fc = nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.fc(F.relu(self.c(F.relu(self.b(self.a(x))))).mean((2, 3)))
            return logits

    x = torch.randn(4, *IMAGE, dtype=torch.float64)
    for module in (Does(dilated).double(), Tied().double()):
        net = nest(module, growth, shape=IMAGE).eval()
        whole = net(x)
        if not growth:
            assert torch.allclose(whole[0], module(x))
        for answer, staged, stage in zip(whole, net.answers(x), range(1, 4), strict=False):
            assert torch.allclose(answer, staged) and torch.allclose(answer, net.subnet(stage)(x))


@pytest.mark.parametrize("name", ["width-resnet42", "even-resnet42", "width-digits", "even-digits"])
@pytest.mark.parametrize("side", [(30, 30), (33, 33), (7, 9)])
def test_odd_sizes_of_width_resnets(name: str, side: tuple[int, int]) -> None:
    if name.endswith("42") and side == (7, 9):
        pytest.skip("three groups: too small to be interesting")
    net = build(NetworkRecipe(name), shape=(1, *side)).eval()
    x = torch.randn(2, 1, *side)
    with torch.no_grad():
        for whole, staged in zip(net(x), net.answers(x), strict=True):
            assert torch.allclose(whole, staged, atol=1e-4)


def test_odd_sizes_are_exported(tmp_path: Path) -> None:
    net = build(NetworkRecipe("width-digits"), shape=(1, 7, 9)).eval()
    spec = nestling.Spec("odd", (1, 7, 9), tuple("0123456789"), net.sizes, mean=(0.5,), std=(0.5,))
    nestling.export_net(net, spec, str(tmp_path / "odd"), torch.randn(8, 1, 7, 9))  # which verifies what it wrote


def test_a_subnetwork_has_its_own_dropout() -> None:
    net = nest(plain(nn.ReLU(), nn.Dropout(0.5)), "w,w", shape=IMAGE).train()
    small = net.subnet(1).eval()
    x = torch.randn(4, *IMAGE)
    assert not torch.equal(net(x)[-1], net(x)[-1]), "the nest still drops"
    assert torch.equal(small(x), small(x))


def test_stages_respect_the_mode_of_each_norm() -> None:
    net = nest(plain(nn.BatchNorm2d(8), nn.ReLU()), "w", shape=IMAGE).train()
    net.layer("1").eval()
    x = torch.randn(4, *IMAGE) + 3
    before = net.layer("1").running_mean.clone()
    for whole, staged in zip(net(x), net.answers(x), strict=True):
        assert torch.allclose(whole, staged, atol=1e-5)
    assert torch.equal(before, net.layer("1").running_mean)


def test_a_layer_that_is_replaced_is_seen_by_the_stages() -> None:
    net = nest(plain(nn.BatchNorm2d(8), nn.ReLU()), "w", shape=IMAGE).eval()
    x = torch.randn(2, *IMAGE)
    list(net.answers(x))
    fresh = NestedBatchNorm2d(net.plan.by_name["1"].births).eval()
    nn.init.constant_(fresh.weight, 3.0)
    net._modules["1"] = fresh
    for whole, staged in zip(net(x), net.answers(x), strict=True):
        assert torch.allclose(whole, staged, atol=1e-5)


def test_a_layer_that_knows_no_births_is_refused() -> None:
    net = nest(plain(nn.BatchNorm2d(8), nn.ReLU()), "w", shape=IMAGE).eval()
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    with pytest.raises(NestlingError, match="1 has been replaced by a SyncBatchNorm"):
        synced.stages  # noqa: B018
    net._modules["0"] = nn.Conv2d(3, 8, 3, padding=1)
    with pytest.raises(NestlingError, match="0 has been replaced by a Conv2d, which knows no births"):
        net(torch.randn(2, *IMAGE))


def test_reset_forgets_what_norms_have_seen() -> None:
    fresh = build(NetworkRecipe("width-digits"), generator=torch.Generator().manual_seed(1))
    used = build(NetworkRecipe("width-digits"))
    used.train()(torch.randn(16, 1, 8, 8) * 4 + 1)
    nn.init.constant_(used.layer("head.norm").weight, 7.0)
    used.reset(torch.Generator().manual_seed(1))
    assert all(torch.equal(value, fresh.state_dict()[key]) for key, value in used.state_dict().items())


def test_frozen_parameters_modes_and_number_types_are_kept() -> None:
    module = plain(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)).bfloat16().train()
    module[1].float().eval()
    module[0].weight.requires_grad_(False)
    module[6].weight.requires_grad_(False)
    net = nest(module, "w", shape=IMAGE)
    for each in (net, net.subnet(2).net):
        assert each.layer("0").weight.dtype == torch.bfloat16 and each.layer("1").running_var.dtype == torch.float32
        assert each.layer("1").weight.dtype == torch.float32
        assert not each.layer("1").training and each.layer("0").training and each.training
        assert not each.layer("0").weight.requires_grad and each.layer("0").bias.requires_grad
        assert not each.layer("head2.6").weight.requires_grad and each.layer("head2.6").bias.requires_grad
