"""What a recipe can ask for beyond the paper (weights per stage, orders that change, distillation, averaging, warm-up) does what
it says, under every strategy and on both ways of getting the tasks' gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_train import digits, stepped, untimed, weights
from torch import Tensor

from nestling.errors import NestlingError
from nestling.gradients.combiners import COMBINERS, make_combiner
from nestling.nets import NestedNet, build
from nestling.recipes.recipe import NetworkRecipe, Recipe, StrategyRecipe, TrainRecipe, override
from nestling.runs.folder import RunDir
from nestling.runs.open import resolve
from nestling.train import Training, train
from nestling.train.loop import make_optimizer
from nestling.train.losses import stage_losses
from nestling.train.step import Step
from nestling.train.teacher import Teacher

STRATEGIES = tuple(COMBINERS)
OPTIONS: dict[str, tuple[str, ...]] = {
    "importance": ("strategy.importance=1,0.5,2",),
    "order": ("strategy.order=3,1,2",),
    "orders": ("strategy.order=1,2,3,3,2,1", "train.epochs=4"),
    "distill": ("train.distill=0.7", "train.distill_temperature=3"),
    "average": ("train.average=0.8",),
    "smoothing": ("train.smoothing=0.1",),
    "clip": ("train.clip=0.05",),
    "added heads": ("network.heads=added",),
    "hidden heads": ("network.heads=hidden", "strategy.importance=1,0.5,2"),
    "everything": ("strategy.importance=1,0.5,2", "strategy.order=2,3,1", "train.distill=0.3", "train.average=0.5"),
}


def recipe(strategy: str, *settings: str, network: str = "width-digits") -> Recipe:
    base = Recipe("step", network=NetworkRecipe(name=network), train=TrainRecipe(diagnostics=True))
    return override(base, [f"strategy.name={strategy}", *settings])


@pytest.mark.parametrize("network", ["width-digits", "depth-digits"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_both_ways_to_the_gradients_take_the_same_step(strategy: str, option: str, network: str) -> None:
    chosen = recipe(strategy, *OPTIONS[option], network=network)
    shared, first = stepped(chosen, own_subnets=False)
    own, second = stepped(chosen, own_subnets=True)
    assert torch.allclose(torch.stack(first), torch.stack(second), rtol=1e-6)
    for (key, a), b in zip(shared.state_dict().items(), own.state_dict().values(), strict=True):
        assert torch.allclose(a, b, rtol=1e-7, atol=1e-9), key  # losses are taken in float32


# --- the gradient, written out --------------------------------------------------------------------------------------


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(16, 1, 8, 8, generator=generator).double(), torch.randint(0, 10, (16,), generator=generator)


def plain_losses(net: NestedNet, x: Tensor, y: Tensor, made: TrainRecipe) -> list[Tensor]:
    """Cross-entropy of every stage; earlier stages also learn from the last one's softened answer, which itself is fixed."""
    logits = net(x)
    losses = [F.cross_entropy(stage, y, label_smoothing=made.smoothing) for stage in logits]
    if made.distill:
        t = made.distill_temperature
        soft = torch.softmax(logits[-1].detach() / t, 1)
        for at, stage in enumerate(logits[:-1]):
            log = torch.log_softmax(stage / t, 1)
            kl = (soft * (soft.log() - log)).sum(1).mean() * t * t
            losses[at] = (1 - made.distill) * losses[at] + made.distill * kl
    return losses


def plain_update(rows: list[Tensor], strategy: StrategyRecipe) -> Tensor:
    k = list(strategy.importance) or [1.0] * len(rows)
    if strategy.name.startswith("sgd"):
        total = sum(weight * row for weight, row in zip(k, rows, strict=True))
        return torch.as_tensor(total / (sum(k) if strategy.name == "sgd" else 1))
    done: list[Tensor] = []
    update = torch.zeros_like(rows[0])
    for stage in strategy.order or range(1, len(rows) + 1):  # Gram-Schmidt, as the paper writes it
        left = rows[stage - 1].clone()
        for other in done:
            left -= (left @ other) / (other @ other) * other
        done.append(left)
        update += k[stage - 1] * left
    return update


@pytest.mark.parametrize("own_subnets", [False, True])
@pytest.mark.parametrize(
    "option", ["importance", "order", "distill", "smoothing", "added heads", "hidden heads", "everything"]
)
@pytest.mark.parametrize("strategy", ["sgd", "sgd-sum", "osgd"])
def test_a_step_fills_in_the_gradient_that_the_recipe_describes(
    strategy: str, option: str, own_subnets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = recipe(strategy, *OPTIONS[option])
    net, (x, y) = build(chosen.network).double().train(), batch()
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    parameters = list(net.parameters())
    rows = []
    for loss in plain_losses(net, x, y, chosen.train):
        grads = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        masked = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, parameters, strict=True)]
        rows.append(torch.cat([g.flatten() for g in masked]))
    monkeypatch.setattr("nestling.train.step.worth_own_subnets", lambda _: own_subnets)
    step = Step(net, torch.optim.SGD(parameters, lr=0.1), chosen)
    step.gradients(x.contiguous(memory_format=torch.channels_last), y)
    found = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters])
    expected = plain_update(rows, chosen.strategy)
    assert float((found - expected).norm() / expected.norm()) < 1e-6  # losses are taken in float32


@pytest.mark.parametrize("own_subnets", [False, True])
@pytest.mark.parametrize("constant, literal", [(0.5, False), (0.2, False), (0.01, True)])
@pytest.mark.parametrize("strategy", ["normsgd", "osgd-norm"])
def test_normalised_gradients_have_the_norm_that_the_recipe_says(
    strategy: str, constant: float, literal: bool, own_subnets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C times sqrt(d_s), as the paper writes it, or that in parts of the largest task's; C is 1/2 where nothing is said."""
    said = [] if constant == 0.5 else [f"strategy.constant={constant}", f"strategy.literal={literal}"]
    chosen = recipe(strategy, *said)
    net, (x, y) = build(chosen.network).double().train(), batch()
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    parameters, owners = list(net.parameters()), net.owners()
    bits = torch.cat([owners[name].expand_as(p).flatten() for name, p in net.named_parameters()])
    owned = torch.stack([bits >> task & 1 for task in range(3)]).double()
    norms = constant * owned.sum(1).sqrt() / (1 if literal else owned.sum(1).max().sqrt())
    rows = []
    for loss, norm in zip(plain_losses(net, x, y, chosen.train), norms, strict=True):
        grads = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        masked = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, parameters, strict=True)]
        row = torch.cat([g.flatten() for g in masked])
        rows.append(row * norm / row.norm())
    osgd = StrategyRecipe("osgd")
    expected = sum(rows) / owned.sum(0).clamp_min(1) if strategy == "normsgd" else plain_update(rows, osgd)
    monkeypatch.setattr("nestling.train.step.worth_own_subnets", lambda _: own_subnets)
    Step(net, torch.optim.SGD(parameters, lr=0.1), chosen).gradients(x.contiguous(memory_format=torch.channels_last), y)
    found = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters])
    assert float((found - expected).norm() / torch.as_tensor(expected).norm()) < 1e-6


# --- weights that change ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own_subnets", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_several_weights_of_losses_share_the_epochs(
    strategy: str, own_subnets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every epoch the step is that of a recipe which has that epoch's weights alone."""
    monkeypatch.setattr("nestling.train.step.worth_own_subnets", lambda _: own_subnets)
    changing = recipe(strategy, "strategy.importance=1,2,3,3,1,1", "train.epochs=4")
    x, y = batch()
    net = build(changing.network).double().train()
    step = Step(net, torch.optim.SGD(net.parameters(), lr=0.1), changing)
    for epoch, now in ((0, "1,2,3"), (1, "1,2,3"), (2, "3,1,1"), (3, "3,1,1"), (0, "1,2,3")):
        step.begin(epoch)
        step.gradients(x, y)
        other = build(changing.network).double().train()
        fixed = Step(other, torch.optim.SGD(other.parameters(), lr=0.1), recipe(strategy, f"strategy.importance={now}"))
        fixed.begin(epoch)
        fixed.gradients(x, y)
        mine, its = ([p.grad for p in each.parameters() if p.grad is not None] for each in (net, other))
        assert mine and all(torch.equal(one, two) for one, two in zip(mine, its, strict=True)), (epoch, now)
        net.zero_grad()


def test_a_stage_without_a_loss_learns_when_its_turn_comes(tmp_path: Path) -> None:
    settings = ("strategy.name=sgd", "strategy.importance=0,0,1,1,1,1", "train.weight_decay=0", "data.limit=128")
    made = digits(*settings, "train.epochs=2")
    training = Training(made, RunDir.create(tmp_path / "run"))
    head = training.net.layer("head1.linear").weight
    before = head.detach().clone()
    kept = [head.detach().clone() for _ in training.epochs()]
    steps = len(kept) // 2
    assert all(torch.equal(each, before) for each in kept[:steps]) and not torch.equal(kept[-1], before)


def test_weights_that_are_none_at_some_time_are_refused() -> None:
    with pytest.raises(NestlingError, match="at least one above zero at any time"):
        make_combiner(StrategyRecipe("sgd", importance=(1, 1, 1, 0, 0, 0)), 3)


# --- orders that change ----------------------------------------------------------------------------------------------


def test_several_orders_share_the_epochs() -> None:
    combine: Any = make_combiner(StrategyRecipe("osgd", order=(1, 2, 3, 3, 2, 1)), 3, epochs=5)
    seen = []
    for epoch in range(6):
        combine.set_epoch(epoch)
        seen.append(combine.priority(3))
    assert seen == [(0, 1, 2)] * 3 + [(2, 1, 0)] * 3, "and the last one stays"


@pytest.mark.parametrize("name", ["digits-width", "digits-depth"])
def test_a_changed_order_is_a_changed_training_from_that_epoch_on(tmp_path: Path, name: str) -> None:
    """Two epochs each: as with the first order for the first half, then as if that run went on with the other order."""
    changing = digits("train.epochs=2", "train.lr=0.02", "strategy.order=1,2,3,3,2,1", name=name)
    usual = digits("train.epochs=2", "train.lr=0.02", name=name)
    train(changing, str(tmp_path / "changing"), quiet=True)
    train(usual, str(tmp_path / "usual"), quiet=True)
    first, second = untimed(tmp_path / "changing"), untimed(tmp_path / "usual")
    assert first[0] == second[0] and first[1] != second[1]
    # by hand: the usual run's state after one epoch, then an epoch in reverse order
    again = Training(override(usual, ["strategy.order=3,2,1"]), RunDir.create(tmp_path / "hand"))
    halfway = Training(usual, RunDir.create(tmp_path / "half"))
    for epoch, _ in halfway.epochs():
        if epoch == 1:
            break
    tensors, _ = RunDir(tmp_path / "half").load_checkpoint()
    again.net.load_state_dict({k.removeprefix("net."): v for k, v in tensors.items() if k.startswith("net.")})
    for key, parameter in again.net.named_parameters():
        like = torch.empty_like(parameter)
        again.optimizer.state[parameter]["momentum_buffer"] = like.copy_(tensors[f"momentum_buffer.{key}"])
    again.done = 1
    for _ in again.epochs():
        pass
    again.finish()
    found, expected = weights(tmp_path / "changing"), weights(tmp_path / "hand")
    assert all(torch.equal(found[key], expected[key]) for key in found)


def test_a_run_stopped_in_each_order_ends_like_one_never_stopped(tmp_path: Path) -> None:
    changing = digits("train.epochs=3", "strategy.order=1,2,3,2,3,1,3,2,1")
    train(changing, str(tmp_path / "whole"), quiet=True)
    for _ in range(2):
        train(changing, str(tmp_path / "parts"), resume=(tmp_path / "parts").exists(), quiet=True, seconds=0)
    train(changing, str(tmp_path / "parts"), resume=True, quiet=True)
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize(
    "engine", ["cpu eager", *(pytest.param(f"cuda {e}", marks=pytest.mark.cuda) for e in ("eager", "graph"))]
)
def test_the_weights_in_the_log_follow_a_changed_order(tmp_path: Path, engine: str) -> None:
    """The last task in the order of priority has weight one, and it is another one in the second epoch."""
    device, kind = engine.split()
    settings = (f"train.device={device}", f"train.engine={kind}", "train.compile=false", "train.diagnostics=true")
    train(digits(*settings, "strategy.order=1,2,3,3,2,1"), str(tmp_path / "run"), quiet=True)
    first, second = (line["weights"][0] for line in RunDir(tmp_path / "run").read_log())
    assert first[2] == 1.0 != first[0] and second[0] == 1.0 != second[2]


# --- averaging, warm-up, refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["sgd", "osgd"])
def test_averaged_weights_are_the_moving_average_and_are_what_is_saved(tmp_path: Path, strategy: str) -> None:
    chosen = digits("train.epochs=1", "train.average=0.9", f"strategy.name={strategy}")
    training = Training(chosen, RunDir.create(tmp_path / "run"))
    training.run.write_recipe(chosen)
    kept = {k: v.clone() for k, v in training.net.state_dict().items() if v.is_floating_point()}
    for _ in training.epochs():
        kept = {k: 0.9 * kept[k] + 0.1 * training.net.state_dict()[k] for k in kept}
    live = {k: v.clone() for k, v in training.net.state_dict().items()}
    training.finish()
    saved = weights(tmp_path / "run")
    assert all(torch.allclose(saved[key], kept[key], rtol=1e-5, atol=1e-7) for key in kept)
    assert all(torch.equal(live[key], value) for key, value in training.net.state_dict().items()), (
        "training is undisturbed"
    )


def test_a_run_that_is_too_short_for_its_average_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Training(digits("train.epochs=1", "train.average=0.9995"), RunDir.create(tmp_path / "short"))
    told = capsys.readouterr().err
    assert "train.average=0.9995 is too much for the" in told and "of what is saved will be what it began with" in told
    advice = told.partition("set train.average=")[2].partition(" ")[0]
    for average in (advice, "0"):
        Training(digits("train.epochs=1", f"train.average={average}"), RunDir.create(tmp_path / f"with{average}"))
        assert "began with" not in capsys.readouterr().err


@pytest.mark.parametrize("strategy", [*STRATEGIES, "greedy"])
def test_warm_up_and_averaging_run_under_every_strategy(tmp_path: Path, strategy: str) -> None:
    chosen = digits("train.warmup=1", "train.average=0.9", f"strategy.name={strategy}", "train.lr=0.05")
    results = train(chosen, str(tmp_path / "run"), quiet=True)
    assert len(results["stages"]) == 3
    log = RunDir(tmp_path / "run").read_log()
    assert log[0]["lr"] == pytest.approx(0.05) and log[1]["lr"] < 0.05, "it has risen to the rate, then falls"


@pytest.mark.parametrize("spared", [False, True])
def test_weight_decay_spares_norms_where_asked(spared: bool) -> None:
    net = build(NetworkRecipe(name="width-digits"))
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    settings = (f"train.decay_norms={not spared}", "train.lr=0.5", "train.weight_decay=0.2", "train.nesterov=false")
    optimizer = make_optimizer(net, recipe("sgd", *settings), torch.device("cpu"))
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in net.named_parameters():
        shrunk = before[name] * (1 if spared and parameter.dim() == 1 else 0.9)
        torch.testing.assert_close(parameter.detach(), shrunk, msg=name)


def test_a_run_whose_norms_are_spared_resumes_bit_for_bit(tmp_path: Path) -> None:
    chosen = digits("train.decay_norms=false")
    train(chosen, str(tmp_path / "whole"), quiet=True)
    train(chosen, str(tmp_path / "parts"), quiet=True, seconds=0)
    train(chosen, str(tmp_path / "parts"), resume=True, quiet=True)
    for key, value in weights(tmp_path / "whole").items():
        assert torch.equal(value, weights(tmp_path / "parts")[key]), key


@pytest.mark.parametrize("setting", ["strategy.order=3,2,1", "strategy.importance=1,2,3", "train.distill=0.5"])
def test_greedy_refuses_what_it_has_no_use_for(setting: str) -> None:
    with pytest.raises(NestlingError, match=rf"{setting.partition('=')[0]} is .* with strategy.name=greedy"):
        digits("strategy.name=greedy", setting)


@pytest.mark.parametrize("order", ["1,2,3,3,2", "1,2,3,1,1,1", "1,2"])
def test_orders_that_are_none_are_refused(tmp_path: Path, order: str) -> None:
    with pytest.raises(NestlingError, match=r"names a stage twice|expected each of 1 to 3 once"):
        train(digits(f"strategy.order={order}"), str(tmp_path / "run"), quiet=True)


# --- a teacher from outside -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["network.alone=3", "network.alone=0"], ids=["independent", "nest"])
def taught_by(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> str:
    path = str(tmp_path_factory.mktemp("teacher") / "run")
    train(digits("strategy.name=sgd", request.param), path, quiet=True)
    return path


@pytest.mark.parametrize("teaches", ["all", "last"])
@pytest.mark.parametrize("network", ["width-digits", "depth-digits"])
@pytest.mark.parametrize("strategy", ["sgd", "osgd"])
def test_with_a_teacher_both_ways_to_the_gradients_take_the_same_step(
    strategy: str, network: str, teaches: str, taught_by: str
) -> None:
    settings = (f"train.teacher={taught_by}", f"train.teaches={teaches}", "train.distill=0.7")
    chosen = recipe(strategy, *settings, network=network)
    shared, first = stepped(chosen, own_subnets=False)
    own, second = stepped(chosen, own_subnets=True)
    assert torch.allclose(torch.stack(first), torch.stack(second), rtol=1e-6)
    for (key, a), b in zip(shared.state_dict().items(), own.state_dict().values(), strict=True):
        assert torch.allclose(a, b, rtol=1e-7, atol=1e-9), key


def test_a_teacher_teaches_every_stage_with_the_last_stage_of_its_run(taught_by: str) -> None:
    made = recipe("sgd", f"train.teacher={taught_by}", "train.distill=0.7", "train.distill_temperature=3").train
    net, wise = build(NetworkRecipe(name="width-digits")), resolve(taught_by).net().train()
    x, y = batch()
    x = x.float()
    with torch.no_grad():
        soft = torch.softmax(wise(x)[-1] / 3, 1)
    logits = net(x)
    expected = [
        0.3 * F.cross_entropy(stage, y)
        + 0.7 * 9 * (soft * (soft.log() - torch.log_softmax(stage / 3, 1))).sum(1).mean()
        for stage in logits
    ]
    teacher = Teacher(made, net)
    found = stage_losses(logits, y, made, teacher(x))
    assert torch.allclose(torch.stack(found), torch.stack(expected), rtol=1e-5)


def test_a_teacher_keeps_no_count_of_what_it_sees_and_has_no_gradients(taught_by: str) -> None:
    made = recipe("sgd", f"train.teacher={taught_by}", "train.distill=0.7").train
    teacher = Teacher(made, build(NetworkRecipe(name="width-digits")))
    before = {key: value.clone() for key, value in teacher.net.state_dict().items()}
    assert not teacher(batch()[0].float()).requires_grad
    assert all(torch.equal(before[key], value) for key, value in teacher.net.state_dict().items())


def test_a_teacher_of_other_classes_or_without_a_weight_is_refused(taught_by: str) -> None:
    with pytest.raises(NestlingError, match=r"train\.distill is 0"):
        recipe("sgd", f"train.teacher={taught_by}")
    made = recipe("sgd", f"train.teacher={taught_by}", "train.distill=0.7").train
    with pytest.raises(NestlingError, match=r"classes 10, this network 7"):
        Teacher(made, build(NetworkRecipe(name="width-digits"), classes=7))


def test_a_teacher_of_the_last_stage_leaves_the_others_to_it(taught_by: str) -> None:
    settings = (f"train.teacher={taught_by}", "train.teaches=last", "train.distill=0.7")
    made = recipe("sgd", *settings).train
    net = build(NetworkRecipe(name="width-digits"))
    x, y = batch()
    logits, soft = net(x.float()), torch.randn(16, 10)
    *earlier, last = stage_losses(logits, y, made, soft)
    *by_the_last, untaught = stage_losses(logits, y, made)
    assert torch.equal(torch.stack(earlier), torch.stack(by_the_last))
    assert torch.equal(last, stage_losses((logits[-1],), y, made, soft)[0]) and not torch.equal(last, untaught)
