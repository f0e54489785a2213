"""A small part of the campaign: random models in every mode against the literal loop, and that it notices what is wrong."""

import subprocess
import sys
from pathlib import Path

import campaign
import pytest
import torch
import torch._functorch.config as functorch_config

from nestling.gradients import products

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("number", range(32))
def test_random_models_in_one_process(number: int) -> None:
    torch._dynamo.reset()
    case = campaign.Case(number, campaign.ALONE)
    with functorch_config.patch(donated_buffer=False):
        assert case.error() <= 1, str(case)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(40))
def test_random_models_by_the_faster_library(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, where products go by oneDNN: here even the smallest."""
    monkeypatch.setattr(products, "LEAST", 0)
    monkeypatch.setattr(products, "WEIGHTS", 0)
    case = campaign.Case(number, ["float32"])
    assert case.error() <= 1, str(case)


@pytest.mark.slow
def test_random_models_on_two_ranks() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run(
        [*command, str(HERE / "campaign.py"), "--cases", "16"], capture_output=True, text=True, timeout=240
    )
    assert ran.returncode == 0 and "16 cases, 0 wrong" in ran.stdout, ran.stdout + ran.stderr


def test_another_method_is_noticed() -> None:
    """Of cases that run one method and expect another, nearly all are called wrong."""
    noticed = 0
    for number in range(0, 10 * len(campaign.ALONE), len(campaign.ALONE)):  # with rows
        case = campaign.Case(number, campaign.ALONE)
        wanted, method = case.wanted, case.method

        def other(losses: list[torch.Tensor], case: campaign.Case = case, wanted=wanted, method=method):  # type: ignore[no-untyped-def]
            case.method = "osgd" if method != "osgd" else "sgd"
            found = wanted(losses)
            case.method = method
            return found

        case.wanted = other  # type: ignore[method-assign, assignment]
        noticed += case.error() > 1
    assert noticed >= 8
