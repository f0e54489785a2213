"""A folder from a stranger: what it tells of a network runs functions of tensors alone, and asks for no more than it holds."""

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import nestling
from nestling import NestlingError
from nestling.files import NETWORK, WEIGHTS, from_text, to_text
from nestling.nets import NestedNet
from nestling.nets.told import ShapesOfWeights, account, functions, rebuilt

SHAPE = (3, 8, 8)


class Tokens(nn.Module):
    """With operations that are told as they were recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.places, self.head = (
            nn.Conv2d(3, 16, 4, 4),
            nn.Parameter(torch.randn(1, 4, 16)),
            nn.Linear(16, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        logits: Tensor = self.head(x.cumsum(1).mean(1))
        return logits


def plain(act: nn.Module | None = None, padding: int = 0) -> NestedNet:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(3, 16, 3),
        act or nn.ReLU(),
        nn.Conv2d(16, 16, 3, 1, padding),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    return nestling.nest(nn.Sequential(*layers, nn.Linear(16, 10)), "w", SHAPE)


def recorded() -> tuple[dict[str, Any], str]:
    told = account(nestling.exits(Tokens().eval(), (0.3,), SHAPE))
    return told, next(name for name, layer in told["layers"].items() if layer["is"] == "Recorded")


def shapes(net: NestedNet) -> ShapesOfWeights:
    return {key: tuple(tensor.shape) for key, tensor in net.state_dict().items()}


def made(step: int) -> dict[str, Any]:
    return {"Made": {"step": step}}


def held(name: str) -> dict[str, Any]:
    return {"Held": {"name": name}}


def lent(owner: Any, word: str) -> dict[str, Any]:
    return {"dict": [["it", [{"list": [owner]}, word]]]}


NONE: dict[str, Any] = {"dict": []}
GET = {"function": "operator.getitem"}


def test_attributes_of_python_are_out_of_reach(tmp_path: Path) -> None:
    """From a layer's own methods one gets to all of Python: these steps opened a file."""
    told, name = recorded()
    where = tmp_path / "ran"
    told["layers"][name]["with"]["steps"] = {
        "list": [
            ["call_module", "__getattribute__", ["forward"], NONE],
            ["call_module", "__setattr__", ["borrowed", lent(made(0), "__globals__")], NONE],
            ["call_function", GET, [held("it"), "__builtins__"], NONE],
            ["call_function", GET, [made(2), "open"], NONE],
            ["call_module", "__setattr__", ["borrowed", lent(made(3), "__call__")], NONE],
            ["call_module", "it", [str(where), "w"], NONE],
        ]
    }
    with pytest.raises(NestlingError, match=r"calls \.__getattribute__, which is no function of tensors"):
        net = rebuilt(told)
        net(torch.randn(2, *SHAPE))
    assert not where.exists()


READ: dict[str, Any] = {"Read": {"place": 0}}


@pytest.mark.parametrize(
    "step",
    [
        ["call_function", GET, [held("__dict__"), "steps"], NONE],
        ["call_function", GET, [[held("forward")], 0], NONE],
        ["call_function", GET, [READ, {"slice": [None, {"Copy": {"of": held("state_dict")}}, None]}], NONE],
        ["call_function", GET, [READ], {"dict": [["index", held("register_buffer")]]}],
        ["call_module", "register_forward_hook", [{"function": "torch.relu"}], NONE],
        ["call_method", "apply_", [READ, {"function": "torch.relu"}], NONE],
        ["call_method", "numpy", [READ], NONE],
        ["call_function", {"function": "torch.Tensor.set_"}, [READ, READ], NONE],
        ["call_function", READ, [READ], NONE],
        ["get_attr", "places", [], NONE],
    ],
)
def test_a_step_holds_tensors_and_layers_and_calls_functions_of_tensors(step: list[Any]) -> None:
    told, name = recorded()
    told["layers"][name]["with"]["steps"] = {"list": [step]}
    with pytest.raises(NestlingError, match="account of a network is damaged"):
        rebuilt(told)


def test_what_is_borrowed_is_a_tensor_or_a_layer() -> None:
    told, name = recorded()
    told["layers"][name]["borrowed"] = {"mine": [name, "__setattr__"]}
    with pytest.raises(NestlingError, match="borrows mine, which is no tensor and no layer"):
        rebuilt(told)


def test_arithmetic_is_named_and_looked_up_nowhere_else() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.shift, self.head = nn.Conv2d(3, 16, 3), nn.Parameter(torch.rand(16, 1, 1)), nn.Linear(16, 10)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head((self.one(x) + self.shift).mean((2, 3)))
            return logits

    told = account(nestling.nest(Shifted(), "w", SHAPE))
    [scale] = [node[1]["Scale"] for node in told["nodes"] if "Scale" in node[1]]
    assert rebuilt(told).plan.stages == 2
    scale["function"] = "save"
    with pytest.raises(NestlingError, match=r"'save', which is no arithmetic"):
        rebuilt(told)


def test_the_functions_give_away_no_memory_and_call_nothing() -> None:
    last = {name.rpartition(".")[2] for name in functions()}
    assert not last & {
        "apply_",
        "map_",
        "numpy",
        "set_",
        "storage",
        "untyped_storage",
        "data_ptr",
        "resize_",
        "register_hook",
    }
    assert not any(word.startswith("_") or word in ("load", "save", "from_file", "exec") for word in last)


def conv(told: dict[str, Any]) -> Any:
    return next(node for node in told["nodes"] if "Conv" in node[1])


LARGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "channels": lambda told: conv(told).__setitem__(3, [[1, 10**12], [2, 8]]),
    "channels below none": lambda told: conv(told).__setitem__(3, [[1, -8], [2, 24]]),
    "a layer": lambda told: [
        node.__setitem__(3, [[1, 50_000], [2, 50_000]]) for node in told["nodes"] if "Conv" in node[1]
    ],
    "a kernel": lambda told: conv(told)[1]["Conv"].update(kernel=[50_000, 50_000]),
    "tensors": lambda told: told["layers"]["1"].update(
        parameters={"weight": [[10**6, 10**6], {"kind": "torch.float32"}]}
    ),
    "buffers": lambda told: told["layers"]["1"].update(buffers={"mean": [[10**10], {"kind": "torch.float32"}]}),
}


@pytest.mark.parametrize("what", LARGE)
def test_what_asks_for_more_than_lies_beside_it_is_refused_before_it_is_made(what: str) -> None:
    net = plain(nn.Tanh())
    told = copy.deepcopy(account(net))
    assert rebuilt(told, shapes(net)).plan == net.plan
    LARGE[what](told)
    start = time.process_time()
    with pytest.raises(NestlingError, match="account of a network is damaged"):
        rebuilt(told, shapes(net))
    assert time.process_time() - start < 10


def test_values_that_are_nested_too_deeply_are_refused() -> None:
    told, deep = account(plain(nn.Tanh())), "[" * 50_000 + "]" * 50_000
    with pytest.raises(NestlingError, match="account of a network"):
        try:
            rebuilt({**told, "frozen": from_text(deep)})
        except ValueError as error:
            raise NestlingError(f"this account of a network: {error}") from error
    value: Any = []
    for _ in range(5000):
        value = [value]
    told["layers"]["1"]["with"]["slope"] = value
    with pytest.raises(NestlingError, match="account of a network is damaged"):
        rebuilt(told)


DATA = torch.randn(16, *SHAPE), torch.randint(0, 10, (16,))


def run_of(net: NestedNet, out: Path, build: Callable[[], NestedNet] | None = None) -> Path:
    return nestling.fit(net, DATA, DATA, out=out, epochs=1, batch=8, quiet=True, repeats=0, build=build).path


@pytest.mark.parametrize(
    "other",
    [lambda: plain(nn.Tanh()), lambda: plain(nn.LeakyReLU(0.1)), lambda: plain(padding=1)],
    ids=["another layer", "a layer with another number", "another padding"],
)
def test_a_function_that_was_changed_since_training_is_refused(tmp_path: Path, other: Callable[[], NestedNet]) -> None:
    """Its weights have the same names and shapes; it answered, and otherwise."""
    path = run_of(plain(), tmp_path / "run", plain)
    before = nestling.load(path)(DATA[0])
    assert {k: v.shape for k, v in other().state_dict().items()} == {
        k: v.shape for k, v in plain().state_dict().items()
    }
    with pytest.raises(
        NestlingError, match=r"builds another network than the one that was trained.*without that function"
    ):
        nestling.load(path, build=other)
    assert nestling.load(path, build=lambda: plain().double())(DATA[0].double())[0].dtype == torch.float64
    for again in (nestling.load(path, build=plain), nestling.load(path)):
        assert all(torch.equal(a, b) for a, b in zip(again(DATA[0]), before, strict=True))
    (path / NETWORK).write_text('{"format": 99}')  # of another version: then the function is what there is
    assert nestling.load(path, build=plain).plan == plain().plan


def test_a_folder_with_the_weights_of_another_network_is_refused(tmp_path: Path) -> None:
    path = run_of(plain(nn.Tanh()), tmp_path / "run")
    told = from_text((path / NETWORK).read_text())
    LARGE["tensors"](told)
    (path / NETWORK).write_text(to_text(told))
    with pytest.raises(NestlingError, match=r"network\.json.*the weights beside it are of another network"):
        nestling.load(path)
    safetensors.torch.save_file({"x": torch.zeros(1)}, path / WEIGHTS)
    (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:20])
    with pytest.raises(NestlingError, match="truncated, damaged or no safetensors file"):
        nestling.load(path)
