"""Folders of pictures: what is shown, that workers change nothing, and what is said about bad folders."""

import json
import math
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from nestling.commands.data import command
from nestling.data import load
from nestling.data.image_folder import MEAN, STD, FolderSplit, shown
from nestling.data.picture_file import Unreadable, middle, random_part, read
from nestling.errors import NestlingError
from nestling.recipes.recipe import DataRecipe

CLASSES = ("ant", "bee", "cat")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three classes of small pictures of many sizes and kinds, 7 to train and 4 to evaluate each."""
    chance = np.random.RandomState(0)
    for part, n in (("train", 7), ("val", 4)):
        for name in CLASSES:
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for i in range(n):
                pixels = chance.randint(0, 256, (chance.randint(20, 60), chance.randint(20, 60), 3), dtype=np.uint8)
                picture = Image.fromarray(pixels)
                if i % 3 == 0:
                    picture.save(folder / f"{i}.JPEG", quality=90)
                else:
                    (picture.convert("L") if i % 3 == 1 else picture).save(folder / f"{i}.png")
            (folder / "notes.txt").write_text("not a picture")
    return tmp_path


def splits(
    root: Path, workers: int = 0, skip_unreadable: bool = False, validation: int = 0
) -> tuple[FolderSplit, FolderSplit]:
    data = load(DataRecipe("folder", str(root), validation, size=16, workers=workers, skip_unreadable=skip_unreadable))
    assert isinstance(data.train, FolderSplit) and isinstance(data.test, FolderSplit)
    return data.train, data.test


def epoch(split: FolderSplit, seed: int | None) -> tuple[Tensor, Tensor]:
    pairs = list(split.batches(5, None if seed is None else seeded(seed)))
    return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])


def test_a_folder_is_a_data_set(root: Path) -> None:
    data = load(DataRecipe("folder", str(root), size=16, workers=0))
    assert (data.classes, data.shape, len(data.train), len(data.test)) == (CLASSES, (3, 16, 16), 21, 12)
    x, y = next(data.train.batches(5, seeded()))
    assert x.shape == (5, 3, 16, 16) and x.dtype == torch.float32 and y.dtype == torch.int64
    assert torch.equal(data.test.labels, torch.tensor([0, 1, 2]).repeat_interleave(4))
    assert (data.mean, data.std) == (MEAN, STD)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_number_of_workers_changes_nothing(root: Path, workers: int) -> None:
    alone, _ = splits(root, workers=0)
    many, test = splits(root, workers=workers)
    generator, same = seeded(1), seeded(1)
    for _ in range(2):  # two epochs of one generator
        for (x, y), (x_many, y_many) in zip(alone.batches(5, generator), many.batches(5, same), strict=True):
            assert torch.equal(x, x_many) and torch.equal(y, y_many)
    assert torch.equal(epoch(test, None)[0], epoch(splits(root)[1], None)[0])


def test_training_is_shuffled_and_varied_evaluation_is_neither(root: Path) -> None:
    train, test = splits(root)
    (x, y), (x_again, _), (x_other, _) = epoch(train, 0), epoch(train, 0), epoch(train, 1)
    assert torch.equal(x, x_again) and not torch.equal(x, x_other)
    assert sorted(y.tolist()) == train.labels.tolist() and y.tolist() != train.labels.tolist()
    for split in (train, test):
        x, y = epoch(split, None)
        assert torch.equal(y, split.labels)
        plain = torch.stack([read(file, 16) for file in split.files])
        assert torch.equal(split.pictures(torch.arange(len(split))), plain)
        expected = (plain / 255 - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
        torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-5)


def test_augmentation_can_be_switched_off_without_changing_the_order(root: Path) -> None:
    train, _ = splits(root)
    plain, _ = epoch(train, None)
    order = torch.randperm(21, generator=seeded(3))
    x = torch.cat([x for x, _ in train.batches(5, seeded(3), augment=False)])
    assert torch.equal(x, plain[order])
    off = load(DataRecipe("folder", str(root), size=16, workers=0, augment=False)).train
    assert torch.equal(torch.cat([x for x, _ in off.batches(5, seeded(3))]), plain[order])
    assert len(list(train.batches(5, drop_last=True))) == 4


def test_streaming_leaves_torchs_own_randomness_alone(root: Path) -> None:
    before = torch.get_rng_state()
    epoch(splits(root, workers=1)[0], 0)
    assert torch.equal(before, torch.get_rng_state())


def test_validation_comes_out_of_the_training_part(root: Path) -> None:
    shutil.rmtree(root / "val")
    train, held = splits(root, validation=6)
    assert (len(train), len(held)) == (15, 6) and not set(train.files) & set(held.files)
    assert held.augmented is False
    limited = load(DataRecipe("folder", str(root), validation=6, limit=4, size=16)).train
    assert isinstance(limited, FolderSplit) and limited.files == train.files[:4]


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(0, 2**62))
def test_a_random_part_lies_inside_and_has_a_permitted_size_and_ratio(width: int, height: int, seed: int) -> None:
    left, top, right, bottom = random_part(width, height, random.Random(seed))
    assert 0 <= left < right <= width and 0 <= top < bottom <= height
    if min(width, height) > 100 and max(width, height) < 4 / 3 * min(width, height):
        w, h = right - left, bottom - top
        assert 0.075 < w * h / (width * height) <= 1.001 and 0.73 < w / h < 1.37


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 300))
def test_the_middle_is_a_square_inside_around_the_centre(width: int, height: int, size: int) -> None:
    left, top, right, bottom = middle(width, height, shown(size))
    assert left >= -1e-6 and right <= width + 1e-6 and top >= -1e-6 and bottom <= height + 1e-6
    assert (
        math.isclose(right - left, bottom - top)
        and math.isclose(left + right, width)
        and math.isclose(top + bottom, height)
    )
    if size == 224:
        assert math.isclose(right - left, min(width, height) * 224 / 256)


def test_a_crop_of_one_colour_has_that_colour_and_half_are_mirrored(tmp_path: Path) -> None:
    Image.new("RGB", (50, 30), (10, 20, 30)).save(tmp_path / "plain.png")
    for seed in (None, 0, 1, 2):
        assert read(tmp_path / "plain.png", 8, seed).unique().tolist() == [10, 20, 30]
    ramp = np.tile(np.arange(0, 250, 5, dtype=np.uint8)[None, :, None], (50, 1, 3))  # brighter to the right
    Image.fromarray(ramp).save(tmp_path / "ramp.png")
    rises = [float(r[0, 0, -1]) > float(r[0, 0, 0]) for r in (read(tmp_path / "ramp.png", 8, s) for s in range(300))]
    assert 110 < sum(rises) < 190


def test_pictures_of_16_bits_are_scaled_not_cut_off(tmp_path: Path) -> None:
    deep = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    Image.fromarray((deep >> 8).astype(np.uint8)).save(tmp_path / "plain.png")
    assert torch.equal(read(tmp_path / "deep.png", 32), read(tmp_path / "plain.png", 32))
    Image.fromarray(deep.astype(np.float32)).save(tmp_path / "floats.tiff")
    with pytest.raises(Unreadable, match="32 bits"):
        read(tmp_path / "floats.tiff", 32)


def spoil(root: Path) -> tuple[Path, Path]:
    """One picture without its end, and one that is none."""
    cut, fake = root / "train" / "bee" / "3.JPEG", root / "train" / "cat" / "2.png"
    cut.write_bytes(cut.read_bytes()[:-400])
    fake.write_text("this is no picture")
    return cut, fake


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_picture_is_named(root: Path, workers: int) -> None:
    cut, _ = spoil(root)
    train, _ = splits(root, workers)
    with pytest.raises(
        NestlingError, match=rf"cannot read the picture {cut} \(.*\); .*data.skip_unreadable=true"
    ) as error:
        epoch(train, None)
    assert "Traceback" not in str(error.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_pictures_are_skipped_and_counted_when_asked(
    root: Path, workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    spoiled = spoil(root)
    train, _ = splits(root, workers, skip_unreadable=True)
    capsys.readouterr()
    x, y = epoch(train, None)
    said = capsys.readouterr().err
    assert f"nestling: 2 of the 21 pictures in {root / 'train'} cannot be read and are left out, such as" in said
    assert ".py" not in said
    assert set(train.skipped) == {str(path) for path in spoiled}
    assert len(x) == 19 and y.bincount().tolist() == [7, 6, 6]
    assert len(epoch(train, 0)[0]) == 19
    assert not capsys.readouterr().err  # said once, not every epoch


def test_pictures_are_counted_as_answers_are_where_some_cannot_be_read(root: Path) -> None:
    """The report shows test pictures by the place of their answers."""
    before = splits(root)[1]
    Path(before.files[2]).write_bytes(b"spoilt")
    test = splits(root, skip_unreadable=True)[1]
    _, labels = epoch(test, None)
    good = [position for position in range(len(test)) if position != 2]
    assert torch.equal(labels, before.labels[good])
    assert torch.equal(test.pictures(torch.arange(11)), before.pictures(torch.tensor(good)))


def test_a_folder_of_nothing_readable_is_an_error(root: Path) -> None:
    for file in (root / "train").rglob("*.*"):
        file.write_text("no")
    train, _ = splits(root, skip_unreadable=True)
    with pytest.raises(NestlingError, match="none of the 21 pictures can be read"):
        epoch(train, None)


def remove_pictures(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def leave_one_class(root: Path) -> None:
    for name in ("bee", "cat"):
        shutil.rmtree(root / "train" / name)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda root: shutil.rmtree(root / "train"), "there is no folder .*/train; expected train/CLASS"),
        (lambda root: shutil.rmtree(root / "val"), "there is no folder .*/val; expected val/CLASS"),
        (lambda root: remove_pictures(root / "train" / "bee"), "class folder .*/train/bee holds no pictures"),
        (lambda root: remove_pictures(root / "val" / "cat"), "class folder .*/val/cat holds no pictures"),
        (lambda root: (root / "train").rename(root / "x") and (root / "train").mkdir(), "/train has no class folders"),
        (lambda root: (root / "val" / "cat").rename(root / "val" / "cats"), "/val/cats is no class .*did you mean cat"),
        (lambda root: shutil.rmtree(root / "val" / "cat"), "/val lacks the class folder cat"),
        (
            lambda root: (root / "train" / "bee" / "x").symlink_to(root / "train"),
            "bee/x is a link to a folder that holds",
        ),
        (
            lambda root: (root / "val" / "bee" / "x").symlink_to(root / "val" / "bee"),
            "bee/x is a link to a folder that",
        ),
        (lambda root: (root / "train" / "dog").symlink_to(root / "gone"), "dog is a link to what is not there"),
        (lambda root: leave_one_class(root), "has one class, ant"),
        (lambda root: shutil.rmtree(root), "there is no folder .*; data.root must hold train/CLASS"),
    ],
)
def test_a_bad_folder_is_told(root: Path, spoil, message: str) -> None:  # type: ignore[no-untyped-def]
    spoil(root)
    with pytest.raises(NestlingError, match=message):
        splits(root)


@pytest.mark.parametrize("form", ["png", "jpg", "bmp", "gif", "webp", "tif", "tiff", "ppm"])
def test_no_picture_that_can_be_read_is_passed_over(form: str, root: Path) -> None:
    before = len(splits(root)[0])
    Image.new("RGB", (40, 30)).save(root / "train" / "bee" / f"another.{form}")
    assert len(splits(root)[0]) == before + 1


def test_pictures_in_subfolders_of_a_class_are_found(root: Path) -> None:
    flat = splits(root)[0].files
    for name in CLASSES:
        (root / "train" / name / "images").mkdir()
        for picture in (root / "train" / name).glob("[1-3].*"):
            picture.rename(picture.parent / "images" / picture.name)
    (root / "train" / "bee" / "._1.png").write_bytes(b"what macOS keeps beside 1.png")
    (root / "train" / "bee" / ".trash").mkdir()
    (root / "train" / "bee" / ".trash" / "9.png").write_bytes(b"gone")
    train, _ = splits(root)
    assert len(train) == len(flat) == 21 and sum("images" in file for file in train.files) == 9
    assert torch.equal(train.labels, torch.tensor([0, 1, 2]).repeat_interleave(7))


@pytest.mark.parametrize("folder", ["images", ""])
def test_classes_in_an_annotation_file_are_explained(root: Path, folder: str) -> None:
    """Tiny ImageNet's own layout: val/images/*.JPEG and val/val_annotations.txt."""
    (root / "val" / folder).mkdir(exist_ok=True)
    for name in CLASSES:
        for picture in (root / "val" / name).glob("*.JPEG"):
            picture.rename(root / "val" / folder / f"{name}_{picture.name}")
        shutil.rmtree(root / "val" / name)
    (root / "val" / "val_annotations.txt").write_text("ant_0.JPEG\tant\t0\t0\t9\t9")
    with pytest.raises(
        NestlingError, match=r"val has no folder per class: its classes seem to stand in val_annotations\.txt"
    ):
        splits(root)


def test_pictures_of_a_data_set_are_shown_as_stored(tmp_path: Path) -> None:
    """Loaders for ImageNet, and so its published errors, ignore how the camera was held."""
    pixels = np.random.RandomState(0).randint(0, 256, (30, 40, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "plain.png")
    Image.fromarray(pixels).save(tmp_path / "held.png", exif=exif)
    assert torch.equal(read(tmp_path / "held.png", 16), read(tmp_path / "plain.png", 16))
    assert torch.equal(read(tmp_path / "held.png", 16, seed=1), read(tmp_path / "plain.png", 16, seed=1))


def test_no_folder_and_no_pillow_are_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NestlingError, match=r"no folder of pictures was named; .*--root"):
        load(DataRecipe("folder"))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(NestlingError, match=r"needs Pillow, .*pip install 'nestling\[data\]'"):
        load(DataRecipe("folder", str(root)))


def test_the_command_reads_every_picture(root: Path) -> None:
    run = [sys.executable, "-m", "nestling", "data", "folder", "--root", str(root), "--json"]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["per_class"] == {"train": [7, 7, 7], "test": [4, 4, 4]} and result["unreadable"] == {}
    cut, fake = spoil(root)
    with pytest.raises(NestlingError, match=rf"2 pictures in {root} cannot be read: {cut} \(.*\); {fake} \(.*\)"):
        command("folder", str(root), workers=0)
    assert set(command("folder", str(root), workers=0, skip_unreadable=True)["unreadable"]) == {str(cut), str(fake)}  # type: ignore[call-overload]
