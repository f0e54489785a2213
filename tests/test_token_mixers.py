"""What transformers and token mixers are made of, each on a small module: every promise of a nest holds."""

from collections.abc import Callable

import promises
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.errors import NestlingError
from nestling.nets.nest import nest
from nestling.nets.ops import Computed, Covariance, Headwise, Join, Merge, Mingle

IMAGE = (3, 8, 8)


class Heads(nn.Module):
    """Attention over (N, tokens, channels); the subclasses say how queries and keys become looks."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        n, tokens, _ = x.shape
        return self.qkv(x).reshape(n, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)

    def looks(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1)).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        return self.proj((self.looks(q, k) @ v).transpose(1, 2).reshape(x.shape))


class Biased(Heads):
    """A bias for every pair of tokens, looked up in a table of parameters."""

    pairs: Tensor

    def __init__(self, tokens: int = 16, fused: bool = False, heads: int = 4) -> None:
        super().__init__(heads=heads)
        self.table, self.fused = nn.Parameter(torch.randn(2 * tokens - 1, heads)), fused
        self.register_buffer("pairs", torch.arange(tokens)[:, None] - torch.arange(tokens) + tokens - 1)

    def bias(self) -> Tensor:
        tokens = self.pairs.shape[0]
        return self.table[self.pairs.view(-1)].view(tokens, tokens, -1).permute(2, 0, 1).contiguous().unsqueeze(0)

    def looks(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1) + self.bias()).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        if not self.fused:
            return super().forward(x)
        q, k, v = self.parts(x)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias())
        return self.proj(y.transpose(1, 2).reshape(x.shape))


class OneForAll(nn.Module):
    """Many heads of queries, and one of keys and values for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.proj = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = self.kv(x).unsqueeze(1).chunk(2, dim=-1)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


class OneKey(Heads):
    """All tokens look at one, which is their mean."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        y = F.scaled_dot_product_attention(q, k.mean(2, keepdim=True), v.mean(2, keepdim=True))
        return self.proj(y.transpose(1, 2).reshape(x.shape))


class Cosines(Heads):
    """Queries and keys of length one, and a temperature of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.rand(4, 1, 1) + 1)

    def looks(self, q: Tensor, k: Tensor) -> Tensor:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        return (q @ k.transpose(-2, -1) * self.temperature.exp()).softmax(-1)


class NormedKeys(Heads):
    """Queries and keys normalised in each head, by parameters that all heads have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(4), nn.LayerNorm(4)
        nn.init.normal_(self.q_norm.weight)

    def looks(self, q: Tensor, k: Tensor) -> Tensor:
        return super().looks(self.q_norm(q), self.k_norm(k))


class LateBias(Heads):
    """The bias of one layer put together of several parameters."""

    k_bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48, bias=False)
        self.q_bias, self.v_bias = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(16))
        self.register_buffer("k_bias", torch.zeros(16), persistent=False)

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        y = F.linear(x, self.qkv.weight, torch.cat((self.q_bias, self.k_bias, self.v_bias)))
        return y.reshape(x.shape[0], x.shape[1], 3, 4, -1).permute(2, 0, 3, 1, 4).unbind(0)


class HeadsInBatch(Heads):
    """Heads beside the images of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(n, tokens, 3, 4, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, n * 4, tokens, -1).unbind(0)
        y = self.looks(q, k) @ v
        return self.proj(y.view(n, 4, tokens, -1).transpose(1, 2).reshape(x.shape))


class ClassLast(nn.Module):
    """One token that looks at all others and is then joined with them."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.q, self.k, self.v, self.proj = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, _ = x.shape
        u = torch.cat((self.token.expand(n, -1, -1), x), dim=1)
        q = self.q(u[:, 0]).unsqueeze(1).reshape(n, 1, 4, 4).permute(0, 2, 1, 3)
        k, v = (layer(u).reshape(n, tokens + 1, 4, 4).permute(0, 2, 1, 3) for layer in (self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, 1, 16)
        return torch.cat((self.proj(y), x), dim=1)


class Shifted(nn.Module):
    """Swin: images rolled, windows with a mask, patches merged into channels."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.attention = nn.Conv2d(3, 16, 1), nn.LayerNorm(16), Biased(4)
        self.reduction, self.merged = nn.Linear(64, 32), nn.LayerNorm(64)
        self.register_buffer("mask", torch.where(torch.rand(16, 4, 4) > 0.3, 0.0, -9.0))
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        x = self.stem(x).permute(0, 2, 3, 1)
        y = torch.roll(self.norm(x), shifts=(-1, -1), dims=(1, 2))
        y = y.view(n, 4, 2, 4, 2, 16).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 16)
        q, k, v = self.attention.parts(y)
        looks = q @ k.transpose(-2, -1) + self.attention.bias()
        looks = (looks.view(n, 16, 4, 4, 4) + self.mask.unsqueeze(1).unsqueeze(0)).view(-1, 4, 4, 4).softmax(-1)
        y = self.attention.proj((looks @ v).transpose(1, 2).reshape(y.shape))
        y = y.view(n, 4, 4, 2, 2, 16).permute(0, 1, 3, 2, 4, 5).reshape(n, 8, 8, 16)
        x = x + torch.roll(y, shifts=(1, 1), dims=(1, 2))
        x = x.reshape(n, 4, 2, 4, 2, 16).permute(0, 1, 3, 4, 2, 5).flatten(3)
        return self.head(self.reduction(self.merged(x)).mean((1, 2)))


class Places(nn.Module):
    """Positions that are made while running, by a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.made = nn.Linear(2, 16)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device, dtype=x.dtype) / 7
        places = torch.stack([at.sin(), at.cos()], dim=-1).unsqueeze(0).repeat(x.shape[0], 1, 1)
        return x + self.made(places)


class NormOfTokens(nn.Module):
    """A batch norm over tokens that stand beside the images of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return self.norm(x.flatten(0, 1)).reshape_as(x)


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.rand(1, 1, 16) + 0.5), nn.Parameter(torch.randn(1, 1, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.beta, self.alpha, x)


class ScaleOnly(nn.Module):
    """A norm over channels and pixels with a scale and no shift."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x.transpose(1, 2), 1, self.weight).transpose(1, 2)


class FewHeads(nn.Module):
    """Keys and values of a smaller image, of fewer heads than there are stages: no channel of it is made for nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.small = nn.Linear(16, 16), nn.Linear(16, 32), nn.Conv2d(16, 16, 2, 2)
        self.proj = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        q = self.q(x).reshape(n, tokens, 2, 8).permute(0, 2, 1, 3)
        y = self.small(x.transpose(1, 2).reshape(n, width, 4, 4)).flatten(2).transpose(1, 2)
        k, v = self.kv(y).reshape(n, -1, 2, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj((((q @ k.transpose(-2, -1)).softmax(-1)) @ v).transpose(1, 2).reshape(n, tokens, width))


class Covariances(Heads):
    """Channels that look at channels (XCiT): queries and keys of length one over the tokens, a temperature of each head."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.temperature, self.fused = nn.Parameter(torch.rand(4, 1, 1) + 1), fused

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.transpose(-2, -1) for part in self.parts(x))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
            y = (q @ k.transpose(-2, -1) * self.temperature).softmax(-1) @ v
        return self.proj(y.permute(0, 3, 1, 2).reshape(x.shape))


class ChannelsOfWindows(Heads):
    """The same in each of four windows, values before looks."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        x = x.reshape(n, 4, 4, 16)
        q, k, v = self.qkv(x).reshape(n, 4, 4, 3, 4, 4).permute(3, 0, 1, 4, 2, 5).unbind(0)
        looks = (q.transpose(-2, -1) @ k).softmax(-1)
        y = v @ looks.transpose(-2, -1)
        return self.proj(y.transpose(2, 3).reshape(n, 16, 16))


class ByLetters(Heads):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        looks = torch.einsum("b h i d, b h j d -> b h i j", q, k).softmax(-1)
        return self.proj(torch.einsum("bhij,bhjd->bihd", looks, v).reshape(x.shape))


class ValuesFirst(nn.Module):
    """One head of images (SHViT): values by looks, not looks by values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Conv1d(16, 32, 1), nn.Conv1d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.transpose(1, 2)).split((8, 8, 16), dim=1)
        looks = (q.transpose(-2, -1) @ k * 8**-0.5).softmax(-1)
        return self.proj(v @ looks.transpose(-2, -1)).transpose(1, 2)


@torch.fx.wrap
def masked_looks(q: Tensor, k: Tensor) -> Tensor:
    """A function that torch.fx is told not to look into, with a mask made of nothing but shapes."""
    mask = q.new_zeros((q.shape[-2], q.shape[-2]))
    for row in range(q.shape[-2]):
        mask[row, row + 1 :] = -9.0
    return (q @ k.transpose(-2, -1) + mask).softmax(-1)


class Masked(Heads):
    def looks(self, q: Tensor, k: Tensor) -> Tensor:
        return masked_looks(q, k)


class TokenAlone(Heads):
    """A token of the module's own that looks at all others, and is what the answer is added to (CaiT)."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.norm = nn.Parameter(torch.randn(1, 1, 16)), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        token = self.token.expand(x.shape[0], -1, -1)
        u = torch.cat((token, x), dim=1)
        token = token + super().forward(self.norm(u))[:, :1]
        return torch.cat((token, x), dim=1)


class Rotated(Heads):
    """Queries and keys turned by angles of their tokens, all but the first; halves of a head, or every other channel."""

    angles: Tensor

    def __init__(self, halves: bool, alone: int = 1) -> None:
        super().__init__()
        self.halves, self.alone = halves, alone
        self.register_buffer("angles", torch.rand(16 - alone, 4))

    def turned(self, x: Tensor) -> Tensor:
        first, rest = x[:, :, : self.alone], x[:, :, self.alone :]
        if self.halves:
            one, other = rest.chunk(2, -1)
            across = torch.cat([-other, one], -1)
        else:
            across = torch.stack([-rest[..., 1::2], rest[..., ::2]], -1).reshape(rest.shape)
        return torch.cat([first, rest * self.angles.cos() + across * self.angles.sin()], dim=2)

    def looks(self, q: Tensor, k: Tensor) -> Tensor:
        return super().looks(self.turned(q), self.turned(k))


class LargestQueries(Heads):
    """Queries of fewer tokens: the largest of every four, in two windows (Hiera)."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        q, k, v = self.qkv(x).reshape(n, 8, 2, 3, 4, 4).permute(3, 0, 4, 2, 1, 5).unbind(0)
        q = q.view(n, 4, 2, 4, 2, 4).amax(dim=3)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 3).reshape(n, 4, 16))


class PooledWindows(Heads):
    """Windows beside the images of the batch, pooled there (SAM 2); one query of all images' own for every window (GCViT)."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.all = nn.MaxPool2d(2), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        windows = x.view(n, 2, 2, 2, 2, 16).permute(0, 1, 3, 2, 4, 5).reshape(-1, 2, 2, 16)
        small = self.pool(windows.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        q, k, v = self.parts(windows.reshape(-1, 4, 16))
        asked = self.all(x[:, :4]).repeat_interleave(4, dim=0).reshape(4 * n, 4, 4, 4).permute(0, 2, 1, 3)
        y = (self.looks(asked + q, k) @ v).transpose(1, 2).reshape(-1, 2, 2, 16)
        y = self.proj(y + small)
        return y.view(n, 2, 2, 2, 2, 16).permute(0, 1, 3, 2, 4, 5).reshape(n, 16, 16)


class WrittenNorm(nn.Module):
    """A norm of images, written out in operations, with a scale."""

    def __init__(self, variance: bool = False) -> None:
        super().__init__()
        self.variance = variance
        self.norm, self.mix = nn.Parameter(torch.rand(16) + 0.5), nn.Conv2d(16, 16, 3, padding=1)
        self.more = nn.Conv2d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(x.transpose(1, 2).reshape(-1, 16, 4, 4))
        v = torch.var(y, dim=1, keepdim=True) if self.variance else torch.mean(y.pow(2), dim=1, keepdim=True)
        y = y * torch.rsqrt(v + 1e-6)
        y = self.more(y) if self.variance else y * self.norm.reshape(1, -1, 1, 1)
        return y.flatten(2).transpose(1, 2)


class PixelsOfPatches(Heads):
    """Patches taken by Unfold, whose pixels look at each other and then become channels of their patch (TNT)."""

    def __init__(self) -> None:
        super().__init__()
        self.unfold, self.place = nn.Unfold(2, stride=2), nn.Parameter(torch.randn(1, 16, 2, 2))
        self.inner, self.outer, self.wide = nn.LayerNorm(16), nn.LayerNorm(64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        y = self.unfold(x.transpose(1, 2).reshape(n, 16, 4, 4)).transpose(1, 2).reshape(4 * n, 16, 2, 2)
        y = (y + self.place).reshape(4 * n, 16, 4).transpose(1, 2)
        y = y + super().forward(self.inner(y))
        return self.wide(self.outer(y.reshape(n, 4, 64).contiguous()))


class PaddedHeads(Heads):
    """Attention without softmax of queries, and something of all tokens but the first, with zeros for that one (CoaT)."""

    def __init__(self) -> None:
        super().__init__()
        self.around = nn.Conv2d(16, 16, 3, padding=1, groups=16)

    def forward(self, x: Tensor) -> Tensor:
        n, tokens = x.shape[:2]
        q, k, v = self.parts(torch.cat([x[:, :1], x], dim=1))
        y = q @ (k.softmax(dim=2).transpose(-1, -2) @ v)
        image = v[:, :, 1:].transpose(-1, -2).reshape(n, 16, 4, 4)
        near = self.around(image).reshape(n, 4, 4, 16).transpose(-1, -2)
        y = y + F.pad(q[:, :, 1:] * near, (0, 0, 1, 0, 0, 0))
        return self.proj(y.transpose(1, 2).reshape(n, tokens + 1, 16))[:, 1:]


class Sums(Heads):
    """Linear attention: values with a one behind them, whose share every other is divided by (EfficientViT)."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        y = q.relu() @ (k.relu().transpose(-1, -2) @ F.pad(v, (0, 1), mode="constant", value=1.0))
        y = y[..., :-1] / (y[..., -1:] + 1e-2)
        return self.proj(y.transpose(1, 2).reshape(x.shape).to(x.dtype))


class OneNetwork(nn.Module):
    """Two places whose constants a small network makes, the same for both."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.places = nn.Buffer(torch.randn(16, 2))
        self.make = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(drop), nn.Linear(8, 16))
        self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        table = self.make(self.places)
        y = self.one(x + table).relu()
        return self.other(y * table.sigmoid())


class OneTable(nn.Module):
    """A table of biases that two layers of attention have in common, and a gate for two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.gate = Biased(), Heads(), nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        y, share = self.one(x), self.gate.sigmoid()
        q, k, v = self.other.parts(y)
        z = (q @ k.transpose(-2, -1) + 2 * self.one.bias()).softmax(-1) @ v
        return (1 - share) * y + share * self.other.proj(z.transpose(1, 2).reshape(x.shape))


class Tokens(nn.Module):
    """Patches, something done to their tokens, and the mean of these."""

    def __init__(self, middle: nn.Module, residual: bool = True) -> None:
        super().__init__()
        self.patch, self.norm, self.middle, self.residual = nn.Conv2d(3, 16, 2, 2), nn.LayerNorm(16), middle, residual
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        y = self.middle(self.norm(x))
        return self.head((x + y if self.residual else y).mean(1))


class Distilled(nn.Module):
    """Two classifiers, whose answers are averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.other = nn.Conv2d(3, 16, 3), nn.Linear(16, 5), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).relu()
        return (self.one(x.mean((2, 3))) + self.other(x.amax((2, 3)))) / 2


GOOD: dict[str, Callable[[], nn.Module]] = {
    "a bias looked up in a table": lambda: Tokens(Biased()),
    "the same in torch's fused form": lambda: Tokens(Biased(fused=True)),
    "a single head, a bias, torch's fused form": lambda: Tokens(Biased(fused=True, heads=1)),
    "one head of keys for all queries": lambda: Tokens(OneForAll()),
    "a single token to look at": lambda: Tokens(OneKey()),
    "queries and keys of length one": lambda: Tokens(Cosines()),
    "queries and keys normalised": lambda: Tokens(NormedKeys()),
    "a bias put together of several": lambda: Tokens(LateBias()),
    "heads in the batch": lambda: Tokens(HeadsInBatch()),
    "attention of one token, joined": lambda: Tokens(ClassLast(), residual=False),
    "shifted windows, merged patches": lambda: Shifted(),
    "positions made while running": lambda: Tokens(Places()),
    "batch norm of tokens": lambda: Tokens(NormOfTokens()),
    "a scale and a shift at once": lambda: Tokens(Affine()),
    "a norm without a shift": lambda: Tokens(ScaleOnly()),
    "fewer heads than stages": lambda: Tokens(FewHeads()),
    "two classifiers": lambda: Distilled(),
    "channels that look at channels": lambda: Tokens(Covariances()),
    "the same in torch's fused form, scaled": lambda: Tokens(Covariances(fused=True)),
    "channels of windows, values first": lambda: Tokens(ChannelsOfWindows()),
    "products spelled by letters": lambda: Tokens(ByLetters()),
    "values before looks": lambda: Tokens(ValuesFirst()),
    "a mask made while running, in a wrapped function": lambda: Tokens(Masked()),
    "an RMS norm written out": lambda: Tokens(WrittenNorm()),
    "a norm by the variance written out": lambda: Tokens(WrittenNorm(variance=True)),
    "pixels of patches": lambda: Tokens(PixelsOfPatches(), residual=False),
    "zeros around tokens of heads": lambda: Tokens(PaddedHeads()),
    "attention divided by its sum": lambda: Tokens(Sums()),
    "constants of parameters in common": lambda: Tokens(OneTable()),
    "constants of one small network": lambda: Tokens(OneNetwork()),
    "a token that is read by itself, too": lambda: Tokens(TokenAlone(), residual=False),
    "queries and keys turned, halves of heads": lambda: Tokens(Rotated(halves=True)),
    "queries and keys turned, pairs of channels": lambda: Tokens(Rotated(halves=False)),
    "queries and keys turned, of all tokens": lambda: Tokens(Rotated(halves=True, alone=0)),
    "the largest of some queries": lambda: Tokens(LargestQueries(), residual=False),
    "windows pooled, one query for all of them": lambda: Tokens(PooledWindows()),
}


@pytest.mark.parametrize("growth", ["", "w,w"])
@pytest.mark.parametrize("what", GOOD)
def test_every_mechanism_keeps_the_promises(what: str, growth: str) -> None:
    promises.check_module(GOOD[what], growth, IMAGE)


@pytest.mark.parametrize("what", GOOD)
def test_a_network_that_is_kept_and_one_with_exits_end_where_it_ended(what: str) -> None:
    promises.check_ends(GOOD[what], IMAGE)


def test_each_mechanism_is_the_operation_it_is_meant_to_be() -> None:
    def kinds(what: str) -> set[type]:
        return {type(node.op) for node in nest(GOOD[what](), "w", shape=IMAGE, proof=False).plan.nodes}

    assert Computed in kinds("a bias looked up in a table")
    assert Headwise in kinds("queries and keys of length one")
    assert Join in kinds("attention of one token, joined")
    assert {Computed, Merge} <= kinds("shifted windows, merged patches")
    assert {Covariance, Mingle} <= kinds("channels of windows, values first")


def test_parameters_of_a_constant_that_a_layer_has_too_are_refused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x + self.layer.bias.sin())

    with pytest.raises(NestlingError, match="serve other places too"):
        nest(Tokens(Twice()), "w", shape=IMAGE)


def test_a_constant_made_with_dropout_for_several_places_is_refused() -> None:
    with pytest.raises(NestlingError, match="made with dropout, of which each place would draw its own"):
        nest(Tokens(OneNetwork(drop=0.5)), "w", shape=IMAGE)


def test_random_numbers_made_while_running_are_refused() -> None:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand(16)

    with pytest.raises(NestlingError, match="not the same in every run"):
        nest(Tokens(Noise()), "w", shape=IMAGE)


def test_a_tensor_that_the_module_replaces_while_running_is_there_after_a_run() -> None:
    class Late(nn.Module):
        places: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(16))
            self.register_buffer("places", torch.zeros(1, 1), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            if self.places.shape[0] != x.shape[1]:
                self.places = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[:, None] / 7
            return x + self.places * self.scale.cos()

    module = Tokens(Late())
    with pytest.raises(NestlingError, match="run the module on an image of this size first"):
        nest(module, "w", shape=IMAGE)
    module(torch.randn(1, *IMAGE))
    assert len(nest(module, "w", shape=IMAGE).sizes) == 2


def test_queries_by_a_table_of_positions_are_refused_for_what_they_are() -> None:
    class Decomposed(HeadsInBatch):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(16, 16, 4))

        def looks(self, q: Tensor, k: Tensor) -> Tensor:
            return (q @ k.transpose(-2, -1) + torch.einsum("bqc,qkc->bqk", q, self.table)).softmax(-1)

    with pytest.raises(NestlingError, match=r"operation einsum .* multiplies tensors of shapes"):
        nest(Tokens(Decomposed()), "w", shape=IMAGE)
