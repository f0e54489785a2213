"""Numbers chosen by somebody's network: channels and pixels by number, the larger ones, one or the other by a mask."""

from collections.abc import Callable
from pathlib import Path

import promises
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.errors import NestlingError
from nestling.nets.nest import nest
from nestling.runtime.runtime import bare_spec
from nestling.runtime.verified import export_net

IMAGE = (3, 8, 8)


class Does(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Ordered(nn.Module):
    """Channels in the order of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.tensor([3, 1, 0, 2, 7, 5, 6, 4]))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.order] + torch.index_select(x, 1, self.order)  # type: ignore[arg-type, index]


def backbone(*layers: nn.Module, before: tuple[nn.Module, ...] = (), out: int = 8) -> nn.Module:
    body = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), *layers, nn.Conv2d(out, 8, 1), nn.ReLU())
    return nn.Sequential(*before, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def gated(x: Tensor) -> Tensor:
    """A gate whose only pixel is flattened away and put back, beside what it was made of."""
    return x * F.adaptive_avg_pool2d(x, 1).squeeze(-1).squeeze(-1)[:, :, None, None]


GOOD: dict[str, Callable[[], nn.Module]] = {
    "one or the other": lambda: backbone(
        Does(lambda x: torch.where(x > 0, x, 0.1 * x)), Does(lambda x: torch.where(x.le(0.5), 0.5, x)),
        Does(lambda x: x.where(x != 0.25, torch.zeros_like(x)) * (x >= -1).to(x.dtype)), Does(lambda x: x * (x < 3)),
    ),
    "the larger of two": lambda: backbone(Does(lambda x: torch.max(x, x.tanh()) + torch.min(x.exp(), x.sigmoid()))),
    "maxout": lambda: backbone(nn.Conv2d(8, 16, 1), Does(lambda x: torch.max(*x.chunk(2, 1)))),
    "the largest of neighbouring channels": lambda: backbone(
        nn.Conv2d(8, 16, 1), Does(lambda x: x.view(x.size(0), 8, 2, 8, 8).max(2)[0])
    ),
    "the largest pixel": lambda: backbone(
        Does(lambda x: x - x.max(dim=3, keepdim=True).values + x.flatten(2).min(-1)[0][..., None, None])
    ),
    "channels by number": lambda: backbone(Ordered(), nn.ReLU(), before=(Does(lambda x: x[:, [2, 1, 0]]),)),
    "pixels by number": lambda: backbone(
        Does(lambda x: x[:, :, [0, 2, 4]]), Does(lambda x: x.narrow(2, 0, 2).narrow(3, -5, 4))
    ),
    "turned around": lambda: backbone(
        Does(lambda x: x + x.flip(-1) + torch.flip(x, (2, 3))), before=(Does(lambda x: x.flip(1)),)
    ),
    "rolled channels": lambda: backbone(nn.ReLU(), Does(lambda x: x.roll(2, 1) + torch.roll(x, (1, 1), (2, 3)))),
    "one colour as three": lambda: backbone(before=(Does(lambda x: x[:, :1].expand(-1, 3, -1, -1)),)),
    "repeated": lambda: backbone(
        Does(lambda x: x.mean((2, 3), keepdim=True).repeat(1, 1, 8, 8) + x), Does(lambda x: x.repeat(1, 2, 1, 1)),
        Does(lambda x: x.repeat_interleave(2, dim=2).repeat_interleave(2, 1)), out=32
    ),
    "moved there and back": lambda: backbone(Does(lambda x: x.movedim(1, -1).relu().movedim(-1, 1))),
    "functions of each number": lambda: backbone(
        Does(lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)) + torch.log1p(x.abs()) + (x.square() + 1).rsqrt().nan_to_num()),
        Does(lambda x: torch.clip(x.clamp_min(-2), -1, 1) + x.sin().reciprocal().clamp(-1, 1) + x.detach().sign().to(x.dtype)),
    ),
    "sums with a factor": lambda: backbone(Does(lambda x: torch.add(x, x.tanh(), alpha=0.5).sub(x.sigmoid(), alpha=2))),
    "a gate of one pixel": lambda: backbone(Does(gated)),
}  # fmt: skip


@pytest.mark.parametrize("growth", ["", "w,w"])
@pytest.mark.parametrize("what", GOOD)
def test_every_choice_keeps_the_promises(what: str, growth: str) -> None:
    promises.check_module(GOOD[what], growth, IMAGE)


@pytest.mark.parametrize("what", GOOD)
def test_a_network_that_is_kept_and_one_with_exits_end_where_it_ended(what: str) -> None:
    promises.check_ends(GOOD[what], IMAGE)


@pytest.mark.parametrize("what", ["one or the other", "the largest pixel", "pixels by number", "repeated"])
def test_choices_are_exported(what: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nest(GOOD[what]().eval(), "w", shape=IMAGE)
    export_net(net, bare_spec(net), tmp_path / "it", torch.randn(3, *IMAGE))  # which compares what it wrote


BAD: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "the largest channel": (
        lambda: backbone(Does(lambda x: x * x.max(1, keepdim=True)[0])),
        r"operation \.max in .*it mixes channels",
    ),
    "the largest of all": (lambda: backbone(Does(lambda x: x / x.max())), "it mixes channels"),
    "where the largest is": (
        lambda: backbone(Does(lambda x: x * x.max(2, keepdim=True)[1])),
        "where the largest stand",
    ),
    "a count": (
        lambda: backbone(Does(lambda x: x / (x > 0).sum((2, 3), keepdim=True))),
        r"numbers of the type torch\.int64",
    ),
    "truths added": (lambda: backbone(Does(lambda x: x * ((x > 0) + (x < -1)))), "not supported"),
    "some images": (lambda: backbone(Does(lambda x: x[[0]])), "images"),
    "compared tensors": (
        lambda: backbone(Does(lambda x: x * (x > x.tanh()))),
        "only a tensor is compared, with a number",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_keep_the_rule_is_refused(what: str) -> None:
    make, words = BAD[what]
    with pytest.raises(NestlingError, match=words):
        nest(make(), "w,w", shape=IMAGE)
