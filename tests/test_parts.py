"""Parts of channels that are combined, gates of one channel, channels that only a gate needs: every promise of a nest holds."""

from collections.abc import Callable

import promises
import pytest
import torch
from torch import Tensor, nn

IMAGE = (3, 8, 8)


class Body(nn.Module):
    """A stem, something done to its image, and the mean of that."""

    def __init__(self, middle: nn.Module, width: int = 16) -> None:
        super().__init__()
        self.stem, self.middle, self.head = nn.Conv2d(3, 16, 3, stride=2, padding=1), middle, nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(torch.relu(self.stem(x))).mean((2, 3)))


class SplitAttention(nn.Module):
    """ResNeSt: two branches, squeezed as their sum, each weighed by a softmax over both."""

    def __init__(self, cardinality: int = 1) -> None:
        super().__init__()
        self.branches = nn.Conv2d(16, 32, 3, padding=1, groups=2)
        self.one, self.other, self.cardinality = nn.Conv2d(16, 8, 1), nn.Conv2d(8, 32, 1), cardinality

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        x = self.branches(x).reshape(n, 2, 16, 4, 4)
        gate = self.other(torch.relu(self.one(x.sum(dim=1).mean((2, 3), keepdim=True))))
        gate = gate.view(n, self.cardinality, 2, -1).transpose(1, 2).softmax(dim=1).reshape(n, -1)
        return (x * gate.reshape(n, 2, 16, 1, 1)).sum(dim=1)


class SelectiveKernels(nn.Module):
    """SKNet: paths with other kernels, stacked, and a softmax over them."""

    def __init__(self) -> None:
        super().__init__()
        self.paths = nn.ModuleList(nn.Conv2d(16, 16, k, padding=k // 2) for k in (1, 3, 5))
        self.one, self.other = nn.Conv2d(16, 8, 1), nn.Conv2d(8, 48, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([path(x) for path in self.paths], dim=1)
        gate = self.other(torch.relu(self.one(x.sum(1).mean((2, 3), keepdim=True))))
        gate = torch.softmax(gate.view(x.shape[0], 3, 16, 1, 1), dim=1)
        return torch.sum(x * gate, dim=1)


class Extremes(nn.Module):
    """The mean, the largest and the smallest of parts; a stack behind the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.last = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.wide(x).unflatten(1, (2, 16))
        y = torch.stack((y.mean(1), y.amax(1) - y.amin(1, keepdim=True).squeeze(1)), dim=2).flatten(1, 2)
        return self.last(y)


class SpatialGate(nn.Module):
    """BAM: one channel for all, spread over them, beside one number for each."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.squeeze, self.place = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 4, 1), nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        each = self.each(x.mean((2, 3), keepdim=True)).expand_as(x)
        place = self.place(torch.relu(self.squeeze(x))).expand_as(x)
        return x * (1 + torch.sigmoid(each * place))


class GatedForNobody(nn.Module):
    """MixNet: what is squeezed by everybody, but of which the second half is read by late channels alone."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.squeeze, self.excite = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 4, 1), nn.Conv2d(4, 32, 1)
        self.one, self.other = nn.Conv2d(16, 8, 1), nn.Conv2d(16, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.wide(x))
        y = y * torch.sigmoid(self.excite(torch.relu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        one, other = y.chunk(2, dim=1)
        return x + torch.cat((self.one(one), self.other(other)), dim=1)


class Committee(nn.Module):
    """CrossViT, EfficientViM: several classifiers, whose answers are stacked and averaged, or weighed by a softmax."""

    def __init__(self, weighed: bool = False) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([0.3, -0.2])) if weighed else None
        self.one, self.other = nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.Conv2d(16, 8, 3, padding=1)
        self.heads = nn.ModuleList((nn.Linear(16, 5), nn.Linear(8, 5)))

    def forward(self, x: Tensor) -> Tensor:
        one = torch.relu(self.one(x))
        means = [each.mean((2, 3)) for each in (one, torch.relu(self.other(one)))]
        answers = [head(mean) for head, mean in zip(self.heads, means, strict=True)]
        if self.weights is None:
            return torch.mean(torch.stack(answers, dim=0), dim=0)
        weights = self.weights.softmax(-1)
        return torch.stack([weights[i] * answer for i, answer in enumerate(answers)]).sum(0)


GOOD: dict[str, Callable[[], nn.Module]] = {
    "split attention": lambda: Body(SplitAttention()),
    "split attention of several groups": lambda: Body(SplitAttention(cardinality=2)),
    "selective kernels": lambda: Body(SelectiveKernels()),
    "means and extremes of parts": lambda: Body(Extremes()),
    "a gate of one channel": lambda: Body(SpatialGate()),
    "a gate that nobody needs at first": lambda: Body(GatedForNobody()),
    "the mean of several classifiers": Committee,
    "several classifiers, weighed": lambda: Committee(weighed=True),
}


@pytest.mark.parametrize("growth", ["", "w,w"])
@pytest.mark.parametrize("what", GOOD)
def test_every_mechanism_keeps_the_promises(what: str, growth: str) -> None:
    promises.check_module(GOOD[what], growth, IMAGE, uneven=True)


@pytest.mark.parametrize("what", GOOD)
def test_a_network_that_is_kept_and_one_with_exits_end_where_it_ended(what: str) -> None:
    promises.check_ends(GOOD[what], IMAGE)
