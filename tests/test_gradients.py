"""Gradients: sgd-sum is plain backward on every kind of net and precision; rows, accumulation, refresh, errors."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch._functorch.config as functorch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from nestling.errors import NestlingError
from nestling.gradients import Accumulator, TaskRows, backward, checks
from nestling.gradients.checks import explained
from nestling.gradients.combiners import COMBINERS, OSGD, SGD, NormOSGD, NormSGD, PCGrad, SumSGD
from nestling.gradients.combiners.diagnosis import Report
from nestling.gradients.combiners.weighted import Weighted
from nestling.gradients.owners import from_owners

# Nets of every shape that ownership can take.


class Nested(nn.Module):
    """Depth-nested exits: task t owns the first t + 1 stages. One stage holds a parameter nobody uses."""

    def __init__(self, stages: int = 3, wrap: Callable[[nn.Module], nn.Module] = lambda stage: stage) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            wrap(nn.Sequential(nn.Conv2d(3 if s == 0 else 6, 6, 3, padding=1), nn.ReLU())) for s in range(stages)
        )
        self.heads = nn.ModuleList(nn.Linear(6, 4) for _ in range(stages))
        self.unused = nn.Parameter(torch.ones(5))

    def features(self, x: Tensor) -> Iterator[Tensor]:
        for stage in self.stages:
            x = stage(x)
            yield x

    def forward(self, x: Tensor) -> list[Tensor]:
        return [head(f.mean((2, 3))) for head, f in zip(self.heads, self.features(x), strict=True)]


class Checkpointed(Nested):
    def features(self, x: Tensor) -> Iterator[Tensor]:
        for stage in self.stages:
            x = checkpoint(stage, x, use_reentrant=False)
            yield x


class Tree(nn.Module):
    """A trunk, two branches, and two tasks on each: shared by four, by two and by one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Conv2d(3, 6, 3)
        self.branches = nn.ModuleList(nn.Conv2d(6, 5, 3) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(5, 4) for _ in range(4))

    def forward(self, x: Tensor) -> list[Tensor]:
        middle = [branch(self.trunk(x).relu()).relu().mean((2, 3)) for branch in self.branches]
        return [head(middle[t // 2]) for t, head in enumerate(self.heads)]


class Sliced(nn.Module):
    """Width-nested: masked weights, block lower triangular; births 1, 1, 2 of 4 channels' quarters."""

    births = torch.tensor([1, 2, 3, 3])

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.second = nn.Conv2d(4, 4, 3)
        self.heads = nn.ModuleList(nn.Linear(w, 4) for w in (1, 2, 4))
        self.register_buffer("mask", (self.births[:, None] >= self.births[None, :]).float()[:, :, None, None])

    def features(self, x: Tensor) -> Tensor:
        return self.first(x).relu()

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.features(x)
        weight = self.second.weight * self.get_buffer("mask")
        pooled = F.conv2d(x, weight, self.second.bias).relu().mean((2, 3))
        return [head(pooled[:, :width]) for width, head in zip((1, 2, 4), self.heads, strict=True)]

    def owners(self) -> dict[str, Tensor]:
        from_birth = torch.tensor([0, 7, 6, 4])  # born at 1: tasks 0 1 2; at 2: 1 2; at 3: 2
        born: Tensor = from_birth[self.births]
        second = torch.where(self.get_buffer("mask")[:, :, 0, 0].cpu() > 0, born[:, None], 0)
        owners = {
            "first.weight": born[:, None, None, None],
            "first.bias": born,
            "second.weight": second[:, :, None, None],
            "second.bias": born,
        }
        for task in range(3):
            owners[f"heads.{task}.weight"] = owners[f"heads.{task}.bias"] = torch.tensor(1 << task)
        return owners


class TwoTask(nn.Module):
    """One encoder, a classifier and a regressor: not an anytime net. Tied weights inside the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv2d(3, 3, 3, padding=1)
        self.classify = nn.Linear(3, 4)
        self.regress = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> list[Tensor]:
        pooled = self.encoder(self.encoder(x).relu()).mean((2, 3))
        return [self.classify(pooled), self.regress(pooled)]


NETS: dict[str, Callable[[], nn.Module]] = {
    "nested": Nested,
    "checkpointed": Checkpointed,
    "tree": Tree,
    "sliced": Sliced,
    "two tasks": TwoTask,
}


def make(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return NETS[name]()


def batch(size: int = 4, seed: int = 1) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(size, 3, 8, 8, generator=g), torch.randint(4, (size,), generator=g)


def losses_of(net: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    return [F.cross_entropy(out, y) if out.shape[1] > 1 else (out[:, 0] - y).pow(2).mean() for out in net(x)]


def gradients(net: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}


def assert_same(found: dict[str, Tensor | None], wanted: dict[str, Tensor | None], atol: float = 1e-6) -> None:
    for name, want in wanted.items():
        have = found[name]
        if want is None:
            assert have is None, f"{name} got a gradient that plain backward does not give"
        else:
            assert have is not None, f"{name} got no gradient"
            assert have.stride() == want.stride(), name
            torch.testing.assert_close(have, want, atol=atol, rtol=1e-5)


def plain(net: nn.Module, losses: list[Tensor]) -> dict[str, Tensor | None]:
    net.zero_grad()
    sum(losses[1:], start=losses[0]).backward()
    wanted = gradients(net)
    net.zero_grad()
    return wanted


both = pytest.mark.parametrize("diagnose", [True, False], ids=["rows", "one backward"])


@both
@pytest.mark.parametrize("name", sorted(NETS))
class TestSumIsPlainBackward:
    def test_in_float32(self, name: str, diagnose: bool) -> None:
        net = make(name)
        wanted = plain(net, losses_of(net, *batch()))
        backward(losses_of(net, *batch()), net, SumSGD(), diagnose=diagnose)
        assert_same(gradients(net), wanted)

    def test_with_frozen_parameters(self, name: str, diagnose: bool) -> None:
        net = make(name)
        every = list(net.parameters())
        every[0].requires_grad_(False)
        every[-1].requires_grad_(False)
        wanted = plain(net, losses_of(net, *batch()))
        backward(losses_of(net, *batch()), list(net.parameters()), SumSGD(), diagnose=diagnose)
        assert_same(gradients(net), wanted)

    def test_adds_to_what_is_there(self, name: str, diagnose: bool) -> None:
        net = make(name)
        once = plain(net, losses_of(net, *batch()))
        for _ in range(2):
            backward(losses_of(net, *batch()), net, SumSGD(), diagnose=diagnose)
        assert_same(gradients(net), {n: None if g is None else 2 * g for n, g in once.items()})

    def test_under_accumulation(self, name: str, diagnose: bool) -> None:
        net = make(name)
        x, y = batch(8)
        wanted = plain(net, losses_of(net, x, y))
        rows = Accumulator(net, SumSGD(), diagnose=diagnose)
        for part in range(4):
            rows.add([loss / 4 for loss in losses_of(net, x[2 * part : 2 * part + 2], y[2 * part : 2 * part + 2])])
        assert all(p.grad is None for p in net.parameters())  # nothing is written before fill
        rows.fill()
        assert_same(gradients(net), wanted)

    def test_under_bfloat16_autocast(self, name: str, diagnose: bool) -> None:
        net = make(name)

        def losses() -> list[Tensor]:
            with torch.autocast("cpu", torch.bfloat16):
                return losses_of(net, *batch())

        wanted = plain(net, losses())
        backward(losses(), net, SumSGD(), diagnose=diagnose)
        assert_same(gradients(net), wanted, atol=8e-3)  # bfloat16 carries 8 bits; passes are summed apart

    def test_under_float16_with_a_scaler(self, name: str, diagnose: bool) -> None:
        net = make(name)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

        def losses() -> list[Tensor]:
            with torch.autocast("cpu", torch.float16):
                return losses_of(net, *batch())

        wanted = plain(net, [scaler.scale(loss) for loss in losses()])
        wanted = {n: None if g is None else g / 2.0**10 for n, g in wanted.items()}
        backward(losses(), net, SumSGD(), diagnose=diagnose, scaler=scaler)
        scaler.unscale_(optimizer)
        assert_same(gradients(net), wanted, atol=1e-3)  # float16 carries 11 bits

    def test_in_channels_last(self, name: str, diagnose: bool) -> None:
        net = make(name).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x, y = batch()
        x = x.to(memory_format=torch.channels_last)
        wanted = plain(net, losses_of(net, x, y))
        backward(losses_of(net, x, y), net, SumSGD(), diagnose=diagnose)
        found = gradients(net)
        assert_same(
            {n: None if g is None else g.contiguous() for n, g in found.items()},
            {n: None if g is None else g.contiguous() for n, g in wanted.items()},
        )

    def test_in_float64(self, name: str, diagnose: bool) -> None:
        net = make(name).double()
        x, y = batch()
        wanted = plain(net, losses_of(net, x.double(), y))
        backward(losses_of(net, x.double(), y), net, SumSGD(), diagnose=diagnose)
        assert_same(gradients(net), wanted, atol=1e-14)


@pytest.mark.slow
def test_sum_is_plain_backward_with_compiled_stages() -> None:
    torch.manual_seed(0)
    with functorch.patch(donated_buffer=False):
        net = Nested(wrap=lambda stage: torch.compile(stage))  # type: ignore[arg-type, return-value]
        wanted = plain(net, losses_of(net, *batch()))
        backward(losses_of(net, *batch()), net, SumSGD(), diagnose=True)
        assert_same(gradients(net), wanted)
        backward(losses_of(net, *batch()), net, OSGD())


def test_failures_of_torch_are_explained() -> None:
    """Whether torch gives buffers away depends on what it compiled and cached before, so its words are used here."""
    donated = "This backward function was compiled with non-empty donated buffers which requires retain_graph=False"
    assert "donated_buffer = False" in str(explained(RuntimeError(donated), 1))
    layer = nn.Linear(3, 3)
    out = checkpoint(layer, torch.ones(2, 3, requires_grad=True), use_reentrant=True)
    with pytest.raises(NestlingError, match="use_reentrant=False"):
        backward([out.sum(), out.pow(2).sum()], layer, OSGD())


@pytest.mark.parametrize("method", ["sgd", "osgd", "normsgd", "osgd-norm"])
def test_a_scaler_changes_no_step(method: str) -> None:
    """Scaled, combined, unscaled: the same update as without a scaler, normalised methods included."""
    net, scaled = make("nested"), make("nested")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    optimizer = torch.optim.SGD(scaled.parameters(), lr=0.1)
    for _ in range(2):
        for module, s in ((net, None), (scaled, scaler)):
            module.zero_grad()
            backward(losses_of(module, *batch()), module, COMBINERS[method](), scaler=s)
        scaler.unscale_(optimizer)
        assert_same(gradients(scaled), gradients(net), atol=1e-7)
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for p, q in zip(net.parameters(), scaled.parameters(), strict=True):
                p.copy_(q)


def test_a_scaler_skips_the_step_of_an_overflow() -> None:
    net = make("nested")
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = losses_of(net, *batch())
    losses[1] = losses[1] * float("inf")
    backward(losses, net, NormOSGD(), scaler=scaler)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    for name, p in net.named_parameters():
        assert torch.equal(p, before[name])


def test_only_the_given_parameters_get_gradients() -> None:
    net = make("two tasks")
    encoder, head = net.get_submodule("encoder"), net.get_submodule("classify")
    backward(losses_of(net, *batch()), encoder, OSGD())
    assert [name for name, grad in gradients(net).items() if grad is None] == [
        f"{name}.{kind}" for name in ("classify", "regress") for kind in ("weight", "bias")
    ]
    backward(losses_of(net, *batch()), [*encoder.parameters(), *head.parameters()], OSGD())
    assert all(p.grad is not None for p in head.parameters())


# Rows are stored only where owned, and a task's backward runs only through its own subnetwork.


def test_rows_hold_only_what_a_task_owns() -> None:
    net = make("sliced")
    rows = Accumulator(net, OSGD())
    rows.add(losses_of(net, *batch()))
    counts = [sum(g.numel() for g in row if g is not None) for row in rows.step.stored]
    # first: 27 + 1 per channel; second: a leading block of the channels; own head
    assert counts == [28 * w + 9 * w * w + w + 4 * w + 4 for w in (1, 2, 4)]


def test_a_task_runs_backward_only_through_its_own_stages() -> None:
    net = make("nested")
    ran: list[int] = []
    for index, stage in enumerate(net.stages):  # type: ignore[arg-type]
        stage.register_full_backward_hook(lambda m, i, o, index=index: ran.append(index))
    backward(losses_of(net, *batch()), net, OSGD())
    assert sorted(ran) == [0, 0, 0, 1, 1, 2]


def test_sgd_needs_one_backward_only() -> None:
    net = make("nested")
    ran: list[int] = []
    net.stages[0].register_full_backward_hook(lambda m, i, o: ran.append(0))  # type: ignore[index, union-attr]
    report = backward(losses_of(net, *batch()), net, SGD())
    assert ran == [0]
    with pytest.raises(NestlingError, match="diagnose=True"):
        _ = report.cosines


def test_element_wise_ownership_of_a_width_nest() -> None:
    """OSGD by block on a width nest equals the loop over its padded rows, block by block."""
    net = make("sliced").double()
    x, y = batch()
    x = x.double()
    named = list(net.named_parameters())
    owners = net.owners()  # type: ignore[operator]
    layout = from_owners(named, owners, 3)
    assert {piece.owners for piece in layout.pieces} == {7, 6, 4, 1, 2}
    assert sum(piece.size for piece in layout.pieces) == sum(int((owners[n].expand_as(p) != 0).sum()) for n, p in named)
    from gradient_zoo import literal_osgd

    jacobian = []
    for loss in losses_of(net, x, y):
        grads = torch.autograd.grad(loss, [p for _, p in named], retain_graph=True, allow_unused=True)
        jacobian.append(
            torch.cat(
                [
                    torch.zeros_like(p).flatten() if g is None else g.flatten()
                    for (_, p), g in zip(named, grads, strict=True)
                ]
            )
        )
    rows = torch.stack(jacobian)
    masks = torch.cat([owners[n].expand_as(p).flatten() for n, p in named])
    wanted = torch.zeros_like(rows[0])
    for owner in masks.unique().tolist():
        columns = masks == owner
        wanted[columns] = literal_osgd(rows[:, columns], [0, 1, 2], [1, 1, 1])
    backward(losses_of(net, x, y), net, OSGD(scope="block"))
    found = torch.cat([p.grad.flatten() for _, p in named if p.grad is not None])
    torch.testing.assert_close(found, wanted, atol=1e-13, rtol=1e-10)


@pytest.mark.parametrize("name", sorted(NETS))
def test_compact_rows_and_padded_rows_agree(name: str) -> None:
    """The Gram of what is stored is the Gram of the padded matrix."""
    net = make(name).double()
    x, y = batch()
    seen: list[tuple[Tensor, Tensor]] = []

    class Look(SumSGD):
        def __call__(self, rows: TaskRows) -> Report:
            matrix = rows.matrix()
            seen.append((rows.gram()[0], matrix @ matrix.T))
            return super().__call__(rows)

    backward(losses_of(net, x.double(), y), net, Look(), diagnose=True)
    torch.testing.assert_close(seen[0][0], seen[0][1], atol=1e-14, rtol=1e-12)


# Accumulation projects once; refresh goes on with old weights.


def test_accumulation_adds_rows_and_projects_once() -> None:
    net = make("nested")
    x, y = batch(8)
    backward(losses_of(net, x, y), net, OSGD())
    wanted = gradients(net)
    net.zero_grad()
    rows = Accumulator(net, OSGD())
    for half in (slice(0, 4), slice(4, 8)):
        rows.add([loss / 2 for loss in losses_of(net, x[half], y[half])])
    rows.fill()
    assert_same(gradients(net), wanted)
    net.zero_grad()
    for half in (slice(0, 4), slice(4, 8)):  # projecting each half is something else
        backward([loss / 2 for loss in losses_of(net, x[half], y[half])], net, OSGD())
    found, want = gradients(net)["stages.0.0.weight"], wanted["stages.0.0.weight"]
    assert found is not None and want is not None and (found - want).norm() > 1e-3 * want.norm()


def test_gradients_that_autograd_shares_between_parameters_survive_accumulation() -> None:
    a, b = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    rows = Accumulator([a, b], SumSGD(), diagnose=True)
    for _ in range(3):
        total = (a + b).sum()
        rows.add([total, 2 * total])
    rows.fill()
    assert a.grad is not None and b.grad is not None
    assert a.grad.tolist() == b.grad.tolist() == [9.0] * 3
    a.grad.zero_()
    assert b.grad.tolist() == [9.0] * 3


def test_refresh_keeps_the_weights_between() -> None:
    net = make("nested")
    rows = Accumulator(net, OSGD(), refresh=3)
    passes: list[int] = []
    net.stages[0].register_full_backward_hook(lambda m, i, o: passes.append(0))  # type: ignore[index, union-attr]
    reports, counts = [], []
    for step in range(7):
        net.zero_grad()
        passes.clear()
        losses = losses_of(net, *batch(seed=step))
        report = rows.backward(losses)
        reports.append(report)
        counts.append(len(passes))
        assert report.weights is not None
        found = gradients(net)
        fresh = losses_of(net, *batch(seed=step))
        weighted = [w * loss for w, loss in zip(report.weights[0].float(), fresh, strict=True)]
        assert_same(found, plain(net, weighted))
    assert counts == [3, 1, 1, 3, 1, 1, 3]
    assert [r.refreshed for r in reports] == [True, False, False, True, False, False, True]
    assert reports[1].weights is reports[0].weights and reports[3].weights is not reports[0].weights
    assert not rows.backward(losses_of(net, *batch())).refreshed
    rows.renew()
    assert [rows.backward(losses_of(net, *batch())).refreshed for _ in range(4)] == [True, False, False, True]


@pytest.mark.parametrize("combine", [OSGD(scope="tensor"), NormSGD()])
def test_refresh_needs_one_weight_per_task(combine: Weighted) -> None:
    net = make("nested")
    with pytest.raises(NestlingError, match="scope='all'"):
        Accumulator(net, combine, refresh=2).backward(losses_of(net, *batch()))


# Freezing and unfreezing is followed from step to step.


@both
@pytest.mark.parametrize("at_first", [True, False], ids=["frozen later", "unfrozen later"])
@pytest.mark.parametrize("name", ["nested", "sliced"])  # owners found from the graph, and given
def test_parameters_may_be_frozen_and_unfrozen_between_steps(name: str, at_first: bool, diagnose: bool) -> None:
    net = make(name)
    first = list(net.parameters())[:2]
    for p in first:
        p.requires_grad_(at_first)
    rows = Accumulator(net, SumSGD(), diagnose=diagnose)
    used: dict[bool, object] = {}
    for needed in (at_first, not at_first, at_first, not at_first):
        for p in first:
            p.requires_grad_(needed)
        wanted = plain(net, losses_of(net, *batch()))
        with NoWaiting() if needed in used else nullcontext():  # planned at the first step with these parameters only
            rows.backward(losses_of(net, *batch()))
        assert_same(gradients(net), wanted)
        assert rows.now.used is used.setdefault(needed, rows.now.used)  # what a captured CUDA graph reads from


def test_weights_are_found_anew_for_other_parameters() -> None:
    net = make("nested")
    rows = Accumulator(net, OSGD(), refresh=3)
    refreshed = [rows.backward(losses_of(net, *batch())).refreshed for _ in range(2)]
    net.get_parameter("stages.0.0.weight").requires_grad_(False)
    refreshed += [rows.backward(losses_of(net, *batch())).refreshed for _ in range(2)]
    assert refreshed == [True, False, True, False]


def test_freezing_amid_a_step_is_refused_in_words() -> None:
    net = make("nested")
    rows = Accumulator(net, OSGD())
    rows.add(losses_of(net, *batch()))
    net.get_parameter("stages.0.0.weight").requires_grad_(False)
    with pytest.raises(NestlingError, match=r"stages.0.0.weight was frozen .* call fill first"):
        rows.add(losses_of(net, *batch()))
    rows.fill()
    rows.add(losses_of(net, *batch()))


# No waiting for the device.


class NoWaiting(TorchDispatchMode):
    """Fails on every operation that reads a value back to the host or makes a shape of it."""

    forbidden = ("_local_scalar_dense", "nonzero", "item", "is_nonzero", "unique", "masked_select", "equal")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func._schema.name.split("::")[1]
        assert name not in self.forbidden, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scope", ["all", "shared", "block", "tensor"])
@pytest.mark.parametrize("method", sorted(COMBINERS))
def test_a_step_never_waits_for_the_device(method: str, scope: str) -> None:
    """On the meta device there is no value to read: whatever runs there cannot wait. On the CPU, watch the calls."""
    for device in ("meta", "cpu"):
        net = make("nested").to(device)
        combine = COMBINERS[method]()
        combine.scope = scope if method not in ("normsgd", "sgd", "sgd-sum") else combine.scope
        rows = Accumulator(net, combine, diagnose=True, check=False)
        x, y = (t.to(device) for t in batch())
        for _ in range(2):
            with NoWaiting():
                report = rows.backward(losses_of(net, x, y))
                _ = report.cosines, report.kept, report.flips
        first = net.get_parameter("stages.0.0.weight")
        assert first.grad is not None and first.grad.device.type == device


# Wrong use gets words.


@dataclass
class Wrong:
    name: str
    words: str
    act: Callable[[nn.Module, list[Tensor]], object]


WRONG = [
    Wrong("a vector", r"task 1 has shape \(2,\)", lambda n, ls: backward([ls[0], torch.stack(ls[:2])], n, OSGD())),
    Wrong("one tensor", r"list\(losses\)", lambda n, ls: backward(torch.stack(ls), n, OSGD())),
    Wrong("no losses", "found 0 losses", lambda n, ls: backward([], n, OSGD())),
    Wrong("a float", "task 0 is a float", lambda n, ls: backward([1.0, *ls], n, OSGD())),  # type: ignore[list-item]
    Wrong(
        "names",
        "the losses have no names: pass the losses as a dict",
        lambda n, ls: backward(ls, n, OSGD(order=["a", "b", "c"])),
    ),
    Wrong(
        "a name",
        "'d', but the losses' names are",
        lambda n, ls: backward(dict(zip("abc", ls, strict=True)), n, OSGD(order=["a", "b", "d"])),
    ),
    Wrong("none", "every loss is None", lambda n, ls: backward([None, None], n, OSGD())),
    Wrong("a class", r"the class OSGD: .*nestling.OSGD\(\)", lambda n, ls: backward(ls, n, OSGD)),  # type: ignore[arg-type]
    Wrong("a name", "combine is 'osgd'", lambda n, ls: backward(ls, n, "osgd")),  # type: ignore[arg-type]
    Wrong(
        "optimizer",
        "params is an optimizer",
        lambda n, ls: backward(ls, torch.optim.SGD(n.parameters()), OSGD()),  # type: ignore[arg-type]
    ),
    Wrong("swapped", "losses is a Nested: .*the losses come first", lambda n, ls: backward(n, ls, OSGD())),  # type: ignore[arg-type]
    Wrong("swapped parameters", "losses come first", lambda n, ls: backward(n.parameters(), ls, OSGD())),
    Wrong("a number", "losses is a float: expected a list", lambda n, ls: backward(1.0, n, OSGD())),  # type: ignore[arg-type]
    Wrong("no graph", "task 2 has no graph", lambda n, ls: backward([*ls[:2], ls[2].detach()], n, OSGD())),
    Wrong("order", "permutation", lambda n, ls: backward(ls, n, OSGD(order=[0, 1]))),
    Wrong("k", "importance has 2 numbers for 3", lambda n, ls: backward(ls, n, SGD(importance=[1, 2]))),
    Wrong("no params", "none of the 0 parameters", lambda n, ls: backward(ls, [], OSGD())),
    Wrong("frozen", "none of the", lambda n, ls: backward(ls, [torch.ones(3)], OSGD())),
    Wrong("names", "expected tensors", lambda n, ls: backward(ls, ["weight"], OSGD())),  # type: ignore[arg-type]
    Wrong("not leaf", "not a leaf", lambda n, ls: backward(ls, [next(n.parameters()) * 2], OSGD())),
    Wrong("nan", "gradient of task 1 ", lambda n, ls: backward([ls[0], ls[1] * float("nan"), ls[2]], n, OSGD())),
    Wrong("nan in sgd", "loss of task 2 ", lambda n, ls: backward([*ls[:2], ls[2] * float("inf")], n, SGD())),
    Wrong("refresh", "refresh is 0", lambda n, ls: Accumulator(n, OSGD(), refresh=0)),
    Wrong("empty fill", "call add", lambda n, ls: Accumulator(n, OSGD()).fill()),
    Wrong("used twice", "already freed", lambda n, ls: (ls[0].backward(), backward(ls, n, OSGD()))),
    Wrong("owners' names", "no entry for parameter", lambda n, ls: backward(ls, n, OSGD(), owners={"x": ls[0]})),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: w.name)
def test_wrong_use_is_refused_in_words(wrong: Wrong) -> None:
    net = make("nested")
    losses = losses_of(net, *batch())
    before = gradients(net)
    with pytest.raises(NestlingError, match=wrong.words):
        wrong.act(net, losses)
    if wrong.name != "used twice":
        assert gradients(net) == before  # `.grad` was left alone


@both
def test_losses_may_come_from_a_generator(diagnose: bool) -> None:
    net = make("nested")
    wanted = plain(net, losses_of(net, *batch()))
    backward((loss for loss in losses_of(net, *batch())), net, SumSGD(), diagnose=diagnose)
    assert_same(gradients(net), wanted)


def test_losses_are_checked_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = checks.check_losses

    def counted(losses: Iterable[Tensor | None]) -> list[Tensor | None]:
        calls.append(losses)
        return real(losses)

    monkeypatch.setattr(checks, "check_losses", counted)
    net = make("nested")
    backward(losses_of(net, *batch()), net, OSGD())
    Accumulator(net, OSGD()).backward(losses_of(net, *batch()))
    assert len(calls) == 2


def owner_case(owners: dict[str, Tensor], words: str) -> None:
    layer = nn.Linear(4, 4, bias=False)
    losses = [layer(torch.ones(1, 4)).sum(), layer(torch.ones(1, 4)).pow(2).sum()]
    with pytest.raises(NestlingError, match=words):
        backward(losses, layer, OSGD(), owners=owners)


def test_wrong_owners_are_refused_in_words() -> None:
    owner_case({"weight": torch.ones(4, 4)}, "expected int64")
    owner_case({"weight": torch.ones(3, 4, dtype=torch.int64)}, "broadcasts to the parameter's shape")
    owner_case({"weight": torch.full((4, 4), 4)}, "name task 2, but there are 2 losses")


def test_owners_scattered_beyond_reason_are_refused_in_words() -> None:
    layer = nn.Linear(64, 64, bias=False)
    scattered = torch.randint(1, 4, (64, 64), generator=torch.Generator().manual_seed(0))
    losses = [layer(torch.ones(1, 64)).sum(), layer(torch.ones(1, 64)).pow(2).sum()]
    with pytest.raises(NestlingError, match="sorted by birth"):
        backward(losses, layer, OSGD(), owners={"weight": scattered})


def test_a_lost_check_can_be_made_up_for() -> None:
    """On a GPU a step does not look for NaN; the report does when asked."""
    net = make("nested")
    losses = losses_of(net, *batch())
    report = backward([losses[0], losses[1] * float("nan"), losses[2]], net, OSGD(), check=False)
    with pytest.raises(NestlingError, match="task 1 "):
        report.check()


# Golden losses.

GOLDEN: dict[str, list[float]] = {
    "normsgd": [
        1.38714669,
        1.36654203,
        1.35701897,
        1.35269438,
        1.34851067,
        1.34889448,
        1.34542844,
        1.33110112,
        1.29948245,
        1.24075605,
    ],
    "osgd": [
        1.38714669,
        1.3719966,
        1.35334074,
        1.34227892,
        1.3424886,
        1.34911404,
        1.35340466,
        1.35116407,
        1.34447287,
        1.33731146,
    ],
    "osgd-norm": [
        1.38714669,
        1.36577887,
        1.35500789,
        1.34889695,
        1.34324294,
        1.33555695,
        1.31618031,
        1.26241392,
        1.22572596,
        1.13371027,
    ],
    "damped": [
        1.38714669,
        1.37216040,
        1.35364995,
        1.34285975,
        1.34341089,
        1.35036086,
        1.35511828,
        1.35325372,
        1.34688974,
        1.34040406,
    ],
    "pcgrad": [
        1.38714669,
        1.37188044,
        1.35321384,
        1.34220214,
        1.34249832,
        1.34910181,
        1.35314104,
        1.35051422,
        1.34357463,
        1.33637998,
    ],
    "sgd": [
        1.38714669,
        1.38174692,
        1.37275698,
        1.3625125,
        1.35311875,
        1.34606527,
        1.34198129,
        1.34079843,
        1.34176048,
        1.34370617,
    ],
    "sgd-sum": [
        1.38714669,
        1.37203067,
        1.35341911,
        1.34231954,
        1.34245746,
        1.34904704,
        1.35338024,
        1.35124963,
        1.34471244,
        1.33764475,
    ],
}


@pytest.mark.parametrize("method", sorted(COMBINERS))
def test_golden_losses_of_ten_steps(method: str) -> None:
    net = make("nested").double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    combine = PCGrad(shuffle=False) if method == "pcgrad" else COMBINERS[method]()
    rows = Accumulator(net, combine)
    seen = []
    for _ in range(10):
        x, y = batch(16)
        losses = losses_of(net, x.double(), y)
        optimizer.zero_grad()
        rows.backward(losses)
        optimizer.step()
        seen.append(sum(loss.item() for loss in losses) / len(losses))
    assert seen == pytest.approx(GOLDEN[method], abs=1e-7)
