"""A network of the user's own as data: what a run's folder tells of it, and what a process without the code builds of that."""

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import nestling
from nestling import NestlingError
from nestling.files import NETWORK, from_text, to_text
from nestling.nets import NestedNet
from nestling.nets.told import account, rebuilt
from nestling.recipes.code import HANDED

SHAPE = (3, 8, 8)


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        images, tokens, width = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(images, tokens, 3, 4, width // 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(images, tokens, width)
        return x + self.out(y)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.places = nn.Conv2d(3, 32, 4, 4), nn.Parameter(torch.randn(1, 4, 32))
        self.one, self.attention = Block(), nn.MultiheadAttention(32, 4, batch_first=True)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(self.patches(x).flatten(2).transpose(1, 2) + self.places)
        x = x + self.attention(x, x, x)[0]
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits


class Odds(nn.Module):
    """Layers and functions of many kinds, with arguments that JSON has no word for; a layer that serves two places."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.clip = (
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.Hardtanh(-1, float("inf")),
        )
        self.two, self.slope, self.drop = nn.Conv2d(16, 16, 3, padding=1, groups=4), nn.PReLU(), nn.Dropout(0.1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.clip(self.norm(self.one(x)))
        x = self.slope(F.leaky_relu(self.two(self.two(x)), 0.2) + x)
        x = torch.clamp(F.interpolate(F.max_pool2d(x, 2), scale_factor=2.0), -2, 2)
        logits: Tensor = self.head(self.drop(x.mean((2, 3))))
        return logits


class Tied(nn.Module):
    """One linear layer used as it is and turned around, with a table that several blocks look up."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.head = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.mean((1, 2)) @ self.table
        logits: Tensor = self.head(F.relu(self.first(x @ self.table.t())))
        return logits


WAYS: dict[str, Callable[[nn.Module], NestedNet]] = {
    "nest": lambda module: nestling.nest(module, "w,w", SHAPE),
    "keep": lambda module: nestling.keep(module, (1 / 4, 1 / 4), SHAPE),
    "exits": lambda module: nestling.exits(module, (0.3, 0.6), SHAPE),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("kind", "way"), [(k, w) for k in (Tokens, Odds) for w in WAYS] + [(Tied, "exits")])
def test_what_is_built_of_an_account_is_the_same_network(kind: type[nn.Module], way: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    made = {"exits": lambda m: nestling.exits(m, (0.3,), SHAPE)}.get(way, WAYS[way]) if kind is Tied else WAYS[way]
    net = made(kind().eval()).to(dtype)
    told = account(net)
    assert "missing" not in told, told["missing"]
    again = rebuilt(from_text(to_text(told)))  # through the very text
    again.load_state_dict(net.state_dict())
    assert again.plan == net.plan and type(again) is type(net)
    for mode in (True, False):
        states = [[m.training for m in each.train(mode).modules()] for each in (net, again)]
        assert states[0] == states[1]
    x = torch.randn(3, *SHAPE, dtype=dtype)
    assert all(torch.equal(a, b) for a, b in zip(net(x), again(x), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(net.answers(x), again.answers(x), strict=True))
    named = [{n: (p.requires_grad, p.dtype) for n, p in each.named_parameters()} for each in (net, again)]
    assert named[0] == named[1]  # without names of what is tied: those are one in both


def test_what_cannot_be_told_says_why() -> None:
    class Mine(nn.ReLU):
        pass

    net = WAYS["nest"](
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    )
    net._modules["1"] = Mine()
    assert account(net)["missing"] == "1 is a Mine, a layer of your own"
    net._modules["1"], net._modules["0"] = nn.GELU(), nn.Conv2d(3, 8, 3)
    assert account(net)["missing"] == "0 has been replaced by a Conv2d"


def spoilt(told: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    told = copy.deepcopy(told)
    change(told)
    return told


def test_an_account_makes_nothing_else_run(tmp_path: Path) -> None:
    """What it names is looked up among layers and functions of tensors; anything else is refused, and never called."""
    torch.manual_seed(0)
    told = account(WAYS["exits"](Tokens().eval()))
    steps = next(layer for layer in told["layers"].values() if layer["is"] == "Recorded")
    name = next(key for key, layer in told["layers"].items() if layer is steps)
    where = str(tmp_path / "ran")

    def with_steps(*step: Any) -> Callable[[dict[str, Any]], object]:
        return lambda t: t["layers"][name]["with"].update(steps=[[*step, {"dict": []}]])

    bad: list[Callable[[dict[str, Any]], object]] = [
        lambda t: t.update(format=99),
        lambda t: t.pop("plan"),
        lambda t: t["nodes"].pop(1),
        lambda t: t["nodes"][1].__setitem__(1, {"Evil": {}}),
        lambda t: t["layers"][name].update({"is": "Popen"}),
        with_steps("call_function", {"function": "os.mkdir"}, [where]),
        with_steps("call_function", {"function": "torch.load"}, [where]),
        with_steps("call_method", "__reduce_ex__", [{"Read": {"place": 0}}, 2]),
        lambda t: t["layers"].pop(name),
        lambda t: t["types"].update({"head": {"kind": "os.sep"}}),
    ]
    for change in bad:
        with pytest.raises(NestlingError, match="account of a network"):
            rebuilt(spoilt(told, change))
    others: tuple[Any, ...] = ([], None, 3, "x")
    for other in others:
        with pytest.raises(NestlingError, match="expected 1"):
            rebuilt(other)
    assert not (tmp_path / "ran").exists()


SCRIPT = """
import torch, nestling
from sklearn.datasets import load_digits
from torch import nn

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm, self.two = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 16, 3, 2, 1)
        self.act, self.head = nn.SiLU(), nn.Linear(16, 10)

    def forward(self, x):
        return self.head(torch.relu(self.two(self.act(self.norm(self.one(x))))).mean((2, 3)))

digits = load_digits()
images, labels = (torch.tensor(digits.images[:, None]) * 15.9).to(torch.uint8), torch.tensor(digits.target)
for way in (nestling.nest, nestling.keep, nestling.exits):
    torch.manual_seed(0)
    net = way(Mine().eval(), shape=(1, 8, 8))
    train, test = (images[:256], labels[:256]), (images[1500:], labels[1500:])
    run = nestling.fit(net, train, test, out=f"runs/{way.__name__}", epochs=1, quiet=True, repeats=0)
    torch.save([answer for answer in run.net()(torch.linspace(-1, 1, 128).view(2, 1, 8, 8))], f"{way.__name__}.pt")
"""


def test_another_process_opens_the_folder_without_the_code(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "mine.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    (tmp_path / "mine.py").unlink()
    pixels = np.zeros((8, 8), np.uint8)
    pixels[1:7, 3:5] = 255
    Image.fromarray(pixels).save(tmp_path / "one.png")
    x = torch.linspace(-1, 1, 128).view(2, 1, 8, 8)
    for way in ("nest", "keep", "exits"):
        run = tmp_path / "runs" / way
        asked = [a.detach() for a in torch.load(tmp_path / f"{way}.pt")]
        assert all(torch.equal(a, b) for a, b in zip(nestling.load(run)(x), asked, strict=True))
    for words in (
        ("predict", "runs/keep", "one.png"),
        ("profile", "runs/keep", "--repeats", "2", "--device", "cpu"),
        ("export", "runs/keep", "--out", "folder"),
        ("predict", "folder", "one.png"),
        ("report", "runs/keep", "--out", "report.html"),
    ):
        asked_of = [sys.executable, "-m", "nestling", *words, "--json"]
        found = subprocess.run(asked_of, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert not found.returncode, (words, found.stdout, found.stderr)


def test_a_network_of_the_same_name_in_this_process_is_not_taken_for_it(tmp_path: Path) -> None:
    """Both are called Sequential, and their weights have the same names and shapes."""

    def net(act: nn.Module) -> NestedNet:
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 8, 3), act, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
        return nestling.nest(nn.Sequential(*layers), "w", SHAPE)

    data = torch.randn(16, *SHAPE), torch.randint(0, 10, (16,))
    run = nestling.fit(net(nn.ReLU()), data, data, out=tmp_path / "run", epochs=1, batch=8, quiet=True, repeats=0)
    before = run.net()(data[0])
    HANDED[run.recipe.network.name] = lambda: net(nn.Tanh())  # as a run of this process would
    assert all(torch.equal(a, b) for a, b in zip(nestling.load(run.path)(data[0]), before, strict=True))


def test_a_folder_that_does_not_tell_it_asks_for_the_function(tmp_path: Path) -> None:
    def net() -> NestedNet:
        torch.manual_seed(0)
        return nestling.nest(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)), "w", SHAPE)  # fmt: skip  # noqa: E501

    data = torch.randn(16, *SHAPE), torch.randint(0, 10, (16,))
    run = nestling.fit(net(), data, data, out=tmp_path / "run", epochs=1, batch=8, quiet=True, repeats=0)
    HANDED.pop(run.recipe.network.name)
    assert nestling.load(run.path).plan.stages == 2
    (run.path / NETWORK).write_text('{"format": 1, "missing": "1 is a Mine, a layer of your own"}')
    with pytest.raises(NestlingError, match=r"holds no code.*--build.*1 is a Mine, a layer of your own"):
        nestling.load(run.path)
    (run.path / NETWORK).write_text('{"format": 1}')
    with pytest.raises(NestlingError, match=r"network\.json: this account of a network is damaged"):
        nestling.load(run.path)
    (run.path / NETWORK).unlink()  # as of runs from before
    with pytest.raises(NestlingError, match="holds no code"):
        nestling.load(run.path)
    assert nestling.load(run.path, build=net).plan.stages == 2
