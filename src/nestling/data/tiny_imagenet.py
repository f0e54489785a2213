"""Tiny ImageNet: 100,000 training and 10,000 test photographs of 200 things, 64x64, in its own layout.

Comes in: ROOT with train/CLASS/images/*.JPEG, val/images and val/val_annotations.txt. `prepare` decodes every picture once
into files of plain pixels beside them; `load` maps those into memory, so that they are read as they are used, or lie whole on
a GPU. A cache is complete or not there: what describes it is written last.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestling.data.cifar10 import cache
from nestling.data.dataset import DataSet, Images, in_memory
from nestling.data.image_folder import class_names, need_pillow, scan
from nestling.errors import NestlingError
from nestling.files import to_text, write_atomically
from nestling.recipes.recipe import DataRecipe

SIDE = 64
FOLDER = "tiny-imagenet-200"  # what its archive unpacks to
ABOUT = "tiny-imagenet.json"  # classes, labels, statistics; the pixels are in PIXELS
PIXELS = {"train": "tiny-imagenet-train.bin", "val": "tiny-imagenet-val.bin"}
CHUNK = 1024  # pictures decoded between two reports of how far it is


def load(recipe: DataRecipe, device: torch.device | str = "cpu") -> DataSet:
    """The prepared data set in data.root; training shows crops of images padded by 8, and mirror images."""
    root = place(recipe.root)
    about = read_about(root)
    train, val = (pixels(root, part, len(about[part])) for part in PIXELS)
    images = Images(train, torch.tensor(about["train"]), val, torch.tensor(about["val"]))
    mean, std = tuple(about["mean"]), tuple(about["std"])
    return in_memory(images, recipe, tuple(about["classes"]), mean, std, device, pad=8, flip=True)


def usual(root: str) -> Path:
    """The folder that was named, or the usual place: what the archive unpacks to, in the folder for prepared data."""
    return Path(root) if root else cache() / FOLDER


def place(root: str) -> Path:
    folder = usual(root)
    if not folder.is_dir():
        raise NestlingError(
            f"there is no folder {folder}; unpack Tiny ImageNet there, or say where it is: --set data.root=FOLDER (nestling "
            "data tiny-imagenet: --root FOLDER)"
        )
    return folder


def prepared(root: str) -> bool:
    """Whether training may begin: every picture has been decoded."""
    return (usual(root) / ABOUT).is_file()


def read_about(root: Path) -> dict[str, Any]:
    path = root / ABOUT
    if not path.is_file():
        raise NestlingError(
            f"Tiny ImageNet is not prepared: there is no {path}; run: nestling data tiny-imagenet --root {root}"
        )
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if set(found) != {"classes", "train", "val", "mean", "std"}:
            raise ValueError(f"it has {', '.join(sorted(found))}")
    except ValueError as error:
        raise NestlingError(f"{path} is damaged ({error}); delete it and prepare the data again") from error
    return found


def pixels(root: Path, part: str, n: int) -> Tensor:
    """The pictures of one part, (n,3,64,64) uint8, mapped: writing to them would change a copy, never the file."""
    path, bytes_expected = root / PIXELS[part], n * 3 * SIDE * SIDE
    size = path.stat().st_size if path.is_file() else 0
    if size != bytes_expected:
        raise NestlingError(
            f"{path} has {size:,} bytes, expected {bytes_expected:,} ({n:,} pictures); delete {root / ABOUT} and prepare the "
            "data again"
        )
    return torch.from_numpy(np.memmap(path, np.uint8, mode="c", shape=(n, 3, SIDE, SIDE)))


# --- preparing --------------------------------------------------------------------------------------------------------


def prepare(root: str, workers: int = 2, tell: Callable[[int, int], None] = lambda done, many: None) -> Path:
    """Decode all pictures once; `tell` hears how many of how many are done. What is prepared already stays."""
    folder = place(root)
    if (folder / ABOUT).is_file():
        return folder
    need_pillow()
    classes = class_names(folder / "train")
    train, train_labels = scan(folder / "train", classes)
    val, val_labels = annotated(folder / "val", classes)
    many = len(train) + len(val)
    counts = np.zeros((3, 256))
    done = 0
    for part, files in (("train", train), ("val", val)):
        for images in decoded(folder / PIXELS[part], files, workers):
            done += len(images)
            if part == "train":
                counts += [np.bincount(images[:, channel].reshape(-1), minlength=256) for channel in range(3)]
            tell(done, many)
    levels = np.arange(256) / 255
    mean = counts @ levels / counts.sum(1)
    std = np.sqrt((counts * (levels - mean[:, None]) ** 2).sum(1) / counts.sum(1))
    about = {"classes": words(folder, classes), "train": train_labels.tolist(), "val": val_labels.tolist()}
    about |= {"mean": mean.tolist(), "std": std.tolist()}
    write_atomically(folder / ABOUT, to_text(about, indent=None).encode())
    return folder


def annotated(part: Path, classes: tuple[str, ...]) -> tuple[list[str], Tensor]:
    """The pictures that val_annotations.txt names, in its order, and their labels."""
    listed = part / "val_annotations.txt"
    if not listed.is_file():
        raise NestlingError(f"there is no {listed}; expected Tiny ImageNet's own layout, or use data.name=folder")
    files, labels = [], []
    for number, line in enumerate(listed.read_text(encoding="utf-8").splitlines(), start=1):
        name, _, rest = line.partition("\t")
        label = rest.partition("\t")[0].strip()
        if label not in classes or Path(name).name != name:
            raise NestlingError(
                f"{listed}, line {number} is {line!r}; expected a picture's name, a tab, and a class of train"
            )
        files.append(str(part / "images" / name))
        labels.append(classes.index(label))
    if not files:
        raise NestlingError(f"{listed} names no pictures; restore it from the archive")
    return files, torch.tensor(labels)


def decoded(path: Path, files: list[str], workers: int) -> Iterator[np.ndarray]:
    """Write all pictures into one file of pixels, yielding them a chunk at a time; the file has its name when it is whole."""
    temporary = path.with_name(f".{path.name}.tmp")
    room = np.memmap(temporary, np.uint8, mode="w+", shape=(len(files), 3, SIDE, SIDE))
    try:
        with ThreadPoolExecutor(max(1, workers)) as pool:
            for start in range(0, len(files), CHUNK):
                chunk: Iterable[np.ndarray] = pool.map(picture, files[start : start + CHUNK])
                room[start : start + CHUNK] = np.stack(list(chunk))
                yield room[start : start + CHUNK]
        room.flush()
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def picture(path: str) -> np.ndarray:
    """One picture as (3,64,64) uint8; grey ones in three equal channels."""
    from nestling.data.picture_file import Unreadable, load_rgb

    try:
        found = np.array(load_rgb(path))
    except Unreadable as error:
        raise NestlingError(f"cannot read the picture {path} ({error}); restore it from the archive") from error
    if found.shape != (SIDE, SIDE, 3):
        raise NestlingError(f"{path} is {found.shape[1]}x{found.shape[0]}; pictures of Tiny ImageNet are {SIDE}x{SIDE}")
    return found.transpose(2, 0, 1)


def words(root: Path, classes: tuple[str, ...]) -> list[str]:
    """What the classes are called by words.txt, as short as tells them apart; their numbers where it is missing."""
    if not (root / "words.txt").is_file():
        return list(classes)
    lines = (line.partition("\t") for line in (root / "words.txt").read_text(encoding="utf-8").splitlines())
    called = {number: names.strip() for number, _, names in lines}
    long = [called.get(name) or name for name in classes]
    short = [each.partition(",")[0] for each in long]
    return [one if short.count(one) == 1 else whole for one, whole in zip(short, long, strict=True)]
