"""Gram matrix and update without rows: the same as with rows, on every layer that is known and beside those that are not."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from test_gradients import NETS, assert_same, batch, gradients, losses_of, make
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nestling.errors import NestlingError
from nestling.gradients import Accumulator, backward, products
from nestling.gradients.combiners import COMBINERS, OSGD, NormSGD, PCGrad
from nestling.gradients.combiners.weighted import Weighted
from nestling.gradients.layered import exact
from nestling.gradients.patches import image_bands
from nestling.gradients.products import product
from nestling.gradients.rowless import cheaper, find


class Zoo(nn.Module):
    """Layers of many kinds under three heads: tokens, strides, dilation, groups, no bias, a weight used twice, a hook."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 6, 3, stride=2, padding=1, bias=False)
        self.dilated = nn.Conv2d(6, 8, (3, 1), padding=(2, 0), dilation=(2, 1))
        self.grouped = nn.Conv2d(8, 8, 3, groups=2, padding="same")
        self.norm = nn.BatchNorm2d(8)
        self.line = nn.Conv1d(8, 8, 3)
        self.tokens = nn.Linear(8, 12)
        self.bare = nn.Linear(12, 10, bias=False)
        self.tied = nn.Linear(10, 10)
        self.hooked = nn.Linear(10, 10)
        self.hooked.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        self.scale = nn.Parameter(torch.ones(10))
        self.heads = nn.ModuleList(nn.Linear(10, 4) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.norm(self.grouped(self.dilated(self.conv(x)).tanh())).relu()
        x = self.line(x.flatten(2)).transpose(1, 2)
        x = self.bare(self.tokens(x).tanh()).mean(1)
        x = self.hooked(self.tied(self.tied(x).tanh())) * self.scale
        return [head(x) for head in self.heads]


KINDS: dict[str, Callable[[], nn.Module]] = {**{name: lambda name=name: make(name) for name in NETS}, "zoo": Zoo}  # type: ignore[misc]


def both(
    net: nn.Module, combine: Weighted, **options: object
) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """Gradients with rows and without."""
    found = []
    for mode in ("rows", "layers"):
        net.zero_grad()
        x, y = batch()
        x = x.to(next(net.parameters()).dtype)
        rows = Accumulator(net, combine, mode=mode, **options)  # type: ignore[arg-type]
        for _ in range(2):  # adds to what is there
            rows.backward(losses_of(net, x, y))
        found.append(gradients(net))
    return found[0], found[1]


@pytest.mark.parametrize("scope", ["all", "shared", "block", "tensor"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_same_update_in_every_scope(kind: str, scope: str) -> None:
    net = KINDS[kind]().double()
    rows, layers = both(net, OSGD(scope=scope))
    assert_same(layers, rows, atol=1e-12)


@pytest.mark.parametrize("method", sorted(COMBINERS))
def test_the_same_update_by_every_method(method: str) -> None:
    combine = PCGrad(shuffle=False) if method == "pcgrad" else COMBINERS[method]()
    rows, layers = both(Zoo().double(), combine, diagnose=True)
    assert_same(layers, rows, atol=1e-12)


def test_the_same_update_in_float32_and_channels_last() -> None:
    for kind in ("zoo", "tree"):
        net = KINDS[kind]().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        rows, layers = both(net, OSGD())
        assert_same(layers, rows, atol=1e-6)


def test_nearly_parallel_gradients_lose_nothing() -> None:
    """At cosine 1 - 5e-5 products in float32 would lose 4e-5 of the update."""
    updates = {}
    for dtype, mode in ((torch.float64, "rows"), (torch.float32, "rows"), (torch.float32, "layers")):
        torch.manual_seed(0)
        net, head, x, noise = nn.Linear(40, 60), torch.randn(60), torch.randn(8, 40), torch.randn(3, 60)
        net, head, x, noise = net.to(dtype), head.to(dtype), x.to(dtype), noise.to(dtype)
        losses = [(0.02 * net(x) @ (head + 0.01 * noise[t])).tanh().sum() for t in range(3)]
        report = backward(losses, net, OSGD(), mode=mode)
        assert net.weight.grad is not None and 1e-6 < float(1 - report.cosines[0, 1]) < 2e-4
        updates[dtype, mode] = net.weight.grad.double()
    exact = updates.pop((torch.float64, "rows"))
    for (_, mode), found in updates.items():
        assert float((found - exact).norm() / exact.norm()) < 1e-5, mode


def test_inputs_far_from_zero_under_a_batch_norm_lose_nothing() -> None:
    """Output gradients then add up to zero over the samples, where rows lose 6e-6 of the update; products in
    float32 alone would lose 4e-5."""
    updates = []
    for mode in ("rows", "layers"):
        torch.manual_seed(0)
        layer, norm = nn.Linear(300, 80), nn.BatchNorm1d(80)
        x, heads = 1 + 0.01 * torch.randn(16, 300), torch.randn(3, 80)
        z = norm(layer(x)).tanh()
        backward([(z @ head).pow(2).mean() for head in heads], layer, OSGD(), mode=mode)
        assert layer.weight.grad is not None
        updates.append(layer.weight.grad.double())
    assert float((updates[1] - updates[0]).norm() / updates[0].norm()) < 1.5e-5


def test_products_are_made_again_where_float32_is_not_enough() -> None:
    gram = torch.tensor([[[4.0, 1.0, 0.0], [1.0, 9.0, 0.0], [0.0, 0.0, 0.0]]], dtype=torch.float64)
    none, some = torch.zeros(1, 3, dtype=torch.float64), torch.tensor([[1e-6, 1e-6, 0.0]], dtype=torch.float64)
    assert exact(gram, none) and exact(gram, some) and not exact(gram, 10 * some)
    close = torch.tensor([[[1.0, 1 - 1e-3], [1 - 1e-3, 1.0]]], dtype=torch.float64)
    assert not exact(close, some[:, :2]) and not exact(close * float("inf"), none[:, :2])


def test_a_graph_that_is_kept_carries_no_hooks_of_ours() -> None:
    net = make("two tasks")
    losses = losses_of(net, *batch())
    rows = Accumulator(net, OSGD(), mode="layers")
    rows.backward(losses, retain_graph=True)
    first, kept = gradients(net), rows.step
    net.zero_grad()
    torch.stack(losses).sum().backward(retain_graph=True)
    assert not kept.layers and not kept.stored
    net.zero_grad()
    rows.backward(losses)
    assert_same(gradients(net), first, atol=0)


def found_in(net: nn.Module, losses: list[Tensor]) -> set[str]:
    named = list(net.named_parameters())
    return {named[layer.param][0] for layer in find(losses, [p for _, p in named], always=True)}


def test_only_layers_that_are_known_go_without_rows() -> None:
    net = Zoo()
    heads = {f"heads.{t}.weight" for t in range(3)}
    assert (
        found_in(net, losses_of(net, *batch()))
        == {"conv.weight", "dilated.weight", "tokens.weight", "bare.weight"} | heads
    )


def test_weight_gradients_are_made_once_and_only_where_that_is_cheaper() -> None:
    net = nn.Sequential(nn.Linear(600, 500), nn.ReLU(), nn.Linear(500, 400))
    losses = [net(torch.randn(8, 600)).pow(2).sum() for _ in range(1)]
    node = losses[0].grad_fn.next_functions[0][0].next_functions[0][0]
    assert node.name() == "AddmmBackward0"
    assert cheaper(net[2].weight, node, 3) and not cheaper(net[2].weight, node, 1)  # type: ignore[arg-type]
    small = nn.Linear(4, 4)
    out = small(torch.randn(64, 4))
    assert not cheaper(small.weight, out.grad_fn, 3)


@pytest.mark.parametrize("band", [1, 40, 1000])
@pytest.mark.parametrize(
    ("kernel", "padding", "dilation"),
    [
        ((3, 3), (1, 1), (1, 1)),
        ((1, 1), (0, 0), (1, 1)),
        ((2, 3), (0, 2), (1, 1)),
        ((3, 2), (3, 0), (2, 4)),
        ((5, 4), (2, 1), (1, 1)),
    ],
)
def test_products_of_patches_without_patches(
    kernel: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int], band: int
) -> None:
    images = torch.randn(5, 3, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    patches = F.unfold(images, kernel, dilation, padding).transpose(1, 2).flatten(0, 1)
    start = 0
    for among in image_bands(images, kernel, padding, dilation, band):
        stop = start + len(among)
        torch.testing.assert_close(among, patches[start:stop] @ patches[:stop].T, atol=1e-12, rtol=0)
        start = stop
    assert start == len(patches)


def test_convolutions_go_without_rows_where_pixels_are_few() -> None:
    """The four widths of a ResNet-18, of 16 images of 32x32."""

    def goes(channels: int, side: int, stride: int = 1) -> bool:
        conv = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        return cheaper(conv.weight, conv(torch.randn(16, channels, side, side)).grad_fn, 4)

    assert [goes(64, 32), goes(128, 16), goes(256, 8), goes(512, 4)] == [False, False, True, True]
    assert not goes(256, 16, stride=2)  # as many patches as at stride 1, but made of taps one by one


def test_large_images_are_not_multiplied_with_all_others_at_once() -> None:
    """Of one image of 40x40 alone that would be 1600 x 1600 numbers; bands of it are 64 x 1600."""
    conv = nn.Conv2d(2, 3, 3, padding=1)
    x = torch.randn(1, 2, 40, 40)
    updates = []
    for mode in ("rows", "layers"):
        conv.zero_grad()
        out = conv(x).tanh()
        backward([out.pow(2).mean(), out.mean(), out[..., :20].mean()], conv, OSGD(), mode=mode)
        assert conv.weight.grad is not None
        updates.append(conv.weight.grad)
    torch.testing.assert_close(updates[1], updates[0], atol=1e-6, rtol=1e-5)
    out = conv(x)
    use = find([out.mean(), out.pow(2).mean()], list(conv.parameters()), always=True)[0]
    use.deltas = {task: torch.randn_like(out) for task in use.tasks}
    assert max(len(among) for among in use._bands(torch.float32)) == 64


def test_a_checkpoint_is_not_run_again_for_its_inputs() -> None:
    torch.manual_seed(0)
    stage = nn.Sequential(nn.Linear(6, 30), nn.BatchNorm1d(30))
    heads = nn.ModuleList(nn.Linear(30, 4) for _ in range(2))
    x, y = torch.randn(8, 6), torch.randint(4, (8,))

    def losses() -> list[Tensor]:
        z = checkpoint(stage, x, use_reentrant=False)
        return [F.cross_entropy(head(z), y) for head in heads]

    every = nn.ModuleList([stage, heads])
    found = losses()
    counted = int(stage[1].num_batches_tracked)  # type: ignore[arg-type]
    assert found_in(every, found) == {"1.0.weight", "1.1.weight"}
    assert int(stage[1].num_batches_tracked) == counted  # type: ignore[arg-type]
    rows = Accumulator(every, OSGD(), mode="layers")
    rows.backward(found)
    assert int(stage[1].num_batches_tracked) == counted + 1  # type: ignore[arg-type]


def test_a_report_keeps_no_graph() -> None:
    net = make("two tasks")
    report = Accumulator(net, OSGD(), mode="layers").backward(losses_of(net, *batch()))
    assert report.gram is not None and not report.gram.requires_grad


def test_micro_batches_have_rows() -> None:
    net = make("two tasks")
    rows = Accumulator(net, OSGD(), mode="layers")
    rows.add(losses_of(net, *batch()))
    assert not rows.step.layers and all(g is not None for g in rows.step.stored[0][:2])


def test_heads_in_one_layer_are_still_noticed() -> None:
    """Rows are looked at once before methods that ask who owns what go without them."""
    net = nn.Linear(6, 8)
    outs = net(torch.randn(5, 6)).chunk(2, 1)
    with pytest.raises(NestlingError, match="never meet"):
        backward([out.pow(2).sum() for out in outs], net, NormSGD(), mode="layers")


def test_wrong_modes_and_numbers_are_refused_in_words() -> None:
    net = make("two tasks")
    with pytest.raises(NestlingError, match=r"mode is 'fast': expected auto, rows or layers"):
        Accumulator(net, OSGD(), mode="fast")
    losses = losses_of(net, *batch())
    with pytest.raises(NestlingError, match="gradient of task 1 "):
        backward([losses[0], losses[1] * float("nan")], net, OSGD(), mode="layers")
    assert all(grad is None for grad in gradients(net).values())
    losses = losses_of(net, *batch())
    losses[0].backward()
    with pytest.raises(NestlingError, match="already freed"):
        backward(losses, net, OSGD(), mode="layers")
    net.zero_grad()
    with pytest.raises(NestlingError, match="scope='all'"):
        Accumulator(net, OSGD(scope="tensor"), mode="layers", refresh=2).backward(losses_of(net, *batch()))
    assert all(grad is None for grad in gradients(net).values())


def test_methods_that_need_all_rows_get_them() -> None:
    aggregation = pytest.importorskip("torchjd.aggregation")
    from nestling.gradients.combiners.torchjd import FromTorchJD

    for aggregator in (aggregation.MGDA(), aggregation.TrimmedMean(trim_number=1)):
        rows, layers = both(Zoo().double(), FromTorchJD(aggregator))  # type: ignore[arg-type]
        assert_same(layers, rows, atol=1e-10)


def test_a_scaler_changes_no_step() -> None:
    net = Zoo()
    net.hooked.weight._backward_hooks.clear()  # type: ignore[union-attr]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    backward(losses_of(net, *batch()), net, OSGD(), mode="rows")
    wanted = gradients(net)
    net.zero_grad()
    backward(losses_of(net, *batch()), net, OSGD(), mode="layers", scaler=scaler)
    scaler.unscale_(torch.optim.SGD(net.parameters()))
    assert_same(gradients(net), wanted, atol=1e-6)


@pytest.mark.parametrize("shape", [(64, 256, 512), (300, 64, 1000), (1, 70_000, 4), (3, 5, 7)])
def test_products_by_the_faster_library_are_products(shape: tuple[int, int, int]) -> None:
    """However the matrices lie in memory; in strides of their own, oneDNN's would take a thousand times as long."""
    generator = torch.Generator().manual_seed(0)
    m, k, n = shape
    wide_a, wide_b = torch.randn(2 * m, 2 * k, generator=generator), torch.randn(2 * k, 2 * n, generator=generator)
    a, b = wide_a[:m, :k], wide_b[::2, ::2]
    wanted = a.double() @ b.double()
    for left in (a, a.contiguous(), a.T.contiguous().T):
        for right in (b, b.contiguous(), b.T.contiguous().T):
            found = product(left, right)
            assert found.dtype == torch.float32
            assert float((found.double() - wanted).norm() / wanted.norm()) < 2e-6
    torch.testing.assert_close(product(a.double(), b.double()), wanted)


def test_passes_by_the_faster_library_are_those_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Absent tasks, a checkpoint, a layer compiled and a loss made of it as ever, and the same update."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(7, 200), nn.Tanh(), nn.Linear(200, 200, bias=False), nn.Tanh())
    heads = nn.ModuleList(nn.Linear(200, 3) for _ in range(3))
    every, x = nn.ModuleList([net, heads]), torch.randn(200, 7)

    def losses() -> list[Tensor | None]:
        first = checkpoint(net[:2], x, use_reentrant=False)
        z = net[2:](first)
        return [heads[0](first).pow(2).mean(), heads[1](z).exp().mean(), None, heads[2](z).sin().mean()]

    def updated(mode: str, scope: str) -> dict[str, Tensor | None]:
        rows = Accumulator(every, OSGD(scope=scope), mode=mode)
        for _ in range(2):  # at the first step some methods look at the rows themselves
            every.zero_grad()
            rows.backward(losses())
        return gradients(every)

    for scope in ("all", "shared"):
        found = {mode: updated(mode, scope) for mode in ("rows", "auto", "layers")}
        with monkeypatch.context() as patch:
            patch.setattr(products, "present", lambda: False)
            wanted = updated("rows", scope)
        for update in found.values():
            assert_same(update, wanted, atol=1e-6)


def test_only_passes_with_large_products_go_by_the_faster_library(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def wide(a: Tensor, b: Tensor) -> Tensor:
        asked.append((*a.shape, *b.shape))
        return a @ b

    monkeypatch.setattr(products, "present", lambda: True)
    monkeypatch.setattr(products, "_wide", wide)
    for width in (20, 256):
        net = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        out = net(torch.randn(50, width))
        backward([out.pow(2).mean(), out.mean()], net, OSGD(), mode="rows")
        assert bool(asked) == (width == 256)
    assert {(256, 50, 50, 256), (50, 256, 256, 256)} == set(asked)  # gradients of weights, and of what came in


def test_sparse_products_in_a_pass_stay_torchs_own() -> None:
    torch.manual_seed(0)
    net, x = nn.Linear(256, 256), torch.randn(128, 256)
    graph = (torch.rand(128, 128) < 0.05).float().to_sparse_csr()
    updates = []
    for adjacency in (graph, graph.to_dense()):
        net.zero_grad()
        out = adjacency @ net(x).tanh()
        backward([out.pow(2).mean(), out.mean()], net, OSGD(), mode="rows")
        updates.append(gradients(net))
    assert_same(updates[0], updates[1], atol=1e-6)


def test_passes_by_the_faster_library_load_no_compiler() -> None:
    code = """
import sys, torch
from nestling.gradients import backward, products
from nestling.gradients.combiners import OSGD
net = torch.nn.Linear(256, 256)
out = net(torch.randn(64, 256))
with products._Passing():
    out.sum().item()
backward([out.pow(2).mean(), out.mean()], net, OSGD())
print("torch._dynamo" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
