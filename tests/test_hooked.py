"""Hooks that somebody puts on a nested network: they run in net(x); where no layer is called they are refused, never left out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nestling
from nestling.errors import NestlingError
from nestling.export.freeze import freeze, freeze_whole
from nestling.nets import NestedNet

SHAPE = (3, 8, 8)


def trained() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)).eval()


WAYS: dict[str, Callable[[], NestedNet]] = {
    "nest": lambda: nestling.nest(trained(), "w", SHAPE).eval(),
    "keep": lambda: nestling.keep(trained(), (1 / 4,), SHAPE).eval(),
    "exits": lambda: nestling.exits(trained(), (0.5,), SHAPE).eval(),
}
HOOKS: dict[str, Callable[[Any], Any]] = {
    "forward": lambda layer: layer.register_forward_hook(
        lambda m, a, out: tuple(2 * o for o in out) if isinstance(out, tuple) else 2 * out
    ),
    "pre": lambda layer: layer.register_forward_pre_hook(lambda m, a: (2 * a[0], *a[1:])),
    "backward": lambda layer: layer.register_full_backward_hook(lambda m, i, o: None),
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("where", ["", "0", "1", "2"])
@pytest.mark.parametrize("way", WAYS)
def test_a_hook_runs_in_whole_runs_and_is_refused_elsewhere(way: str, where: str, kind: str) -> None:
    net, x = WAYS[way](), torch.randn(2, *SHAPE)
    before, held = net(x), net.stages
    handle = HOOKS[kind](net.get_submodule(where))
    if kind != "backward":
        assert not torch.equal(net(x)[-1], before[-1])
    uses: list[Callable[[], Any]] = [
        lambda: list(net.answers(x)), lambda: net.stages, lambda: net.subnet(2), lambda: freeze(net),
        lambda: freeze_whole(net), lambda: nestling.Runtime(net, spec=nestling.Spec("it", SHAPE, tuple("0123456789"), net.sizes)),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(NestlingError, match=r"has a hook.*handle\.remove"):
            use()
    if where in held[-1].layers:  # stages that were asked for before
        state: tuple[Tensor, ...] = (x,)
        with pytest.raises(NestlingError, match="has a hook"):
            for stage in held:
                _, state = stage(state)
    handle.remove()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(before, net.answers(x), strict=True))


def test_a_subnetwork_with_a_hook_is_not_nested_again() -> None:
    small = WAYS["nest"]().subnet(2)
    small.net.layer("0").register_forward_hook(lambda m, a, out: 2 * out)
    with pytest.raises(NestlingError, match="has a hook"):
        nestling.keep(small, (1 / 4,), SHAPE)
    early = WAYS["nest"]()
    early.layer("0").register_forward_hook(lambda m, a, out: 2 * out)
    with pytest.raises(NestlingError, match="has a hook"):
        nestling.keep(trained(), shape=SHAPE, early=early)


def test_fit_refuses_a_hook_before_it_trains(tmp_path: Path) -> None:
    net, data = WAYS["exits"](), (torch.randn(8, *SHAPE), torch.randint(0, 10, (8,)))
    net.layer("0").register_forward_hook(lambda m, a, out: 2 * out)
    with pytest.raises(NestlingError, match="has a hook"):
        nestling.fit(net, data, data, out=tmp_path / "run", epochs=1, batch=4, quiet=True)
