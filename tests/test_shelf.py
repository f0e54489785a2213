"""The networks that come with nestling do what their cards say, on real images where they are to be had."""

import pytest
import torch

import nestling
from nestling import shelf
from nestling.data import load
from nestling.errors import NestlingError
from nestling.recipe import DataRecipe, from_dict


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


@pytest.mark.parametrize("name", shelf.names())
def test_the_card_is_true_on_the_first_thousand_test_images(name: str) -> None:
    card = shelf.card(name)
    try:
        data = load(DataRecipe(name=from_dict(card["recipe"]).data.name))
    except NestlingError as error:
        pytest.skip(f"the real images are not here: {error}")
    net = nestling.load(name)
    wrong = torch.zeros(len(net.plan.heads))
    seen = 0
    with torch.no_grad():
        for x, y in data.test.batches(100):
            wrong += torch.stack([(answer.argmax(1) != y).sum() for answer in net(x)])
            seen += len(y)
            if seen == card["first"]["n"]:
                break
    assert (wrong / seen).tolist() == pytest.approx(card["first"]["errors"], abs=1e-6)


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(NestlingError, match="did you mean width-resnet42-cifar10"):
        nestling.load("width-resnet42-cifar")
