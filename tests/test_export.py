"""Exported stages: the same answers as the network in every form, a folder that is whole or not there, its price in int8."""

import copy
import json
import operator
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nestling.commands.export import command, show
from nestling.data import load
from nestling.errors import NestlingError
from nestling.export.fold import fold, merge, split
from nestling.export.freeze import Frozen, freeze, freeze_whole, shapes
from nestling.export.graph import must_trace, write_stage
from nestling.export.manifest import FORMAT, read_manifest
from nestling.export.torchstage import TorchStage
from nestling.export.write import whole_folder
from nestling.files import MANIFEST
from nestling.nets import NETS, NestedNet, build
from nestling.nets.draft import Draft
from nestling.nets.nest import nest
from nestling.nets.ops import BatchNorm, Cat, Conv, GroupNorm, Module, PReLU, Zip
from nestling.nets.ops.calls import Call, DropPath, Repeat, Reshape
from nestling.nets.ops.forms import FORMS, as_onnx
from nestling.nets.ops.frozen import Op
from nestling.nets.plan import Node
from nestling.recipes.recipe import DataRecipe, NetworkRecipe
from nestling.runs.folder import shipped
from nestling.runs.open import resolve
from nestling.runtime import verified
from nestling.runtime.engines.onnx import OnnxEngine, StageGraph
from nestling.runtime.portable import Portable
from nestling.runtime.runtime import bare_spec
from nestling.runtime.verified import export_net

SMALLER: dict[str, dict[str, Any]] = {
    "width-resnet50": {"widths": (16, 32, 64, 128), "blocks": (1, 1, 1, 1)},
    "depth-sparse66": {"widths": (8, 8, 16, 16), "blocks": (4, 4, 4, 4)},
    "width-resnet18": {"widths": (8, 16, 32), "blocks": (1, 1, 1)},
    "width-resnet42": {"blocks": (2, 2, 2)},
    "even-resnet42": {"blocks": (2, 2, 2)},
    "depth-sparse98": {"widths": (4, 8, 8), "blocks": (8, 8, 8)},
    "alternate-sparse98": {"widths": (4, 8, 16), "blocks": (4, 8, 4)},
    "together-sparse98": {"widths": (4, 8, 16), "blocks": (4, 8, 4)},
    "cascade-sparse98": {"widths": (4, 4, 8)},
    "msdnet": {"widths": (4, 8, 16)},
}


def stirred(net: NestedNet) -> tuple[NestedNet, Tensor]:
    """The network with norms that are not at their defaults, and images for it."""
    chance = torch.Generator().manual_seed(1)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight.data, module.running_var):
                tensor.uniform_(0.5, 1.5, generator=chance)  # type: ignore[union-attr]
            for tensor in (module.bias.data, module.running_mean):
                tensor.normal_(0, 0.3, generator=chance)  # type: ignore[union-attr]
    shape = (3, net.plan.input.channels, *net.plan.input.size)
    return net.eval(), torch.randn(shape, generator=chance)


def network(name: str) -> tuple[NestedNet, Tensor]:
    shape = (3, 32, 32) if name in ("width-resnet50", "depth-sparse66") else None
    return stirred(build(NetworkRecipe(name=name, **SMALLER.get(name, {})), classes=10, shape=shape))


def by_torch(stages: tuple[Frozen, ...], x: Tensor) -> list[Tensor]:
    values, found = {"input": x}, []
    with torch.no_grad():
        for stage in stages:
            logits, *given = TorchStage(stage)(*(values[name] for name in stage.takes))
            values |= dict(zip(stage.gives, given, strict=True))
            found.append(logits)
    return found


def by_onnx(net: NestedNet, stages: tuple[Frozen, ...], x: Tensor, batch: int = 3) -> list[Tensor]:
    known = shapes(net, stages)
    graphs = [StageGraph(write_stage(stage, known), stage.takes, stage.gives) for stage in stages]
    engine = OnnxEngine(graphs, known, known[stages[0].head])
    return [torch.from_numpy(logits) for logits in verified.run_all(engine, x.numpy(), batch)]


def agree(found: list[Tensor], net: NestedNet, x: Tensor) -> None:
    with torch.no_grad():
        expected = net(x)
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).abs().max() <= 2e-5 * max(1, float(theirs.abs().max()))


# --- the same answers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(NETS))
def test_every_network_of_the_registry_frozen_folded_and_as_onnx(name: str) -> None:
    net, x = network(name)
    frozen = freeze(net)
    folded = merge(fold(frozen))
    parted = split(folded, block=4)
    for stages in (folded, parted):
        agree(by_torch(stages, x), net, x)
    agree(by_onnx(net, parted, x), net, x)
    agree(by_onnx(net, parted, x, batch=1), net, x)
    agree(list(TorchStage(fold((freeze_whole(net),))[0])(x)), net, x)
    first = [op.kind for op in folded[0].ops]
    assert first.count("affine") < [op.kind for op in frozen[0].ops].count("affine")  # norms went into convolutions


@settings(max_examples=12)
@given(
    growth=st.lists(st.sampled_from(["w", "d", "wd"]), min_size=1, max_size=3).map(",".join),
    widths=st.sampled_from([(8, 16), (16, 16)]),
)
def test_any_growth_order(growth: str, widths: tuple[int, int]) -> None:
    net, x = stirred(build(NetworkRecipe(name="alternate-digits", growth=growth, widths=widths, blocks=(8, 8))))
    stages = split(merge(fold(freeze(net))), block=4)
    agree(by_torch(stages, x), net, x)
    agree(by_onnx(net, stages, x), net, x)


def test_split_only_takes_apart_what_nobody_else_needs() -> None:
    net, _ = network("width-resnet42")
    stages = merge(fold(freeze(net)))
    parted = split(stages)
    kinds = [[op.kind for op in stage.ops] for stage in parted]
    assert kinds[2].count("cat") == 1  # of the head; the joins before convolutions are gone
    assert kinds[1].count("cat") == [op.kind for op in stages[1].ops].count("cat")  # stage 3 takes these
    assert all(len(stage.takes) <= 1 + len(parted[index - 1].gives) for index, stage in enumerate(parted) if index)


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(-1, 1) * 0.5


def other_layers(activation: nn.Module) -> NestedNet:
    """A plan with group norm, PReLU, a grouped convolution and somebody's own modules."""
    draft = Draft("other", (3, 8, 8))
    births = (1,) * 4 + (2,) * 4
    x = draft.conv("stem", "input", births)
    x = draft.put(Node("gn", GroupNorm(4), (x,), births, (8, 8)))
    x = draft.put(Node("prelu", PReLU(), (x,), births, (8, 8)))
    x = draft.put(Node("depthwise", Conv((3, 3), (1, 1), (1, 1), groups=8), (x,), births, (8, 8)))
    x = draft.put(Node("own", Module(), (x,), births, (8, 8)))
    y = draft.conv("more", x, births, kernel=1)
    x = draft.enter("most", Zip("max"), [x, y])
    x = draft.enter("join", Cat(), [x, y])
    x = draft.enter("plain", BatchNorm(affine=False), [x])
    heads = [draft.head(stage, x, 5) for stage in (1, 2)]
    net = NestedNet(draft.finish(heads, ("s1", "s2")), {"own": activation}).reset(torch.Generator().manual_seed(0))
    with torch.no_grad():
        net.layer("gn").weight.uniform_(0.5, 2)
        net.layer("prelu").weight.uniform_(0, 1)
        net.layer("plain").running_mean.normal_()
    return net.eval()


@pytest.mark.parametrize("activation", [nn.SiLU(), nn.Dropout(0.5), Odd()], ids=["SiLU", "Dropout", "traced"])
def test_other_norms_activations_and_groups(activation: nn.Module) -> None:
    net = other_layers(activation)
    x = torch.randn(3, 3, 8, 8)
    stages = merge(fold(freeze(net)))
    agree(by_torch(stages, x), net, x)
    agree(by_onnx(net, stages, x), net, x)


@pytest.mark.parametrize("kind", sorted(FORMS, key=str), ids=str)
def test_modules_as_onnx_operators(kind: type[nn.Module]) -> None:
    options: dict[Any, tuple[Any, ...]] = {
        DropPath: (0.5,), nn.MaxPool1d: (3, 2, 1), nn.AvgPool1d: (2,), nn.AdaptiveAvgPool1d: (1,), nn.AdaptiveMaxPool1d: (1,),
        nn.MaxPool2d: (3, 2, 1), nn.AvgPool2d: (2,), nn.AdaptiveAvgPool2d: (1,), nn.AdaptiveMaxPool2d: (1,),
        nn.Softmax: (1,), nn.LogSoftmax: (1,), nn.Softplus: (2.0,), nn.CELU: (0.7,), nn.Hardtanh: (-0.5, 2.0),
        nn.Upsample: (None, 2), nn.UpsamplingNearest2d: (None, 3), nn.ZeroPad2d: ((1, 2, 0, 3),), nn.ConstantPad2d: (1, 0.5),
        nn.ReflectionPad2d: ((1, 2, 0, 3),), nn.ReplicationPad2d: (2,), nn.Softshrink: (0.7,),
        nn.Threshold: (0.1, 0.5), nn.UpsamplingBilinear2d: (None, 2), Reshape: ((16, 2, 2),), Repeat: (3,),
    }  # fmt: skip
    module = kind(*options.get(kind, ())).eval()
    x = torch.randn(2, 4, *[8] * (1 if "1d" in kind.__name__ else 2)) * 3
    expected = module(x)
    frozen = Frozen(1, (Op(Module(), "y", ("input",), tuple(expected.shape[1:]), module=module),), ("input",), (), "y")
    assert not must_trace(frozen)
    import onnxruntime

    model = write_stage(frozen, {"input": tuple(x.shape[1:]), "y": tuple(expected.shape[1:])})
    [found] = onnxruntime.InferenceSession(model).run(None, {"input": x.numpy()})
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("module", "opset", "ir"),
    [
        (nn.ReLU(), 13, 7), (nn.LeakyReLU(), 13, 7), (nn.AvgPool2d(2), 13, 7), (nn.Hardswish(), 14, 7), (nn.Mish(), 18, 8),
        (nn.AvgPool2d(3, 2, ceil_mode=True), 19, 9), (nn.GELU(), 20, 9), (nn.ReflectionPad2d(1), 18, 8),
        (nn.CircularPad2d(1), 19, 9), (nn.Upsample(None, 2), 13, 7),
    ],
    ids=str,
)  # fmt: skip
def test_graphs_ask_for_no_newer_onnx_than_their_operators(module: nn.Module, opset: int, ir: int) -> None:
    import onnx
    import onnxruntime

    made = module
    if isinstance(module, nn.CircularPad2d):
        made = Call(nn.functional.pad, 0, (None, module.padding, "circular"), {})
    x = torch.randn(2, 4, 8, 8)
    expected = module(x)
    frozen = Frozen(1, (Op(Module(), "y", ("input",), tuple(expected.shape[1:]), module=made),), ("input",), (), "y")
    data = write_stage(frozen, {"input": tuple(x.shape[1:]), "y": tuple(expected.shape[1:])})
    model = onnx.load_from_string(data)
    assert [(each.domain, each.version) for each in model.opset_import] == [("", opset)] and model.ir_version == ir
    [found] = onnxruntime.InferenceSession(data).run(None, {"input": x.numpy()})
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    "module",
    [
        nn.AvgPool2d(1, 2), nn.MaxPool2d(1, (2, 3)), nn.MaxPool2d(1, 2, ceil_mode=True), Call(Tensor.contiguous, 0, (None,), {}),
        *(Call(operator.getitem, 0, (None, which), {}) for which in (
            (slice(None), slice(None), slice(1, None), slice(None, -1)), (slice(None), slice(None), 0), (slice(None), -1, 2),
            (slice(None), slice(None), slice(-3, None, 2)), (slice(None),), (slice(None), slice(None), slice(2, 5), 1),
        )),
    ],
    ids=str,
)  # fmt: skip
def test_what_leaves_pixels_out_as_onnx_operators_behind_padding(module: nn.Module) -> None:
    """ONNX Runtime joins padding with a pool behind it, and refuses a pool of one pixel that is padded."""
    import onnxruntime

    x, around = torch.randn(2, 4, 7, 8), nn.ZeroPad2d((1, 0, 1, 0))
    expected = module(around(x))
    ops = [
        Op(Module(), "padded", ("input",), (4, 8, 9), module=around),
        Op(Module(), "y", ("padded",), tuple(expected.shape[1:]), module=module),
    ]
    frozen = Frozen(1, tuple(ops), ("input",), (), "y")
    assert not must_trace(frozen)
    model = write_stage(frozen, {"input": (4, 7, 8), "y": tuple(expected.shape[1:])})
    [found] = onnxruntime.InferenceSession(model).run(None, {"input": x.numpy()})
    np.testing.assert_array_equal(found, expected.numpy())


@pytest.mark.parametrize(
    ("call", "rank"),
    [
        (Call(torch.mean, 0, (None, (2,)), {}), 3), (Call(torch.mean, 0, (None, -1), {"keepdim": True}), 4),
        (Call(F.normalize, 0, (None,), {"p": 2.0, "eps": 1e-12, "dim": 2}), 4), (Call(F.normalize, 0, (None,), {"dim": -1}), 3),
        (Call(torch.amax, 0, (None, (3,)), {"keepdim": True}), 4), (Call(torch.amin, 0, (None, (2,)), {}), 3),
        (Call(torch.sum, 0, (None,), {"dim": -1}), 4), (Call(torch.mean, 0, (None, (2, 3)), {}), 4),
        (Call(torch.roll, 0, (None, (-3, 2), (2, 3)), {}), 4), (Call(torch.roll, 0, (None, (0,), (2,)), {}), 3),
    ],
    ids=str,
)  # fmt: skip
def test_functions_of_tokens_and_windows_as_onnx_operators(call: Call, rank: int) -> None:
    import onnxruntime

    x = torch.randn(2, 4, *(7, 8)[: rank - 2])
    expected = call(x)
    frozen = Frozen(1, (Op(Module(), "y", ("input",), tuple(expected.shape[1:]), module=call),), ("input",), (), "y")
    assert not must_trace(frozen)
    model = write_stage(frozen, {"input": tuple(x.shape[1:]), "y": tuple(expected.shape[1:])})
    [found] = onnxruntime.InferenceSession(model).run(None, {"input": x.numpy()})
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-6)


def test_a_subclass_is_not_taken_for_its_parent() -> None:
    class Louder(nn.ReLU):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    assert as_onnx(nn.ReLU()) and as_onnx(Louder()) is None
    assert as_onnx(nn.AdaptiveAvgPool2d(2)) is None


def test_functions_of_a_nested_module_of_your_own() -> None:
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
            self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.one(x))
            return self.head(nn.functional.relu(self.norm(self.two(x)) + x).mean((2, 3)))

    net = nest(Mine(), "w,w", (3, 8, 8)).eval()
    x = torch.randn(3, 3, 8, 8)
    stages = merge(fold(freeze(net)))
    agree(by_torch(stages, x), net, x)
    agree(by_onnx(net, stages, x), net, x)


class Functional(nn.Module):
    """An ordinary network written with functions; `pool` is how it comes from pixels to a vector."""

    def __init__(self, pool: Callable[[Tensor], Tensor], activation: Callable[[Tensor], Tensor] = F.relu) -> None:
        super().__init__()
        self.pool, self.activation = pool, activation
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.activation(self.conv(x))))


@pytest.mark.parametrize(
    "pool",
    [
        lambda x: x.mean((2, 3)),
        lambda x: torch.mean(x, dim=[-2, -1]),
        lambda x: x.mean((3, 2), keepdim=True).flatten(1),
        lambda x: torch.flatten(F.adaptive_avg_pool2d(x, 1), 1),
        lambda x: F.adaptive_max_pool2d(x, (1, 1)).flatten(1),
        lambda x: F.avg_pool2d(F.max_pool2d(x, 2), 4).flatten(1),
        lambda x: F.avg_pool2d(F.max_pool2d(x, 3, 2, 1, ceil_mode=True), 4).flatten(1),
        lambda x: F.max_pool2d(x, 3, 2, 1, 1, True).mean((2, 3)),
    ],
)
def test_functional_networks_are_written_directly(pool: Callable[[Tensor], Tensor]) -> None:
    net = nest(Functional(pool), "w,w", (3, 8, 8)).eval()
    x = torch.randn(3, 3, 8, 8)
    stages = merge(fold(freeze(net)))
    assert not any(must_trace(stage) for stage in stages)
    agree(by_onnx(net, stages, x), net, x)


@pytest.mark.parametrize(
    "activation",
    [
        F.relu,
        torch.tanh,
        F.gelu,
        F.mish,
        F.hardswish,
        F.selu,
        partial(F.leaky_relu, negative_slope=0.2),
        F.softsign,
        F.relu6,
        F.silu,
        F.softplus,
        F.hardsigmoid,
        F.elu,
        F.celu,
        F.logsigmoid,
        F.hardtanh,
        lambda x: x.sigmoid(),
        lambda x: torch.clamp(x, -1, 2),
        lambda x: x.clamp(min=0),
        lambda x: x * x.sigmoid(),
        lambda x: 1 - x / 2,
        lambda x: (x + 3).clamp(0, 6) * 0.5,
        lambda x: x.abs() + torch.exp(-x),
        lambda x: F.interpolate(x, scale_factor=2),
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True),
        lambda x: F.pad(x, (1, 0, 2, 1)),
        lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    ],
)
def test_functional_activations_are_written_directly(activation: Callable[[Tensor], Tensor]) -> None:
    net = nest(Functional(lambda x: x.mean((2, 3)), activation), "w", (3, 8, 8)).eval()
    x = torch.randn(3, 3, 8, 8)
    stages = merge(fold(freeze(net)))
    assert not any(must_trace(stage) for stage in stages)
    agree(by_onnx(net, stages, x), net, x)


def test_tracing_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    net = nest(Functional(lambda x: x.mean((2, 3)), lambda x: F.lp_pool2d(x, 2, 2)), "", (3, 8, 8)).eval()
    stages = merge(fold(freeze(net)))
    assert must_trace(stages[0]), "pooling by norms is not written by us"
    by_onnx(net, stages, torch.randn(3, 3, 8, 8))
    assert "torchvision" not in "".join(capfd.readouterr())


# --- folders -----------------------------------------------------------------------------------------------------


def test_an_export_is_whole_verified_and_replaces_an_earlier_one(tmp_path: Path) -> None:
    net, x = network("width-digits")
    folder = tmp_path / "stages"
    for _ in range(2):
        manifest = export_net(net, bare_spec(net), folder, x)
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json",
        "stage1.onnx",
        "stage2.onnx",
        "stage3.onnx",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["stages"]
    found = read_manifest(folder)
    assert found.stages == manifest.stages and found.shapes == manifest.shapes and found.spec == manifest.spec
    assert found.about is not None and max(found.about["verified"]["largest_difference"]) < 1e-4
    assert found.about["verified"]["batches"] == [1, 32]


def test_equal_weights_are_exported_as_equal_bytes(tmp_path: Path) -> None:
    for name in ("first", "second"):
        net, images = stirred(build(NetworkRecipe(name="alternate-digits")))
        torch.manual_seed(0)
        for parameter in net.parameters():
            parameter.data.normal_()
        export_net(net, bare_spec(net), tmp_path / name, images)
    graphs = [[path.read_bytes() for path in sorted((tmp_path / name).glob("*.onnx"))] for name in ("first", "second")]
    assert graphs[0] == graphs[1] and len(graphs[0]) == 5


def test_nothing_is_written_when_verification_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = network("width-digits")
    export_net(net, bare_spec(net), tmp_path / "stages", x)
    before = {path.name: path.read_bytes() for path in (tmp_path / "stages").iterdir()}
    monkeypatch.setattr(verified, "TOLERANCE", 0.0)
    monkeypatch.setattr(verified, "MOST", 0.0)
    with pytest.raises(NestlingError, match="differs from the network"):
        export_net(copy.deepcopy(net), bare_spec(net), tmp_path / "stages", x)
    assert {path.name: path.read_bytes() for path in (tmp_path / "stages").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["stages"]


def engine_of(net: NestedNet) -> OnnxEngine:
    stages = merge(fold(freeze(net)))
    known = shapes(net, stages)
    graphs = [StageGraph(write_stage(stage, known), stage.takes, stage.gives) for stage in stages]
    return OnnxEngine(graphs, known, known[stages[0].head])


def bias_of(net: NestedNet, head: int) -> nn.Parameter:
    return next(p for name, p in net.named_parameters() if name.startswith(f"head{head}.") and name.endswith("bias"))


def test_verification_allows_what_the_networks_own_arithmetic_is_off() -> None:
    """Logits that are small differences of large numbers: no engine can have float32's digits of them."""
    net, x = network("width-digits")
    with torch.no_grad():
        bias_of(net, 3).add_(1e4)
        engine = engine_of(net)
        bias_of(net, 3).add_(0.5)
    with pytest.raises(NestlingError, match="stage 3 differs"):  # of numbers that are exact, half of one is much
        verified.verify(engine, net, x)
    torch.manual_seed(0)
    last = nn.Linear(64, 4)
    first = nn.Conv2d(1, 64, 3)
    model = nn.Sequential(first, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), last).eval()
    with torch.no_grad():
        first.bias.add_(3e4)  # type: ignore[union-attr]
        last.weight -= last.weight.mean(1, keepdim=True)
        own, exact = model(x[:, :1]), copy.deepcopy(model).double()(x[:, :1].double())
        net = nest(model, "w", (1, 8, 8))
        engine = engine_of(net)
    assert verified.distance(own.numpy(), exact.numpy()) > verified.TOLERANCE
    assert verified.verify(engine, net, x[:, :1])["tolerance"] > verified.TOLERANCE
    with torch.no_grad():
        bias_of(net, 2).add_(0.5)
    with pytest.raises(NestlingError, match="stage 2 differs"):
        verified.verify(engine, net, x[:, :1])


def test_verification_sees_what_is_no_number() -> None:
    net, x = network("width-digits")
    broken = copy.deepcopy(net)
    bias_of(broken, 2).data[0] = float("nan")
    with pytest.raises(NestlingError, match="stage 2 differs from the network by nan"):
        verified.verify(engine_of(broken), net, x)


def test_a_folder_of_other_things_is_not_overwritten(tmp_path: Path) -> None:
    net, x = network("width-digits")
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(NestlingError, match="other things"):
        export_net(net, bare_spec(net), tmp_path, x)
    with pytest.raises(NestlingError, match="is a file"):
        export_net(net, bare_spec(net), tmp_path / "precious.txt", x)
    for name, text in (("site", '{"name": "somebody\'s web page"}'), ("broken", "{")):  # others have manifests, too
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text(text)
        with pytest.raises(NestlingError, match="other things"):
            export_net(net, bare_spec(net), tmp_path / name, x)
    export_net(net, bare_spec(net), tmp_path / "stages", x)
    (tmp_path / "stages" / "notes.md").write_text("mine")
    with pytest.raises(NestlingError, match="other things"):
        export_net(net, bare_spec(net), tmp_path / "stages", x)
    assert (tmp_path / "stages" / "notes.md").read_text() == "mine"
    with pytest.raises(NestlingError, match="a name of its own, such as export"):
        export_net(net, bare_spec(net), ".", x)
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_two_that_export_to_one_place_do_not_mix(tmp_path: Path) -> None:
    """Each fills a folder of its own; the last one stays, whole."""
    folder = tmp_path / "stages"
    with whole_folder(folder) as first:
        (first / "a").write_text("a")
        with whole_folder(folder) as second:
            (second / MANIFEST).write_text(json.dumps({"format": FORMAT, "stages": []}))
        assert [path.name for path in folder.iterdir()] == [MANIFEST] and (first / "a").read_text() == "a"
        left = tmp_path / ".stages.x.tmp"
        left.mkdir()
        os.utime(left, (0, 0))
    assert [path.name for path in folder.iterdir()] == ["a"]
    (folder / "a").unlink()
    with whole_folder(folder):
        assert not left.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["stages"]


def test_exporting_leaves_the_network_as_it_was(tmp_path: Path) -> None:
    net, x = network("depth-digits")
    net.train()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    export_net(net, bare_spec(net), tmp_path / "stages", x)
    assert net.training and all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


# --- the command -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real, short run on the digits."""
    from nestling.commands import train

    path = tmp_path_factory.mktemp("runs") / "digits"
    train.command("digits-width", out=str(path), set=("train.epochs=3",), quiet=True)
    return path


@pytest.mark.parametrize("format", ["onnx", "pt2"])
def test_the_command_exports_a_run(run: Path, format: Any) -> None:
    result = command(str(run), format=format)
    assert show(result).row_count == 3
    assert json.loads(json.dumps(result))["about"]["data"] == "digits"
    errors = [row["error"] for row in json.loads((run / "results.json").read_text())["stages"]]
    assert result["network"]["errors"] == errors and result["network"]["classes"] == list("0123456789")
    assert abs(sum(result["network"]["prior"]) - 1) < 1e-6 and len(result["network"]["mean"]) == 1
    assert max(result["about"]["verified"]["largest_difference"]) <= 1e-4


def test_int8_says_what_it_costs_on_real_data(run: Path) -> None:
    result = command(str(run), int8=True)
    assert show(result).row_count == 3 and result["precision"] == "int8"
    price = result["about"]["int8"]
    for after, slower in ((9.0, True), (0.1, False)):
        times = {"ms_before": [1.0] * 3, "ms_after": [after] * 3}
        caption = show(result | {"about": result["about"] | {"int8": price | times}}).caption
        assert ("use float32 on this machine" in str(caption)) is slower
    assert result["about"]["measured"]["on"] and result["about"]["measured"]["at"].startswith("20")
    assert price["images"] == 360 and result["network"]["errors"] == price["error_after"]
    results = json.loads((run / "results.json").read_text())["stages"]
    assert price["error_before"] == pytest.approx([row["error"] for row in results], abs=1e-6)
    assert max(abs(a - b) for a, b in zip(price["error_after"], price["error_before"], strict=True)) < 0.1
    plain = command(str(run))
    assert result["bytes"] < plain["bytes"]


def test_int8_of_a_network_without_convolutions_is_refused(tmp_path: Path) -> None:
    layers = [nn.Sequential(nn.Linear(i, o), nn.ReLU()) for i, o in ((64, 16), (16, 16))]
    net = nest(nn.Sequential(nn.Flatten(), *layers, nn.Linear(16, 10)), "w", (1, 8, 8)).eval()
    data = load(DataRecipe(), torch.device("cpu"))
    with pytest.raises(NestlingError, match="no convolutions"):
        verified.export_int8(net, bare_spec(net), tmp_path / "stages", data, 0, {})
    assert not list(tmp_path.iterdir())


def test_unfinished_runs_and_wrong_wishes_are_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_bytes((run / "recipe.json").read_bytes())
    with pytest.raises(NestlingError, match="finish the run"):
        command(str(tmp_path))
    with pytest.raises(NestlingError, match="int8 is for onnx"):
        command(str(run), format="pt2", int8=True)
    with pytest.raises(NestlingError, match="found images -5"):
        command(str(run), int8=True, images=-5)
    with pytest.raises(NestlingError, match="unknown format"):
        net, x = network("width-digits")
        export_net(net, bare_spec(net), tmp_path / "x", x, "onyx")


@pytest.mark.parametrize("name", shipped())
def test_a_trained_network_is_exported_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = command(name)
    assert result["folder"] == f"{name}-export-onnx" and result["about"]["run"] == name
    results, sample = resolve(name).results, resolve(name).data(sample=True).test
    with Portable(result["folder"]) as runtime:
        answers = runtime.answer_batch(sample.pictures(torch.arange(100)).numpy())
    right = [answer.label == label for answer, label in zip(answers, sample.labels.tolist(), strict=False)]
    expected = 100 * (1 - results["stages"][-1]["error"])
    assert sum(right) > expected - 10 and result["network"]["errors"] == [row["error"] for row in results["stages"]]
