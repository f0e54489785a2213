"""Nesting other people's networks: one stage is the module itself, the four promises hold on a member of every family,
each operation is understood, and what cannot keep the rule is refused by name."""

import csv
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import promises
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import nestling
from nestling.errors import NestlingError
from nestling.nets.births import grow
from nestling.nets.nest import nest
from nestling.nets.net import NestedNet
from nestling.nets.reading.ties import quotas

ROOT = Path(__file__).parent.parent

# --- real backbones: a small member of each family ---------------------------------------------------------------

FAMILIES = {
    "resnet20_cifar10": "nested",
    "preresnet20_cifar10": "nested",
    "resnext20_32x2d_cifar10": "nested",
    "seresnet20_cifar10": "nested unevenly",  # squeezes 16 channels into 1
    "sepreresnet20_cifar10": "nested unevenly",
    "pyramidnet110_a48_cifar10": "nested unevenly",  # grows by less than a channel a block
    "densenet40_k12_bc_cifar10": "nested",
    "nin_cifar10": "nested",
    "ror3_56_cifar10": "nested",
    "diaresnet20_cifar10": "nested",  # all units of a stage share one LSTM
    "xdensenet40_2_k24_bc_cifar10": "nested",  # weights are multiplied by a mask while running
    "shakedropresnet20_cifar10": "refused",  # random signs in training
    "msdnet22_cifar10": "nested unevenly",  # Python decides by shapes
    "resdropresnet20_cifar10": "refused",  # random numbers decide what runs
}


@pytest.mark.parametrize("name", FAMILIES)
def test_real_backbones_keep_the_promises(name: str) -> None:
    pytest.importorskip("pytorchcv")
    row = promises.examine(name, promises.models()[name])
    assert row["outcome"] == FAMILIES[name]
    if row["outcome"] != "refused":
        assert row["macs_w1"] < row["macs_w2"] < row["macs_w4"] < row["macs_unnested"]
        assert row["error_float32"] <= 1e-5


def rows_of(name: str) -> list[dict[str, str]]:
    with (ROOT / "results" / name).open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_sweep_is_told_as_it_came_out() -> None:
    rows, listed = rows_of("sweep.csv"), rows_of("sweep-families.csv")
    text = (ROOT / "docs" / "log" / "nest.md").read_text(encoding="utf-8")
    ways = ("exits", "stripes", "keep")
    convs = [row for row in rows if row["kind"] == "conv"]
    for library in sorted({row["library"] for row in listed}):
        mine = [row for row in convs if row["library"] == library]
        families = sum(row["library"] == library and row["kind"] == "conv" for row in listed)
        made = [sum(row[way] == "ok" for row in mine) for way in ways]
        assert f"| {library} | {families} | {len(mine)} | {' | '.join(map(str, made))} |" in text
    done = {(row["library"], row["family"]) for row in convs}
    assert all(row["model"] in text for row in convs if any(row[way] != "ok" for way in ways))
    assert all(
        row["model"] in text for row in listed if row["kind"] == "conv" and not {(row["library"], row["family"])} & done
    )
    page = (ROOT / "docs" / "nest.md").read_text(encoding="utf-8")  # which has the sums alone
    for kind, name in (("conv", "convolutional"), ("transformer", "transformers")):
        mine = [row for row in rows if row["kind"] == kind]
        made = [sum(row[way] == "ok" for row in mine) for way in ways]
        told = next(line for line in page.splitlines() if line.startswith(f"| {name}"))
        assert told.endswith(f" | {len(mine)} | {' | '.join(map(str, made))} |"), kind
    assert all(row[f"why_{way}"] for row in rows for way in ways if row[way] != "ok")


@pytest.mark.parametrize("number", [0, 1])
def test_the_documentation_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "nest.md").read_text(encoding="utf-8")
    whole = [block for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if "import torch" in block]
    assert len(whole) == 2
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "docs"}
    exec(compile(whole[number], "docs/nest.md", "exec"), names)
    assert isinstance(names["net"], NestedNet)
    if "values" in names:  # onnxruntime alone, the last stage: as the network itself says
        with torch.no_grad():
            expected = names["net"].eval()(names["images"][1500:1501])[-1]
        np.testing.assert_allclose(names["values"]["logits"], expected, atol=1e-4)


# --- small networks of our own, one idea each -----------------------------------------------------------------------


class Squeeze(nn.Module):
    """Squeeze-and-excitation with linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, width // 2), nn.Linear(width // 2, width)

    def forward(self, x: Tensor) -> Tensor:
        gate = x.mean((2, 3)).view(x.size(0), -1)
        return x * torch.sigmoid(self.up(F.relu(self.down(gate), inplace=True))).unsqueeze(2).unsqueeze(3)


class Dense(nn.Module):
    """A block whose output is its input with new channels behind it."""

    def __init__(self, width: int, more: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(width), nn.Conv2d(width, more, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(self.norm(x).relu_())], 1)


class Residual(nn.Module):
    """An activation that overwrites its input before the shortcut reads it, twice the width through zero channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.activ = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        self.activ(x)
        y = self.conv(x)
        x = F.pad(F.avg_pool2d(x, 2), (0, 0, 0, 0, 0, x.shape[1]))
        x += y
        return x


class Pieces(nn.Module):
    """Splits its channels, treats the halves differently, and joins them with zeros and a copy."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(width // 2, width // 2, 1), nn.Conv2d(width // 2, width // 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=1)
        a = torch.maximum(self.one(a), a) - 0.5 * b
        b = F.hardswish(self.two(b)).clamp(-2, 2) / 2
        return torch.cat((a, b, torch.zeros_like(a), b), dim=1)


class Slices(nn.Module):
    """Takes channels and pixels by slices, and gates all channels by one."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.gate = nn.Conv2d(8, 16, 3), nn.Conv2d(8, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(x)[:, ::2, ::2, 1:] * torch.sigmoid(self.gate(x))[:, :, ::2, 1:]


class Twice(nn.Module):
    """One layer in two places, on images of two sizes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(F.avg_pool2d(self.layer(x), 2))
        return y


class OwnNorm(nn.BatchNorm2d):
    """Batch norm and an activation in one, as timm has it."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        assert self.momentum is not None
        stats = (self.running_mean, self.running_var, self.weight, self.bias)
        return F.silu(F.batch_norm(x, *stats, self.training, self.momentum, self.eps))


class OwnGroups(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps))


class OwnConv(nn.Conv2d):
    """Subclasses without a forward of their own are what they were."""


class OwnSlope(nn.PReLU):
    pass


class Blur(nn.Module):
    """A depthwise convolution by a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        line = torch.tensor([1.0, 2.0, 1.0])
        self.register_buffer("kernel", (line[:, None] * line / 16).expand(width, 1, 3, 3).clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (1, 1, 1, 1), "reflect"), self.get_buffer("kernel"), stride=2, groups=x.shape[1])


class DropPath(nn.Module):
    """As timm's."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob, self.scale_by_keep = drop_prob, True

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = 1 - self.drop_prob
        return x * x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(keep).div_(keep)


class Normalised(nn.Module):
    """Images as networks take them, then a batch norm that is frozen into numbers."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("mean", "std", "gain"):
            self.register_buffer(name, torch.rand(3) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = (x - self.get_buffer("mean").view(1, -1, 1, 1)) / self.get_buffer("std")[None, :, None, None]
        return x * (self.get_buffer("gain") * (self.get_buffer("std") + 1e-5).rsqrt()).reshape(1, -1, 1, 1)


class Half(nn.Module):
    """As in CSPNet and ShuffleNet: the second half goes through layers of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        one, two = x.chunk(2, 1)
        return torch.cat([one, self.conv(two)], 1)


class Turned(nn.Module):
    """Of two tensors that are put behind each other, what is read is all of one and nothing of the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([x, self.conv(x)], 1)
        return both.flip(1)[:, : x.shape[1]].relu() + x


class Functional(nn.Module):
    """Weights of its own, used through functions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, 3, 3) / 10)
        self.stages = nn.Sequential(nn.Conv2d(width, width, 3, padding="same", padding_mode="reflect"), nn.PReLU())

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.weight, None, stride=1, padding=1)
        return F.max_pool2d(F.dropout(self.stages(x), 0.0, training=self.training), 2)


class Below(nn.Module):
    """A layer below a module that has weights itself, which are used after it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(width, width, 3, 3) / 10)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.relu(self.first(x)), self.weight, None, 1, 1)


def backbone(*middle: nn.Module, width: int = 8, out: int = 8, pixels: int = 16) -> nn.Sequential:
    """A stem, what is to be tried, and a classifier."""
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(out, 5)] if pixels == 1 else [
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(out * pixels, 5)
    ]  # fmt: skip
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *middle, *head)


class Attention(nn.Module):
    """As timm writes it: one layer for queries, keys and values."""

    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads, self.fused = nn.Linear(width, 3 * width), nn.Linear(width, width), heads, fused

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(n, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            x = F.scaled_dot_product_attention(q, k, v)
        else:
            x = (q * 0.5 @ k.transpose(-2, -1)).softmax(dim=-1) @ v
        return self.proj(x.transpose(1, 2).reshape(n, tokens, width))


class Transformer(nn.Module):
    """A class token, positions, attention and a wide layer, and the answer of the class token."""

    def __init__(self, width: int = 16, heads: int = 4, fused: bool = False, layers: bool = False) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, width, 4, 4), nn.Parameter(torch.randn(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, 5, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.attention = (
            nn.MultiheadAttention(width, heads, batch_first=True) if layers else Attention(width, heads, fused)
        )
        self.wide, self.narrow, self.head = nn.Linear(width, 32), nn.Linear(32, width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1) + self.places
        y = self.norms[0](x)
        x = x + (
            self.attention(y, y, y, need_weights=False)[0]
            if isinstance(self.attention, nn.MultiheadAttention)
            else self.attention(y)
        )
        x = x + self.narrow(F.gelu(self.wide(self.norms[1](x))))
        return self.head(self.norms[2](x)[:, 0])


class Windows(nn.Module):
    """Attention inside windows of four pixels, which stand beside the images of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.attention = nn.Conv2d(3, 8, 1), nn.LayerNorm(8), Attention(8, 4, False)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        x = self.norm(self.stem(x).permute(0, 2, 3, 1))
        parts = x.view(n, 4, 2, 4, 2, 8).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 8)
        y = self.attention(parts).view(n, 4, 4, 2, 2, 8).permute(0, 1, 3, 2, 4, 5).reshape(n, 8, 8, 8)
        return self.head((x + y).mean((1, 2)))


GOOD: dict[str, Callable[[], nn.Module]] = {
    "batch norm and activations": lambda: backbone(
        nn.BatchNorm2d(8, eps=1e-3, momentum=0.2), nn.ReLU6(), nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16, affine=False),
        nn.Hardswish(), nn.MaxPool2d(2), nn.Conv2d(16, 8, 1), nn.SiLU(inplace=True)
    ),
    "prelu of one slope and of many": lambda: backbone(nn.PReLU(), nn.Conv2d(8, 16, 1), nn.PReLU(16), out=16),
    "layers below a layer": lambda: backbone(Below(8)),
    "grouped convolution": lambda: backbone(nn.Conv2d(8, 16, 3, groups=4, dilation=2), nn.Conv2d(16, 8, 1)),
    "stripes inside one group": lambda: backbone(nn.Conv2d(8, 16, 3, groups=2), nn.ReLU(), out=16),
    "depthwise with a multiplier": lambda: backbone(nn.Conv2d(8, 24, 3, groups=8), nn.Conv2d(24, 8, 1), nn.ReLU()),
    "group and instance norm": lambda: backbone(nn.GroupNorm(4, 8), nn.InstanceNorm2d(8, affine=True), nn.ELU()),
    "squeeze and excitation": lambda: backbone(Squeeze(8), nn.Conv2d(8, 8, 3, stride=2), Squeeze(8)),
    "dense blocks": lambda: backbone(Dense(8, 4), Dense(12, 4), nn.Conv2d(16, 8, 1), Dense(8, 8), out=16, pixels=1),
    "depthwise after a dense block": lambda: backbone(Dense(8, 4), nn.Conv2d(12, 12, 3, groups=12), out=12),
    "zero channels": lambda: backbone(Residual(8), Residual(16), out=32, pixels=1),
    "pieces": lambda: backbone(Pieces(8), nn.Conv2d(16, 8, 1), nn.ReLU()),
    "one layer in two places": lambda: backbone(nn.ReLU(), Twice(nn.Conv2d(8, 8, 3, padding=1)), nn.Tanh()),
    "one norm in two places": lambda: backbone(nn.ReLU(), Twice(nn.BatchNorm2d(8)), Twice(nn.BatchNorm2d(8, affine=False))),
    "one prelu in two places": lambda: backbone(Twice(nn.PReLU(8)), nn.Conv2d(8, 8, 1)),
    "layers of one's own": lambda: backbone(
        OwnNorm(8), OwnConv(8, 8, 3, padding=1), OwnGroups(4, 8), nn.Conv2d(8, 8, 1), OwnSlope(8)
    ),
    "synchronised batch norm": lambda: backbone(nn.SyncBatchNorm(8), nn.ReLU()),
    "a blur of a fixed kernel": lambda: backbone(nn.ReLU(), Blur(8), nn.Conv2d(8, 8, 1), Blur(8)),
    "channel shuffle": lambda: backbone(Does(shuffle), nn.ReLU(), nn.ChannelShuffle(4), nn.Conv2d(8, 8, 1)),
    "halves of which one goes on": lambda: backbone(nn.Conv2d(8, 16, 1), Half(8), nn.Conv2d(16, 8, 1)),
    "some of the patches merged into channels": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 2, 2), Does(lambda x: x.flatten(2).transpose(1, 2).reshape(x.shape[0], 8, 16)[..., 3:13]),
        nn.Linear(10, 8), nn.ReLU(), Does(lambda x: x.mean(1)), nn.Linear(8, 5)
    ),
    "one of two that were joined": lambda: backbone(Turned(8), nn.Conv2d(8, 8, 1)),
    "a number for every channel": lambda: backbone(
        Scaled((1, 8, 1, 1)), nn.Conv2d(8, 8, 1), Scaled((8, 1, 1)), Scaled((1,)), nn.ReLU(), Twice(Scaled((8, 1, 1)))
    ),
    "images normalised by buffers": lambda: nn.Sequential(Normalised(), *backbone(nn.ReLU())),
    "gates": lambda: backbone(nn.Conv2d(8, 16, 1), nn.GLU(1), Does(lambda x: F.glu(torch.cat([x, x], 1), 1))),
    "pixels by slices and deviations": lambda: backbone(
        Does(lambda x: x[..., 1:, ::2]), Does(lambda x: x - x.mean((2, 3), keepdim=True).expand_as(x)),
        Does(lambda x: x / (x.std((2, 3), keepdim=True).expand(x.shape[0], -1, *x.shape[2:]) + 1)),
    ),
    "stochastic depth": lambda: backbone(nn.Conv2d(8, 8, 1), DropPath(0.0), nn.ReLU()),
    "slices and one gate for all": lambda: backbone(Slices(), nn.ReLU()),
    "functional forms": lambda: backbone(Functional(8), nn.Tanh()),
    "group norm of one group": lambda: backbone(nn.GroupNorm(1, 8), nn.Conv2d(8, 8, 1), nn.GroupNorm(1, 8, affine=False)),
    "channels in two dimensions": lambda: backbone(Does(lambda x: x.view(-1, 2, 4, 8, 8).relu().flatten(1, 2))),
    "a number for every pixel": lambda: backbone(Scaled((8, 8, 8)), nn.ReLU()),
    "linear over pixels": lambda: backbone(nn.Linear(8, 6), nn.ReLU()),
    "joined rows": lambda: backbone(Does(lambda x: torch.cat([x, x.relu(), x], 2)), nn.ReLU()),
    "new dimensions": lambda: backbone(Does(lambda x: x[:, None].flatten(1, 2))),
    "norms of images with channels last": lambda: backbone(
        Does(lambda x: x.permute(0, 2, 3, 1)), nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), Scaled((8,)),
        nn.RMSNorm(8), Does(lambda x: x.permute(0, 3, 1, 2)), nn.Conv2d(8, 8, 2, 2)
    ),
    "a transformer": lambda: Transformer(fused=False),
    "a transformer by torch's attention": lambda: Transformer(fused=True),
    "a transformer by torch's layers": lambda: Transformer(layers=True),
    "a transformer of one head": lambda: Transformer(heads=1),
    "a transformer of windows": lambda: Windows(),
    "a mixer": lambda: nn.Sequential(
        nn.Conv2d(3, 16, 2, 2), nn.Flatten(2), nn.Linear(16, 12), nn.GELU(), nn.Linear(12, 16),
        Does(lambda x: x.transpose(1, 2)), nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16),
        Does(lambda x: x.mean(1)), nn.Linear(16, 5)
    ),
    "several linear layers": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(32, 16), nn.BatchNorm1d(16), nn.ReLU(),
        nn.Dropout(0.0), nn.Linear(16, 5), nn.LogSoftmax(1)
    ),
    "classifier by convolution": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 1), nn.BatchNorm2d(5), nn.ReLU(), nn.AvgPool2d(6), nn.Flatten()
    ),
}  # fmt: skip


def stirred(module: nn.Module) -> nn.Module:
    """In float64, with norms that are not at their defaults."""
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d | nn.BatchNorm1d):
            assert layer.running_mean is not None and layer.running_var is not None
            layer.running_mean.normal_(0, 0.3)
            layer.running_var.uniform_(0.5, 1.5)
    return module.double()


IMAGE = (3, 8, 8)


@pytest.mark.parametrize("growth", ["", "w", "w,w"])
@pytest.mark.parametrize("what", GOOD)
def test_every_operation_keeps_the_promises(what: str, growth: str) -> None:
    module = stirred(GOOD[what]()).eval()
    x = torch.randn(4, *IMAGE, dtype=torch.float64)
    net = nest(module, growth, shape=IMAGE, uneven="gate" in what)
    assert len(net(x)) == 1 + growth.count("w")
    if not growth:
        assert torch.allclose(net(x)[0], module(x), rtol=1e-12, atol=1e-12), "one stage is the module itself"
    with torch.no_grad():
        for number, answer in enumerate(net(x), start=1):
            assert answer.std() > 0
            alone = net.subnet(number)
            assert torch.allclose(alone(x), answer, rtol=1e-12, atol=1e-12)
    planned = net.plan.params(net.plan.stages)
    owners = net.owners()
    assert planned == sum(int((owners[k].expand_as(p) != 0).sum()) for k, p in net.named_parameters())
    promises.check_promises(net, x)


@settings(max_examples=15, deadline=None)
@given(width=st.integers(4, 9), more=st.integers(1, 6), stripes=st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_uneven_widths_keep_the_promises(width: int, more: int, stripes: list[int]) -> None:
    module = stirred(
        nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2), nn.BatchNorm2d(width), Dense(width, more), nn.ReLU(),
            nn.Conv2d(width + more, width, 1), Dense(width, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(width + 1, 5),
        )
    ).eval()  # fmt: skip
    net = nest(module, ",".join("w" * (len(stripes) - 1)), IMAGE, tuple(stripes), uneven=True)
    x = torch.randn(4, *IMAGE, dtype=torch.float64)
    with torch.no_grad():
        for whole, staged in zip(net(x), net.answers(x), strict=True):
            assert torch.allclose(whole, staged, rtol=1e-12, atol=1e-12)
    assert sum(net.plan.new_macs(s) for s in range(1, len(stripes) + 1)) == net.plan.macs(len(stripes))


def test_groups_that_stripes_would_cut_are_born_whole() -> None:
    """As in RegNet: three groups, stripes 1, 1, 2."""
    module = stirred(backbone(nn.Conv2d(8, 24, 1), nn.ReLU(), nn.Conv2d(24, 24, 3, groups=3), nn.ReLU(), out=24)).eval()
    with pytest.raises(NestlingError, match="do not grow alike"):
        nest(module, "w,w", shape=IMAGE)
    net = nest(module, "w,w", shape=IMAGE, uneven=True)
    births = net.plan.by_name["3"].births
    assert all(len(set(births[i : i + 8])) == 1 for i in (0, 8, 16)) and set(births) == {1, 2, 3}
    promises.check_promises(net, torch.randn(4, *IMAGE, dtype=torch.float64))


def test_groups_whose_inputs_were_shuffled_are_born_whole() -> None:
    """As in IGCV3 and ESPNetv2: stripes hold whole groups, but what each group reads is of several stripes."""
    layers = (
        nn.Conv2d(8, 32, 1, groups=2),
        nn.ChannelShuffle(2),
        nn.Conv2d(32, 32, 3, groups=32),
        nn.Conv2d(32, 16, 1, groups=2),
    )
    module = stirred(backbone(*layers, nn.Conv2d(16, 16, 1, groups=4), nn.ReLU(), out=16)).eval()
    net = nest(module, "w,w", shape=IMAGE, uneven=True)
    for node in (node for node in net.plan.nodes if getattr(node.op, "groups", 1) in (2, 4)):
        size = node.channels // node.op.groups  # type: ignore[attr-defined]
        assert all(len(set(node.births[i : i + size])) == 1 for i in range(0, node.channels, size))
    promises.check_promises(net, torch.randn(4, *IMAGE, dtype=torch.float64))


def test_auxiliary_heads_are_left_out_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.aux, self.fc = (
                nn.Conv2d(3, 8, 3),
                nn.Conv2d(8, 8, 3),
                nn.BatchNorm2d(8),
                nn.Linear(8, 5),
            )
            self.aux_drop, self.drop = nn.Dropout(0.7), nn.Dropout(0.3)

        def forward(self, x: Tensor) -> Any:
            y = self.one(x)
            other = self.aux_drop(self.aux(y)) if self.training else y  # draws its random numbers first
            logits = self.fc(self.drop(F.relu(self.two(F.relu(y))).mean((2, 3))))
            return (logits, self.fc(other.mean((2, 3)))) if self.training else logits

    module = Auxiliary().double()
    net, x = nest(module, "", shape=IMAGE), torch.randn(2, *IMAGE, dtype=torch.float64)
    assert "of ['aux', 'aux_drop'] something runs that reaches no answer" in caplog.text
    assert torch.allclose(net.eval()(x)[0], module.eval()(x)) and "aux" not in net._modules


def test_stripes_are_cut_at_the_nearest_channel() -> None:
    growth = grow("w,w")
    assert quotas(16, growth) == [4, 4, 8]
    assert quotas(17, growth) == [4, 5, 8]
    assert quotas(2, growth) == [1, 0, 1]
    assert quotas(1, growth) == [1, 0, 0]
    assert [sum(quotas(n, growth)) for n in range(1, 50)] == list(range(1, 50))


# --- what comes out ---------------------------------------------------------------------------------------------


def test_layers_keep_their_names_and_allowed_weights() -> None:
    module = backbone(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3), out=16)
    net = nest(module, "w", shape=IMAGE, order=False)
    assert {"0.weight", "1.running_mean", "3.bias", "head1.6.weight", "head2.6.bias"} <= set(net.state_dict())
    old, new = module.state_dict()["3.weight"], net.layer("3").weight
    classifier = module.state_dict()["6.weight"]
    assert torch.equal(new[:8, :4], old[:8, :4]) and torch.equal(new[8:], old[8:])
    assert not new[:8, 4:].any(), "early channels lose what they read from later ones"
    assert torch.equal(net.layer("head2.6").weight, classifier)
    assert torch.equal(net.layer("head1.6").weight, classifier[:, : 8 * 16])
    assert net.sizes == ("w1", "w2")


def test_the_module_is_left_alone() -> None:
    module = stirred(GOOD["functional forms"]()).train()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    net = nest(module, "w", shape=IMAGE)
    assert net.training and module.training
    net.reset(torch.Generator().manual_seed(0))
    torch.stack([y.sum() for y in net(torch.randn(2, *IMAGE, dtype=torch.float64))]).sum().backward()
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_names_that_a_nested_network_needs_are_moved_aside() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
            self.plan = nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.plan(self.stages(x).mean([2, 3]))
            return logits

    net = nest(Named(), "w", shape=IMAGE)
    assert "stages_.0.weight" in net.state_dict()
    assert len(net.stages) == 2


def test_it_is_public() -> None:
    assert nestling.nest is nest
    assert isinstance(nestling.nest(backbone(), "w", shape=IMAGE), NestedNet)


def test_stages_of_your_own_compile() -> None:
    net = nest(GOOD["pieces"]().eval(), "w", shape=IMAGE)
    with torch.no_grad():
        state: tuple[Tensor, ...] = (torch.randn(2, *IMAGE),)
        for stage, answer in zip(net.stages, net(state[0]), strict=True):
            logits, state = torch.compile(stage, backend="aot_eager", fullgraph=True)(state)
            assert torch.allclose(logits, answer, atol=1e-5)


def test_a_nest_of_your_own_trains() -> None:
    net = nest(backbone(nn.BatchNorm2d(8), nn.ReLU(), Squeeze(8)), "w,w", shape=IMAGE).train()
    masked = {key: bits == 0 for key, bits in net.owners().items()}
    steps = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    x, y = torch.randn(16, *IMAGE), torch.arange(16) % 5
    losses = []
    for _ in range(30):
        steps.zero_grad()
        loss = torch.stack([F.cross_entropy(logits, y) for logits in net(x)]).sum()
        loss.backward()
        steps.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    for key, parameter in net.named_parameters():
        assert not parameter[masked[key].expand_as(parameter)].any()


# --- refusals ---------------------------------------------------------------------------------------------------


class Does(nn.Module):
    """One operation, by name of a test."""

    def __init__(self, operation: Callable[[Any], Any]) -> None:
        super().__init__()
        self.operation = operation

    def forward(self, x: Tensor) -> Any:
        return self.operation(x)


class Scaled(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(shape) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Random(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(1) if self.training else x


def shuffle(x: Tensor) -> Tensor:
    return x.view(x.size(0), 2, 4, 8, 8).transpose(1, 2).reshape(x.size(0), 8, 8, 8)


BAD: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "layer norm": (lambda: backbone(nn.LayerNorm((8, 8, 8))), r"cannot nest 1 \(LayerNorm\): it normalises the last dim"),
    "groups across stripes": (lambda: backbone(nn.GroupNorm(2, 8)), r"group 1 of 2 of 1 \(group norm\) holds channels born"),
    "channels into pixels": (lambda: backbone(Does(lambda x: x.view(-1, 2, 16, 16)), out=2), r"\.view in 1 .*into one dim"),
    "transpose": (lambda: backbone(Does(lambda x: x.transpose(1, 2))), r"2 \(AdaptiveAvgPool2d\): it treats the channels at"),
    "softmax": (lambda: backbone(nn.Softmax(1)), r"cannot nest 1 \(Softmax\): it mixes channels"),
    "mean over channels": (lambda: backbone(Does(lambda x: x * x.mean(1, keepdim=True))), r"\.mean in 1 .*mixes channels"),
    "matrix product": (lambda: backbone(Does(lambda x: x @ x)), r"matmul in 1 \(Does\): it multiplies tensors of shapes"),
    "width": (lambda: backbone(nn.Conv2d(8, 6, 3), out=6), r"cannot nest 1: 6 channels cannot be cut into stripes .*uneven"),
    "groups": (lambda: backbone(nn.Conv2d(8, 24, 3, groups=8), nn.Conv2d(24, 12, 1, groups=3), out=12), "do not grow alike"),
    "random scale": (lambda: backbone(Random()), r"cannot nest 1 \(Random\): it does other operations in training"),
    "control flow": (lambda: backbone(Does(lambda x: x if x.sum() > 0 else -x)), r"depends on the numbers .* gt in 1 \(Does\)"),
    "running momentum": (lambda: backbone(nn.BatchNorm2d(8, momentum=None)), r"1 \(BatchNorm2d\): batch norm needs"),
    "two answers": (lambda: nn.Sequential(nn.Conv2d(3, 8, 1), Does(lambda x: (x, x))), "must return one tensor"),
    "no classifier": (lambda: nn.Sequential(nn.Conv2d(3, 8, 1), Does(lambda x: x + x)), "not of one classifier"),
    "wrong image": (lambda: nn.Sequential(nn.Conv2d(1, 8, 1)), r"0 \(Conv2d\): it does not run on images of shape \(3, 8, 8\)"),
    "same padding": (lambda: backbone(nn.Conv2d(8, 8, 2, padding="same")), r'1 \(Conv2d\): padding "same"'),
    "late channels only": (lambda: backbone(Does(lambda x: x[:, 5:]), out=3), "none of the channels it reads .* by stage 1"),
    "joined images": (lambda: backbone(Does(lambda x: torch.cat([x, x], 0))), r"cat in 1 \(Does\): it joins along dimension 0"),
    "one channel by number": (lambda: backbone(Does(lambda x: x[:, 0]), out=1), r"2 \(AdaptiveAvgPool2d\): it works on a"),
    "power of a tensor": (lambda: backbone(Does(lambda x: x**x)), r"pow in 1 \(Does\): it reads several tensors"),
    "numbers": (lambda: backbone(Does(lambda x: x * x.sum().item())), r"it takes numbers out of a tensor"),
    "unknown": (lambda: backbone(Does(lambda x: x.cumsum(1))), "not known to work"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_keep_the_rule_is_refused_by_name(what: str) -> None:
    make, words = BAD[what]
    with pytest.raises(NestlingError, match=words):
        nest(make(), "w,w", shape=IMAGE, name="mine")


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(NestlingError, match="found a str, 'resnet18'; expected a torch module"):
        nest("resnet18")  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 1, 28, 28)])
def test_images_of_another_shape_are_refused_whole_and_staged(shape: tuple[int, ...]) -> None:
    net, x = nest(backbone(), "w,w", shape=IMAGE), torch.zeros(shape)
    for ask in (net, lambda x: list(net.answers(x))):
        with pytest.raises(NestlingError, match="takes images of shape"):
            ask(x)


def test_depth_is_refused() -> None:
    with pytest.raises(NestlingError, match="nested in width only"):
        nest(backbone(), "w,d", shape=IMAGE)


def test_what_a_module_calls_by_another_name_is_an_operation_of_ours() -> None:
    """Kernels know relu, halving and the mean as operations of the plan; a module that only looks alike stays what it is."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
            self.relu, self.most, self.head = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1), nn.Linear(8, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = F.avg_pool2d(self.most(self.relu(self.one(x))), 2)
            return self.head(F.relu(self.two(x)).mean((2, 3)))

    def maps(module: nn.Module) -> list[str]:
        net = nest(module.eval(), "w", shape=(3, 16, 16))
        return [getattr(node.op, "function", node.op.kind) for node in net.plan.nodes if not node.op.weighted]

    assert maps(Named()) == ["input", "relu", "maxpool3", "pool2", "relu", "mean", "select"]
    conv = nn.Conv2d(3, 8, 3, padding=1)
    pooled = nn.Sequential(
        conv, nn.AvgPool2d(2, ceil_mode=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    )
    assert maps(pooled) == ["input", "pool2up", "mean", "select"]
    others = (nn.ReLU6(), nn.AvgPool2d(2, 1), nn.AvgPool2d(2, padding=1), nn.AvgPool2d(2, divisor_override=3))
    for other in (
        *others,
        nn.MaxPool2d(3, 2),
        nn.MaxPool2d(3, 2, 1, dilation=2),
        nn.MaxPool2d(3, 2, 1, ceil_mode=True),
    ):
        kinds = maps(nn.Sequential(conv, other, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)))
        assert kinds == ["input", "module", "mean", "select"]
    twice = nn.Sequential(conv, nn.AdaptiveAvgPool2d((1, 2)), nn.Flatten(), nn.Linear(16, 10))
    assert maps(twice) == ["input", "module", "flatten", "select"]
