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
from nestling.gradients.combiners import OSGD, SGD, NormOSGD, NormSGD, SumSGD, UPGrad
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


class Joined(nn.Module):
    """Three heads whose outputs come in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(8, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 4) for _ in range(3))

    def forward(self, x: Tensor, how: str) -> "list[Tensor] | Tensor":
        outs = [head(self.trunk(x).tanh()) for head in self.heads]
        if how == "written":
            whole = torch.zeros(3, *outs[0].shape)
            for task, out in enumerate(outs):
                whole[task] = out
            return whole
        joined = {"stacked": torch.stack, "joined": lambda found: torch.cat(found, 1).view(-1, 3, 4).transpose(0, 1)}
        return joined[how](outs) if how in joined else outs


@pytest.mark.parametrize("mode", ["rows", "layers"])
@pytest.mark.parametrize("how", ["stacked", "joined", "written", "losses", "compiled"])
@pytest.mark.parametrize("combine", [NormSGD(), NormOSGD(), OSGD(scope="shared"), OSGD(scope="block"), UPGrad()])
def test_outputs_in_one_tensor_do_not_make_heads_shared(combine: Weighted, how: str, mode: str) -> None:
    """The graph gives zeros, not nothing, to the heads that a loss does not use."""
    x, y = torch.randn(5, 8), torch.tensor([0, 1, 2, 3, 0])

    def two_steps(how: str, mode: str) -> dict[str, Tensor | None]:
        net = Joined()
        run = torch.compile(net, backend="aot_eager") if how == "compiled" else net
        rows = Accumulator(net, combine, mode=mode)
        for _ in range(2):
            losses = [F.cross_entropy(out, y) for out in run(x, how if how != "compiled" else "stacked")]
            report = rows.backward(list(torch.stack(losses)) if how == "losses" else losses)
        assert report.private is not None and report.private.any(0).tolist() == [True] * 3
        return gradients(net)

    with functorch.patch(donated_buffer=False):
        assert_same(two_steps(how, mode), two_steps("apart", "rows"))


def test_a_task_that_was_silent_owns_what_it_uses_later() -> None:
    net, x, y = Joined(), torch.randn(5, 8), torch.tensor([0, 1, 2, 3, 0])
    rows = Accumulator(net, NormSGD())
    first = [F.cross_entropy(out, y) for out in net(x, "stacked")]
    rows.backward([first[0] * 0, *first[1:]])
    net.zero_grad()
    rows.backward([F.cross_entropy(out, y) for out in net(x, "stacked")])
    wanted = Joined()
    backward([F.cross_entropy(out, y) for out in wanted(x, "apart")], wanted, NormSGD())
    assert_same(gradients(net), gradients(wanted))


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu")], ids=["plain", "scaler"])
@pytest.mark.parametrize("spare", [0, 1])
def test_stacks_are_seen_with_room_to_spare_and_with_a_scaler(scaler: torch.amp.GradScaler | None, spare: int) -> None:
    net, x, y = Stacked(), torch.randn(5, 8), torch.tensor([0, 1, 2, 3, 0])
    net.heads = nn.Parameter(torch.randn(3 + spare, 6, 4))
    with pytest.raises(NestlingError, match=r"heads never meet.*Pass owners="):
        backward(net.losses(x, y)[:3], net, NormSGD(), scaler=scaler)
    assert backward(net.losses(x, y)[:3], net, OSGD()).private is None


def test_learnt_weights_of_losses_in_one_vector_need_owners() -> None:
    net, x, y = Joined(), torch.randn(5, 8), torch.tensor([0, 1, 2, 3, 0])
    variance = nn.Parameter(torch.zeros(3))
    losses = [F.cross_entropy(out, y) * (-v).exp() + v for out, v in zip(net(x, "apart"), variance, strict=True)]
    with pytest.raises(NestlingError, match="never meet"):
        backward(losses, [*net.parameters(), variance], NormSGD())


# Parameters that cannot be, or were not, meant.


@pytest.mark.parametrize("combine", [OSGD(), SumSGD()], ids=["osgd", "sgd-sum"])
@pytest.mark.parametrize("classes", [4, 5])
def test_a_list_made_before_a_head_was_replaced_is_refused_at_once(combine: Weighted, classes: int) -> None:
    net, x = Joined(), torch.randn(5, 8)
    rows = Accumulator(list(net.parameters()), combine)
    net.heads[1] = nn.Linear(6, classes)
    with pytest.raises(NestlingError, match=r"parameter 4 is not used.*Give the model itself"):
        rows.backward([out.square().mean() for out in net(x, "apart")])
    part = [*net.trunk.parameters(), *net.heads[0].parameters()]
    backward([out.square().mean() for out in net(x, "apart")], part, combine)  # a part may be given


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


def test_a_new_order_or_importance_does_not_wait_for_a_refresh() -> None:
    net, combine = make("nested"), OSGD()
    rows = Accumulator(net, combine, refresh=5)
    rows.backward(losses_of(net, *batch()))
    assert not rows.backward(losses_of(net, *batch())).refreshed
    combine.order = [2, 1, 0]
    assert rows.backward(losses_of(net, *batch())).refreshed
    combine.importance = [1, 2, 3]
    assert rows.backward(losses_of(net, *batch())).refreshed
    assert not rows.backward(losses_of(net, *batch())).refreshed


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


@pytest.mark.parametrize("given", [lambda net: net, lambda net: list(net.parameters())], ids=["module", "list"])
def test_checkpointed_batch_norms_count_a_batch_as_plain_backward_does(given) -> None:  # type: ignore[no-untyped-def]
    x, y = torch.randn(8, 6), torch.randint(4, (8,))
    plain, ours = Recomputed(), Recomputed()
    rows = Accumulator(given(ours), OSGD())
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


@pytest.mark.parametrize("combine", [OSGD(), NormSGD(), OSGD(scope="shared"), OSGD(scope="tensor")])
@pytest.mark.parametrize("size", [1e-30, 1e-23, 1e-12, 3e17, 1e30])
def test_squares_of_layers_without_rows_neither_vanish_nor_overflow(combine: Weighted, size: float) -> None:
    """The weights that tasks get do not depend on the losses' unit."""
    net, x = Joined(), torch.randn(5, 8)
    rows = Accumulator(net, combine, mode="layers")

    def weights(unit: float) -> Tensor:
        report = rows.backward([(out - t).square().mean() * unit for t, out in enumerate(net(x, "apart"))])
        assert report.weights is not None
        return report.weights * (unit if isinstance(combine, NormSGD) else 1)

    weights(1.0)
    torch.testing.assert_close(weights(size), weights(1.0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1e-20, 1e-12, 1e12])
def test_inputs_of_layers_without_rows_may_be_of_any_size(size: float) -> None:
    torch.manual_seed(0)
    trunk, heads, x = nn.Linear(8, 6, bias=False), nn.Linear(6, 3, bias=False), torch.randn(5, 8)
    nets = [*trunk.parameters(), *heads.parameters()]

    def weights(unit: float) -> Tensor:
        outs = heads(trunk(x * unit)) / unit
        losses = [outs[:, 0].square().mean(), outs.square().mean(), (outs[:, 1] + outs[:, 2]).square().mean()]
        report = backward(losses, nets, OSGD(scope="tensor"), mode="layers")
        assert report.weights is not None
        return report.weights

    torch.testing.assert_close(weights(size), weights(1.0), rtol=1e-5, atol=1e-6)


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


@pytest.mark.parametrize(
    "scale",
    [
        lambda s, loss: s.scale(loss),
        lambda s, loss: s.scale(loss / 2) / 4,
        lambda s, loss: s.scale([loss])[0],  # by a copy of the scale
        lambda s, loss: loss * s.get_scale(),
        lambda s, loss: s.scale(torch.stack([loss, loss])).mean(),
    ],
)
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
    "scope": (lambda: OSGD(scope=3), "unknown scope 3: expected all"),  # type: ignore[arg-type]
    "tolerance": (lambda: OSGD(tolerance=-1), "tolerance is -1: expected a number"),
    "owners": (lambda: Accumulator(Nested(), OSGD(), owners=[1]), "owners is a list: expected a mapping"),  # type: ignore[arg-type]
    "owners in numbers": (lambda: Accumulator(Nested(), OSGD(), owners={"a": 1}), "owners is a mapping to"),  # type: ignore[arg-type]
    "reduce": (lambda: Accumulator(Nested(), OSGD(), reduce="x"), "reduce is 'x': expected True"),  # type: ignore[arg-type]
    "features": (
        lambda: backward(losses_of(make("nested"), *batch()), Nested(), OSGD(), features=3),  # type: ignore[arg-type]
        "features has no graph",
    ),
    "retain_graph": (
        lambda: backward(losses_of(make("nested"), *batch()), Nested(), OSGD(), retain_graph="x"),  # type: ignore[arg-type]
        "retain_graph is 'x': expected True or False",
    ),
    "complex losses": (
        lambda: backward([torch.ones((), dtype=torch.cfloat)], Nested(), OSGD()),
        "is complex: expected",
    ),
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
