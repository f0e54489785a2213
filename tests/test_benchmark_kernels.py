"""How tuning becomes a chip's table: what is in use stays unless others are worth the change, and nothing is typed by hand."""

import sys
from pathlib import Path
from typing import Any

import pytest

from nestling.kernels.backends import tile_tables

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import kernels as benchmark


def row(kernel: str, used: tuple[float, float], best: tuple[float, float]) -> dict[str, Any]:
    def told(name: str, times: tuple[float, float]) -> dict[str, Any]:
        return {"us": times[0], "alone_us": times[1], "tiles": {"rows": {"used": 8, "best": 16}[name]}}

    shape = {"backend": "sm80", "kernel": kernel, "cin": 8, "cout": 16, "side": 32, "batch": 128, "beside": 6}
    return shape | {"used": told("used", used), "best": [told("best", best)], "wrong": []}


@pytest.mark.parametrize(
    ("kernel", "used", "best", "rows"),
    [
        ("forward", (9.0, 5.0), (2.0, 4.9), 8),  # alone it is only 2 % faster
        ("forward", (2.0, 5.0), (9.0, 4.0), 16),
        ("weights", (5.0, 2.0), (4.0, 9.0), 16),  # beside others it takes less of the chip
        ("weights", (5.0, 9.0), (4.9, 2.0), 8),
    ],
)
def test_tiles_are_replaced_by_faster_ones_only(kernel: str, used: Any, best: Any, rows: int) -> None:
    (found,) = benchmark.table_rows([row(kernel, used, best)])
    assert found["tiles"] == {"rows": rows} and found["kernel"] == kernel


def test_where_all_tiles_are_wrong_those_in_use_stay() -> None:
    (found,) = benchmark.table_rows([row("back", (5.0, 5.0), (1.0, 1.0)) | {"best": []}])
    assert found["tiles"] == {"rows": 8}


def test_a_written_table_is_read_again_and_keeps_what_was_not_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_tables, "FOLDER", tmp_path)
    try:
        for kernel, best in (("forward", (1.0, 1.0)), ("back", (1.0, 1.0)), ("forward", (9.0, 9.0))):
            tile_tables.table.cache_clear()
            path = benchmark.write_table("NVIDIA Next", [row(kernel, (5.0, 5.0), best)], {"commit": "abc"})
        tile_tables.table.cache_clear()
        assert path.name == "nvidia-next.json" and len(path.read_text().splitlines()) == 4
        found = {shape[1]: (shape, row["tiles"]) for shape, row in tile_tables.table("NVIDIA Next").items()}
        assert found["forward"] == (("sm80", "forward", 8, 16, 32), {"rows": 8})
        assert found["back"] == (("sm80", "back", 8, 16, 32), {"rows": 16})
    finally:
        tile_tables.table.cache_clear()


def test_shapes_are_read() -> None:
    assert [benchmark.shape_of(each) for each in ("32:16", "8:16:32")] == [(32, 32, 16), (8, 16, 32)]
