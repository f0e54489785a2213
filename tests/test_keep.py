"""A kept network: the last answer is its own, image by image, whatever happens to the early stages beside it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import nestling
from nestling.errors import NestlingError
from nestling.nets import build, plan
from nestling.nets.extended import Extended
from nestling.nets.keep import keep
from nestling.recipes import named
from nestling.recipes.recipe import NetworkRecipe, override
from nestling.studies.live import independent
from nestling.train import train
from nestling.train.kept import copies

IMAGE = (3, 16, 16)


class Residual(nn.Module):
    """Shortcuts, a strided projection, dropout, and a module called as a new one would be."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.early, self.backbone = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 32, 3, 2, 1)
        self.down, self.norm2 = nn.Conv2d(16, 32, 1, 2), nn.BatchNorm2d(32)
        self.drop, self.fc = nn.Dropout(0.3), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.stem(x)))
        y = y + F.relu(self.early(y))
        y = F.relu(self.norm2(self.backbone(y)) + self.down(y))
        logits: Tensor = self.fc(self.drop(y.mean((2, 3))))
        return logits


class Mobile(nn.Module):
    """Depthwise convolution, squeeze and excitation, PReLU, a classifier that is a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.deep = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.norm, self.act = nn.BatchNorm2d(16), nn.PReLU()
        self.squeeze, self.excite = nn.Conv2d(16, 8, 1), nn.Conv2d(8, 16, 1)
        self.classify = nn.Conv2d(16, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm(self.deep(self.widen(x))))
        y = y * self.excite(F.relu(self.squeeze(y.mean((2, 3), keepdim=True)))).sigmoid()
        return self.classify(F.max_pool2d(y, 4)).mean((2, 3))


class Dense(nn.Module):
    """Concatenation, groups, a layer used twice, flattened pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.grouped, self.norm = nn.Conv2d(8, 16, 3, 2, 1, groups=4), nn.GroupNorm(8, 16)
        self.join = nn.Conv2d(24, 8, 1)
        self.fc = nn.Sequential(nn.Flatten(), nn.Linear(16 * 16, 24), nn.ReLU(), nn.Linear(24, 5))

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.one(x))
        b = F.relu(self.two(a))
        y = torch.cat([a, b, F.relu(self.two(b))], 1)
        logits: Tensor = self.fc(F.relu(self.norm(self.grouped(self.join(y)))))
        return logits


MODULES: dict[str, Callable[[], nn.Module]] = {"residual": Residual, "mobile": Mobile, "dense": Dense}


def trained(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    """A module whose norms have seen something."""
    torch.manual_seed(0)
    module = make().to(dtype)
    with torch.no_grad():
        for _ in range(20):
            module.train()(2 * torch.randn(32, *IMAGE, dtype=dtype) + 1)
    return module.eval()


def noise(dtype: torch.dtype = torch.float32, count: int = 7) -> Tensor:
    return torch.randn(count, *IMAGE, dtype=dtype, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("reads", [False, True], ids=["apart", "reads"])
@pytest.mark.parametrize("what", MODULES)
def test_the_last_answer_is_the_networks_own(what: str, reads: bool, dtype: torch.dtype) -> None:
    module = trained(MODULES[what], dtype)
    net = keep(module, (1 / 4, 1 / 4), IMAGE, reads=reads)
    for x in (noise(dtype), noise(dtype, 1)):
        with torch.no_grad():
            own = module(x)
            assert torch.equal(net.train()(x)[-1], own) and torch.equal(net.eval()(x)[-1], own), "bit for bit"
            whole = net(x)
            for stage, (mine, staged) in enumerate(zip(whole, net.answers(x), strict=True), start=1):
                limit = 1e-5 if dtype == torch.float32 else 1e-12
                assert torch.allclose(mine, staged, rtol=0, atol=limit)
                assert torch.allclose(net.subnet(stage)(x), mine, rtol=0, atol=limit)
    assert len(whole) == 3 and all(answer.dtype == dtype for answer in whole)
    assert not any(torch.equal(whole[-1], answer) for answer in whole[:-1])


@pytest.mark.parametrize("what", MODULES)
def test_early_answers_need_nothing_that_comes_later(what: str) -> None:
    net = keep(trained(MODULES[what]), (1 / 4, 1 / 4), IMAGE, reads=True).eval()
    before = [answer.clone() for answer in net.answers(noise())]
    for node in net.plan.nodes:
        if node.op.layered and not node.op.given and not node.shares:
            late = torch.tensor(node.births) == 3
            for tensor in (
                *net.layer(node.name).parameters(recurse=False),
                *net.layer(node.name).buffers(recurse=False),
            ):
                if tensor.is_floating_point() and tensor.dim() and len(tensor) == len(late):
                    tensor.data[late] = float("nan")
    staged = net.answers(noise())
    for early in before[:2]:
        assert torch.equal(next(staged), early)
    assert next(staged).isnan().all()


@pytest.mark.parametrize("what", MODULES)
@pytest.mark.parametrize("combine", [nestling.OSGD, nestling.SGD])
def test_training_what_is_new_never_changes_the_network(what: str, combine: Any) -> None:
    module = trained(MODULES[what])
    net = keep(module, (1 / 4, 1 / 4), IMAGE).train()
    own, before = module(noise()), {key: value.clone() for key, value in net.state_dict().items()}
    steps, losses = torch.optim.SGD(net.parameters(), 0.02, momentum=0.9, weight_decay=0.1), []
    x, y = noise(count=32), torch.arange(32) % 5
    for _ in range(30):
        steps.zero_grad()
        found = [F.cross_entropy(answer, y) for answer in net(x)]
        losses.append([float(loss.detach()) for loss in found])
        nestling.backward(found, net, combine())
        steps.step()
    assert torch.equal(net(noise())[-1], own) and torch.equal(net.eval()(noise())[-1], own)
    changed = {key for key, value in net.state_dict().items() if not torch.equal(value, before[key])}
    assert changed and all(key.startswith("early.") for key in changed), "statistics of old norms included"
    assert all(last < first for first, last in zip(losses[0][:2], losses[-1][:2], strict=True))
    assert losses[-1][2] == losses[0][2]


def test_new_weights_are_simple_to_get_and_the_network_can_be_thawed() -> None:
    module = trained(Residual).requires_grad_(False)
    net = keep(module, (1 / 4,), IMAGE)
    new = {id(p) for p in net.new_parameters()}
    assert all((id(p) in new) == p.requires_grad == name.startswith("early.") for name, p in net.named_parameters())
    net.thaw().train()
    net(noise())[-1].sum().backward()
    assert all(p.grad is not None for p in net.parameters() if id(p) not in new)
    assert not torch.equal(net.state_dict()["norm.running_mean"], module.state_dict()["norm.running_mean"])


def test_reading_starts_at_zero_and_learns() -> None:
    module = trained(Residual)
    net = keep(module, (1 / 4, 1 / 4), IMAGE, reads=True).train()
    readers = {name: p for name, p in net.named_parameters() if name.startswith("reads.")}
    assert readers and all(p.requires_grad and not p.any() for p in readers.values())
    assert not any("fc" in name for name in readers), "the old head reads old channels only"
    y = torch.arange(7) % 10
    steps, losses = torch.optim.SGD(net.new_parameters(), 0.05), []
    for _ in range(20):
        steps.zero_grad()
        found = [F.cross_entropy(answer, y) for answer in net(noise())]
        nestling.backward(found, net, nestling.SumSGD())
        losses.append(float(found[-1].detach()))
        steps.step()
    assert losses[-1] < losses[0] and all(p.any() for p in readers.values())
    net.reset(torch.Generator().manual_seed(3))
    assert torch.equal(net.eval()(noise())[-1], module(noise())), "drawn anew, it is the network again"


def test_a_checkpoint_of_the_network_fits_under_its_own_names() -> None:
    module, other = trained(Mobile), trained(Mobile)
    with torch.no_grad():
        other.classify.bias.add_(1)  # type: ignore[union-attr, operator]
    net = keep(module, (1 / 4,), IMAGE).eval()
    missing, strange = net.load_state_dict(
        {key: value for key, value in other.state_dict().items() if "act" not in key}, strict=False
    )
    assert all(key.startswith(("early.", "act.")) for key in missing)
    assert all(key.endswith("num_batches_tracked") for key in strange)
    assert torch.equal(net(noise())[-1], other(noise()))


@pytest.mark.parametrize("way", [keep, nestling.nest], ids=["keep", "nest"])
def test_networks_of_ours_are_taken_too(way: Any, dense: Path) -> None:
    module = nestling.load(dense).subnet(1)
    assert not module.training, "it answers as it was loaded"
    x = torch.randn(5, 1, 8, 8)
    net = way(module, shape=(1, 8, 8)).eval()
    assert len(net(x)) == 3 and isinstance(net, Extended) == (way is keep)
    if way is keep:
        assert torch.equal(net(x)[-1], module(x))
    assert torch.equal(nestling.nest(module, "", (1, 8, 8))(x)[0], module(x))
    with pytest.raises(NestlingError, match="3 stages already"):
        way(net, shape=(1, 8, 8))
    with pytest.raises(NestlingError, match="takes images of shape"):
        way(module, shape=(1, 9, 9))


class Gained(nn.Module):
    """Numbers of its own, and a layer below."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain, self.body = nn.Parameter(torch.randn(width, 1, 1)), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.body(x)


class Tokens(nn.Module):
    """Three class tokens, positions, norms over channels and attention; as many tokens as channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.wide = nn.Conv2d(3, 16, 4, 4), nn.ConvTranspose2d(16, 8, 3, padding=1)
        self.narrow = nn.Conv2d(8, 16, (1, 2), (1, 1), (0, 1))
        self.tokens, self.places = nn.Parameter(torch.randn(1, 3, 16)), nn.Parameter(torch.randn(1, 23, 16))
        self.norm, self.qkv, self.last = nn.LayerNorm(16), nn.Linear(16, 48), nn.RMSNorm(16)
        self.gained, self.fc = Gained(16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.gained(self.narrow(F.relu(self.wide(F.relu(self.patch(x)))))).flatten(2).transpose(1, 2)
        y = torch.cat([self.tokens.expand(x.shape[0], -1, -1), y], 1) + self.places
        q, k, v = self.qkv(self.norm(y)).reshape(x.shape[0], 23, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = y + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape[0], 23, 16)
        logits: Tensor = self.fc(self.last(y)[:, :3].mean(1))
        return logits


class Square(nn.Module):
    """As many channels as pixels, and as tokens that come first: nothing but their places tells them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.tokens, self.places = nn.Parameter(torch.randn(1, 16, 16)), nn.Parameter(torch.randn(1, 16, 16))
        self.wide, self.fc = nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.patch(x).flatten(2).transpose(1, 2) + self.places
        y = torch.cat([self.tokens.expand(x.shape[0], -1, -1), y], 1)
        logits: Tensor = self.fc(F.gelu(self.wide(y)).mean(1))
        return logits


@pytest.mark.parametrize("make", [Tokens, Square])
def test_what_was_nested_is_nested_once_more(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = nestling.nest(make().double().eval(), "w", IMAGE).subnet(2)
    x = noise().double()
    with torch.no_grad():
        own = module(x)
        assert torch.allclose(nestling.nest(module, "", IMAGE)(x)[0], own, rtol=1e-12, atol=1e-12)
        for net in (keep(module, (1 / 4, 1 / 4), IMAGE), nestling.nest(module, "w,w", IMAGE)):
            whole = net.eval()(x)
            for stage, answer in enumerate(net.answers(x), start=1):
                assert torch.allclose(answer, whole[stage - 1], rtol=1e-12, atol=1e-12)
                assert torch.allclose(answer, net.subnet(stage)(x), rtol=1e-12, atol=1e-12)
        assert torch.allclose(keep(module, (1 / 4,), IMAGE)(x)[-1], own, rtol=1e-12, atol=1e-12)
        parts = keep(module, (1 / 4,), IMAGE).state_dict(), module.net.state_dict()
        assert all(torch.equal(parts[0][key], value) for key, value in parts[1].items())


def test_norms_over_some_of_the_channels_they_read_are_not_nested_twice() -> None:
    from nestling.nets.ops.layernorm import Alike, LayerNorm
    from nestling.nets.plan import Node

    read = Node("x", LayerNorm(), (), (1, 1, 2), ())
    some = Node("norm", LayerNorm(parts=(Alike((0,), (2,), (0, 1, 2)),)), ("x",), (2,), ())
    with pytest.raises(NestlingError, match=r"cannot nest norm once more: .* nest the module that it was made of"):
        some.op.untold("it", some, [read])


def test_a_kept_network_alone_stays_in_evaluation() -> None:
    module = trained(Residual)
    alone = keep(module, (1 / 4,), IMAGE).train().subnet(2)
    assert torch.equal(alone(noise()), module(noise())), "its dropout too"


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_what_is_added_is_counted_before_it_is_built() -> None:
    """By hand: 3x3 convolutions 3 -> 16 and 16 -> 16, heads of 10; a quarter is 4 channels, another 4 more."""
    module = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip
    pixels = 16 * 16
    own = pixels * 9 * (3 * 16 + 16 * 16) + 160
    first = pixels * 9 * (3 * 4 + 4 * 4) + 40
    second = pixels * 9 * (3 * 4 + 4 * 8) + 80
    net = keep(module, (1 / 4, 1 / 4), IMAGE)
    assert [net.plan.macs(stage) for stage in (1, 2, 3)] == [first, first + second, first + second + own]
    assert net.overhead == pytest.approx((first + second) / own)
    reads = keep(module, (1 / 4, 1 / 4), IMAGE, reads=True)
    assert reads.plan.macs(3) - net.plan.macs(3) == pixels * 9 * 8 * 16, "the image is read as it always was"


def test_products_of_attention_are_the_modules_own_work() -> None:
    module, counter = Tokens().eval(), FlopCounterMode(display=False)
    with torch.no_grad(), counter, sdpa_kernel(SDPBackend.MATH):
        module(noise()[:1])
    net, own = keep(module, (1 / 4, 1 / 4), IMAGE), counter.get_total_flops() / 2
    assert net.overhead == pytest.approx(net.plan.macs(3) / own - 1)


def test_early_widths_may_be_multiples() -> None:
    """Vectors are filled, and kernels of ours fit; a layer whose own width is no multiple is cut as ever."""
    module = nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 20, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(20, 10),
    )
    for multiple, widths in ((1, (8, 20, 5, 13)), (8, (8, 16, 5, 13)), (16, (16, 16, 5, 13))):
        net = keep(module.eval(), (0.25, 0.375), IMAGE, proof=False, multiple=multiple)
        births = [net.plan.by_name[f"early.{name}"].births for name in ("0", "2")]
        assert tuple(sum(b <= stage for b in found) for found in births for stage in (1, 2)) == widths
        x = torch.randn(2, *IMAGE)
        assert torch.equal(net(x)[-1], module(x))


def test_a_budget_narrows_the_stripes() -> None:
    wide = keep(trained(Residual), (1 / 4, 1 / 2), IMAGE)
    net = keep(trained(Residual), (1 / 4, 1 / 2), IMAGE, budget=0.15)
    assert wide.overhead > 0.3 and 0.05 < net.overhead <= 0.15
    with pytest.raises(NestlingError, match=r"more than the budget of 0\.1%; give a larger one"):
        keep(trained(Residual), (1 / 4, 1 / 2), IMAGE, budget=0.001)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no stripe": ({"stripes": ()}, "found the stripes"),
    "a stripe of nothing": ({"stripes": (0.0, 0.5)}, "found the stripes"),
    "more than there is": ({"stripes": (0.5, 0.5)}, "together below 1"),
    "a budget of nothing": ({"budget": 0}, "found the budget"),
    "a multiple of nothing": ({"multiple": 0}, "found multiple=0"),
    "no image": ({"shape": (3, 0, 1)}, "found images of shape"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_use_is_refused(what: str) -> None:
    options, words = WRONG[what]
    with pytest.raises(NestlingError, match=words):
        keep(Residual(), **{"shape": IMAGE, **options})


def test_it_answers_by_deadline_and_elsewhere(tmp_path: Path) -> None:
    module = trained(Residual)
    net = keep(module, (1 / 4, 1 / 4), IMAGE).eval()
    spec = nestling.Spec("mine", IMAGE, tuple("abcdefghij"), net.sizes, mean=(0.5,) * 3, std=(0.5,) * 3)
    nestling.export_net(net, spec, str(tmp_path / "mine"), noise())  # which verifies what it wrote
    image = torch.randint(0, 256, IMAGE, dtype=torch.uint8)
    with nestling.Runtime(str(tmp_path / "mine")) as runtime:
        answer = runtime.answer(image, deadline=None)
    expected = module(((image / 255 - 0.5) / 0.5)[None])[0]
    assert answer.stage == 3 and answer.name == "abcdefghij"[int(expected.argmax())]


# --- as a run ---------------------------------------------------------------------------------------------------------

FAST = ["train.epochs=2", "data.limit=256", "train.device=cpu"]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the digits network of full width by itself."""
    path = tmp_path_factory.mktemp("runs") / "dense"
    train(override(named("digits-width"), [*FAST, "network.alone=3"]), str(path), quiet=True)
    return path


@pytest.mark.parametrize("strategy", ["sgd", "osgd", "greedy"])
def test_a_run_keeps_the_network_of_another(dense: Path, tmp_path: Path, strategy: str) -> None:
    settings = [*FAST, f"network.keep={dense}", "network.early=0.25,0.25", f"strategy.name={strategy}"]
    settings += ["train.average=0.9"] + (["train.distill=0.5"] if strategy != "greedy" else [])
    results = train(override(named("digits-width"), settings), str(tmp_path / "kept"), quiet=True)
    run, before = nestling.resolve(tmp_path / "kept"), nestling.resolve(dense)
    assert torch.equal(run.outputs()["logits"][-1], before.outputs()["logits"][0]), "image by image"
    assert [stage["size"] for stage in results["stages"]] == ["early1", "early2", "w4"]
    net, own = run.net(), before.net().state_dict()
    assert isinstance(net, Extended) and all(torch.equal(net.state_dict()[key], own[key]) for key in own)
    first, last = ([line["train_loss"] for line in run.read_log()][at] for at in (0, -1))
    assert len(first) == 3 and last[0] < first[0]


@pytest.mark.parametrize(
    ("name", "last", "shares"),
    [("width-digits", 3, (1 / 4, 1 / 4)), ("depth-digits", 3, (1 / 4, 1 / 2)), ("together-digits", 3, (1 / 8,))],
)
def test_a_runs_early_stages_start_as_copies(name: str, last: int, shares: tuple[float, ...]) -> None:
    """The early stages of a drawn network and those that were cut out of the kept one do the same."""
    own = build(NetworkRecipe(name, alone=last), generator=torch.Generator().manual_seed(1))
    for layer in own.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.weight.data.uniform_(0.5, 1.5)
            layer.running_mean.normal_(0, 0.1)  # type: ignore[union-attr]
            layer.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr]
    net = build(NetworkRecipe(name, early=shares, keep="run")).eval()
    net.load_state_dict({**net.state_dict(), **own.state_dict(), **copies(net, own, shares)})
    cut, x = keep(own.eval(), shares, (1, 8, 8)).eval(), torch.randn(4, 1, 8, 8)
    for mine, theirs in zip(net(x), cut(x), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6) and mine.std() > 0


def test_a_stopped_run_goes_on_without_the_one_it_keeps(dense: Path, tmp_path: Path) -> None:
    settings = [*FAST, "train.epochs=2", f"network.keep={tmp_path / 'mine'}", "network.early=0.25"]
    (tmp_path / "mine").symlink_to(dense)
    recipe = override(named("digits-width"), settings)
    train(recipe, str(tmp_path / "whole"), quiet=True)
    train(recipe, str(tmp_path / "stopped"), quiet=True, seconds=0.0)
    (tmp_path / "mine").unlink()
    train(recipe, str(tmp_path / "stopped"), resume=True, quiet=True)
    one, other = (nestling.load(tmp_path / name).state_dict() for name in ("whole", "stopped"))
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_shares_known_beforehand() -> None:
    """The early stages for CIFAR-10, as shares of the network's MACs."""
    own = plan(NetworkRecipe("width-resnet42", alone=3)).macs(1)
    kept = plan(NetworkRecipe("width-resnet42", early=(9 / 32, 11 / 32), keep="w4"))
    assert [round(kept.macs(stage) / own, 3) for stage in (1, 2, 3)] == [0.080, 0.295, 1.295]


REFUSED: dict[str, tuple[list[str], str]] = {
    "no run": (["network.early=0.25"], "belong together"),
    "no stages": (["network.keep=RUN"], "belong together"),
    "one stage alone": (["network.keep=RUN", "network.early=0.25", "network.alone=2"], "stands before the whole network"),
    "another network": (["network.keep=RUN", "network.early=0.25", "network.name=even-digits"], "expected one of even-digits"),
    "other widths": (["network.keep=RUN", "network.early=0.25", "network.widths=32,64"], "the same data and widths"),
    "inside a channel": (["network.keep=RUN", "network.early=0.3"], "would cut 16 channels inside one"),
    "exits there already": (["network.keep=RUN", "network.early=0.25", "network.name=cascade-digits"], "has its exits already"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_runs_that_do_not_fit_are_refused(dense: Path, tmp_path: Path, what: str) -> None:
    settings, words = REFUSED[what]
    with pytest.raises(NestlingError, match=words):
        recipe = override(named("digits-width"), [*FAST, *(each.replace("RUN", str(dense)) for each in settings)])
        train(recipe, str(tmp_path / "kept"), quiet=True)


def test_a_runs_early_stages_may_be_those_of_a_trained_nest(dense: Path, tmp_path: Path) -> None:
    """Nothing is trained: the first answers are the nest's but for rounding, the last is the kept network's, bit for bit."""
    train(override(named("digits-width"), FAST), str(tmp_path / "nest"), quiet=True)
    settings = [*FAST, "train.epochs=0", f"network.keep={dense}", "network.early=0.25,0.25"]
    settings += [f"network.early_from={tmp_path / 'nest'}"]
    train(override(named("digits-width"), settings), str(tmp_path / "kept"), quiet=True)
    found, nest, own = (
        nestling.resolve(path).outputs()["logits"] for path in (tmp_path / "kept", tmp_path / "nest", dense)
    )
    assert torch.equal(found[2], own[0]) and torch.allclose(found[:2], nest[:2], atol=1e-5)
    parts = nestling.resolve(tmp_path / "kept").read_json("provenance.json")["adopted"]
    assert {field: part["command"] for field, part in parts.items()}.keys() == {"network.keep", "network.early_from"}
    other = [each.replace("network.early=0.25,0.25", "network.early=0.125,0.25") for each in settings]
    with pytest.raises(NestlingError, match="other first stages"):
        train(override(named("digits-width"), other), str(tmp_path / "other"), quiet=True)
    with pytest.raises(NestlingError, match="stages before a kept network"):
        override(named("digits-width"), [f"network.early_from={tmp_path / 'nest'}"])


def test_early_stages_have_widths_of_their_own(tmp_path: Path) -> None:
    """A nest's first stages before a network of other widths."""
    train(override(named("digits-width"), FAST), str(tmp_path / "nest"), quiet=True)
    other = [*FAST, "network.widths=24,56"]
    train(override(named("digits-width"), [*other, "network.alone=3"]), str(tmp_path / "own"), quiet=True)
    settings = [*other, "train.epochs=0", f"network.keep={tmp_path / 'own'}", "network.early=0.25,0.25"]
    settings += [f"network.early_from={tmp_path / 'nest'}"]
    with pytest.raises(NestlingError, match="other first stages"):
        train(override(named("digits-width"), settings), str(tmp_path / "shares"), quiet=True)
    settings += ["network.early_widths=8,16"]
    recipe = override(named("digits-width"), settings)
    train(recipe, str(tmp_path / "kept"), quiet=True)
    found, nest, own = (nestling.resolve(tmp_path / name).outputs()["logits"] for name in ("kept", "nest", "own"))
    assert torch.equal(found[2], own[0]) and torch.allclose(found[:2], nest[:2], atol=1e-5)
    assert [independent(recipe.network, stage).widths for stage in (1, 2, 3)] == [(4, 8), (8, 16), (24, 56)]
    for widths, words in (("8", "expected 2 widths"), ("7,16", "would cut 7 channels")):
        with pytest.raises(NestlingError, match=words):
            build(replace(recipe.network, early_widths=tuple(int(width) for width in widths.split(","))), 10, IMAGE)
    with pytest.raises(NestlingError, match=r"set network.early_from, too"):
        replace(recipe.network, early_from="")


def test_the_stages_of_a_trained_nest_come_before_any_module() -> None:
    module, nest = trained(Residual), build(NetworkRecipe("width-digits"), 10, IMAGE).eval()
    net = keep(module, shape=IMAGE, early=nest).eval()
    x = noise()
    with torch.no_grad():
        *first, last = net(x)
        assert torch.equal(last, module(x))
        for mine, theirs in zip(first, nest(x), strict=True):
            assert torch.allclose(mine, theirs, atol=1e-5)
    assert net.plan.macs(3) == nest.plan.macs(3)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"reads": True}, "early= with"),
        ({"early": build(NetworkRecipe("width-digits"))}, "have images"),
    ]
    for options, words in wrong:
        with pytest.raises(NestlingError, match=words):
            keep(module, shape=IMAGE, **{"early": nest, **options})
