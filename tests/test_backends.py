"""Who computes a convolution: backends in order of preference, by chip and shape; and the tables that their tiles come from."""

import itertools
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from nestling.kernels import backends, chip, nvrtc
from nestling.kernels.backends import BACKENDS, choices, sm80, sm90, tile_tables, triton
from nestling.kernels.backends.triton import Tiles, conv_tiles, weight_splits
from nestling.kernels.elementwise import elementwise_rows
from nestling.kernels.patterns import Unit, items, plain
from nestling.nets import plan
from nestling.recipes.recipe import NetworkRecipe

ROOT = Path(__file__).parent.parent
A100 = chip.Chip("NVIDIA A100-SXM4-80GB", (8, 0), 108)
H200 = chip.Chip("NVIDIA H200", (9, 0), 132)


def test_a_chip_gets_what_suits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best backend first, those of older chips behind it, Triton's last; without NVRTC that alone."""
    ada, blackwell = chip.Chip("NVIDIA L4", (8, 9), 58), chip.Chip("NVIDIA B200", (10, 0), 148)
    turing = chip.Chip("Tesla T4", (7, 5), 40)
    expected = {8: [sm80], 16: [sm80], 32: [sm80], 64: [], 128: [], 24: []}
    for on in (A100, ada, blackwell):
        assert order(monkeypatch, on) == expected and on.architecture == f"sm_{on.capability[0]}{on.capability[1]}"
    assert order(monkeypatch, H200) == expected | {32: [sm90, sm80], 64: [sm90], 128: [sm90]}
    assert H200.architecture == "sm_90a", "wgmma is compiled for that alone"
    for on, there in ((turing, True), (H200, False)):
        assert order(monkeypatch, on, there) == {channels: [] for channels in expected}


def order(monkeypatch: pytest.MonkeyPatch, on: chip.Chip, there: bool = True) -> dict[int, list[Any]]:
    """By channels: who is asked before Triton."""
    monkeypatch.setattr(chip, "of", lambda device: on)
    monkeypatch.setattr(nvrtc, "available", lambda: there)
    found: dict[int, list[Any]] = {}
    for channels in (8, 16, 32, 64, 128, 24):
        x = torch.empty(4, channels, 16, 16, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
        for kernel in ("forward", "back", "weights"):
            *others, last = dict.fromkeys(choice.backend for choice in choices(kernel, x, channels))
            assert last is triton and found.setdefault(channels, others) == others
        assert {choice.backend for choice in choices("stem", x, channels)} == {triton}
    return found


def test_a_chip_more_is_a_module_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend of its own is asked first, and what it does not suit goes to the others."""
    new: Any = ModuleType("sm110")
    for name in ("forward", "back", "weights", "candidates"):
        setattr(new, name, getattr(sm80, name))
    new.NAME = "sm110"
    new.suits = lambda kernel, x, cout: kernel != "weights" and cout == 64
    new.tiles = lambda kernel, x, cout: ["its own"]
    new.halves = lambda device, cin, cout, size: cout == 128
    monkeypatch.setattr(backends, "BACKENDS", [new, *BACKENDS])
    pretend(monkeypatch, "NVIDIA Thor", (11, 0), 20)
    x = torch.empty(4, 64, 16, 16, dtype=torch.bfloat16, device="meta")
    assert choices("forward", x, 64)[0] == choices("back", x, 64)[0] == (new, "its own")
    assert choices("weights", x, 64)[0].backend is choices("forward", x, 32)[0].backend is triton
    units = [item for item in items(plan(NetworkRecipe(name="width-resnet42"))) if isinstance(item, Unit)]
    assert [unit.conv.channels for unit in units if unit.conv and not plain(unit.conv)] == [128], "it halves those"


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], processors: int) -> None:
    """As if every device were this chip, with NVRTC."""
    monkeypatch.setattr(chip, "of", lambda device: chip.Chip(name, capability, processors))
    monkeypatch.setattr(nvrtc, "available", lambda: True)


def test_the_table_has_every_shape_that_kernels_in_cuda_c_suit(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, tile_tables.FIRST, (9, 0), 132)
    for backend, images, cin, cout, side in itertools.product(
        (sm80, sm90), (4, 128), (8, 16, 32, 64, 128), (8, 16, 32, 64, 128), (8, 16, 32)
    ):
        x = torch.empty(images, cin, side, side, dtype=torch.bfloat16, device="meta")
        for kernel in ("forward", "back", "weights"):
            if backend.suits(kernel, x, cout):
                (tiles,) = backend.tiles(kernel, x, cout)
                assert images * side**2 % tiles.pixels(side) == 0, "whole tiles"
                assert kernel != "weights" or 1 <= tiles.splits <= images * side**2 // tiles.pixels(side)
    assert {row[0] for row in tile_tables.table(tile_tables.FIRST)} >= {"sm80", "sm90"}


def test_a_chips_own_table_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tile_tables.file_of(tile_tables.FIRST)
    monkeypatch.setattr(tile_tables, "FOLDER", tmp_path)
    (tmp_path / first.name).write_text(first.read_text())
    own = {"rows": 4, "warps": 4, "blocks_per_sm": 6}
    row = {"backend": "sm80", "kernel": "back", "cin": 8, "cout": 8, "side": 32, "batch": 128, "tiles": own}
    of_triton = Tiles(64, 32, 32, 8, 2)
    rows = [row, {**row, "backend": "triton", "cin": 24, "cout": 24, "tiles": of_triton._asdict()}]
    pretend(monkeypatch, "NVIDIA Next", (8, 0), 100)
    tile_tables.file_of("NVIDIA Next").write_text(tile_tables.written("NVIDIA Next", {}, rows))
    try:
        tile_tables.table.cache_clear()
        x = torch.empty(128, 8, 32, 32, dtype=torch.bfloat16, device="meta")
        assert choices("back", x, 8)[0] == (sm80, sm80.Tiles(**own))
        assert choices("forward", x, 8)[0] == (sm80, sm80.Tiles(16, 4, 4)), "what it does not have is the first chip's"
        x = torch.empty(128, 24, 32, 32, dtype=torch.bfloat16, device="meta")
        assert choices("back", x, 24)[0] == (triton, of_triton)
        assert choices("forward", x, 24)[0] == (triton, conv_tiles(128 * 32**2, 24, 24)), "by rule"
        assert choices("back", x[:64], 24)[0] == (triton, conv_tiles(64 * 32**2, 24, 24, back=True)), "other images"
    finally:
        tile_tables.table.cache_clear()


def test_programs_are_as_many_as_the_chip_has_processors_for(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(128, 24, 32, 32, dtype=torch.bfloat16, device="meta")
    for name, capability, processors in (("NVIDIA A100", (8, 0), 108), ("NVIDIA H200", (9, 0), 132)):
        pretend(monkeypatch, name, capability, processors)
        assert choices("weights", x, 24)[0].tiles.programs == processors


def test_halving_convolutions_are_taken_where_kernels_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of width-resnet42 the two that have a norm before them go from 32 to 64 and from 64 to 128 channels: Hopper's."""
    drawn, device = plan(NetworkRecipe(name="width-resnet42")), torch.device("cpu")
    for capability, fused in (((8, 0), 40), ((9, 0), 42)):
        pretend(monkeypatch, "a chip", capability, 100)
        units = [item for item in items(drawn, device) if isinstance(item, Unit)]
        assert sum(unit.conv is not None for unit in units) == fused


@pytest.mark.parametrize("pixels", [64, 128, 8192, 2**15, 2**17, 2**19, 3 * 64])
@pytest.mark.parametrize("channels", [8, 16, 24, 32, 64, 96, 128])
def test_tiles_divide_the_pixels(pixels: int, channels: int) -> None:
    for back in (False, True):
        tiles = conv_tiles(pixels, channels, channels, back)
        assert pixels % tiles.rows == 0 and tiles.columns >= min(channels, 64)
        assert tiles.depth >= (3 * channels if tiles.taps == 3 else min(channels, 64))
    assert pixels % elementwise_rows(pixels, channels) == 0
    splits = weight_splits(pixels, channels, channels, processors=132)
    assert splits.outs * splits.ins <= 64 * 128


def test_tiles_are_those_measured_to_be_fast() -> None:
    """By results/tiles-h200.json: what is waited for is fast alone, what runs beside it takes little of a shared chip."""
    rows = json.loads((ROOT / "results" / "tiles-h200.json").read_text())["rows"]
    assert len(rows) == 27
    for row in rows:
        pixels, channels, back = row["batch"] * row["side"] ** 2, row["channels"], row["kernel"] == "back"
        known = [*(row[used] for used in ("own", "shared", "used") if used in row), *row["best"]]
        splits = tuple(weight_splits(pixels, channels, channels, processors=132))
        if row["kernel"] != "weights":
            timed = {tuple(each["choice"]): each["alone_us"] for each in known}
            assert timed[tuple(conv_tiles(pixels, channels, channels, back))] <= 1.04 * known[0]["alone_us"], row
        elif (channels, row["side"]) == (32, 32):  # twice the programs of the best: by whole steps, docs/speed.md
            assert splits == (32, 32, 128, 132, 4, 3)
        else:
            timed = {tuple(each["choice"]): each["us"] for each in known}
            assert timed[splits] <= 1.04 * row["best"][0]["us"], row
