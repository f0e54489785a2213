"""Every operation of the registry, in a small network of two stages: what it says of itself is what it computes, stages and
subnetworks agree with the whole, nothing of a later stage is read by an earlier one, and frozen it computes the same."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from nestling.errors import NestlingError
from nestling.export.fold import fold, merge
from nestling.export.freeze import freeze, freeze_whole, shapes
from nestling.export.graph import write_stage
from nestling.export.torchstage import TorchStage
from nestling.nets import NestedNet
from nestling.nets.draft import Draft
from nestling.nets.nest import nest
from nestling.nets.ops import (
    OPS,
    BatchNorm,
    Cat,
    Computed,
    Conv,
    Covariance,
    Flatten,
    GroupNorm,
    Headwise,
    Input,
    Join,
    LayerNorm,
    Linear,
    Map,
    Mean,
    Merge,
    Mingle,
    Module,
    Opaque,
    Operation,
    PixelLinear,
    PReLU,
    Rearrange,
    Scale,
    Scores,
    Select,
    Tokens,
    Weigh,
    Zip,
)
from nestling.nets.ops.conv1d import Conv1d
from nestling.nets.ops.conv_transpose2d import ConvTranspose2d
from nestling.nets.plan import Node
from nestling.nets.within import can_live_within, within
from nestling.runtime.portable import Portable
from nestling.runtime.runtime import bare_spec
from nestling.runtime.verified import export_net

BIRTHS = (1, 1, 2, 2)
IMAGE = (3, 6, 6)


@dataclass(frozen=True)
class Example:
    """A network body that uses one operation; its last node is what the heads read."""

    draw: Callable[[Draft], str]
    shape: tuple[int, ...] = IMAGE
    given: dict[str, nn.Module] = field(default_factory=dict)
    axis: int = 1


def behind_a_stem(op: Operation, *births: int) -> Callable[[Draft], str]:
    return lambda draft: draft.enter("it", op, [draft.conv("stem", "input", BIRTHS)], births or None)


def behind_a_sequence(op: Operation, *births: int) -> Callable[[Draft], str]:
    stem = Conv1d((3,), padding=(1,))
    return lambda draft: draft.enter("it", op, [draft.enter("stem", stem, ["input"], BIRTHS)], births)


def of_two(op: Operation) -> Callable[[Draft], str]:
    return lambda draft: draft.enter("it", op, [draft.conv(name, "input", BIRTHS) for name in ("one", "two")])


def gated(draft: Draft) -> str:
    """A single channel, broadcast over others."""
    one, all_of_them = draft.conv("one", "input", (1,), kernel=1), draft.conv("all", "input", BIRTHS)
    return draft.enter("it", Zip("mul"), [one, all_of_them])


def born_at_once(op: Operation) -> Callable[[Draft], str]:
    """Behind a stem of which everything is born at the first stage."""
    return lambda draft: draft.enter("it", op, [draft.conv("stem", "input", (1, 1, 1, 1))])


def after_mixed_births(op: Operation) -> Callable[[Draft], str]:
    return lambda draft: draft.enter("it", op, [draft.conv("stem", "input", (2, 1, 2, 1))])


def token_norms(draft: Draft) -> str:
    """Layer norm and RMS norm of tokens, with linear layers between; a token is answered."""
    wide = draft.enter("wide", Linear(axis=2), ["input"], BIRTHS)
    layer = draft.enter("it", LayerNorm(axis=2), [wide])
    deep = draft.enter("deep", Linear(axis=2), [layer], BIRTHS)
    rms = draft.enter("rms", LayerNorm(center=False, shift=False, axis=2), [deep])
    last = draft.enter("last", Linear(axis=2), [rms], BIRTHS)
    return draft.enter("turned", Rearrange.to_axis(draft.nodes[last], 1), [last])


def windows(draft: Draft) -> str:
    """An image cut into four windows, as tokens, and put together again."""
    cut = Rearrange((0, 2, 3, 2, 3), (0, 2, 4, 3, 5, 1), (4, 9, 0), axis=3)
    tokens = draft.enter("it", cut, [draft.conv("stem", "input", BIRTHS)])
    wide = draft.enter("wide", Linear(bias=True, axis=3), [tokens], BIRTHS)
    back = Rearrange((2, 2, 3, 3, 0), (0, 5, 1, 3, 2, 4), (0, 6, 6))
    return draft.conv("last", draft.enter("back", back, [wide]), BIRTHS)


def attending(draft: Draft) -> str:
    """Two heads over an image's pixels, the second born at stage 2; a class token, positions, a bias for pairs of pixels."""
    stem = draft.conv("stem", "input", BIRTHS, stride=3)
    flat = draft.enter("flat", Rearrange((0, 4), (0, 2, 1), (4, 0), axis=2), [stem])
    more = draft.enter("more", Tokens(2, axis=2), [flat])
    it = draft.enter("it", Scale("add", pixels=(6,), axis=2), [more])
    normed = draft.enter("normed", LayerNorm(axis=2), [it])
    q, k, v = (draft.enter(name, Linear(axis=2), [normed], BIRTHS) for name in "qkv")
    scores = draft.enter("scores", Scores(2, 2), [q, k])
    bias = draft.enter("bias", Scale("add", pixels=(6, 6)), [scores])
    soft = draft.enter("soft", Module(), [bias])
    made = draft.enter("made", Weigh(2, axis=2), [soft, v])
    total = draft.enter("total", Zip("add", axis=2), [it, draft.enter("deep", Linear(axis=2), [made], BIRTHS)])
    return draft.enter("turned", Rearrange.to_axis(draft.nodes[total], 1), [total])


ATTENDING = Example(attending, given={"soft": nn.Softmax(-1)})


def channels_attending(draft: Draft) -> str:
    """Two heads whose channels look at each other over the rows of an image, the second born at stage 2."""
    rows = draft.enter(
        "rows", Rearrange((0, 6, 6), (0, 2, 3, 1), (6, 6, 0), axis=3), [draft.conv("stem", "input", BIRTHS)]
    )
    q = draft.enter("q", Linear(axis=3), [rows], BIRTHS)
    k, v = (draft.enter(name, Linear(axis=3), [rows], (1, 1, 1, 2, 2, 2)) for name in "kv")
    looks = draft.enter("looks", Covariance(2, 0.5), [q, k])
    soft = draft.enter("soft", Module(), [looks])
    made = draft.enter("made", Mingle(2, axis=3), [soft, v])
    return draft.enter("turned", Rearrange.to_axis(draft.nodes[made], 1), [made])


CHANNELS_ATTENDING = Example(channels_attending, given={"soft": nn.Softmax(-1)})


def mixing_pixels(draft: Draft) -> str:
    stem = draft.conv("stem", "input", (2, 1, 2, 1))
    return draft.enter("it", PixelLinear(6, 5), [stem])


class Numbers(nn.Module):
    """Some for every channel, made of a table."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(shape))

    def forward(self) -> Tensor:
        return self.table.sin() + 2


def heads_apart(draft: Draft) -> str:
    """Something over each of two heads, the second born at stage 2."""
    wide = draft.enter("wide", Linear(axis=2), ["input"], BIRTHS)
    it = draft.enter("it", Headwise(2, 2, 4, axis=2), [wide])
    last = draft.enter("last", Linear(axis=2), [it], BIRTHS)
    return draft.enter("turned", Rearrange.to_axis(draft.nodes[last], 1), [last])


def merging(outer: bool) -> Callable[[Draft], str]:
    """Rows of an image as channels, behind or before those they were of."""

    def draw(draft: Draft) -> str:
        stem = draft.conv("stem", "input", (2, 1, 2, 1))
        turned = Rearrange((0, 2, 3, 6), (0, 2, 1, 3, 4), (2, 0, 18), axis=2) if outer else None
        plain = Rearrange((0, 2, 3, 6), (0, 1, 2, 3, 4), (0, 2, 18))
        read = draft.enter("turned", turned or plain, [stem])
        return draft.enter("deep", Conv1d((1,)), [draft.enter("it", Merge(2, outer), [read])], BIRTHS)

    return draw


def mlp(draft: Draft) -> str:
    flat = draft.enter("flat", Flatten(), [draft.conv("stem", "input", (1, 2), stride=2)])
    return draft.enter("it", Linear(bias=True), [flat], (1, 1, 2))


EXAMPLES: dict[str, list[Example]] = {
    "conv": [
        Example(behind_a_stem(Conv((3, 2), (2, 1), (1, 0), (1, 2), bias=True), 1, 1, 2)),
        Example(behind_a_stem(Conv((3, 3), padding=(1, 1), groups=4), *BIRTHS)),
        Example(behind_a_stem(Conv((1, 1), groups=2, bias=True), 1, 1, 1, 2, 2, 2)),
        Example(behind_a_stem(Conv((3, 3)), 2, 1, 2, 1)),  # births that are not sorted
    ],
    "conv1d": [
        Example(behind_a_sequence(Conv1d((3,), (2,), (1,), (2,), bias=True), 1, 1, 2), (3, 12)),
        Example(behind_a_sequence(Conv1d((2,), groups=4), *BIRTHS), (3, 12)),
    ],
    "convtranspose2d": [
        Example(behind_a_stem(ConvTranspose2d((3, 2), (2, 1), (1, 0), (1, 0), (1, 2), bias=True), 1, 1, 2)),
        Example(behind_a_stem(ConvTranspose2d((2, 2), (2, 2), groups=4), *BIRTHS)),
        Example(behind_a_stem(ConvTranspose2d((3, 3), groups=2, bias=True), 1, 1, 1, 2, 2, 2)),
        Example(behind_a_stem(ConvTranspose2d((3, 3)), 2, 1, 2, 1)),
    ],
    "linear": [Example(mlp)],
    "batchnorm": [Example(behind_a_stem(BatchNorm(1e-3, 0.2))), Example(behind_a_stem(BatchNorm(affine=False)))],
    "groupnorm": [Example(behind_a_stem(GroupNorm(2))), Example(behind_a_stem(GroupNorm(4, affine=False)))],
    "layernorm": [
        Example(behind_a_stem(LayerNorm())),
        Example(behind_a_stem(LayerNorm(1e-3, scale=False, shift=False))),
        Example(behind_a_stem(LayerNorm(None, center=False, shift=False))),
        Example(behind_a_stem(LayerNorm(pixels=True))),
        Example(after_mixed_births(LayerNorm())),
        Example(token_norms, (5, 3), axis=2),
    ],
    "prelu": [Example(behind_a_stem(PReLU()))],
    "map": [Example(behind_a_stem(Map(function))) for function in ("relu", "pool2", "pool2up", "maxpool3")],
    "mean": [Example(behind_a_stem(Mean()))],
    "module": [Example(behind_a_stem(Module()), given={"it": nn.Hardswish()})],
    "scale": [Example(behind_a_stem(Scale(function))) for function in ("add", "sub", "mul", "div")],
    "opaque": [Example(born_at_once(Opaque()), given={"it": nn.Softmax2d()})],
    "zip": [Example(of_two(Zip(function))) for function in ("add", "sub", "max", "min")] + [Example(gated)],
    "select": [
        Example(behind_a_stem(Select((2, 0, -1, -1, 1)), 2, 1, 1, 2, 1)),
        Example(behind_a_stem(Select((-1, 0, 2)), 2, 1, 2)),
        Example(behind_a_stem(Select((1, 3)), 1, 2)),
    ],
    "cat": [Example(of_two(Cat()))],
    "flatten": [Example(behind_a_stem(Flatten()))],
    "scores": [ATTENDING],
    "weigh": [ATTENDING],
    "covariance": [CHANNELS_ATTENDING],
    "mingle": [CHANNELS_ATTENDING],
    "tokens": [ATTENDING],
    "pixellinear": [Example(mixing_pixels, given={"it": nn.Linear(6, 5)})],
    "computed": [
        Example(behind_a_stem(Computed("add", (6, 1), held=24)), given={"it": Numbers(4, 6, 1)}),
        Example(after_mixed_births(Computed("mul", held=4)), given={"it": Numbers(4)}),
        Example(behind_a_stem(Computed("div", before=True, held=4)), given={"it": Numbers(4)}),
    ],
    "join": [Example(of_two(Join(0))), Example(of_two(Join(1)))],
    "headwise": [Example(heads_apart, (5, 3), {"it": nn.LayerNorm(2)}, axis=2)],
    "merge": [Example(merging(True)), Example(merging(False))],
    "rearrange": [Example(windows), Example(token_norms, (5, 3), axis=2)],
}
CASES = [pytest.param(each, id=f"{kind}-{i}") for kind, some in EXAMPLES.items() for i, each in enumerate(some)]


def network(example: Example) -> NestedNet:
    """The example with one head per stage, weights, slopes and statistics drawn at random."""
    draft = Draft("example", example.shape, example.axis)
    body = example.draw(draft)
    heads = [draft.head(stage, body, 3) for stage in (1, 2)]
    torch.manual_seed(0)
    net = NestedNet(draft.finish(heads, ("s", "l")), example.given).reset(torch.Generator().manual_seed(0)).eval()
    with torch.no_grad():
        for name, tensor in (*net.named_parameters(), *net.named_buffers()):
            if name.endswith(("running_mean", "bias", "it.weight")):
                tensor.add_(torch.randn_like(tensor) * (tensor != 0) if name.endswith("it.weight") else 0.5)
    return net


def images(example: Example, count: int = 3) -> Tensor:
    return torch.randn(count, *example.shape, generator=torch.Generator().manual_seed(1))


def close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def test_every_operation_has_an_example() -> None:
    assert set(EXAMPLES) == set(OPS) - {"input"}
    assert all(op.kind == kind for kind, op in OPS.items())


@pytest.mark.parametrize("example", CASES)
def test_what_comes_out_is_as_large_as_planned(example: Example) -> None:
    net, x = network(example), images(example)
    values = {net.plan.input.name: x}
    for node in net.plan.nodes[1:]:
        values[node.name] = net.compute(node, [values[read] for read in node.reads])
        assert values[node.name].shape == (3, *node.shape(node.channels)), node.name
    held = sum(int((bits != 0).expand_as(p).sum()) for p, bits in zip(net.parameters(), owners(net), strict=True))
    assert held == net.plan.params(2), "every parameter that some task owns is counted once"


@pytest.mark.parametrize("example", CASES)
def test_multiplications_are_those_that_torch_counts(example: Example) -> None:
    """The whole form of a network does what the un-nested one does; torch counts two operations for each."""
    net = network(example)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(images(example, 1))
    assert counter.get_total_flops() == 2 * net.plan.dense()[1]


def owners(net: NestedNet) -> list[Tensor]:
    found = net.owners()
    return [found[name] for name, _ in net.named_parameters()]


@pytest.mark.parametrize("example", CASES)
@torch.no_grad()
def test_stages_and_subnetworks_agree_with_the_whole(example: Example) -> None:
    net, x = network(example), images(example)
    whole = net(x)
    for stage, (answer, expected) in enumerate(zip(net.answers(x), whole, strict=True), start=1):
        close(answer, expected)
        close(net.subnet(stage)(x), expected)
        if can_live_within(net.plan):
            close(within(net, stage)(x)[0], expected)
        small = net.subnet(stage).net.plan
        assert small.params(small.stages) == net.plan.task_params(stage - 1)


@pytest.mark.parametrize("example", CASES)
@torch.no_grad()
def test_an_earlier_stage_reads_nothing_of_a_later_one(example: Example) -> None:
    """Whatever the first answer does not own is no number: its stage must not touch it."""
    net, x = network(example), images(example)
    expected = net(x)[0]
    for parameter, bits in zip(net.parameters(), owners(net), strict=True):
        parameter[(bits & 1 == 0).expand_as(parameter)] = float("nan")
    for node in net.plan.nodes:
        later = torch.tensor([not bits & 1 for bits in net.plan.owners[node.name]])
        for statistics in dict(net.layer(node.name).named_buffers() if isinstance(node.op, BatchNorm) else ()).values():
            if statistics.dim():
                statistics[later] = float("nan")
    close(next(iter(net.answers(x))), expected)
    close(net.subnet(1)(x), expected)


@pytest.mark.parametrize("example", CASES)
def test_frozen_it_computes_the_same(example: Example) -> None:
    frozen_agrees(network(example), images(example))


@torch.no_grad()
def frozen_agrees(net: NestedNet, x: Tensor) -> None:
    """Frozen stages by torch and by ONNX Runtime, and all stages frozen at once, against the network itself."""
    onnxruntime = pytest.importorskip("onnxruntime")
    stages = merge(fold(freeze(net)))
    known, by_torch, by_onnx = shapes(net, stages), {"input": x}, {"input": x.numpy()}
    for stage, expected in zip(stages, net(x), strict=True):
        logits, *given = TorchStage(stage)(*(by_torch[name] for name in stage.takes))
        by_torch |= dict(zip(stage.gives, given, strict=True))
        close(logits, expected)
        session = onnxruntime.InferenceSession(write_stage(stage, known), providers=["CPUExecutionProvider"])
        answer, *written = session.run(None, {name: by_onnx[name] for name in stage.takes})
        by_onnx |= dict(zip(stage.gives, written, strict=True))
        close(torch.from_numpy(answer), expected)
    for answer, expected in zip(TorchStage(fold((freeze_whole(net),))[0])(x), net(x), strict=True):
        close(answer, expected)


@pytest.mark.parametrize("example", CASES)
def test_gradients_stay_inside_their_task(example: Example) -> None:
    """The loss of each task reaches what it owns and nothing else."""
    net = network(example).train()
    for task, answer in enumerate(net(images(example))):
        grads = torch.autograd.grad(answer.square().sum(), list(net.parameters()), allow_unused=True, retain_graph=True)
        for grad, bits in zip(grads, owners(net), strict=True):
            if grad is not None:
                assert not grad[(bits >> task & 1 == 0).expand_as(grad)].any()


# --- channels that stand elsewhere --------------------------------------------------------------------------------


def tokens() -> NestedNet:
    """Vectors of 3 channels, 5 of them a sequence: channels are the last axis. Every token is answered."""
    draft = Draft("tokens", (5, 3), axis=2)
    wide = draft.enter("wide", Linear(bias=True, axis=2), ["input"], BIRTHS)
    relu = draft.enter("relu", Map("relu", axis=2), [wide])
    deep = draft.enter("deep", Linear(axis=2), [relu], BIRTHS)
    total = draft.enter("sum", Zip("add", axis=2), [deep, wide])
    turned = draft.enter("turned", Select((3, -1, 0, 1), axis=2), [total], (2, 2, 1, 1))
    both = draft.enter("both", Cat(axis=2), [total, turned])
    heads = []
    for stage in (1, 2):
        live = tuple(c for c, birth in enumerate(draft.births(both)) if birth <= stage)
        taken = draft.enter(f"take{stage}", Select(live, axis=2), [both], tuple(draft.births(both)[c] for c in live))
        heads.append(draft.enter(f"head{stage}", Linear(bias=True, axis=2), [taken], (stage,) * 3))
    net = NestedNet(draft.finish(heads, ("s", "l")))
    return net.reset(torch.Generator().manual_seed(0)).eval()


@torch.no_grad()
def test_channels_may_be_the_last_axis() -> None:
    net, x = tokens(), torch.randn(2, 5, 3)
    assert [tuple(each.shape) for each in net(x)] == [(2, 5, 3)] * 2
    for stage, (answer, expected) in enumerate(zip(net.answers(x), net(x), strict=True), start=1):
        close(answer, expected)
        close(net.subnet(stage)(x), expected)
    frozen_agrees(net, x)
    assert net.plan.row_macs(net.plan.by_name["deep"], 0) == 2 * 5, "one product per token and channel read"


def test_an_operation_that_knows_images_only_refuses_tokens() -> None:
    draft = Draft("tokens", (5, 3), axis=2)
    wide = draft.enter("wide", Linear(bias=True, axis=2), ["input"], BIRTHS)
    normed = draft.enter("norm", BatchNorm(), [wide])
    heads = [draft.enter(f"head{s}", Linear(axis=2), [normed], (s,) * 3) for s in (1, 2)]
    with pytest.raises(
        NestlingError, match=r"norm .batchnorm. reads wide, whose channels stand at axis 2, .* expected axis 1"
    ):
        draft.finish(heads, ("s", "l"))


@torch.no_grad()
def test_channels_of_the_input_that_nobody_reads_stay_in_their_place() -> None:
    draft = Draft("some", IMAGE)
    taken = draft.enter("taken", Select((1, 2)), ["input"])
    own = draft.enter("own", Conv((3, 3), padding=(1, 1), groups=2), [taken], (1, 1))
    body = draft.conv("body", own, BIRTHS)
    net = NestedNet(draft.finish([draft.head(stage, body, 3) for stage in (1, 2)], ("s", "l"))).eval()
    x = torch.randn(2, *IMAGE)
    images = net.layer("body")(net.layer("own")(x[:, 1:])).mean((2, 3))
    for stage, (answer, head) in enumerate(zip(net(x), net.plan.heads, strict=True), start=1):
        close(answer, net.layer(head)(images[:, : 2 * stage]))
        close(net.subnet(stage)(x), answer)


def test_one_layer_in_two_places_freezes_whole() -> None:
    plan = network(EXAMPLES["zip"][0]).plan
    nodes = tuple(replace(node, shares="one") if node.name == "two" else node for node in plan.nodes)
    net = NestedNet(replace(plan, nodes=nodes)).reset(torch.Generator().manual_seed(0)).eval()
    frozen_agrees(net, torch.randn(2, *IMAGE))


# --- Conv1d -------------------------------------------------------------------------------------------------------


def test_conv1d_counted_by_hand() -> None:
    """Of length 12: 4 channels of 3 x 3 weights at 12 places, then kernel 5 and stride 2 at 4 places over 2 and 4 channels."""
    draft = Draft("sequence", (3, 12))
    stem = draft.enter("stem", Conv1d((3,), padding=(1,)), ["input"], BIRTHS)
    it = draft.enter("it", Conv1d((5,), (2,), bias=True), [stem], (1, 2))
    plan = draft.finish([draft.head(stage, it, 3) for stage in (1, 2)], ("s", "l"))
    stem_node, node = plan.by_name["stem"], plan.by_name["it"]
    assert stem_node.size == (12,) and node.size == (4,)
    assert [plan.row_macs(stem_node, row) for row in range(4)] == [3 * 3 * 12] * 4
    assert [plan.row_macs(node, row) for row in range(2)] == [2 * 5 * 4, 4 * 5 * 4]
    assert [plan.row_params(node, row) for row in range(2)] == [2 * 5 + 1, 4 * 5 + 1]


class Sequences(nn.Module):
    """Layers and functions on sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv1d(3, 8, 5, padding=2), nn.BatchNorm1d(8)
        self.deep = nn.Conv1d(8, 8, 3, padding=1, padding_mode="circular", groups=4, bias=False)
        self.weight = nn.Parameter(torch.randn(8, 8, 3) / 5)
        self.pool, self.head = nn.AdaptiveAvgPool1d(1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu(self.norm(self.stem(x)))
        x = x + nn.functional.conv1d(self.deep(x), self.weight, stride=1, padding=1)
        out: Tensor = self.head(self.pool(x).flatten(1))
        return out


def test_sequences_of_your_own_are_nested() -> None:
    module = Sequences()
    net = nest(module, "w", shape=(3, 16)).eval()
    x = torch.randn(2, 3, 16)
    close(nest(module, "", shape=(3, 16)).eval()(x)[0], module.eval()(x))
    for stage, (answer, expected) in enumerate(zip(net.answers(x), net(x), strict=True), start=1):
        close(answer, expected)
        close(net.subnet(stage)(x), expected)
    frozen_agrees(net, x)


# --- ConvTranspose2d ----------------------------------------------------------------------------------------------


def test_transposed_convolution_counted_by_hand() -> None:
    """Of 6 x 6 pixels, each meets the 3 x 3 weights of every channel read once; 2 * 5 - 2 + 2 + 1 + 1 pixels come out."""
    draft = Draft("decoder", IMAGE)
    stem = draft.conv("stem", "input", BIRTHS)
    it = draft.enter("it", ConvTranspose2d((3, 3), (2, 2), (1, 1), (1, 1), bias=True), [stem], (1, 2))
    plan = draft.finish([draft.head(stage, it, 3) for stage in (1, 2)], ("s", "l"))
    node = plan.by_name["it"]
    assert node.size == (12, 12)
    assert [plan.row_macs(node, row) for row in range(2)] == [2 * 9 * 36, 4 * 9 * 36]
    assert [plan.row_params(node, row) for row in range(2)] == [2 * 9 + 1, 4 * 9 + 1]


def test_a_transposed_convolution_starts_with_the_variance_of_he() -> None:
    births = (1,) * 64
    op = ConvTranspose2d((4, 4), (2, 2), (1, 1))
    layer = op.layer(Node("it", op, ("x",), births, (32, 32)), [Node("x", Input(), (), births, (16, 16))])
    y = layer(torch.randn(4, 64, 16, 16)).detach()
    assert float(y.var()) == pytest.approx(2.0, rel=0.1), "two for one: a ReLU before it would halve what it reads"


class Decoder(nn.Module):
    """Smaller and larger again, by a layer and by a function; one class for every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.up = nn.ConvTranspose2d(8, 8, 3, stride=2, padding=1, output_padding=1, groups=2, bias=False)
        self.weight = nn.Parameter(torch.randn(8, 8, 3, 3) / 8)
        self.answer = nn.ConvTranspose2d(8, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.up(torch.relu(self.down(x))))
        x = torch.relu(nn.functional.conv_transpose2d(x, self.weight, None, 1, 1))
        out: Tensor = self.answer(x)
        return out


@pytest.mark.parametrize("pooled", [False, True])
def test_decoders_of_your_own_are_nested(pooled: bool) -> None:
    module = nn.Sequential(Decoder(), nn.AdaptiveAvgPool2d(1), nn.Flatten()) if pooled else Decoder()
    net = nest(module, "w", shape=(3, 8, 8)).eval()
    x = torch.randn(2, 3, 8, 8)
    close(nest(module, "", shape=(3, 8, 8)).eval()(x)[0], module.eval()(x))
    for stage, (answer, expected) in enumerate(zip(net.answers(x), net(x), strict=True), start=1):
        close(answer, expected)
        close(net.subnet(stage)(x), expected)
    frozen_agrees(net, x)


@torch.no_grad()
def test_an_exported_decoder_answers(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    module = nn.Sequential(Decoder(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net = nest(module, "w", shape=(3, 8, 8)).eval()
    x = torch.randn(4, 3, 8, 8)
    export_net(net, bare_spec(net), tmp_path / "decoder", x)
    with Portable(tmp_path / "decoder") as runtime:
        answers = list(runtime.answers(x[0].numpy()))
    for answer, expected in zip(answers, net(x[:1]), strict=True):
        close(torch.as_tensor(answer.probabilities).reshape(1, -1), expected.softmax(1))
