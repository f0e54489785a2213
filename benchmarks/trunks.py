"""The commonest models of several tasks: one trunk, heads at its end. For benchmarks/gradients.py.

An MLP, a ResNet-18 for 32x32 images (no running statistics, which some rivals refuse), and a transformer.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Shared(nn.Module):
    """A trunk, and one linear head per task."""

    def __init__(self, trunk: nn.Module, width: int, tasks: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.heads = nn.ModuleList(nn.Linear(width, 10) for _ in range(tasks))

    def forward(self, x: Tensor) -> list[Tensor]:
        features = self.trunk(x)
        return [head(features) for head in self.heads]


class Residual(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width, track_running_stats=False) for _ in range(2))
        self.short = nn.Conv2d(before, width, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = self.norms[1](self.second(self.norms[0](self.first(x)).relu()))
        return (out + self.short(x)).relu()


class Attention(nn.Module):
    """A pre-norm block of a transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.mixed(self.norms[0](x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norms[1](x))))


class Pooled(nn.Module):
    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.dims)


def mlp() -> tuple[Shared, Tensor]:
    width = 1792
    layers = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())]
    return Shared(nn.Sequential(nn.Linear(256, width), nn.ReLU(), *layers), width, 3), torch.randn(64, 256)


def resnet18() -> tuple[Shared, Tensor]:
    blocks: list[nn.Module] = [
        nn.Conv2d(3, 64, 3, 1, 1, bias=False),
        nn.BatchNorm2d(64, track_running_stats=False),
        nn.ReLU(),
    ]
    before = 64
    for width in (64, 128, 256, 512):
        blocks += [Residual(before, width, 1 if width == before else 2), Residual(width, width, 1)]
        before = width
    return Shared(nn.Sequential(*blocks, Pooled(2, 3)), 512, 4), torch.randn(16, 3, 32, 32)


def transformer() -> tuple[Shared, Tensor]:
    blocks = [Attention(256, 4) for _ in range(4)]
    return Shared(nn.Sequential(*blocks, Pooled(1)), 256, 3), torch.randn(8, 32, 256)


TRUNKS: dict[str, Callable[[], tuple[Shared, Tensor]]] = {
    "shared trunk, MLP 10 M, 3 tasks, batch 64": mlp,
    "shared trunk, ResNet-18, 4 tasks, batch 16": resnet18,
    "shared trunk, transformer 3 M, 3 tasks, 8 x 32 tokens": transformer,
}


def trunk_problem(name: str) -> tuple[Shared, Callable[[], list[Tensor]]]:
    torch.manual_seed(0)
    net, x = TRUNKS[name]()
    targets = [torch.randint(10, (len(x),)) for _ in net.heads]
    return net, lambda: [F.cross_entropy(out, y) for out, y in zip(net(x), targets, strict=True)]
