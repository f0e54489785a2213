"""Heads that add to earlier logits, and heads with a hidden layer: every promise of a nest holds for them."""

from pathlib import Path

import numpy
import pytest
import torch

from nestling.errors import NestlingError
from nestling.nets import build, plan
from nestling.recipes import RECIPES
from nestling.recipes.recipe import NetworkRecipe, override
from nestling.runs.folder import RunDir
from nestling.runtime import Runtime
from nestling.train import train

NETWORKS = ["width-digits", "even-digits", "depth-digits", "alternate-digits", "together-digits", "cascade-digits"]
KINDS = ["added", "hidden"]


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("kind", KINDS)
def test_stages_say_what_the_whole_network_and_their_subnetwork_say(name: str, kind: str) -> None:
    net = build(NetworkRecipe(name, heads=kind)).eval()  # type: ignore[arg-type]
    x = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole, staged = net(x), list(net.answers(x))
        for stage, (one, other) in enumerate(zip(whole, staged, strict=True), start=1):
            assert torch.equal(one, other), stage
            alone = net.subnet(stage).eval()(x)
            assert torch.allclose(alone, one, atol=1e-5), stage


@pytest.mark.parametrize("name", NETWORKS)
def test_added_logits_are_the_sum_of_those_of_all_stages_so_far(name: str) -> None:
    own, added = build(NetworkRecipe(name)).eval(), build(NetworkRecipe(name, heads="added")).eval()
    added.load_state_dict(own.state_dict())  # the same layers by the same names
    x = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        parts = torch.stack(own(x)).cumsum(0)
        assert torch.allclose(torch.stack(added(x)), parts, atol=1e-5)
    stages = plan(NetworkRecipe(name)).answering
    assert [added.plan.macs(s) for s in stages] == [own.plan.macs(s) for s in stages], "a sum is no product"


def test_a_hidden_layer_is_as_wide_as_what_its_head_reads_and_its_stage_pays_for_it() -> None:
    plain, hidden = plan(NetworkRecipe("width-digits")), plan(NetworkRecipe("width-digits", heads="hidden"))
    assert [hidden.new_macs(s) - plain.new_macs(s) for s in (1, 2, 3)] == [8 * 8, 16 * 16, 32 * 32]
    assert [hidden.new_params(s) - plain.new_params(s) for s in (1, 2, 3)] == [8 * 9, 16 * 17, 32 * 33]


@pytest.mark.parametrize("kind", KINDS)
def test_such_a_net_trains_and_answers_by_stages_of_its_own(tmp_path: Path, kind: str) -> None:
    settings = [f"network.heads={kind}", "train.epochs=3", "data.limit=512", "strategy.name=sgd-sum"]
    train(override(RECIPES["digits-depth"](), settings), str(tmp_path / "run"), quiet=True)
    first, *_, last = (line["train_loss"] for line in RunDir(tmp_path / "run").read_log())
    assert all(now < before for now, before in zip(last, first, strict=True)), (first, last)
    picture = numpy.random.default_rng(0).integers(0, 256, (1, 8, 8), dtype="uint8")
    with Runtime(str(tmp_path / "run")) as runtime:
        assert runtime.answer(picture).stage == 3


def test_networks_that_are_kept_as_they_are_keep_their_heads() -> None:
    with pytest.raises(NestlingError, match=r"network\.heads=added would change the answers"):
        plan(NetworkRecipe("width-digits", ensemble=True, heads="added"))
