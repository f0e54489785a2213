"""Greedy training moves the entries of its stage and nothing else; priorities follow deadlines."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from test_gradients import Sliced, batch
from torch import Tensor, nn

from nestling.errors import NestlingError
from nestling.gradients.combiners.greedy import Greedy, stage_of
from nestling.gradients.combiners.priority import from_deadlines
from nestling.nets import NestedNet, build
from nestling.recipes import named
from nestling.recipes.recipe import NetworkRecipe, override
from nestling.train import train
from nestling.train.step import Step


class Normed(Sliced):
    """A width nest with batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)

    def features(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x)).relu()

    def owners(self) -> dict[str, Tensor]:
        owners = super().owners()
        return {**owners, "norm.weight": owners["first.bias"], "norm.bias": owners["first.bias"]}


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, weight_decay=0.1, momentum=0.5),
}


def born(net: nn.Module, stage: int) -> dict[str, Tensor]:
    """Entries that stage trains: its own bit set and no lower one."""
    owners = net.owners()  # type: ignore[operator]
    bits = (1 << stage) - 1
    return {n: (owners[n].expand_as(p) & bits) == 1 << (stage - 1) for n, p in net.named_parameters()}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("set_to_none", [True, False])
def test_only_the_entries_of_the_stage_move(name: str, set_to_none: bool) -> None:
    torch.manual_seed(0)
    net = Normed()
    optimizer = OPTIMIZERS[name](list(net.parameters()))
    greedy = Greedy(net, optimizer, epochs=2)
    assert greedy.stages == 3
    x, y = batch(16)
    for epoch in range(6):
        greedy.set_epoch(epoch)
        assert (greedy.stage, greedy.epoch) == (epoch // 2 + 1, epoch % 2)
        before = {n: p.detach().clone() for n, p in net.named_parameters()}
        stats = {n: b.clone() for n, b in net.named_buffers()}
        with torch.no_grad():
            early = [out.clone() for out in net.eval()(x)][: greedy.stage - 1]
        net.train()
        for _ in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            greedy.backward([F.cross_entropy(out, y) for out in net(x)])
            optimizer.step()
        for n, p in net.named_parameters():
            trains = born(net, greedy.stage)[n]
            assert torch.equal(p[~trains], before[n][~trains]), f"{n} moved outside stage {greedy.stage}"
            if trains.any():
                assert not torch.equal(p[trains], before[n][trains]), f"{n} stands still"
        channels = born(net, greedy.stage)["norm.weight"]
        for n in ("norm.running_mean", "norm.running_var"):
            now = net.get_buffer(n)
            assert torch.equal(now[~channels], stats[n][~channels])
        with torch.no_grad():
            for a, b in zip(early, net.eval()(x), strict=False):
                assert torch.equal(a, b), "an earlier stage answers differently now"
    greedy.close()
    assert "forward" not in net.norm.__dict__


def test_the_first_stage_trains_as_if_alone() -> None:
    torch.manual_seed(0)
    net = Normed()
    greedy = Greedy(net, torch.optim.SGD(net.parameters(), lr=0.1))
    greedy.set_epoch(0)
    x, y = batch()
    first = [p for _, p in net.named_parameters()]
    wanted = torch.autograd.grad(F.cross_entropy(net(x)[0], y), first, allow_unused=True)
    greedy.backward([F.cross_entropy(out, y) for out in net(x)])
    for p, want in zip(first, wanted, strict=True):
        if want is None:
            assert p.grad is None
        elif p.grad is not None:
            torch.testing.assert_close(p.grad, want)
        else:
            assert not want.any()


def test_later_stages_run_backward_only_through_what_trains() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    owners = {n: torch.tensor(3 if n.startswith("0") else 2) for n, _ in net.named_parameters()}
    greedy = Greedy(net, torch.optim.SGD(net.parameters(), lr=0.1), owners=owners)
    ran: list[int] = []
    net[0].register_full_backward_hook(lambda m, i, o: ran.append(0))
    greedy.start(2)
    middle = net[0](torch.ones(2, 4, requires_grad=True))
    greedy.backward([middle.sum(), net[1](middle).pow(2).sum()])
    assert ran == []
    assert net[0].weight.grad is None and net[1].weight.grad is not None


@pytest.mark.parametrize("name", ["width-digits"])
def test_a_nested_net_keeps_its_earlier_answers(name: str) -> None:
    g = torch.Generator().manual_seed(0)
    net = build(NetworkRecipe(name=name), classes=10, shape=(1, 8, 8), generator=g)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    greedy = Greedy(net, optimizer)
    x, y = torch.randn(16, 1, 8, 8, generator=g), torch.randint(10, (16,), generator=g)
    answers = []
    for epoch in range(greedy.stages):
        greedy.set_epoch(epoch)
        net.train()
        for _ in range(2):
            optimizer.zero_grad()
            greedy.backward([F.cross_entropy(out, y) for out in net(x)])
            optimizer.step()
        with torch.no_grad():
            answers.append(net.eval()(x)[: epoch + 1])
    for stage in range(greedy.stages - 1):
        for later in answers[stage + 1 :]:
            assert torch.equal(answers[stage][stage], later[stage])


def test_resuming_mid_stage_keeps_the_optimizers_state() -> None:
    net = Normed()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[net.first.weight]["momentum_buffer"] = torch.ones_like(net.first.weight)
    Greedy(net, optimizer, epochs=3).set_epoch(4)
    assert net.first.weight in optimizer.state
    Greedy(net, optimizer, epochs=3).set_epoch(6)
    assert net.first.weight not in optimizer.state


def test_wrong_use_of_greedy_is_refused_in_words() -> None:
    plain = nn.Linear(2, 2)
    with pytest.raises(NestlingError, match="owners"):
        Greedy(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    net = Normed()
    greedy = Greedy(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(NestlingError, match="no stage has begun"):
        greedy.backward([])
    greedy.start(1)
    with pytest.raises(NestlingError, match="expected 3"):
        greedy.backward([torch.ones((), requires_grad=True)])
    with pytest.raises(NestlingError, match="expected 0 to 2"):
        greedy.set_epoch(3)
    assert stage_of(5, 2, 3) == (3, 1)


# From recipes.


@pytest.mark.parametrize("kind", ["width", "even", "depth", "alternate", "together", "cascade"])
def test_a_recipes_earlier_stages_stay_bit_for_bit(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digits recipes as they are: once a stage's epochs are over, its weights and statistics never move again."""
    nets: list[NestedNet] = []
    states: list[dict[str, Tensor]] = []  # as every epoch begins, and at the end
    begin = Step.begin

    def noting(self: Step, epoch: int) -> None:
        begin(self, epoch)
        nets.append(self.net)
        states[epoch:] = [{key: value.clone() for key, value in self.net.state_dict().items()}]

    monkeypatch.setattr(Step, "begin", noting)
    recipe = override(named(f"digits-{kind}"), ["strategy.name=greedy", "train.epochs=1"])
    assert recipe.train.diagnostics, "as in the recipe"
    train(recipe, str(tmp_path / "run"), quiet=True)
    net = nets[-1]
    stages = len(net.plan.heads)
    states.append(net.state_dict())
    assert len(states) == stages + 1
    for stage in range(1, stages + 1):
        trained = born(net, stage)
        for name in (each for each, mask in list(trained.items()) if mask.dim() == 1 and each.endswith("weight")):
            for statistic in ("running_mean", "running_var"):
                key = name.replace("weight", statistic)
                trained |= {key: trained[name]} if key in states[0] else {}
        assert any("running_mean" in name for name in trained)
        for name, mask in trained.items():
            after = states[stage][name][mask]
            assert all(torch.equal(after, later[name][mask]) for later in states[stage:]), (
                f"{name} of stage {stage} moved"
            )
        assert all(
            not torch.equal(states[stage - 1][name][mask], states[stage][name][mask])
            for name, mask in trained.items()
            if mask.any() and "weight" in name
        ), f"stage {stage} did not train"


# Priorities.


def test_importance_is_the_share_of_deadlines_a_stage_serves() -> None:
    found = from_deadlines([0.5, 1.5, 1.7, 2.5, 9.0, 9.0, 9.0, 9.0], latencies=[1.0, 2.0, 4.0])
    assert found.missed == pytest.approx(1 / 8)
    assert found.importance == pytest.approx((6 / 7, 3 / 7, 12 / 7))  # 2, 1 and 4 of the 7 that were served; mean 1
    assert found.order == (2, 0, 1)


def test_deadlines_may_come_with_probabilities() -> None:
    assert from_deadlines({1.0: 0.25, 3.0: 0.75}, [1.0, 2.0]).importance == pytest.approx((0.5, 1.5))


@given(st.lists(st.floats(0.1, 10), min_size=1), st.lists(st.floats(0.05, 3), min_size=1, max_size=5))
def test_priorities_always_hold_together(deadlines: list[float], steps: list[float]) -> None:
    latencies = [sum(steps[: i + 1]) for i in range(len(steps))]
    if max(deadlines) < latencies[0]:
        with pytest.raises(NestlingError, match="no stage answers"):
            from_deadlines(deadlines, latencies)
        return
    found = from_deadlines(deadlines, latencies)
    assert sum(found.importance) == pytest.approx(len(latencies))
    assert sorted(found.order) == list(range(len(latencies)))
    ranked = [found.importance[task] for task in found.order]
    assert ranked == sorted(ranked, reverse=True)


@pytest.mark.parametrize(
    ("deadlines", "latencies"), [([1.0], []), ([1.0], [2.0, 1.0]), ([], [1.0]), ({1.0: 0.0}, [1.0])]
)
def test_wrong_deadlines_are_refused(deadlines: list[float], latencies: list[float]) -> None:
    with pytest.raises(NestlingError):
        from_deadlines(deadlines, latencies)


def test_frozen_channels_are_normed_by_their_running_statistics() -> None:
    """As in inference: a frozen stage answers while a later one trains as it did before."""
    torch.manual_seed(0)
    net = Normed()
    net.norm.running_mean.copy_(torch.tensor([1.0, -2.0, 0.5, 3.0]))  # type: ignore[union-attr]
    net.norm.running_var.copy_(torch.tensor([4.0, 0.25, 2.0, 9.0]))  # type: ignore[union-attr]
    x = torch.randn(6, 4, 5, 5)
    running, batch_ = net.norm.eval()(x), nn.BatchNorm2d(4)(x)
    greedy = Greedy(net.train(), torch.optim.SGD(net.parameters(), lr=0.1))
    greedy.start(2)  # births 1, 2, 3, 3: the second channel trains
    found = net.norm(x)
    torch.testing.assert_close(found[:, [0, 2, 3]], running[:, [0, 2, 3]])
    torch.testing.assert_close(found[:, 1], batch_[:, 1])
