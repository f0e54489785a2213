"""The registry of strategies: every list follows from it, and one more line is one more way of training."""

import dataclasses
import inspect
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_gradients import Sliced, assert_same, batch, gradients, losses_of
from torch import Tensor

from nestling.commands.cli import main
from nestling.errors import NestlingError
from nestling.gradients import backward
from nestling.gradients.combiners import COMBINERS, OSGD, make_combiner
from nestling.gradients.combiners.weighted import Weighted
from nestling.gradients.flat import FlatRows
from nestling.gradients.owners import from_owners
from nestling.recipes.recipe import StrategyRecipe, keys
from nestling.recipes.rules import says
from nestling.recipes.strategies import STRATEGIES, Strategy, of_the_paper
from nestling.report.paper.tables import ORDER
from nestling.studies.paper.grid import CHOICES


def test_a_combiner_of_ones_own_trains_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(STRATEGIES, "first", Strategy("toy_combiner:First", ("importance",)))
    few = ["train.epochs=1", "data.limit=64", "data.validation=16", "train.weight_decay=0", "train.batch=16"]
    settings = [part for each in ("strategy.name=first", *few) for part in ("--set", each)]
    assert main(["train", "digits-depth", *settings, "--out", str(tmp_path / "run")]) == 0
    end = load_file(next((tmp_path / "run").glob("weights*.safetensors")))
    first, *rest = sorted(name for name in end if name.startswith("head") and name.endswith("weight"))
    assert main(["train", "digits-depth", *settings, "--set", "train.epochs=2", "--out", str(tmp_path / "longer")]) == 0
    longer = load_file(next((tmp_path / "longer").glob("weights*.safetensors")))
    assert not torch.equal(longer[first], end[first]), "the first task trains"
    assert rest and all(torch.equal(longer[name], end[name]) for name in rest), "and the others do not"
    capsys.readouterr()
    assert main(["train", "digits-depth", "--set", "strategy.name=frist", "--out", str(tmp_path / "no")]) != 0
    assert "greedy or first" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(COMBINERS))
def test_what_a_recipe_names_is_what_is_made(name: str) -> None:
    given = StrategyRecipe(
        name, order=(2, 1, 3), scope="block", importance=(1, 2, 3), constant=0.25, literal=True, damping=0.5
    )
    made = make_combiner(given, stages=3, seed=7)
    assert type(made) is COMBINERS[name]
    wanted = {
        "order": (1, 0, 2),
        "scope": "block",
        "importance": (1, 2, 3),
        "constant": 0.25,
        "literal": True,
        "damping": 0.5,
        "seed": 7,
    }
    for field in STRATEGIES[name].takes:
        assert getattr(made, field) == wanted[field]
    missed = set(inspect.signature(COMBINERS[name]).parameters) & set(wanted) - set(STRATEGIES[name].takes)
    assert not missed, f"{name} could be made with {missed}, which the recipe has"


def test_every_list_follows_from_the_registry() -> None:
    assert says(keys()["strategy.name"]).replace(" or ", ", ").split(", ") == list(STRATEGIES)
    assert ORDER[: len(of_the_paper())] == of_the_paper()
    assert {name for name in STRATEGIES if STRATEGIES[name].paper} == set(CHOICES) & set(STRATEGIES)
    with pytest.raises(NestlingError, match=r"strategy.name is 'adam'; expected osgd, osgd-norm"):
        StrategyRecipe("adam")
    with pytest.raises(NestlingError, match=r"strategy.name is 3"):
        StrategyRecipe(3)  # type: ignore[arg-type]
    fields = {field.name for field in dataclasses.fields(StrategyRecipe)} | {"seed"}
    assert all(set(strategy.takes) <= fields for strategy in STRATEGIES.values())


# Rows as a matrix are rows to every combiner.


def matrix_of(net: Sliced, x: Tensor, y: Tensor) -> FlatRows:
    """The rows of a width nest as a matrix, every task handing over all that it may own."""
    named = list(net.named_parameters())
    layout = from_owners(named, net.owners(), 3)
    masks = torch.cat([net.owners()[name].expand_as(p).flatten() for name, p in named])
    places = [(masks >> task & 1).nonzero().flatten() for task in range(3)]
    rows = FlatRows([p for _, p in named], layout, places)
    for task, loss in enumerate(losses_of(net, x, y)):
        grads = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True, allow_unused=True)
        flat = torch.cat(
            [(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(grads, net.parameters(), strict=True)]
        )
        rows.put(task, [flat[places[task]]])
    return rows


@pytest.mark.parametrize("scope", ["all", "shared", "block", "tensor"])
def test_a_matrix_of_rows_gives_the_same_update_in_every_scope(scope: str) -> None:
    torch.manual_seed(0)
    net = Sliced().double()
    x, y = batch()
    combine: Weighted = OSGD(scope=scope)
    report = backward(losses_of(net, x.double(), y), net, combine)
    wanted = gradients(net)
    rows = matrix_of(net, x.double(), y)
    found = combine(rows)
    assert_same(gradients(net), wanted, atol=1e-12)
    assert found.gram is not None and report.gram is not None and found.weights is not None
    torch.testing.assert_close(found.gram, report.gram, atol=1e-14, rtol=1e-10)


def test_a_matrix_of_rows_serves_methods_that_need_all_of_it() -> None:
    aggregation = pytest.importorskip("torchjd.aggregation")
    from nestling.gradients.combiners.torchjd import FromTorchJD

    torch.manual_seed(0)
    net = Sliced().double()
    x, y = batch()
    for aggregator in (aggregation.Sum(), aggregation.TrimmedMean(trim_number=1)):
        net.zero_grad()
        backward(losses_of(net, x.double(), y), net, FromTorchJD(aggregator))
        wanted = gradients(net)
        net.zero_grad()
        FromTorchJD(aggregator)(matrix_of(net, x.double(), y))
        assert_same(gradients(net), wanted, atol=1e-12)
