"""Tiny ImageNet in its own layout: decoded once into mapped pixels, whole or not at all, and trained from the command line."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from nestling.commands import data as data_command
from nestling.commands import describe as describe_command
from nestling.commands import evaluate as evaluate_command
from nestling.commands import paper as paper_command
from nestling.commands import train as train_command
from nestling.data import MemorySplit, load, tiny_imagenet
from nestling.data.dataset import channel_statistics
from nestling.errors import NestlingError
from nestling.recipes.recipe import DataRecipe
from nestling.report.paper.tables import tiny_tables
from nestling.studies.paper.grid import recipe_of
from nestling.studies.paper.results import read_results

CLASSES = ("n01443537", "n01629819", "n01641577", "n01644900")
WORDS = ("goldfish, Carassius auratus", "European fire salamander", "frog, bullfrog", "frog, tailed")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Four classes of six pictures, one of them grey, and eight to test on."""
    chance = np.random.RandomState(0)
    for name in CLASSES:
        here = tmp_path / "train" / name / "images"
        here.mkdir(parents=True)
        for i in range(6):
            shape = (64, 64) if i == 5 else (64, 64, 3)
            Image.fromarray(chance.randint(0, 256, shape, dtype=np.uint8)).save(here / f"{name}_{i}.JPEG")
        (here.parent / f"{name}_boxes.txt").write_text("n_0.JPEG\t0\t0\t1\t1\n")
    (tmp_path / "val" / "images").mkdir(parents=True)
    lines = []
    for i in range(8):
        Image.fromarray(chance.randint(0, 256, (64, 64, 3), dtype=np.uint8)).save(tmp_path / f"val/images/val_{i}.JPEG")
        lines.append(f"val_{i}.JPEG\t{CLASSES[(3 * i) % 4]}\t0\t32\t44\t62\n")
    (tmp_path / "val" / "val_annotations.txt").write_text("".join(lines))
    spoken = [f"{number}\t{words}\n" for number, words in zip(CLASSES, WORDS, strict=True)]
    (tmp_path / "words.txt").write_text("n00001740\tentity\n" + "".join(spoken))
    return tmp_path


def recipe(root: Path) -> DataRecipe:
    return DataRecipe(name="tiny-imagenet", root=str(root))


def test_every_picture_is_there_once_with_its_label(root: Path) -> None:
    found = data_command.command("tiny-imagenet", root=str(root))
    assert (found["train"], found["test"], found["shape"]) == (24, 8, [3, 64, 64])
    assert found["classes"] == ["goldfish", "European fire salamander", "frog, bullfrog", "frog, tailed"]
    assert found["per_class"] == {"train": [6] * 4, "test": [2] * 4}
    shown = Console(width=80, record=True, file=io.StringIO())
    shown.print(data_command.show(found))
    assert "train: 6 each" in shown.export_text(), "200 equal numbers fill a screen"
    data = load(recipe(root))
    assert isinstance(data.train, MemorySplit) and isinstance(data.test, MemorySplit)
    assert (data.train.pad, data.train.flip, data.test.pad) == (8, True, 0)
    for index in (0, 5, 17):
        path = root / "train" / CLASSES[index // 6] / "images" / f"{CLASSES[index // 6]}_{index % 6}.JPEG"
        pixels = torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1)
        assert torch.equal(data.train.images[index], pixels) and int(data.train.labels[index]) == index // 6
    assert data.test.labels.tolist() == [(3 * i) % 4 for i in range(8)]
    mean, std = channel_statistics(data.train.images)
    assert data.mean == pytest.approx(mean) and data.std == pytest.approx(std)


def test_a_second_call_decodes_nothing_and_the_pixels_are_mapped(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    tiny_imagenet.prepare(str(root), tell=lambda done, many: told.append((done, many)))
    assert told == [(24, 32), (32, 32)]
    monkeypatch.setattr(tiny_imagenet, "picture", lambda path: pytest.fail("decoded twice"))
    tiny_imagenet.prepare(str(root))
    images = load(recipe(root)).train
    assert isinstance(images, MemorySplit)
    images.images[0].zero_()  # a copy of the page, not the file
    again = load(recipe(root)).train
    assert isinstance(again, MemorySplit) and bool(again.images[0].any())


def test_stopped_half_way_it_is_not_prepared(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture, left = tiny_imagenet.picture, [27]  # within the second part

    def lost(path: str) -> np.ndarray:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return picture(path)

    monkeypatch.setattr(tiny_imagenet, "picture", lost)
    with pytest.raises(KeyboardInterrupt):
        tiny_imagenet.prepare(str(root), workers=1)
    with pytest.raises(NestlingError, match=r"not prepared.*nestling data tiny-imagenet --root"):
        load(recipe(root))
    assert not list(root.glob(".*.tmp"))
    monkeypatch.setattr(tiny_imagenet, "picture", picture)
    tiny_imagenet.prepare(str(root))
    assert len(load(recipe(root)).test) == 8


def test_what_is_not_its_layout_is_refused(root: Path) -> None:
    with pytest.raises(NestlingError, match=r"there is no folder .*elsewhere; unpack Tiny ImageNet there"):
        tiny_imagenet.prepare(str(root / "elsewhere"))
    odd = root / "train" / CLASSES[0] / "images" / "odd.JPEG"
    Image.new("RGB", (65, 64)).save(odd)
    with pytest.raises(NestlingError, match=r"odd\.JPEG is 65x64"):
        tiny_imagenet.prepare(str(root))
    odd.write_bytes(b"no picture")
    with pytest.raises(NestlingError, match=r"cannot read the picture .*odd\.JPEG"):
        tiny_imagenet.prepare(str(root))
    odd.unlink()
    listed = root / "val" / "val_annotations.txt"
    text = listed.read_text()
    for wrong in ("val_0.JPEG\tn99\t0\n", "../x.JPEG\tn01443537\t0\n"):
        listed.write_text(text + wrong)
        with pytest.raises(NestlingError, match="line 9 is"):
            tiny_imagenet.prepare(str(root))
    listed.unlink()
    with pytest.raises(NestlingError, match="own layout"):
        tiny_imagenet.prepare(str(root))


def test_damaged_caches_are_refused(root: Path) -> None:
    tiny_imagenet.prepare(str(root))
    pixels = root / tiny_imagenet.PIXELS["train"]
    whole = pixels.read_bytes()
    pixels.write_bytes(whole[:1000])
    with pytest.raises(NestlingError, match=r"has 1,000 bytes, expected 294,912 \(24 pictures\)"):
        load(recipe(root))
    pixels.unlink()
    with pytest.raises(NestlingError, match="has 0 bytes"):
        load(recipe(root))
    pixels.write_bytes(whole)
    (root / tiny_imagenet.ABOUT).write_text("{}")
    with pytest.raises(NestlingError, match="is damaged"):
        load(recipe(root))


@pytest.mark.parametrize("name, settings", [
    ("tiny-width", ("network.widths=32,64", "network.blocks=1,1")), ("tiny-depth", ("network.widths=4,8", "network.blocks=4,4")),
    ("tiny-small", ("network.widths=8,16", "network.blocks=1,1", "train.warmup=0")),
])  # fmt: skip
def test_its_recipes_train_from_the_command_line(
    root: Path, tmp_path: Path, name: str, settings: tuple[str, ...]
) -> None:
    data_command.command("tiny-imagenet", root=str(root))
    quick = (f"data.root={root}", "train.epochs=1", "train.batch=8", "train.precision=float32")
    found = train_command.command(name, out=str(tmp_path / "run"), set=(*quick, *settings), quiet=True)
    assert [stage["stage"] for stage in found["stages"]] == [1, 2, 3] and found["data"] == "tiny-imagenet"
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["name"] == name
    five = [
        {**stage, "top5": 0.125 * stage["stage"]} for stage in found["stages"]
    ]  # four classes have none of their own
    shown = Console(width=80, record=True, file=io.StringIO())
    shown.print(evaluate_command.show({**found, "stages": five}))
    text = shown.export_text()
    assert "top-5" in text and "37.50" in text and "…" not in text


def test_without_a_root_it_is_looked_for_in_the_usual_place(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NESTLING_DATA", str(tmp_path / "data"))
    with pytest.raises(NestlingError, match=r"data/tiny-imagenet-200; unpack Tiny ImageNet there, or say where"):
        load(DataRecipe(name="tiny-imagenet"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / tiny_imagenet.FOLDER).symlink_to(root)
    assert not tiny_imagenet.prepared("")
    data_command.command("tiny-imagenet")
    assert tiny_imagenet.prepared("") and len(load(DataRecipe(name="tiny-imagenet")).test) == 8


def test_all_trains_it_where_it_is_prepared(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words: dict[str, Any] = {
        "network": ("width-resnet50",),
        "strategy": ("sgd",),
        "seeds": 1,
        "out": str(tmp_path / "runs"),
    }
    monkeypatch.setenv("NESTLING_DATA", str(root.parent))
    monkeypatch.setattr(tiny_imagenet, "FOLDER", root.name)
    for plan in (True, False):
        found = paper_command.command("all", **words, plan=plan, results="")
        assert found == {"part": "all", "plan": [], "unprepared": 1}, "not prepared: left out"
    data_command.command("tiny-imagenet")
    [line] = paper_command.command("all", **words, plan=True, results="")["plan"]
    assert line["run"] == "tiny-width-resnet50-sgd-seed0" and 0.5 < line["minutes"] < 5
    quick = ("train.epochs=1", "train.batch=8", "train.precision=float32", "network.widths=32,64", "network.blocks=1,1")
    found = paper_command.command("all", **words, set=quick, results=str(tmp_path / "results"))
    assert [row["data"] for row in found["rows"]] == ["tiny-imagenet"] * 3
    again = paper_command.command("all", **words, set=quick, results=str(tmp_path / "results"), plan=True)
    assert again["plan"] == [], "what is on record is not trained again"


def test_describe_shows_its_recipes_as_they_are_trained() -> None:
    found = describe_command.command("tiny-width")
    assert (found["shape"], found["classes"]) == ([3, 64, 64], 200)
    whole = describe_command.command("width-resnet50")
    assert (whole["shape"], whole["classes"]) == ([3, 224, 224], 1000)
    assert 11.5 < whole["stages"][-1]["macs"] / found["stages"][-1]["macs"] < 12.5  # (224/64)^2 and the head
    assert describe_command.command("tiny-width", classes=7, shape="3,32,32")["classes"] == 7
    assert 2 * describe_command.command("tiny-small")["unnested"]["params"] < 20e6, (
        "half precision, what the rule drops as well"
    )


def test_its_part_of_the_grid_stands_beside_no_number_of_the_papers(root: Path, tmp_path: Path) -> None:
    """The paper's numbers of the same networks are ImageNet's."""
    data_command.command("tiny-imagenet", root=str(root))
    quick = (f"data.root={root}", "train.epochs=1", "train.batch=8", "train.precision=float32", "network.widths=32,64")
    found = paper_command.command(
        "tiny", network=("width-resnet50",), strategy=("sgd",), set=(*quick, "network.blocks=1,1"), out=str(tmp_path / "runs"),
        results=str(tmp_path / "results"),
    )  # fmt: skip
    [folder] = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("tiny-width-resnet50-sgd-")
    assert [(row["stage"], row["paper"], row["beyond"]) for row in found["rows"]] == [
        (s, None, False) for s in (1, 2, 3)
    ]
    assert [Path(path).name.startswith("tiny-imagenet-") for path in found["results"]] == [True]
    [row, *_] = read_results(str(tmp_path / "results"))
    assert recipe_of(row).data.name == "tiny-imagenet" and row["train"].startswith("nestling train tiny-width")
    shown = tiny_tables(read_results(str(tmp_path / "results")))
    assert [table.title for table in shown] == [
        "width-resnet50, top-5",
        "width-resnet50, with something changed",
    ]
    assert shown[0].columns[0].text == "top-5 error in %"
    assert "paper" not in "".join(cell.small for table in shown for line in table.rows for cell in line)
