"""Exits of a trained module: its own answer stays, bit for bit; early answers need nothing that lies behind them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nestling
from nestling.errors import NestlingError
from nestling.nets.exits import exits
from nestling.nets.extended import Extended

IMAGE = (3, 16, 16)


class Block(nn.Module):
    def __init__(self, width: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, out, 3, stride, 1), nn.BatchNorm2d(out)
        self.down = nn.Conv2d(width, out, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)) + self.down(x), inplace=True)


class Small(nn.Module):
    """A ResNet of three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layer1, self.layer2, self.layer3 = Block(8, 8), Block(8, 16, 2), Block(16, 32, 2)
        self.fc = nn.Sequential(nn.Dropout(0.5), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer3(self.layer2(self.layer1(self.stem(x))))
        logits: Tensor = self.fc(y.mean((2, 3)))
        return logits


class Attention(nn.Module):
    """One block of a transformer, as people write it: heads stand before the images."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(n, tokens, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
        y = ((q @ k.transpose(-2, -1)) / 2).softmax(-1) @ v
        y = self.out(y.transpose(1, 2).reshape(n, tokens, width))
        y.mul_(self.scale)
        return x + y


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, 12, 4, 4), nn.Parameter(torch.randn(1, 1, 12))
        self.place = nn.Parameter(torch.randn(1, 17, 12))
        self.blocks, self.norm, self.head = (
            nn.Sequential(*(Attention(12) for _ in range(3))),
            nn.LayerNorm(12),
            nn.Linear(12, 7),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.patch(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.token.expand(x.shape[0], -1, -1), y], 1) + self.place
        logits: Tensor = self.head(self.norm(self.blocks(y))[:, 0])
        return logits


class Shuffles(nn.Module):
    """Channel shuffle, a norm over channels, softmax over channels and a parameter that belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.fc = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 5)
        self.gamma = nn.Parameter(torch.rand(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        y = y.view(y.size(0), 2, 4, *y.shape[2:]).transpose(1, 2).contiguous().view(y.shape) * self.gamma
        y = F.layer_norm(self.two(y).permute(0, 2, 3, 1), (8,)).permute(0, 3, 1, 2)
        logits: Tensor = self.fc((y * y.softmax(1)).amax((2, 3)))
        return logits


class Placed(nn.Module):
    """Each pixel's column beside its features, spread over as many images as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(9, 16, 3, padding=1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x).relu()
        columns = torch.linspace(0, 1, y.shape[3]).expand(y.shape[0], 1, y.shape[2], y.shape[3])
        out: Tensor = self.fc(self.two(torch.cat([y, columns], 1)).relu().mean((2, 3)))
        return out


class Reused(nn.Module):
    """One layer in two blocks, and tensors that are laid anew in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.same, self.fc = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.same(self.stem(x)))
        y = y.transpose(2, 3).contiguous()
        logits: Tensor = self.fc(F.relu(self.same(y)).mean((2, 3)))
        return logits


class SideBySide(nn.Module):
    """Every block reads the two before it, and the image is read to the end: no one tensor holds all that goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.shrunk = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 1)
        self.blocks, self.fc = nn.ModuleList(nn.Conv2d(16, 8, 3, padding=1) for _ in range(4)), nn.Linear(16, 5)
        self.gate = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        before, last = self.stem(x), self.stem(x)
        for block in self.blocks:
            before, last = last, F.relu(block(torch.cat([before, last], 1)))
            last = last * self.gate(last.mean((2, 3)))[:, :, None, None].sigmoid()
        logits: Tensor = self.fc(torch.cat([last, self.shrunk(x)], 1).mean((2, 3)))
        return logits


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "resnet": (Small, (0.3, 0.7)),
    "resnet by name": (Small, ("layer1", "layer2")),
    "transformer": (Transformer, (0.4, 0.7)),
    "transformer by name": (Transformer, ("blocks.0", "blocks.1")),
    "what a width nest refuses": (Shuffles, ("one",)),
    "branches side by side": (SideBySide, (0.3, 0.6)),
    "a layer in two blocks": (Reused, ("stem", 0.6)),
    "numbers spread over the batch": (Placed, (0.2,)),
}


@pytest.mark.parametrize("what", MODULES)
def test_the_last_answer_is_the_modules_own(what: str) -> None:
    torch.manual_seed(0)
    make, at = MODULES[what]
    module = make().train()
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            assert layer.running_mean is not None
            layer.running_mean.normal_()
    net = exits(module, at, IMAGE)
    assert module.training and isinstance(net, Extended) and len(net.plan.heads) == len(at) + 1
    for batch in (1, 5):
        x = torch.randn(batch, *IMAGE)
        with torch.no_grad():
            whole = net.eval()(x)
            assert torch.equal(whole[-1], module.eval()(x)), "bit for bit"
            for stage, (mine, staged) in enumerate(zip(whole, net.answers(x), strict=True), start=1):
                assert torch.equal(mine, staged)
                assert torch.allclose(net.subnet(stage)(x), mine, atol=1e-6)
    assert 0 < net.plan.macs(1) < net.plan.macs(2)


def test_an_exit_beside_branches_costs_what_was_asked() -> None:
    net = exits(SideBySide(), (0.3, 0.6), IMAGE)
    shares = [net.plan.macs(stage) / net.plan.macs(3) for stage in (1, 2)]
    assert shares == pytest.approx([0.3, 0.6], abs=0.12)
    sides = [net.plan.by_name[net.plan.by_name[f"exit{stage}.pool"].reads[0]].size for stage in (1, 2)]
    assert sides == [(16, 16)] * 2, "maps of features, no gates"


def test_early_answers_need_nothing_that_comes_later() -> None:
    net = exits(Small().eval(), ("layer1", "layer2"), IMAGE).eval()
    x = torch.randn(2, *IMAGE)
    before = [answer.clone() for answer in net.answers(x)]
    for node in net.plan.nodes:
        if node.births[0] == 3 and node.op.layered:
            for tensor in (*net.layer(node.name).parameters(), *net.layer(node.name).buffers()):
                if tensor.is_floating_point():
                    tensor.data.fill_(float("nan"))
    after = list(net.answers(x))
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1]) and after[2].isnan().all()


def test_only_heads_train_and_the_backbone_stays() -> None:
    torch.manual_seed(0)
    module = Small().eval()
    net = exits(module, (0.3, 0.7), IMAGE, head="conv", width=16).train()
    x, y = torch.randn(32, *IMAGE), torch.arange(32) % 10
    last = module(x)
    learnt = [p for p in net.parameters() if p.requires_grad]
    assert {key.split(".")[0] for key, p in net.named_parameters() if p.requires_grad} == {"exit1", "exit2"}
    steps, losses = torch.optim.Adam(learnt, 0.01), []
    for _ in range(40):
        steps.zero_grad()
        answers = net(x)
        loss = F.cross_entropy(answers[0], y) + F.cross_entropy(answers[1], y)
        loss.backward()
        steps.step()
        losses.append(float(loss.detach()))
        assert torch.equal(answers[-1], last), "also while heads train"
    assert losses[-1] < 0.5 * losses[0]


def test_all_losses_may_be_given_and_the_last_has_nothing_to_train() -> None:
    torch.manual_seed(0)
    module = Small().eval()
    net = exits(module, (0.3, 0.7), IMAGE).train()
    assert {id(p) for p in net.new_parameters()} == {id(p) for p in net.parameters() if p.requires_grad}
    assert 0 < net.overhead < 0.02, "two linear layers"
    x, y = torch.randn(32, *IMAGE), torch.arange(32) % 10
    before, steps = module(x), torch.optim.SGD(net.parameters(), 0.1, weight_decay=0.1)
    first = [float(F.cross_entropy(answer, y).detach()) for answer in net(x)]
    for _ in range(20):
        steps.zero_grad()
        nestling.backward([F.cross_entropy(answer, y) for answer in net(x)], net, nestling.OSGD())
        steps.step()
    last = [float(F.cross_entropy(answer, y).detach()) for answer in net(x)]
    assert last[0] < first[0] and last[1] < first[1] and torch.equal(net(x)[-1], before)


def test_a_module_may_be_called_as_what_is_added() -> None:
    class Named(Small):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.hold, self.exit1 = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.exit1(self.hold(self.backbone(x))))

    module = Named().eval()
    x = torch.randn(2, *IMAGE)
    assert torch.equal(exits(module, ("layer1",), IMAGE).eval()(x)[-1], module(x))


def test_a_transformer_with_exits_answers_by_deadline(tmp_path: Any) -> None:
    net = exits(Transformer().eval(), (0.4,), IMAGE).eval()
    spec = nestling.Spec("mine", IMAGE, tuple("abcdefg"), net.sizes, mean=(0.5,) * 3, std=(0.5,) * 3)
    nestling.export_net(net, spec, str(tmp_path / "mine"), torch.randn(8, *IMAGE))  # which verifies what it wrote
    image = torch.randint(0, 256, IMAGE, dtype=torch.uint8)
    with nestling.Runtime(str(tmp_path / "mine")) as runtime:
        assert not runtime.answer(image, deadline=0.0), "no time, no answer"
        answer = runtime.answer(image, deadline=None)
    assert answer.stage == len(net.sizes) and answer.final
    expected = net(((image / 255 - 0.5) / 0.5)[None])[-1][0]
    assert answer.name == "abcdefg"[int(expected.argmax())]


class Parted(nn.Module):
    """A layer one half of whose channels is read much later than the other."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.both = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.norm, self.deep, self.head = nn.BatchNorm2d(8), nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        early, late = self.norm(self.both(self.stem(x))).chunk(2, dim=1)
        logits: Tensor = self.head((self.deep(early.relu()) * late).mean((2, 3)))
        return logits


def test_channels_that_only_a_later_answer_needs_are_born_with_it() -> None:
    net = exits(Parted().eval(), at=("deep",), shape=IMAGE).eval()
    assert net.plan.by_name["both"].births == (1,) * 4 + (2,) * 4
    x = torch.randn(2, *IMAGE)
    for mine, staged in zip(net(x), net.answers(x), strict=True):
        assert torch.allclose(mine, staged, atol=1e-5)


class Windows(nn.Module):
    """Fused attention inside windows, which have a dimension of their own; all heads have a bias in common."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.qkv, self.head = nn.Conv2d(3, 8, 2, 2), nn.Linear(8, 24), nn.Linear(8, 10)
        self.bias = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(x).reshape(x.shape[0], 4, 16, 3, 2, 4).permute(3, 0, 4, 1, 2, 5).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias).permute(0, 2, 3, 1, 4).reshape(x.shape)
        logits: Tensor = self.head((x + y).mean(1))
        return logits


def test_fused_attention_of_windows_is_exported(tmp_path: Any) -> None:
    module, x = Windows().eval(), torch.randn(2, *IMAGE)
    net = exits(module, at=("patch",), shape=IMAGE).eval()
    spec = nestling.Spec("it", IMAGE, tuple("abcdefghij"), net.sizes, mean=(0.5,) * 3, std=(0.5,) * 3)
    nestling.export_net(net, spec, tmp_path / "it", x)  # which verifies what it wrote


class Positions(Small):
    """Numbers that a small network makes of no image, beside those of the image: they are computed once for all."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Buffer(torch.randn(16 * 16, 2))
        self.table = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer1(self.stem(x)) * self.table(self.places).t().reshape(8, 16, 16)
        logits: Tensor = self.fc(self.layer3(self.layer2(y)).mean((2, 3)))
        return logits


@pytest.mark.parametrize("make", [lambda: Transformer(), Positions])
def test_work_is_counted_as_torch_counts_it(make: Callable[[], nn.Module]) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    module = make().eval()
    net = exits(module, (0.5,), IMAGE).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(torch.randn(1, *IMAGE))
    heads = sum(
        net.plan.row_macs(n, r) for n in net.plan.nodes if n.name.startswith("exit1") for r in range(n.channels)
    )
    assert net.plan.macs(2) - heads == counter.get_total_flops() // 2


def test_each_layer_of_a_nest_holds_its_own_weights_only() -> None:
    module = nestling.nest(Small(), "w", IMAGE).subnet(2).eval()
    net = exits(module, (0.5,), IMAGE)
    assert sum(p.numel() for p in net.subnet(1).parameters()) == net.plan.task_params(0)
    assert sum(p.numel() for p in net.parameters()) == net.plan.params(2)
    own = sum(p.numel() for p in module.parameters())
    assert own == sum(p.numel() for p in net.own_parameters()) and net.plan.params(1) < own
    x = torch.randn(2, *IMAGE)
    assert torch.equal(net.eval()(x)[-1], module(x))


class Again(nn.Module):
    """A convolution, a norm of tokens and a linear layer that serve two places each."""

    def __init__(self, convolution: bool) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 8, 4, 4), nn.Conv2d(8, 8, 1) if convolution else None
        self.norm, self.wide, self.fc = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        y = y if self.conv is None else self.conv(F.relu(self.conv(y)))
        y = y.flatten(2).transpose(1, 2)
        for _ in range(2):
            y = F.relu(self.wide(self.norm(y)))
        logits: Tensor = self.fc(y.mean(1))
        return logits


def test_what_serves_several_places_is_counted_once_and_not_trained_as_copies() -> None:
    net = exits(Again(convolution=False), ("stem",), IMAGE)
    assert net.plan.params(2) == sum(p.numel() for p in net.parameters())
    assert all(p.requires_grad for p in net.thaw().parameters()), "there is one of each"
    net = exits(Again(convolution=True), ("stem",), IMAGE)
    assert net.plan.params(2) == sum(p.numel() for p in net.parameters())
    with pytest.raises(NestlingError, match=r"the weights of conv, conv_2 serve several places, .* own ways"):
        net.thaw()


def test_an_exit_leaves_something_to_do() -> None:
    """Pooling behind the classifier is no stage; what is left for another exit is said."""
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 10, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(NestlingError, match="no further tensor of features"):
        exits(module, (0.3, 0.6), IMAGE)
    with pytest.raises(
        NestlingError, match="nothing is left to do after 2: an exit there would be the module's own answer"
    ):
        exits(module, ("2",), IMAGE)
    net = exits(module, (0.9,), IMAGE)
    assert 0 < net.plan.new_macs(2) < net.plan.macs(1)


def test_exits_of_a_nest_may_change_their_number_type() -> None:
    class Token(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch, self.token = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.randn(1, 2, 8))
            self.wide, self.fc = nn.Linear(8, 8), nn.Linear(8, 10)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.cat([self.token.expand(x.shape[0], -1, -1), self.patch(x).flatten(2).transpose(1, 2)], 1)
            logits: Tensor = self.fc(self.wide(y).mean(1))
            return logits

    module = nestling.nest(Token().double(), "w", IMAGE).subnet(2).eval()
    net, x = exits(module, (0.3,), IMAGE).eval().float(), torch.randn(2, *IMAGE)
    assert torch.allclose(net(x)[-1], module.float()(x), atol=1e-6)


class Two(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Filled(Small):
    """Puts what it computes into a tensor of zeros."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros(x.shape[0], 32)
        y[:, :16] = self.layer2(self.layer1(self.stem(x))).mean((2, 3))
        logits: Tensor = self.fc(y)
        return logits


WRONG: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "no place": (Small, (), "found exits at"),
    "a share of all": (Small, (0.5, 1.0), "found exits at"),
    "text": (Small, "layer1", "found exits at"),
    "twice the same": (Small, ("layer1", "layer1"), "fall on the same place, as after layer1.relu"),
    "unknown": (Small, ("layer9",), r"no module 'layer9' runs in it; did you mean layer"),
    "the answer itself": (Small, ("fc",), "would be the module's own answer"),
    "a tensor filled": (
        Filled,
        (0.5,),
        r"cannot nest the operation \.__setitem__: it puts what is computed from the image into",
    ),
    "two answers": (Two, (0.5,), "must return one tensor"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_have_exits_is_refused(what: str) -> None:
    make, at, words = WRONG[what]
    with pytest.raises(NestlingError, match=words):
        exits(make(), at, IMAGE)


def test_what_is_overwritten_through_views_is_refused() -> None:
    class Overwrites(Shuffles):
        def forward(self, x: Tensor) -> Tensor:
            y = self.one(x)
            y.permute(1, 0, 2, 3).add_(1)
            logits: Tensor = self.fc(self.two(y).mean((2, 3)))
            return logits

    with pytest.raises(NestlingError, match="overwrites in place"):
        exits(Overwrites(), ("one",), IMAGE)


class PutInPlace(nn.Module):
    """A part of a tensor is overwritten by its index, as MViT adds positions to all tokens but the first."""

    def __init__(self, view: bool = False) -> None:
        super().__init__()
        self.one, self.two, self.fc, self.view = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 5), view

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        first = y[:, :, 1].mean(2)
        part = y[:, :, 1]
        y[:, :, 1:] = y[:, :, 1:] * 2 + 1
        logits: Tensor = self.fc(self.two(y).mean((2, 3)) + (part.mean(2) if self.view else first))
        return logits


def test_a_part_that_is_overwritten_by_its_index_is_followed() -> None:
    module, x = PutInPlace().eval(), torch.randn(2, *IMAGE)
    assert torch.equal(exits(module, ("one",), IMAGE).eval()(x)[-1], module(x))
    with pytest.raises(NestlingError, match="by another name or through a view"):
        exits(PutInPlace(view=True), ("one",), IMAGE)

    class Remembers(PutInPlace):
        mark: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.mark[:1] = x.mean((1, 2, 3))[:1]
            return super().forward(x) + self.mark

    module = Remembers()
    module.register_buffer("mark", torch.zeros(5))
    with pytest.raises(NestlingError, match="of a tensor of its own"):
        exits(module, ("one",), IMAGE)
    with pytest.raises(NestlingError, match=r"only nestling\.exits follows"):
        nestling.nest(PutInPlace(), "w", IMAGE)
