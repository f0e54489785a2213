"""Trunks of 16 and 8 bits: float16 under autocast with a GradScaler, and 8-bit products in a function of one's own."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradient_zoo import literal_osgd, normalised
from torch import Tensor, nn

from nestling.errors import NestlingError
from nestling.gradients import Accumulator, backward
from nestling.gradients.combiners import OSGD, NormOSGD
from nestling.gradients.combiners.weighted import Weighted


class Trunk(nn.Module):
    """A trunk of two layers under three heads; `layer` makes its layers."""

    def __init__(self, layer: Any = nn.Linear) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(layer(16, 32), nn.GELU(), layer(32, 32), nn.LayerNorm(32))
        self.heads = nn.ModuleList(nn.Linear(32, 4) for _ in range(3))

    def losses(self, x: Tensor, y: Tensor) -> list[Tensor]:
        z = self.trunk(x)
        return [F.cross_entropy(head(z).float(), y) for head in self.heads]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(24, 16, generator=generator), torch.randint(4, (24,), generator=generator)


def rows_of(net: nn.Module, losses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Gradients of one loss at a time, float64, and who owns what."""
    params = list(net.parameters())
    found = [torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True) for loss in losses]
    rows = [[torch.zeros_like(p) if g is None else g for p, g in zip(params, grads, strict=True)] for grads in found]
    owned = [[torch.full_like(p, g is not None) for p, g in zip(params, grads, strict=True)] for grads in found]
    flat = [torch.stack([torch.cat([g.flatten().double() for g in row]) for row in each]) for each in (rows, owned)]
    return flat[0], flat[1].bool()


def update_of(net: nn.Module) -> Tensor:
    return torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in net.parameters()])


@pytest.mark.parametrize("mode", ["rows", "layers", "auto"])
@pytest.mark.parametrize("combine", [OSGD(), NormOSGD()], ids=["osgd", "osgd-norm"])
def test_float16_with_a_scaler_is_the_literal_update(combine: Weighted, mode: str) -> None:
    """Gradients that float16 would lose without the scale, of the very passes that are compared."""
    net, (x, y) = Trunk(), batch()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    rows = Accumulator(net, combine, scaler=scaler, mode=mode)
    for _ in range(2):
        net.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            losses = [1e-4 * loss for loss in net.losses(x, y)]
        found, owned = rows_of(net, [scaler.scale(loss) for loss in losses])
        found = found / scaler.get_scale()
        if isinstance(combine, NormOSGD):
            found, _ = normalised(found, owned)
        wanted = literal_osgd(found, range(3), [1.0] * 3)
        rows.backward(losses)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler.unscale_(optimizer)
        assert float((update_of(net) - wanted).norm() / wanted.norm()) < 1e-5
        scaler.update()


def test_an_overflow_in_float16_skips_the_step_and_lowers_the_scale() -> None:
    net, (x, y) = Trunk(), batch()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = [p.detach().clone() for p in net.parameters()]
    with torch.autocast("cpu", dtype=torch.float16):
        losses = net.losses(x, y)
    backward(losses, net, OSGD(), scaler=scaler)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**29
    assert all(torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))


def test_float16_without_a_scaler_that_overflows_is_refused() -> None:
    net, (x, y) = Trunk(), batch()
    with torch.autocast("cpu", dtype=torch.float16):
        losses = [loss * 1e9 for loss in net.losses(x, y)]
    with pytest.raises(NestlingError, match="GradScaler"):
        backward(losses, net, OSGD())
    assert all(p.grad is None for p in net.parameters())


def scaled(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax().clamp_min(1e-12) / torch.finfo(dtype).max
    return (x / scale).to(dtype), scale.float()


def product(a: Tensor, b: Tensor, first: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """a @ b.T in 8 bits; outgoing gradients have five bits of exponent."""
    (qa, sa), (qb, sb) = scaled(a, first), scaled(b, torch.float8_e4m3fn)
    found: Tensor = torch._scaled_mm(qa, qb.T, scale_a=sa, scale_b=sb, out_dtype=torch.float32)
    return found


class Product8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return product(delta, weight.T.contiguous(), torch.float8_e5m2), delta.T @ x


class Linear8(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Product8.apply(x, self.weight)
        return out + self.bias


def can_multiply_in_8_bits() -> bool:
    try:
        product(torch.ones(16, 16), torch.ones(16, 16))
    except (RuntimeError, NotImplementedError):
        return False
    return True


@pytest.mark.skipif(not can_multiply_in_8_bits(), reason="this torch has no 8-bit products on a CPU")
@pytest.mark.parametrize("mode", ["rows", "layers", "auto"])
def test_a_trunk_of_8_bits_is_the_literal_update(mode: str) -> None:
    """Each task's gradients are rounded to 8 bits by themselves, as the literal loop has them."""
    net, (x, y) = Trunk(Linear8), batch()
    losses = net.losses(x, y)
    found, _ = rows_of(net, losses)
    wanted = literal_osgd(found, range(3), [1.0] * 3)
    backward(losses, net, OSGD(), mode=mode)
    assert float((update_of(net) - wanted).norm() / wanted.norm()) < 1e-6
    plain, _ = rows_of(exact := Trunk(), exact.losses(x, y))
    assert 1e-3 < float((found - plain).norm() / plain.norm()) < 0.5, "these are not the gradients of 32 bits"
