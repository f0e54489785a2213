"""Latency per stage: its percentiles, and the same after a trip through JSON."""

import json
from pathlib import Path

import pytest

from nestling.errors import NestlingError
from nestling.files import PROFILE
from nestling.runs.folder import RunDir
from nestling.runs.latency import Latency, from_dict, load_profile, to_dict


def test_percentiles_by_hand() -> None:
    trace = tuple((float(v), 10.0 * v) for v in (1, 2, 3, 4, 5))
    row = to_dict(Latency(trace, (7, 9), "here", 1, 1, "float32"))["stages"][1]
    # 95 % of the way through 5 sorted values is position 3.8: 40 + 0.8 * 10
    assert row == {"stage": 2, "median_ms": 30, "mean_ms": 30, "p95_ms": 48, "p99_ms": pytest.approx(49.6), "macs": 9}


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    found = Latency(tuple((1.0 + repeat, 2.5 + repeat) for repeat in range(5)), (7, 9), "here", 2, 3, "float32")
    RunDir(tmp_path).write_json(PROFILE, to_dict(found))
    assert load_profile(RunDir(tmp_path)) == found
    assert json.loads((tmp_path / "profile.json").read_text())["repeats"] == 5


@pytest.mark.parametrize("spoil", [{"trace_ms": []}, {"trace_ms": [[1.0], [1.0, 2.0]]}, {"trace_ms": None}, {}])
def test_what_is_no_profile_is_refused(spoil: dict[str, object]) -> None:
    found = to_dict(Latency(((1.0, 2.0),), (), "here", 1, 1, "float32"))
    spoilt = {**found, **spoil} if spoil else {}
    with pytest.raises(NestlingError, match="measure"):
        from_dict(spoilt)
