"""The networks that come with nestling do what their cards say, on real images where they are to be had."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nestling
from nestling.commands import profile
from nestling.commands.evaluate import command
from nestling.data import load
from nestling.errors import NestlingError
from nestling.recipes.recipe import DataRecipe, from_dict
from nestling.runs import shelf


@pytest.mark.parametrize("name", shelf.names())
def test_a_network_loads_and_answers(name: str) -> None:
    net, card = nestling.load(name), shelf.card(name)
    x = torch.zeros(1, *card["shape"])
    with torch.no_grad():
        answers = list(net.answers(x))
    assert [stage["size"] for stage in card["results"]["stages"]] == list(net.sizes)
    assert all(answer.shape == (1, len(card["results"]["classes"])) for answer in answers)
    assert from_dict(card["recipe"]).network.name == card["results"]["network"]
    assert card["provenance"]["commit"] and card["provenance"]["device"]
    medians = [stage["median_ms"] for stage in card["latency"]["stages"]]
    assert card["latency"]["device"] and medians == sorted(medians) and len(medians) == len(net.sizes)


@pytest.mark.parametrize("name", shelf.names())
def test_evaluating_a_network_gives_what_its_card_says(name: str) -> None:
    """`nestling evaluate` on the first thousand real test images, which are stored, on a CPU: exactly the card's errors."""
    words = [sys.executable, "-m", "nestling", "evaluate", name, "--sample", "--json"]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    found, card = json.loads(done.stdout), shelf.card(name)
    assert (
        (found["n"], found["data"])
        == (card["first"]["n"], from_dict(card["recipe"]).data.name)
        == (1000, found["data"])
    )
    assert [round(stage["error"], 6) for stage in found["stages"]] == card["first"]["errors"] == found["card"]
    assert [stage["size"] for stage in found["stages"]] == [stage["size"] for stage in card["results"]["stages"]]


@pytest.mark.parametrize("name", shelf.names())
def test_a_network_stops_when_it_is_sure_and_loses_what_was_allowed(name: str) -> None:
    said, card = shelf.outputs(name), shelf.card(name)
    wrong = (said["logits"].argmax(2) != said["labels"]).float().mean(1)
    promised = torch.tensor([stage["error"] for stage in card["results"]["stages"]])
    torch.testing.assert_close(wrong, promised, rtol=0, atol=5e-4)  # kept in float16
    x = next(iter(shelf.sample(name).test.batches(64)))[0]
    with nestling.Runtime(name, device="cpu") as runtime:
        found = runtime.stop_when_sure(0.005)
        assert found.error <= found.last_error + 0.005 + 0.004, "judged on images that had no say"
        assert found.cost < 0.8 and found.stopped[0] > 0.3
        stages = [answer.stage for answer in runtime.answer_batch(x)]
        assert len(set(stages)) > 1 and stages.count(1) > len(stages) * 0.3


@pytest.mark.parametrize("name", shelf.names())
def test_profiling_a_network_measures_it_and_stores_nothing(name: str, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in shelf.SHELF.iterdir()}
    words = [sys.executable, "-m", "nestling", "profile", name, "--device", "cpu", "--repeats", "10", "--json"]
    words += ["--threads", "1", "--threads", "2", "--batch", "1", "--batch", "2"]
    done = subprocess.run(words, check=True, capture_output=True, text=True, cwd=tmp_path)
    found, card = json.loads(done.stdout), shelf.card(name)
    conditions = [(each["threads"], each["batch"], each["repeats"]) for each in found["conditions"]]
    assert conditions == [(1, 1, 10), (1, 2, 10), (2, 1, 10), (2, 2, 10)]
    macs = [stage["macs"] for stage in card["results"]["stages"]]
    for condition in found["conditions"]:
        medians = [stage["median_ms"] for stage in condition["stages"]]
        assert medians[0] > 0 and medians == sorted(medians)
        assert [stage["macs"] for stage in condition["stages"]] == macs
    assert {path: path.stat().st_mtime_ns for path in shelf.SHELF.iterdir()} == before and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", shelf.names())
def test_a_report_on_a_network_says_what_to_do_instead(name: str, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "nestling", "report", name]
    done = subprocess.run(words, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and not list(tmp_path.iterdir())
    assert "no log and no outputs to write up" in done.stderr
    assert f"nestling evaluate {name} --sample and nestling profile {name}" in done.stderr


@pytest.mark.parametrize("name", shelf.names())
def test_the_stored_images_are_the_first_of_the_real_test_set(name: str) -> None:
    stored = shelf.sample(name).test
    assert len(stored) == shelf.FIRST and stored.labels.unique().tolist() == list(range(10))
    try:
        real = load(DataRecipe(name=from_dict(shelf.card(name)["recipe"]).data.name))
    except NestlingError as error:
        pytest.skip(f"the real images are not here: {error}")
    first = torch.arange(shelf.FIRST)
    assert torch.equal(stored.pictures(first), real.test.pictures(first))
    assert torch.equal(stored.labels, real.test.labels[first])


def test_a_sample_is_only_for_networks_of_the_shelf(tmp_path: Path) -> None:
    with pytest.raises(NestlingError, match="--sample is for networks that come with nestling"):
        command(str(tmp_path), sample=True)


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(NestlingError, match="did you mean width-resnet42-cifar10"):
        nestling.load("width-resnet42-cifar")
    with pytest.raises(NestlingError, match=r"there is no run folder .*come with nestling: .*width-resnet42-cifar10"):
        nestling.Runtime("width-resnet42-cifar")
    with pytest.raises(NestlingError, match=r"there is no run folder .*come with nestling: .*width-resnet42-cifar10"):
        command("width-resnet42-cifar")
    with pytest.raises(NestlingError, match=r"there is no run folder .*come with nestling: .*width-resnet42-cifar10"):
        profile.command("width-resnet42-cifar")
