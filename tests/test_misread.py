"""Nothing is misread in silence: each case here once came out of `nest`, or of a nested network, as something else."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import nestling
from nestling.errors import NestlingError
from nestling.nets.layers import NestedBatchNorm2d
from nestling.nets.nest import nest
from nestling.nets.net import NestedNet
from nestling.nets.plan import Node
from nestling.nets.reading import agree, read
from nestling.nets.registry import build
from nestling.recipes.recipe import NetworkRecipe
from nestling.runtime.portable import Portable

IMAGE = (3, 8, 8)


class Does(nn.Module):
    """A convolution, any function of its output, and a classifier."""

    def __init__(self, function: Callable[["Does", Tensor], Tensor], width: int = 8) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(width, 5)
        self.w = nn.Parameter(torch.randn(8, 8, 3, 3) / 10)
        self.b = nn.Parameter(torch.randn(8))
        self.drop = nn.Dropout(0.5)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.function(self, self.conv(x)).mean((2, 3)))
        return logits


def one_stage(module: nn.Module) -> NestedNet:
    return nest(module, "", shape=IMAGE)


def plain(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *middle, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


# --- nested networks ----------------------------------------------------------------------------------------------


def dilated(m: Does, y: Tensor) -> Tensor:
    return F.conv2d(y, m.w, None, 1, 1, 1) + F.conv2d(y, m.w, None, 1, 2, 2) + F.conv2d(y, m.w, None, 1, 3, 3)


@pytest.mark.parametrize("growth", ["", "w,w"])
def test_one_weight_with_several_dilations_and_strides(growth: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
            self.c = nn.Conv2d(8, 8, 3, stride=2, padding=2, dilation=2)
            self.c.weight, self.c.bias = self.b.weight, self.b.bias
            self.fc = nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.fc(F.relu(self.c(F.relu(self.b(self.a(x))))).mean((2, 3)))
            return logits

    x = torch.randn(4, *IMAGE, dtype=torch.float64)
    for module in (Does(dilated).double(), Tied().double()):
        net = nest(module, growth, shape=IMAGE).eval()
        whole = net(x)
        if not growth:
            assert torch.allclose(whole[0], module(x))
        for answer, staged, stage in zip(whole, net.answers(x), range(1, 4), strict=False):
            assert torch.allclose(answer, staged) and torch.allclose(answer, net.subnet(stage)(x))


@pytest.mark.parametrize("name", ["width-resnet42", "even-resnet42", "width-digits", "even-digits"])
@pytest.mark.parametrize("side", [(30, 30), (33, 33), (7, 9)])
def test_odd_sizes_of_width_resnets(name: str, side: tuple[int, int]) -> None:
    if name.endswith("42") and side == (7, 9):
        pytest.skip("three groups: too small to be interesting")
    net = build(NetworkRecipe(name), shape=(1, *side)).eval()
    x = torch.randn(2, 1, *side)
    with torch.no_grad():
        for whole, staged in zip(net(x), net.answers(x), strict=True):
            assert torch.allclose(whole, staged, atol=1e-4)


def test_odd_sizes_are_exported(tmp_path: Path) -> None:
    net = build(NetworkRecipe("width-digits"), shape=(1, 7, 9)).eval()
    spec = nestling.Spec("odd", (1, 7, 9), tuple("0123456789"), net.sizes, mean=(0.5,), std=(0.5,))
    nestling.export_net(net, spec, str(tmp_path / "odd"), torch.randn(8, 1, 7, 9))
    x = torch.randn(1, 7, 9)
    with Portable(tmp_path / "odd") as runtime, torch.no_grad():
        found = [answer.probabilities for answer in runtime.answers(x.numpy())]
        expected = [logits.softmax(-1)[0] for logits in net(x[None])]
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(torch.from_numpy(mine), theirs, atol=1e-5)


def test_a_subnetwork_has_its_own_dropout() -> None:
    net = nest(plain(nn.ReLU(), nn.Dropout(0.5)), "w,w", shape=IMAGE).train()
    small = net.subnet(1).eval()
    x = torch.randn(4, *IMAGE)
    assert not torch.equal(net(x)[-1], net(x)[-1]), "the nest still drops"
    assert torch.equal(small(x), small(x))


def test_stages_respect_the_mode_of_each_norm() -> None:
    net = nest(plain(nn.BatchNorm2d(8), nn.ReLU()), "w", shape=IMAGE).train()
    net.layer("1").eval()
    x = torch.randn(4, *IMAGE) + 3
    before = net.layer("1").running_mean.clone()
    for whole, staged in zip(net(x), net.answers(x), strict=True):
        assert torch.allclose(whole, staged, atol=1e-5)
    assert torch.equal(before, net.layer("1").running_mean)


def test_a_layer_that_is_replaced_is_seen_by_the_stages() -> None:
    net = nest(plain(nn.BatchNorm2d(8), nn.ReLU()), "w", shape=IMAGE).eval()
    x = torch.randn(2, *IMAGE)
    list(net.answers(x))
    fresh = NestedBatchNorm2d(net.plan.by_name["1"].births).eval()
    nn.init.constant_(fresh.weight, 3.0)
    net._modules["1"] = fresh
    for whole, staged in zip(net(x), net.answers(x), strict=True):
        assert torch.allclose(whole, staged, atol=1e-5)


def test_a_layer_that_knows_no_births_is_refused() -> None:
    net = nest(plain(nn.BatchNorm2d(8), nn.ReLU()), "w", shape=IMAGE).eval()
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    with pytest.raises(NestlingError, match="1 has been replaced by a SyncBatchNorm"):
        synced.stages  # noqa: B018
    net._modules["0"] = nn.Conv2d(3, 8, 3, padding=1)
    with pytest.raises(NestlingError, match="0 has been replaced by a Conv2d, which knows no births"):
        net(torch.randn(2, *IMAGE))


@pytest.mark.parametrize(
    "how",
    [
        lambda layer: prune.l1_unstructured(layer, "weight", 0.9),
        torch.nn.utils.weight_norm,
        torch.nn.utils.spectral_norm,
    ],
)
def test_a_weight_that_a_hook_makes_is_refused(how: Any) -> None:
    """It would be that of the call before, in training, and stay so in stages and subnetworks."""
    net, x = nest(plain(nn.ReLU()), "w", shape=IMAGE), torch.randn(2, *IMAGE)
    how(net.layer("0"))
    for use in (lambda: net(x), lambda: net.stages, lambda: net.subnet(1)):
        with pytest.raises(NestlingError, match="the weight of 0 is made by a hook when the layer is called"):
            use()


def test_pruning_that_is_permanent_is_fine() -> None:
    net, x = nest(plain(nn.ReLU()), "w", shape=IMAGE).eval(), torch.randn(2, *IMAGE)
    prune.remove(prune.l1_unstructured(net.layer("0"), "weight", 0.9), "weight")
    whole = net(x)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(whole, net.answers(x), strict=True))
    assert all(torch.allclose(whole[s - 1], net.subnet(s)(x), atol=1e-6) for s in (1, 2))


def test_reset_forgets_what_norms_have_seen() -> None:
    fresh = build(NetworkRecipe("width-digits"), generator=torch.Generator().manual_seed(1))
    used = build(NetworkRecipe("width-digits"))
    used.train()(torch.randn(16, 1, 8, 8) * 4 + 1)
    nn.init.constant_(used.layer("head.norm").weight, 7.0)
    used.reset(torch.Generator().manual_seed(1))
    assert all(torch.equal(value, fresh.state_dict()[key]) for key, value in used.state_dict().items())


def test_frozen_parameters_modes_and_number_types_are_kept() -> None:
    module = plain(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)).bfloat16().train()
    module[1].float().eval()
    module[0].weight.requires_grad_(False)
    module[6].weight.requires_grad_(False)
    net = nest(module, "w", shape=IMAGE)
    for each in (net, net.subnet(2).net):
        assert each.layer("0").weight.dtype == torch.bfloat16 and each.layer("1").running_var.dtype == torch.float32
        assert each.layer("1").weight.dtype == torch.float32
        assert not each.layer("1").training and each.layer("0").training and each.training
        assert not each.layer("0").weight.requires_grad and each.layer("0").bias.requires_grad
        assert not each.layer("head2.6").weight.requires_grad and each.layer("head2.6").bias.requires_grad


# --- modules ------------------------------------------------------------------------------------------------------


def gated(m: Does, y: Tensor) -> Tensor:
    a = y[:, :4]
    a.mul_(3)
    return y


def flat(m: Does, y: Tensor) -> Tensor:
    y.flatten(1).relu_()
    return y


def late(m: Does, y: Tensor) -> Tensor:
    a = y[:, :4]
    y.relu_()
    return torch.cat([a, a], 1)


def dropped_view(m: Does, y: Tensor) -> Tensor:
    z = m.drop(y)
    z.relu_()
    return z + y


def copied(m: Does, y: Tensor) -> Tensor:
    z = y.clone()
    z.relu_()
    return z + 2 * y


def halves(m: Does, y: Tensor) -> Tensor:
    a, b = y[:, :4], y[:, 4:]
    a = F.relu(a, True)
    return torch.cat([a, b], 1)


RIGHT: dict[str, Callable[[Does, Tensor], Tensor]] = {
    "ceil_mode by place": lambda m, y: F.avg_pool2d(y, 3, 2, 0, True),
    "count_include_pad by place": lambda m, y: F.avg_pool2d(y, 3, 1, 1, False, True),
    "no count_include_pad": lambda m, y: F.avg_pool2d(y, 3, 1, 1, True, False),
    "max pool ceil_mode": lambda m, y: F.max_pool2d(y, 3, 2, 0, 1, True),
    "inplace by place": lambda m, y: F.relu(y, True) + y,
    "leaky inplace by place": lambda m, y: F.leaky_relu(y, 0.3, True) + y,
    "a clone is another tensor": copied,
    "halves in place": halves,
    "several dilations": dilated,
    "dropout never": lambda m, y: F.dropout(y, 0.5, False),
    "dropout by the mode": lambda m, y: F.dropout(y, 0.5, m.training),
    "dropout by keyword": lambda m, y: F.dropout(y, p=0.5, training=m.training, inplace=True),
    "dropout of nothing": lambda m, y: F.dropout(y, 0.0),
    "shapes decide": lambda m, y: F.avg_pool2d(y, 2) if y.shape[-1] > 4 and len(y.shape) == 4 else y,
    "another word for a tensor": lambda m, y: torch.autograd.Variable(y) * 2,
    "sizes as numbers": lambda m, y: y.sum((2, 3), keepdim=True) / (y.size(2) * y.size(3)),
}


@pytest.mark.parametrize("what", RIGHT)
@pytest.mark.parametrize("training", [True, False])
def test_one_stage_is_the_module_in_both_modes(what: str, training: bool) -> None:
    torch.manual_seed(0)
    module = Does(RIGHT[what]).double().train(training)
    x = torch.randn(5, *IMAGE, dtype=torch.float64)
    net = nest(module, "", shape=IMAGE, proof=False)
    torch.manual_seed(1)
    theirs = module(x)
    torch.manual_seed(1)
    assert torch.allclose(net(x)[0], theirs)


class Counts(nn.Module):
    """Keeps something of what it saw in a buffer, or a mere count."""

    def __init__(self, image: bool) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.image = image

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.mean() if self.image else 1.0)  # type: ignore[operator]
        return x


ONES = torch.ones(8, 1, 1)
WRONG: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a slice is overwritten": (lambda: Does(gated), r"operation \.mul_: it overwrites in place what is read later"),
    "a flattened form is overwritten": (lambda: Does(flat), r"operation \.relu_: it overwrites in place"),
    "what a slice shows is overwritten": (lambda: Does(late), r"operation \.relu_: it overwrites in place"),
    "what dropout passes is overwritten": (lambda: Does(dropped_view), r"operation \.relu_: it overwrites in place"),
    "dropout always": (lambda: Does(lambda m, y: F.dropout(y)), r"dropout.*it drops in evaluation, too.*training=self"),
    "dropout2d by default": (lambda: Does(lambda m, y: F.dropout2d(y, 0.5)), r"dropout2d.*it drops in evaluation, too"),
    "batch size as a number": (lambda: Does(lambda m, y: y / y.size(0)), r"truediv: it computes with the batch size.*2.*3"),
    "batch size in a shape": (lambda: Does(lambda m, y: y.view(2, -1, 8, 8)), r"it does not run|of 2 images it makes"),
    "a number of the mode": (lambda: Does(lambda m, y: y * (2.0 if m.training else 1.0)), r"2\.0 in training and with 1\.0"),
    "one bias left out": (
        lambda: Does(lambda m, y: F.conv2d(F.conv2d(y, m.w, m.b, 1, 1), m.w, None, 1, 1)), "some of its parameters serve"
    ),
    "a count": (lambda: plain(Counts(False)), r"it changes 1\.seen while running"),
    "a mean kept": (lambda: plain(Counts(True)), r"it changes 1\.seen while running"),
    "a tensor that is no buffer": (lambda: Does(lambda m, y: y - ONES), r"sub.*does not go with it.*register_buffer"),
    "lazy": (lambda: plain(nn.LazyConv2d(8, 3)), "a lazy layer whose shape is not known yet"),
    "two images": (lambda: Two(), "it takes 2 inputs; a nested network takes one image"),
    "int8": (lambda: quantised(plain(nn.ReLU())), "torch.int8; nest the network in floating point"),
}  # fmt: skip


class Two(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


def quantised(module: nn.Sequential) -> nn.Module:
    layer: Any = module[0]
    layer.weight = nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    return module


@pytest.mark.parametrize("what", WRONG)
def test_what_would_be_misread_is_refused(what: str) -> None:
    module = WRONG[what][0]()
    with pytest.raises(NestlingError, match=WRONG[what][1]):
        nest(module, "w", shape=IMAGE, proof=False)


def test_stochastic_depth_draws_what_the_module_draws() -> None:
    class DropPath(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop_prob = 0.5

        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                return x
            return x * x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(0.5).div_(0.5)

    module = plain(nn.ReLU(), DropPath()).double().train()
    net, x = nest(module, "", shape=IMAGE), torch.randn(16, *IMAGE, dtype=torch.float64)
    torch.manual_seed(3)
    theirs = module(x)
    torch.manual_seed(3)
    assert torch.allclose(net(x)[0], theirs) and not torch.allclose(net.eval()(x)[0], theirs)


@pytest.mark.parametrize("kind", ["forward", "pre", "backward", "parameter"])
def test_hooks_are_refused(kind: str) -> None:
    module = plain(nn.ReLU())
    if kind == "forward":
        module[0].register_forward_hook(lambda m, a, out: 2 * out)
    elif kind == "pre":
        module[1].register_forward_pre_hook(lambda m, a: None)
    elif kind == "backward":
        module[1].register_full_backward_hook(lambda m, a, b: None)
    else:
        next(module.parameters()).register_hook(lambda g: 2 * g)
    with pytest.raises(NestlingError, match="has a hook"):
        nest(module, "w", shape=IMAGE)


def weighted(how: str) -> nn.Sequential:
    module = plain(nn.ReLU(), nn.Conv2d(8, 8, 1)).double()
    if how == "prune":
        prune.l1_unstructured(module[0], "weight", 0.5)
        prune.ln_structured(module[2], "weight", 0.25, 2, 0)
    else:
        place: Any = nn.utils.parametrizations if how.startswith("new") else nn.utils
        getattr(place, how.removeprefix("new "))(module[0])
        getattr(place, how.removeprefix("new "))(module[2])
    module(torch.randn(2, *IMAGE, dtype=torch.float64))
    return module


@pytest.mark.parametrize("how", ["weight_norm", "spectral_norm", "new weight_norm", "new spectral_norm", "prune"])
def test_weights_made_of_others_are_taken_as_they_are(how: str, caplog: pytest.LogCaptureFixture) -> None:
    module, x = weighted(how), torch.randn(2, *IMAGE, dtype=torch.float64)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    net = nest(module, "", shape=IMAGE)
    assert "the weights of ['0', '2'] are made of others" in caplog.text
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert net.layer("0").weight.requires_grad and len(net.state_dict()) == 6
    with torch.no_grad():
        assert torch.allclose(net.eval()(x)[0], module.eval()(x))
        assert torch.allclose(nestling.exits(module, ("0",), IMAGE).eval()(x)[-1], module(x))


def standardised(m: Does, y: Tensor) -> Tensor:
    """As in timm's StdConv2d."""
    rows = F.batch_norm(m.w.reshape(1, 8, -1), None, None, training=True, momentum=0.0, eps=1e-6)
    return F.conv2d(y, rows.reshape_as(m.w), m.b)


def masked(m: Does, y: Tensor) -> Tensor:
    return F.conv2d(y, m.w * (m.w.detach().abs() > 0.05), m.b)


def blurred(m: Does, y: Tensor) -> Tensor:
    return F.conv2d(y, m.get_buffer("blur").expand(8, 1, 3, 3), groups=8)


@pytest.mark.parametrize("function", [standardised, masked, blurred])
def test_weights_made_while_running_are_taken_as_they_are(
    function: Callable[[Does, Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    module = Does(function)
    module.register_buffer("blur", torch.rand(1, 1, 3, 3))
    for net in (one_stage(module), nestling.keep(module, (1 / 2,), IMAGE)):
        with torch.no_grad():
            x = torch.randn(2, *IMAGE)
            assert torch.allclose(net.eval()(x)[-1], module.eval()(x), atol=1e-6)
    assert ("are made of others" in caplog.text) == (function is not blurred)
    assert nest(module, "w", shape=IMAGE).plan.stages == 2


@pytest.mark.parametrize("first", [True, False])
def test_a_weight_and_what_another_is_made_of_are_not_taken_apart(first: bool) -> None:
    def both(m: Does, y: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(y, m.w), m.w * 2) if first else F.conv2d(F.conv2d(y, m.w * 2), m.w)

    with pytest.raises(NestlingError, match=r"serves? other places too"):
        one_stage(Does(both))


def test_a_weight_computed_from_the_image_is_refused() -> None:
    def dynamic(m: Does, y: Tensor) -> Tensor:
        return F.conv2d(y, F.adaptive_avg_pool2d(y, 1)).sum(1, keepdim=True).expand(-1, 8, -1, -1)

    with pytest.raises(NestlingError, match="its weight is computed from the image"):
        one_stage(Does(dynamic))


class Rounded(torch.autograd.Function):
    """Its gradient is not that of what it does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def test_a_gradient_of_ones_own_is_not_lost_in_silence() -> None:
    with pytest.raises(NestlingError, match=r"gradients of .* differ"):
        nest(Does(lambda m, y: Rounded.apply(y)), "", shape=IMAGE)


def test_code_that_cannot_be_watched_is_refused_as_such() -> None:
    for way in (one_stage, lambda module: nestling.exits(module, ("conv",), IMAGE)):
        with pytest.raises(NestlingError, match="code that cannot be watched"):
            way(Does(lambda m, y: Tensor._make_subclass(Tensor, y)))  # a kernel in C++ that wants a real tensor
    assert "__new__" not in vars(torch.autograd.Variable), "torch is left as it was"


class Named(nn.Module):
    """A backbone whose layers have the names they are given."""

    def __init__(self, first: str, second: str, last: str) -> None:
        super().__init__()
        self.names = (first, second, last)
        layers = (nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"), nn.Conv2d(8, 8, 1), nn.Linear(8, 5))
        for name, layer in zip(self.names, layers, strict=True):
            *outer, inner = name.split(".")
            holder: nn.Module = self
            for part in outer:
                if part not in holder._modules:
                    holder.add_module(part, nn.Module())
                holder = holder.get_submodule(part)
            holder.add_module(inner, layer)

    def forward(self, x: Tensor) -> Tensor:
        one, two, last = (self.get_submodule(name) for name in self.names)
        logits: Tensor = last(F.relu(two(one(x))).mean((2, 3)))
        return logits


@pytest.mark.parametrize(
    "names",
    [
        ("head1.fc", "head2.fc", "fc"), ("stages", "stages_", "plan"), ("k", "k_pad", "fc"), ("k_pad", "k", "take"),
        ("input", "head1", "head2"), ("layers.train_", "_stages", "fc"), ("a.b", "a_b", "fc"),
    ],
)  # fmt: skip
def test_any_names_are_fine(names: tuple[str, str, str]) -> None:
    module = Named(*names).double()
    x = torch.randn(2, *IMAGE, dtype=torch.float64)
    assert torch.allclose(nest(module, "", shape=IMAGE)(x)[0], module(x))
    net = nest(module, "w", shape=IMAGE)
    assert len({node.name for node in net.plan.nodes}) == len(net.plan.nodes)
    for whole, staged in zip(net(x), net.answers(x), strict=True):
        assert torch.allclose(whole, staged)


def test_a_module_of_one_layer() -> None:
    net = nest(nn.Conv2d(3, 5, 3), "", shape=IMAGE)
    assert net(torch.randn(2, *IMAGE))[0].shape == (2, 5, 6, 6)


@pytest.mark.parametrize("growth", [None, ["w"], 3])
def test_growth_that_is_no_text_is_refused(growth: object) -> None:
    with pytest.raises(NestlingError, match="found the growth order"):
        nest(plain(), growth, shape=IMAGE)  # type: ignore[arg-type]


@pytest.mark.parametrize("stripes", ["112", (1.0, 1), ("1", "1")])
def test_stripes_that_are_no_numbers_are_refused(stripes: object) -> None:
    with pytest.raises(NestlingError, match="found the stripes"):
        nest(plain(), "w", shape=IMAGE, stripes=stripes)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [32, (3, 8.0, 8), (3, -1, 8), (3, 8, 8, 8), "388", (True, 8, 8)])
def test_shapes_that_are_none_are_refused(shape: object) -> None:
    with pytest.raises(NestlingError, match="found images of shape"):
        nest(plain(), "w", shape=shape)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [2, 3])
def test_a_batch_of_sequences_is_not_taken_for_one_image(batch: int) -> None:
    """torch takes (2, 3, 8) for one image of 2 channels."""
    module = nn.Sequential(nn.Conv2d(batch, 8, 1), nn.Flatten(), nn.Linear(24, 2))
    with pytest.raises(NestlingError, match="cannot nest"):
        nest(module, "w", shape=(3, 8), proof=False)


def test_more_stages_than_channels_are_refused_at_once() -> None:
    with pytest.raises(NestlingError, match="in 5001 stages: its widest layer has 8 channels"):
        nest(plain(), ",".join("w" * 5000), shape=IMAGE, stripes=(1,) * 5001, uneven=True)


# --- the proof ----------------------------------------------------------------------------------------------------


def spoil(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    """Let the reader misread the layer called 1."""
    sound = read.Reader.add

    def add(self: read.Reader, node: Any, made: Node) -> None:
        sound(self, node, replace(made, op=replace(made.op, **changes)) if made.name == "1" else made)  # type: ignore[arg-type]

    monkeypatch.setattr(read.Reader, "add", add)


def test_the_proof_finds_a_wrong_answer_and_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1, dilation=1), nn.Flatten(), nn.Linear(288, 5)
    )
    nest(module, "w", shape=IMAGE)
    spoil(monkeypatch, dilation=(2, 2), padding=(2, 2))
    with pytest.raises(
        NestlingError, match=r"In training, on 2 images .* the answers differ by up to .*, first after 1\."
    ):
        nest(module, "w", shape=IMAGE)
    assert nest(module, "w", shape=IMAGE, proof=False)


def test_the_proof_finds_a_wrong_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    module = plain(nn.BatchNorm2d(8))
    spoil(monkeypatch, momentum=0.3)
    with pytest.raises(NestlingError, match=r"In training, .*: 1\.running_mean differ"):
        nest(module, "w", shape=IMAGE)


def test_the_proof_finds_a_gradient_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Held(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    module = plain(nn.ReLU(), Held())
    monkeypatch.setattr(Held, "forward", lambda self, x: x)
    sketch = read.read(module, IMAGE, "mine")
    monkeypatch.setattr(Held, "forward", lambda self, x: x.detach())
    with pytest.raises(NestlingError, match="the gradients of the image differ"):
        agree.prove(module, sketch, IMAGE, lambda *_: sketch, "mine")


def test_a_module_that_computes_in_float32_itself_is_held_to_float32() -> None:
    class Coarse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.float() / 3).to(x.dtype)

    nest(plain(Coarse()), "w", shape=IMAGE)


def test_the_proof_leaves_the_module_and_chance_alone() -> None:
    module = plain(nn.BatchNorm2d(8), nn.Dropout(0.5))
    before = {key: value.clone() for key, value in module.state_dict().items()}
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    nest(module, "w", shape=IMAGE)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())


def test_a_long_proof_says_so(caplog: pytest.LogCaptureFixture) -> None:
    module, ticks = plain(), iter(range(0, 100, 3))
    agree.prove(module, read.read(module, IMAGE, "mine"), IMAGE, read.read, "mine", clock=lambda: float(next(ticks)))
    assert "mine: checking that it was read right, 1 of 6 (proof=False skips this)" in caplog.text
