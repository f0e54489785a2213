"""Latency per stage: measured in order, with the conditions kept, and the same after a trip through JSON."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from nestling import nets
from nestling.cost import WARM_UP, Latency, from_dict, load_profile, measure, save_profile, to_dict
from nestling.errors import NestlingError
from nestling.recipe import NetworkRecipe
from nestling.rundir import RunDir


class Ticks:
    """A clock that reads 0, 1, 2, ... seconds."""

    def __init__(self) -> None:
        self.time = -1.0

    def __call__(self) -> float:
        self.time += 1
        return self.time


@pytest.fixture(scope="module")
def net() -> nets.NestedNet:
    return nets.build(NetworkRecipe("width-digits"))


IMAGES = torch.zeros(3, 1, 8, 8)


def test_the_clock_is_read_once_before_the_stages_and_once_after_each(net: nets.NestedNet) -> None:
    clock = Ticks()
    found = measure(net, IMAGES, repeats=4, clock=clock)
    assert found.trace == ((1000.0, 2000.0, 3000.0),) * 4
    assert clock.time + 1 == (WARM_UP + 4) * (1 + 3)


def test_what_is_measured_says_under_which_conditions(net: nets.NestedNet) -> None:
    before = torch.get_num_threads()
    found = measure(net, IMAGES, repeats=2, batch=2, threads=2)
    assert (found.threads, found.batch, found.dtype, found.stages) == (2, 2, "float32", 3)
    assert found.macs == tuple(net.plan.macs(stage) for stage in (1, 2, 3))
    assert found.device.endswith("cores")
    assert torch.get_num_threads() == before


def test_measuring_leaves_the_net_as_it_was(net: nets.NestedNet) -> None:
    net.train()
    kept = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    measure(net, torch.randn(3, 1, 8, 8), repeats=2)
    assert net.training
    assert all(torch.equal(kept[name], tensor) for name, tensor in net.state_dict().items())


def test_real_times_rise_from_stage_to_stage(net: nets.NestedNet) -> None:
    found = measure(net, IMAGES, repeats=20)
    assert (found.array > 0).all()
    assert all(later > earlier for row in found.trace for earlier, later in itertools.pairwise(row))


def test_an_independent_net_has_one_stage() -> None:
    found = measure(nets.build(NetworkRecipe("width-digits", alone=2)), IMAGES, repeats=3)
    assert found.stages == 1


def test_percentiles_by_hand() -> None:
    trace = tuple((float(v), 10.0 * v) for v in (1, 2, 3, 4, 5))
    row = to_dict(Latency(trace, (7, 9), "here", 1, 1, "float32"))["stages"][1]
    # 95 % of the way through 5 sorted values is position 3.8: 40 + 0.8 * 10
    assert row == {"stage": 2, "median_ms": 30, "mean_ms": 30, "p95_ms": 48, "p99_ms": pytest.approx(49.6), "macs": 9}


def test_a_profile_survives_its_file(tmp_path: Path, net: nets.NestedNet) -> None:
    found = measure(net, IMAGES, repeats=5)
    save_profile(RunDir(tmp_path), found)
    assert load_profile(RunDir(tmp_path)) == found
    assert json.loads((tmp_path / "profile.json").read_text())["repeats"] == 5


@pytest.mark.parametrize("spoil", [{"trace_ms": []}, {"trace_ms": [[1.0], [1.0, 2.0]]}, {"trace_ms": None}, {}])
def test_what_is_no_profile_is_refused(spoil: dict[str, object]) -> None:
    found = to_dict(Latency(((1.0, 2.0),), (), "here", 1, 1, "float32"))
    spoilt = {**found, **spoil} if spoil else {}
    with pytest.raises(NestlingError, match="measure"):
        from_dict(spoilt)


@pytest.mark.parametrize(("repeats", "batch"), [(0, 1), (1, 0), (1, 4)])
def test_nothing_to_measure_is_refused(net: nets.NestedNet, repeats: int, batch: int) -> None:
    with pytest.raises(NestlingError, match="at least one"):
        measure(net, IMAGES, repeats=repeats, batch=batch)
