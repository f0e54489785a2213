"""Gradients are right or refused: cases in which a step would otherwise train something else without a word."""

from collections.abc import Callable

import pytest
import torch
import torch._functorch.config as functorch
import torch.nn.functional as F
from test_gradients import Nested, assert_same, batch, gradients, losses_of, make
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nestling.errors import NestlingError
from nestling.gradients import Accumulator, backward, owners_of
from nestling.gradients.combiners import OSGD, SGD, NormOSGD, NormSGD, SumSGD
from nestling.gradients.combiners.weighted import Weighted

# Ownership where the graph does not tell it.


@pytest.fixture
def compiled() -> "Callable[[nn.Module], Callable[[Tensor], list[Tensor]]]":
    return lambda net: torch.compile(net, backend="aot_eager")


def losses_from(outs: list[Tensor], y: Tensor) -> list[Tensor]:
    return [F.cross_entropy(out, y) for out in outs]


@pytest.mark.parametrize("combine", [NormSGD(), NormOSGD(), OSGD(scope="shared"), OSGD(scope="block")])
def test_a_net_compiled_whole_needs_owners_where_they_matter(combine: Weighted, compiled) -> None:  # type: ignore[no-untyped-def]
    net = make("nested")
    x, y = batch()
    backward(losses_of(net, x, y), net, combine)
    wanted = gradients(net)
    net.zero_grad()
    owners = owners_of(losses_of(net, x, y), net.named_parameters())
    with functorch.patch(donated_buffer=False):
        whole = compiled(net)
        with pytest.raises(NestlingError, match=r"compiled whole.*owners_of"):
            backward(losses_from(whole(x), y), net, combine)
        assert all(grad is None for grad in gradients(net).values())
        backward(losses_from(whole(x), y), net, combine, owners=owners)
    assert_same(gradients(net), wanted)


def test_a_net_compiled_whole_is_right_where_owners_do_not_matter(compiled) -> None:  # type: ignore[no-untyped-def]
    net = make("nested")
    x, y = batch()
    backward(losses_of(net, x, y), net, OSGD())
    wanted = gradients(net)
    net.zero_grad()
    with functorch.patch(donated_buffer=False):
        report = backward(losses_from(compiled(net)(x), y), net, OSGD())
    assert_same(gradients(net), wanted)
    assert report.numbers()["flips"] == []
    with pytest.raises(NestlingError, match="compiled whole"):
        _ = report.flips


def test_a_compiled_trunk_keeps_ownership(compiled) -> None:  # type: ignore[no-untyped-def]
    net = make("two tasks")
    x, y = batch()
    backward(losses_of(net, x, y), net, NormSGD())
    wanted = gradients(net)
    net.zero_grad()
    with functorch.patch(donated_buffer=False):
        net.encoder = torch.compile(net.encoder, backend="aot_eager")  # type: ignore[assignment, arg-type]
        backward(losses_of(net, x, y), net, NormSGD())
    found = {name.replace("_orig_mod.", ""): grad for name, grad in gradients(net).items()}
    assert_same(found, wanted)


class Stacked(nn.Module):
    """Three heads in one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(8, 6)
        self.heads = nn.Parameter(torch.randn(3, 6, 4))

    def losses(self, x: Tensor, y: Tensor) -> list[Tensor]:
        outs = torch.einsum("bi,tio->tbo", self.trunk(x).tanh(), self.heads)
        return [F.cross_entropy(out, y) for out in outs]


@pytest.mark.parametrize("combine", [NormSGD(), OSGD(scope="shared")])
def test_heads_stacked_in_one_weight_need_owners(combine: Weighted) -> None:
    net, x, y = Stacked(), torch.randn(5, 8), torch.tensor([0, 1, 2, 3, 0])
    with pytest.raises(NestlingError, match=r"heads never meet.*Pass owners="):
        backward(net.losses(x, y), net, combine)
    owners = {"trunk.weight": torch.tensor(7), "trunk.bias": torch.tensor(7)}
    owners["heads"] = torch.tensor([1, 2, 4])[:, None, None]
    backward(net.losses(x, y), net, combine, owners=owners)
    backward(net.losses(x, y), net, OSGD())  # where nothing hangs on it, nothing is asked


# Parameters that cannot be, or were not, meant.


def test_complex_parameters_are_refused_in_words() -> None:
    w = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(NestlingError, match=r"complex.*view_as_complex"):
        backward([w.imag.pow(2).sum() + w.imag.sum(), w.imag.sum()], [w], OSGD())


@pytest.mark.parametrize("combine", [OSGD(), SGD()])
@pytest.mark.parametrize("name", ["nested", "sliced"])
def test_losses_of_another_model_are_refused_in_words(name: str, combine: Weighted) -> None:
    net, other = make(name), make(name)
    with pytest.raises(NestlingError, match="no loss depends on any of"):
        backward(losses_of(net, *batch()), other, combine)
    rows = Accumulator(list(net.named_parameters()), combine, owners=getattr(net, "owners", dict)() or None)
    net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)
    with pytest.raises(NestlingError, match="load_state_dict"):
        rows.backward(losses_of(net, *batch()))


@pytest.mark.parametrize("combine", [OSGD(), SumSGD()], ids=["osgd", "sgd-sum"])
@pytest.mark.parametrize("mode", ["rows", "layers"])
def test_a_list_of_parameters_does_not_lose_a_head_in_silence(combine: Weighted, mode: str) -> None:
    """Given a list, a head that is replaced later would get no gradient; other changes from step to step are fine."""
    torch.manual_seed(0)
    trunk, heads = nn.Linear(4, 6), nn.ModuleList(nn.Linear(6, 2) for _ in range(2))
    beside = nn.Linear(6, 2)  # used, and not given on purpose

    def losses(absent: bool = False) -> list[torch.Tensor | None]:
        z = trunk(torch.ones(3, 4)).tanh()
        return [(heads[0](z) + beside(z)).pow(2).mean(), None if absent else heads[1](z).exp().mean()]

    rows = Accumulator([*trunk.parameters(), *heads.parameters()], combine, mode=mode)
    for absent in (False, True, False):
        rows.backward(losses(absent))
    heads[0].requires_grad_(False)
    rows.backward(losses())
    heads[0].requires_grad_(True)
    heads[1] = nn.Linear(6, 2)
    with pytest.raises(NestlingError, match=r"seems to have been replaced.*Give the model itself"):
        rows.backward(losses())
    assert heads[1].weight.grad is None


@pytest.mark.parametrize("combine", [OSGD(), SGD()])
def test_parameters_that_are_replaced_are_followed(combine: Weighted) -> None:
    net = make("nested")
    rows = Accumulator(net, combine)
    rows.backward(losses_of(net, *batch()))
    net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)
    net.heads[1] = nn.Linear(6, 4)  # type: ignore[operator, assignment]
    rows.backward(losses_of(net, *batch()))
    found = gradients(net)
    net.zero_grad()
    backward(losses_of(net, *batch()), net, combine)
    assert_same(found, gradients(net))


def test_hooks_that_are_added_later_are_refused_in_words() -> None:
    net = make("nested")
    rows = Accumulator(net, OSGD())
    rows.backward(losses_of(net, *batch()))
    net.get_parameter("heads.0.weight").register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(NestlingError, match=r"heads.0.weight has a post-accumulate-grad hook"):
        rows.backward(losses_of(net, *batch()))


# Micro-batches, refreshing, order.


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        raise ValueError("out of luck")


@pytest.mark.parametrize("combine", [OSGD(), SumSGD()])
def test_a_micro_batch_that_failed_counts_no_task_twice(combine: Weighted) -> None:
    net = make("nested")
    rows = Accumulator(net, combine)
    rows.add(losses_of(net, *batch()))
    losses = losses_of(net, *batch())
    with pytest.raises(ValueError, match="luck"):
        rows.add([*losses[:2], Failing.apply(losses[2])])
    for act in (lambda: rows.add(losses_of(net, *batch())), rows.fill):
        with pytest.raises(NestlingError, match=r"micro-batch 2 of this step failed.*clear\(\)"):
            act()
    rows.clear()
    rows.backward(losses_of(net, *batch()))
    found = gradients(net)
    net.zero_grad()
    backward(losses_of(net, *batch()), net, combine)
    assert_same(found, gradients(net))


def test_a_first_micro_batch_that_failed_leaves_nothing_behind() -> None:
    net = make("nested")
    rows = Accumulator(net, OSGD())
    losses = losses_of(net, *batch())
    with pytest.raises(ValueError, match="luck"):
        rows.add([losses[0], Failing.apply(losses[1]), losses[2]])
    rows.backward(losses_of(net, *batch()))
    found = gradients(net)
    net.zero_grad()
    backward(losses_of(net, *batch()), net, OSGD())
    assert_same(found, gradients(net))


@pytest.mark.parametrize("combine", [OSGD(scope="block"), NormSGD()])
def test_refresh_refuses_before_it_writes(combine: Weighted) -> None:
    net = make("nested")
    with pytest.raises(NestlingError, match="scope='all'"):
        Accumulator(net, combine, refresh=2).backward(losses_of(net, *batch()))
    assert all(grad is None for grad in gradients(net).values())


def test_a_new_order_or_importance_holds_from_the_next_step() -> None:
    net = make("nested")
    combine = OSGD(order=[2, 0, 1], importance=[1, 2, 3])
    rows = Accumulator(net, combine)
    for order, importance in (([2, 0, 1], [1, 2, 3]), ([1, 2, 0], [3, 1, 1]), (None, None), ([0, 2, 1], [1, 1, 2])):
        combine.order, combine.importance = order, importance
        net.zero_grad()
        rows.backward(losses_of(net, *batch()))
        found = gradients(net)
        net.zero_grad()
        backward(losses_of(net, *batch()), net, OSGD(order=order, importance=importance))
        assert_same(found, gradients(net), atol=0)
    with pytest.raises(NestlingError, match="permutation"):
        combine.order = [0, 1]


# What a step leaves behind.


def test_keeping_the_losses_keeps_no_graph() -> None:
    net = make("nested")
    losses = losses_of(net, *batch())
    backward(losses, net, OSGD())
    assert all(loss.grad_fn is None for loss in losses)
    with pytest.raises(NestlingError, match="given to backward before"):
        backward(losses, net, OSGD())


@pytest.mark.parametrize("mode", ["rows", "layers"])
@pytest.mark.parametrize("combine", [OSGD(), SumSGD()])
def test_a_graph_that_is_retained_serves_twice(combine: Weighted, mode: str) -> None:
    """Such as one method for the trunk and another for the heads."""
    net = make("two tasks")
    losses = losses_of(net, *batch())
    trunk, heads = net.get_submodule("encoder"), [net.get_submodule("classify"), net.get_submodule("regress")]
    backward(losses, trunk, combine, retain_graph=True, mode=mode)
    backward(losses, [p for head in heads for p in head.parameters()], SumSGD(), mode=mode)
    found = gradients(net)
    assert all(loss.grad_fn is None for loss in losses)
    net.zero_grad()
    backward(losses_of(net, *batch()), trunk, combine)
    backward(losses_of(net, *batch()), [p for head in heads for p in head.parameters()], SumSGD())
    assert_same(found, gradients(net))


class Recomputed(nn.Module):
    """Two exits; batch norms inside checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stages = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(6, 4) for _ in range(3))

    def losses(self, x: Tensor, y: Tensor) -> list[Tensor]:
        found = []
        for stage, head in zip(self.stages, self.heads, strict=True):
            x = checkpoint(stage, x, use_reentrant=False)
            found.append(F.cross_entropy(head(x), y))
        return found


def test_checkpointed_batch_norms_count_a_batch_as_plain_backward_does() -> None:
    x, y = torch.randn(8, 6), torch.randint(4, (8,))
    plain, ours = Recomputed(), Recomputed()
    rows = Accumulator(ours, OSGD())
    for _ in range(2):
        sum(plain.losses(x, y), start=torch.zeros(())).backward()
        rows.backward(ours.losses(x, y))
    for (name, wanted), found in zip(plain.named_buffers(), ours.buffers(), strict=True):
        assert torch.equal(found, wanted), name


# Numbers.


@pytest.mark.parametrize("size", [1e-23, 1.0, 3e17])
def test_squares_of_what_one_task_owns_neither_vanish_nor_overflow(size: float) -> None:
    w = nn.Parameter(torch.full((40_000,), size))
    shared = nn.Parameter(torch.ones(3))
    report = backward([w.pow(2).sum() / 2 + shared.sum(), 2 * shared.sum()], [w, shared], OSGD())
    assert report.norms[0].item() == pytest.approx((40_000 * size**2 + 3) ** 0.5, rel=1e-6)
    report = backward([w.pow(2).sum() / 2], [w], OSGD())
    assert report.norms[0].item() == pytest.approx(200 * size, rel=1e-6)


def test_gradients_that_are_not_finite_though_the_losses_are() -> None:
    w = nn.Parameter(torch.zeros(3))
    losses = [w.sqrt().sum(), (w + 1).sum()]
    with pytest.raises(NestlingError, match=r"although every loss is finite.*diagnose=True"):
        backward(losses, [w], SumSGD())
    assert w.grad is None


def test_no_task_is_called_finite_that_is_not() -> None:
    net = make("nested")
    for combine in (OSGD(), SGD()):
        with pytest.raises(NestlingError, match="no task's is finite"):
            backward([loss * float("nan") for loss in losses_of(net, *batch())], net, combine)


@pytest.mark.parametrize("scale", [lambda s, loss: s.scale(loss), lambda s, loss: s.scale(loss / 2) / 4])
@pytest.mark.parametrize("combine", [OSGD(), SumSGD()])
def test_losses_that_are_scaled_already_are_not_scaled_again(combine: Weighted, scale) -> None:  # type: ignore[no-untyped-def]
    net = make("nested")
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    losses = [scale(scaler, loss) for loss in losses_of(net, *batch())]
    with pytest.raises(NestlingError, match="scaled already"):
        backward(losses, net, combine, scaler=scaler)
    backward([3 * loss / 4 for loss in losses_of(net, *batch())], net, combine, scaler=scaler)


# Wrong arguments.


class Club(Nested):
    def owners(self) -> list[str]:
        return ["Ada", "Grace"]


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "order": (lambda: OSGD(order=2), r"order is 2: expected the tasks from 0"),  # type: ignore[arg-type]
    "order of both": (lambda: OSGD(order=["a", 1]), r"expected the tasks from 0"),  # type: ignore[arg-type]
    "importance": (lambda: SGD(importance=3), "importance is 3: expected one number per task"),  # type: ignore[arg-type]
    "learnable importance": (
        lambda: OSGD(importance=nn.Parameter(torch.ones(3))),  # type: ignore[arg-type]
        "importance needs a gradient",
    ),
    "one learnable importance": (lambda: SGD([1, nn.Parameter(torch.ones(()))]), "needs a gradient"),  # type: ignore[list-item]
    "scaler": (lambda: Accumulator(Nested(), OSGD(), scaler=True), "scaler is True: expected a torch.amp"),  # type: ignore[arg-type]
    "refresh": (lambda: Accumulator(Nested(), OSGD(), refresh=1.5), "refresh is 1.5: expected a whole"),  # type: ignore[arg-type]
    "unrelated owners": (lambda: Accumulator(Club(), OSGD()), r"Club.owners\(\) gave a list.*named_parameters"),
    "one parameter": (lambda: Accumulator(nn.Parameter(torch.ones(3)), OSGD()), r"params is one tensor.*\[parameter\]"),
    "no parameters": (lambda: Accumulator(3, OSGD()), "params is a int: expected the model"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("wrong", sorted(WRONG))
def test_wrong_arguments_are_refused_in_words(wrong: str) -> None:
    act, words = WRONG[wrong]
    with pytest.raises(NestlingError, match=words):
        act()


def test_a_dense_aggregator_sees_every_parameter_in_the_widest_type() -> None:
    aggregation = pytest.importorskip("torchjd.aggregation")
    from nestling.gradients.combiners.torchjd import FromTorchJD

    torch.manual_seed(0)
    trunk, heads = nn.Linear(6, 6).bfloat16(), [nn.Linear(6, 4) for _ in range(2)]
    x, y = torch.randn(5, 6), torch.tensor([0, 1, 2, 3, 0])
    losses = [F.cross_entropy(head(trunk(x.bfloat16()).float()), y) for head in heads]
    wanted = [
        torch.autograd.grad(loss, head.weight, retain_graph=True)[0] for loss, head in zip(losses, heads, strict=True)
    ]
    every = [p for module in (trunk, *heads) for p in module.parameters()]

    class Total(aggregation.Aggregator):  # type: ignore[name-defined]
        def forward(self, matrix: Tensor, /) -> Tensor:
            return matrix.sum(0)

    backward(losses, every, FromTorchJD(Total()))
    for head, want in zip(heads, wanted, strict=True):
        assert head.weight.grad is not None and torch.equal(head.weight.grad, want)
    assert trunk.weight.grad is not None and trunk.weight.grad.dtype == torch.bfloat16
