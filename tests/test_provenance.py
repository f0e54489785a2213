"""Where a run comes from, in words that are true on every machine."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nestling.runs.provenance import provenance, without_folders


def strings(found: Any) -> Iterator[str]:
    if isinstance(found, dict):
        found = [*found, *found.values()]
    if isinstance(found, list):
        for each in found:
            yield from strings(each)
    elif isinstance(found, str):
        yield found


def test_a_command_says_nothing_of_this_machines_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    inside = f"python {tmp_path}/benchmarks/serve.py --json {tmp_path}/results/serve.json"
    assert without_folders(inside) == "python benchmarks/serve.py --json results/serve.json"
    elsewhere = (
        "nestling train digits --set data.root=/mnt/data/tiny --set network.name=/home/me/net.py:build --out /scratch/a"
    )
    said = "nestling train digits --set data.root=tiny --set network.name=net.py:build --out a"
    assert without_folders(elsewhere) == said == provenance(elsewhere, "cpu", time.time)["command"]
    for untouched in (
        "nestling data x --root ../x",
        "curl http://localhost:8000/v2/models",
        "--set a=1/2",
        "runs/a ~/b ./c",
    ):
        assert without_folders(untouched) == untouched


def test_results_say_nothing_of_a_machines_folders() -> None:
    """Whatever measured them: commands, options and messages that came with an error."""
    found = {
        path.name: said
        for path in sorted((Path(__file__).parent.parent / "results").glob("*.json"))
        for said in strings(json.loads(path.read_text(encoding="utf-8")))
        if without_folders(said) != said
    }
    assert not found
