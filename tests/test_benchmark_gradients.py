"""benchmarks/gradients.py: the tables of the documentation are those of its results, and its files are kept case by case."""

import json
import sys
from pathlib import Path

import pytest
import torch
import torch._functorch.config

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import gradients as benchmark
import large_trunks
import trunk_counts
from gradient_zoo import literal_osgd
from trunks import TRUNKS

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "gradients-cpu.json"


def test_the_tables_of_the_documentation_are_those_of_the_results() -> None:
    shown = {"docs/gradients.md": [benchmark.brief(RESULTS)], "docs/log/gradients.md": benchmark.tables(RESULTS)}
    for page, tables in shown.items():
        for table in tables:
            assert table in (ROOT / page).read_text(encoding="utf-8"), (
                f"{page} lacks what --table {RESULTS.name} prints:\n{table}"
            )


def test_the_counts_of_the_documentation_are_those_of_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "log" / "gradients.md").read_text(encoding="utf-8")
    trunk_counts.main()
    assert capsys.readouterr().out in page


def test_every_case_has_every_method() -> None:
    rows = json.loads(RESULTS.read_text())["rows"]
    assert sorted((row["case"], row["method"]) for row in rows) == sorted(
        (name, method) for name, case in benchmark.CASES.items() for method in benchmark.methods_of(case)
    )


def test_one_case_replaces_its_rows_and_no_others(tmp_path: Path) -> None:
    first, second = list(benchmark.CASES)[:2]
    file, heading = tmp_path / "rows.json", {"device": "CPU"}
    rows = [{"case": first, "ratio": 1}, {"case": second, "ratio": 2}]
    file.write_text(json.dumps({"condition": heading, "rows": rows, "more": 1}))
    assert benchmark.before(file, heading, [first]) == {"condition": heading, "rows": rows[1:], "more": 1}
    assert benchmark.before(tmp_path / "none.json", heading, [first]) == {"rows": []}
    with pytest.raises(SystemExit, match="was made under"):
        benchmark.before(file, {"device": "GPU"}, [first])
    assert benchmark.before(file, {"device": "GPU"}, [first, second])["rows"] == []


@pytest.mark.slow
@pytest.mark.parametrize("case", TRUNKS)
def test_our_update_is_the_literal_one(case: str) -> None:
    """Where layers have no rows, too: to 1e-6 of the loop in float64 over gradients of one loss at a time."""
    net, losses = benchmark.problem(case)
    params, found = list(net.parameters()), losses()
    rows = torch.stack(
        [
            torch.cat(
                [
                    (torch.zeros_like(p) if g is None else g).flatten().double()
                    for p, g in zip(params, grads, strict=True)
                ]
            )
            for grads in (torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True) for loss in found)
        ]
    )
    wanted = literal_osgd(rows, range(len(rows)), [1.0] * len(rows))
    benchmark.METHODS[benchmark.OURS](net, losses)()
    update = torch.cat([p.grad.flatten().double() for p in params if p.grad is not None])
    assert float((update - wanted).norm() / wanted.norm()) < 1e-6


def test_the_large_models_at_a_size_for_a_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes of a GPU are asked for once: it must get to its end and leave its file."""
    pytest.importorskip("torchjd")
    file = tmp_path / "rows.json"
    tiny = ["--device", "cpu", "--tiny", "--batch", "4", "--rounds", "1", "--way", "eager", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["large_trunks.py", *tiny])
    before = torch.get_float32_matmul_precision()
    try:
        with torch._functorch.config.patch(donated_buffer=False):  # as main does; put back afterwards
            large_trunks.main()
    finally:
        torch.set_float32_matmul_precision(before)
    rows = json.loads(file.read_text())["rows"]
    assert {(row["model"], row["method"]) for row in rows} == {
        (model, method) for model in large_trunks.MODELS for method in large_trunks.ASKED
    }
    assert not any(row["failed"] for row in rows) and all(float(row["error"] or 0) < 1e-5 for row in rows)
