"""What the step benchmark compares with: the straightforward module computes the nest's own function and, through TorchJD,
takes the nest's own OSGD step; the floor is what one counts by hand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from floor import floors
from striped import Striped, copied, stripes_step

from nestling.nets import NestedNet, build, plan
from nestling.nets.ops import BatchNorm, Conv
from nestling.recipes.recipe import NetworkRecipe, Recipe, StrategyRecipe, TrainRecipe
from nestling.train.step import Step

NETWORKS = ["width-digits", "depth-digits", "alternate-digits", "cascade-digits"]
STEP = Path(__file__).parent.parent / "benchmarks" / "step.py"


def example(net: NestedNet, n: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, net.plan.input.channels, *net.plan.input.size, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 10, (n,), generator=generator)


@pytest.mark.parametrize("name", [*NETWORKS, "width-resnet42"])
@pytest.mark.parametrize("training", [True, False])
def test_stripes_compute_the_function_of_the_nest(name: str, training: bool) -> None:
    net = build(NetworkRecipe(name=name)).double().train(training)
    stripes = copied(net).double()
    x, _ = example(net, 2)
    for ours, theirs in zip(net(x), stripes(x), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-10)
    assert sum(p.numel() for p in stripes.parameters()) == net.plan.params(net.plan.stages), "no masked entries there"


def test_copied_stripes_differ_when_the_weights_do() -> None:
    net = build(NetworkRecipe(name="width-digits")).double()
    x, _ = example(net)
    assert not torch.allclose(net(x)[0], Striped(net.plan).double()(x)[0], rtol=1e-3)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("way", ["sgd", "backward each", "vectorised"])
def test_stripes_take_the_same_step(name: str, way: str) -> None:
    """One step of the nest and one of the stripes, then the same answers again: gradients and combination agree."""
    pytest.importorskip("torchjd")
    from nestling.gradients.combiners.torchjd import OSGDAggregator

    strategy = StrategyRecipe(name="sgd" if way == "sgd" else "osgd")
    recipe = Recipe(name="step", network=NetworkRecipe(name=name), strategy=strategy, train=TrainRecipe())
    net = build(recipe.network).double().train()
    stripes = copied(net).double()
    x, y = example(net)
    ours = Step(net, torch.optim.SGD(net.parameters(), 0.1, weight_decay=1e-3), recipe)
    theirs = stripes_step(
        stripes,
        torch.optim.SGD(stripes.parameters(), 0.1, weight_decay=1e-3),
        None if way == "sgd" else OSGDAggregator(),
        chunk=None if way == "vectorised" else 1,
    )
    assert torch.allclose(ours(x, y), theirs(x, y), rtol=1e-9)
    for a, b in zip(net.eval()(x), stripes.eval()(x), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-8)


def test_the_floor_by_hand() -> None:
    """With a bandwidth of one byte a second bytes alone decide, with a rate of one operation a second operations do."""
    drawn = plan(NetworkRecipe(name="width-digits"))
    convs = [node for node in drawn.nodes if isinstance(node.op, Conv)]
    moved = sum(
        3
        * 2
        * (drawn.by_name[n.reads[0]].channels * drawn.by_name[n.reads[0]].size[0] ** 2 + n.channels * n.size[0] ** 2)
        for n in convs
    )
    bytes_only = floors(drawn, batch=2, bandwidth=1, rate=1e30)
    assert bytes_only["conv"] == pytest.approx(2 * moved) and bytes_only["lump"] == pytest.approx(2 * moved)
    norms = sum(2 * 3 * n.channels * n.size[0] ** 2 for n in drawn.nodes if isinstance(n.op, BatchNorm))
    assert bytes_only["fused"] > 2 * (moved + norms), "sums, pools and the optimizer come on top"
    work_only = floors(drawn, batch=2, bandwidth=1e30, rate=1)
    assert work_only["lump"] == pytest.approx(6 * 2 * drawn.dense()[1])
    assert work_only["conv"] == pytest.approx(work_only["lump"])
    mixed = floors(drawn, batch=2, bandwidth=1, rate=moved / drawn.dense()[1] / 6)
    assert mixed["lump"] <= mixed["conv"] <= mixed["fused"], "each layer is held by the worse of the two"


def test_both_tables_are_printed(tmp_path: Path) -> None:
    pytest.importorskip("torchjd")
    words = ["--device", "cpu", "--networks", "width-resnet42", "--strategies", "sgd", "osgd", "--batches", "2"]
    more = ["--steps", "1", "--images", "8", "--torchjd", "--beside", "2", "--precision", "float32", "--json"]
    command = [sys.executable, str(STEP), *words, *more, str(tmp_path / "rows.json")]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "osgd/sgd" in found and "backward each" in found and "vectorised" in found
    rows = {row["strategy"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    mixed = rows["sgd osgd"]
    assert mixed["ms"] == pytest.approx((rows["sgd"]["ms"] + rows["osgd"]["ms"]) / 2, abs=1e-3)
    assert mixed["beside_ratio"] == pytest.approx(mixed["beside_ms"] / mixed["ms"], abs=1e-3)
    assert rows["sgd"]["beside_ratio"] > 0


def test_a_profile_names_the_longest_operators_of_a_step(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--networks", "width-resnet42", "--strategies", "sgd", "--batches", "2", "--steps", "2"]
    more = ["--images", "8", "--profile", "5", "--precision", "float32", "--json", str(tmp_path / "rows.json")]
    found = subprocess.run(
        [sys.executable, str(STEP), *words, *more], capture_output=True, text=True, check=True
    ).stdout
    [row] = json.loads((tmp_path / "rows.json").read_text())["rows"]
    profile = row["profile"]
    longest = profile["longest"]
    assert profile["of"] == "operators" and len(longest) == 5
    assert [each["us"] for each in longest] == sorted((each["us"] for each in longest), reverse=True)
    assert sum(each["share"] for each in longest) <= 1 and sum(each["us"] for each in longest) <= profile["us"]
    assert all(each["share"] == pytest.approx(each["us"] / profile["us"], abs=1e-3) for each in longest)
    assert f"{profile['calls']:g} operators" in found and all(each["name"] in found for each in longest)


def test_a_profile_counts_calls_of_one_step() -> None:
    """By hand: three products and one sum a step, whatever number of steps is looked at."""
    import step

    class Known:
        def advance(self, steps: int) -> None:
            a = torch.ones(64, 64)
            for _ in range(steps):
                torch.mm(torch.mm(torch.mm(a, a), a), a).sum()

    for steps in (1, 4):
        found = step.profiled(Known(), torch.device("cpu"), steps, 10)
        calls = {each["name"]: each["calls"] for each in found["longest"]}
        assert calls["aten::mm"] == 3 and calls["aten::sum"] == 1


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["eager", "graph"])
def test_a_profile_counts_the_kernels_of_a_step_also_inside_a_graph(kind: str) -> None:
    import step

    device = torch.device("cuda")
    split = step.images(device, 64)
    driver = step.Driver(step.recipe_for("width-resnet42", "sgd", 8, "bfloat16"), split, device, kind)
    found = step.profiled(driver, device, 3, 10)
    assert found["of"] == "kernels" and found["calls"] > 300 and len(found["longest"]) == 10


def test_own_kernels_can_be_left_out_for_a_while() -> None:
    import step

    before = step.tasks.suits
    with step.unfused(True):
        assert not step.tasks.suits(build(NetworkRecipe(name="width-resnet42")), 128)
    with step.unfused(False):
        assert step.tasks.suits is before
    assert step.tasks.suits is before
