"""Nests in what torch puts around modules, or does to them as a whole: wrappers, averages, compilation, moves, odd weights."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import nestling
from nestling import NestlingError
from nestling.nets import NestedNet
from nestling.nets.extended import Extended

SHAPE = (3, 8, 8)
WAYS: dict[str, Callable[[Any], Any]] = {
    "nest": lambda module: nestling.nest(module, "w,w", SHAPE),
    "keep": lambda module: nestling.keep(module, (1 / 4, 1 / 4), SHAPE),
    "exits": lambda module: nestling.exits(module, (0.3,), SHAPE),
}


def trained() -> nn.Sequential:
    torch.manual_seed(1)
    layers = (
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1),
        nn.BatchNorm2d(32),
    )
    module = nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    for name, buffer in module.named_buffers():
        if "running" in name:
            nn.init.uniform_(buffer, 0.5, 1.5)
    return module.eval()


def images() -> Tensor:
    return torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(0))


def steps(
    net: NestedNet, optimizer: torch.optim.Optimizer, count: int, each: Callable[[], object] = lambda: None
) -> None:
    net.train()
    for _ in range(count):
        optimizer.zero_grad()
        torch.stack(
            [F.cross_entropy(out, torch.arange(4)) for out in net(images()) if out.requires_grad]
        ).sum().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        each()
    net.eval()


def alike(net: Any) -> bool:
    """Whether stages and the whole network say the same."""
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(net(images()), net.answers(images()), strict=True))


@pytest.mark.parametrize("way", ["keep", "exits"])
@pytest.mark.parametrize("wrap", [nn.DataParallel, AveragedModel, nn.Sequential, torch.compile])
def test_calibrating_what_is_wrapped_leaves_a_kept_networks_norms(
    way: str, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    wrapped = wrap(WAYS[way](trained()))
    [net] = [each for each in wrapped.modules() if isinstance(each, Extended)]
    before, last = copy.deepcopy(net.state_dict()), trained()(images())
    nestling.calibrate(wrapped, [5 + 3 * images()])
    assert torch.equal(net(images())[-1], last)
    changed = {key for key, value in net.state_dict().items() if not torch.equal(value, before[key])}
    assert changed and all(key.startswith(("early.", "exit1.")) for key in changed)


@pytest.mark.parametrize("way", ["keep", "exits"])
def test_steps_with_weight_decay_over_all_parameters_leave_a_kept_network(way: str) -> None:
    net = WAYS[way](trained())
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01, weight_decay=0.1)
    steps(net, optimizer, 20, lambda: average.update_parameters(net))
    for each in (net, average.module.eval()):
        assert torch.equal(each(images())[-1], trained()(images())) and alike(each)
    net.requires_grad_(False)
    net.requires_grad_()  # as people freeze and thaw a network around a warm-up
    assert {id(p) for p in net.parameters() if p.requires_grad} == {id(p) for p in net.new_parameters()}
    net.thaw()
    assert all(p.requires_grad for p in net.parameters())


@pytest.mark.parametrize("way", WAYS)
def test_torchs_update_bn_is_refused_in_words(way: str) -> None:
    with pytest.raises(NestlingError, match=r"no momentum, as after .*update_bn.*nestling\.calibrate"):
        update_bn([images()], AveragedModel(WAYS[way](trained())))


@pytest.mark.parametrize("way", WAYS)
def test_memory_that_is_made_empty_and_loaded_is_the_same_network(way: str) -> None:
    """Masks are in no state dict: `to_empty` left in them what was in memory."""
    net = WAYS[way](trained()).eval()
    state, before = copy.deepcopy(net.state_dict()), net(images())
    for place in ("meta", "cpu"):
        empty = WAYS[way](trained()).eval().to(place)
        for _ in range(3):
            torch.full((4096,), float("nan"))
        wrapped = nn.Sequential(empty).to_empty(device="cpu")
        for layer in wrapped.modules():
            if isinstance(mask := getattr(layer, "mask", None), Tensor):
                assert bool(((mask == 0) | (mask == 1)).all())
        empty.load_state_dict(state)
        assert all(torch.equal(a, b) for a, b in zip(empty(images()), before, strict=True)) and alike(empty)


def test_a_move_that_moves_nothing_leaves_masks_where_they_are() -> None:
    """Captured graphs read them there."""
    net = WAYS["nest"](trained())
    places = [layer.mask.data_ptr() for layer in net.modules() if isinstance(getattr(layer, "mask", None), Tensor)]
    net.to("cpu").float()
    assert places and places == [
        m.mask.data_ptr() for m in net.modules() if isinstance(getattr(m, "mask", None), Tensor)
    ]
    assert {m.mask.dtype for m in net.half().modules() if isinstance(getattr(m, "mask", None), Tensor)} == {
        torch.float16
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_weights_of_a_wrapped_network_are_refused_with_their_prefix(way: str, prefix: str) -> None:
    net = WAYS[way](trained())
    state = {f"{prefix}{key}": value for key, value in net.state_dict().items()}
    state |= {"n_averaged": torch.tensor(3)} if prefix == "module." else {}  # as an average of weights has it
    for strict in (True, False):
        with pytest.raises(NestlingError, match=rf"wrapped in another: take '{prefix}' off".replace(".", r"\.")):
            net.load_state_dict(state, strict=strict)
    bare = {key.removeprefix(prefix): value for key, value in state.items()}
    net.load_state_dict(bare, strict=prefix != "module.")


def test_weights_of_which_nothing_fits_are_refused_also_where_it_is_not_strict() -> None:
    net, strange = WAYS["nest"](trained()), {"backbone.weight": torch.zeros(3)}
    with pytest.raises(NestlingError, match="not one of their names is known here, so nothing would be loaded"):
        net.load_state_dict(strange, strict=False)
    with pytest.raises(NestlingError, match="go into the module, which is nested then"):
        net.load_state_dict(trained().state_dict())
    kept = WAYS["keep"](trained())
    assert not kept.load_state_dict(trained().state_dict(), strict=False).unexpected_keys  # its own layers' names
    with pytest.raises(NestlingError, match="these weights are not those of the nest"):
        nestling.keep(trained(), (1 / 8,), SHAPE).load_state_dict(kept.state_dict())


@pytest.mark.parametrize("way", WAYS)
def test_what_is_wrapped_is_refused_with_what_is_inside(way: str) -> None:
    with pytest.raises(NestlingError, match=r"wrapped in DataParallel; nest what is inside, its \.module"):
        WAYS[way](nn.DataParallel(trained()))
    with pytest.raises(NestlingError, match=r"wrapped in OptimizedModule; nest what is inside, its \._orig_mod"):
        WAYS[way](torch.compile(trained()))
    inside: Any = trained()
    inside[0] = torch.compile(inside[0])
    with pytest.raises(NestlingError, match="cannot nest 0: it is wrapped in OptimizedModule"):
        WAYS[way](inside)
    wrappers: tuple[Any, ...] = nn.DataParallel(WAYS[way](trained())), torch.compile(WAYS[way](trained()))
    for wrapped in wrappers:
        with pytest.raises(NestlingError, match=r"around a nested network; hand over the network itself"):
            nestling.fit(wrapped, "digits")


@pytest.mark.parametrize("way", WAYS)
def test_weights_without_numbers_are_refused(way: str) -> None:
    with pytest.raises(NestlingError, match=r"device meta, and have no numbers.*to_empty"):
        WAYS[way](trained().to("meta"))
    if way != "exits":
        with torch.device("meta"), pytest.raises(NestlingError, match="order=False"):
            WAYS[way](trained())


def test_a_network_of_which_all_is_frozen_is_not_trained(tmp_path: Path) -> None:
    data = images(), torch.arange(4)
    with pytest.raises(NestlingError, match=r"all parameters of the network are frozen; let some train"):
        nestling.fit(
            WAYS["nest"](trained().requires_grad_(False)), data, data, out=tmp_path / "run", batch=4, quiet=True
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("way", WAYS)
def test_copies_are_networks_of_their_own(way: str, tmp_path: Path) -> None:
    net = WAYS[way](trained()).eval()
    before = tuple(net.answers(images()))
    for again in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):  # noqa: S301
        assert all(torch.equal(a, b) for a, b in zip(again.answers(images()), before, strict=True))
        with torch.no_grad():
            for parameter in again.parameters():
                parameter.zero_()
        assert all(not answer.any() for answer in again.answers(images()))
        assert all(torch.equal(a, b) for a, b in zip(net.answers(images()), before, strict=True))
    small = pickle.loads(pickle.dumps(net.subnet(1)))  # noqa: S301
    assert torch.equal(small(images()), net.subnet(1)(images()))
