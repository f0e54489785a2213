"""Folder-per-class pictures in ImageNet's layout: ROOT/train/CLASS/*.jpg and ROOT/val/CLASS/*.jpg (or png), also in subfolders.

Goes out: a DataSet whose splits stream from worker processes; training shows random resized crops and mirror
images, evaluation the middle. Each picture's randomness is one seed drawn by the generator passed in, so the
number of workers changes nothing. An unreadable picture is an error unless the recipe says to skip it.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from nestling.data.augment import normalise
from nestling.data.dataset import DataSet, choose
from nestling.data.split import Batch, check_batch, slices
from nestling.errors import NestlingError, nearest, say_once
from nestling.recipes.recipe import DataRecipe

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
MEAN = (0.485, 0.456, 0.406)  # of ImageNet, as everybody uses them
STD = (0.229, 0.224, 0.225)
Request = tuple[int, int | None]  # which file, and the seed of its crop (None = the middle)
Loaded = tuple[Tensor, Tensor, list[tuple[int, str]]]  # pictures, their positions, (position, reason) of failures


@dataclass(frozen=True, eq=False)
class FolderSplit:
    """A split that is read from disk while it is used; `skipped` collects what could not be read."""

    files: tuple[str, ...]
    labels: Tensor  # (n,) int64, on the device
    size: int
    workers: int
    augmented: bool
    skip_unreadable: bool
    mean: Tensor  # (3,) on the device
    std: Tensor
    skipped: dict[str, str] = field(default_factory=dict)  # file -> reason

    def __len__(self) -> int:
        return len(self.files)

    def batches(
        self, batch: int, generator: torch.Generator | None = None, augment: bool | None = None, drop_last: bool = False
    ) -> Iterator[Batch]:
        """As every split's; a skipped picture makes its batch shorter."""
        check_batch(batch, len(self), generator, augment, drop_last)
        order, seeds = list(range(len(self))), None
        if generator is not None:
            # Both are drawn whatever augment says, so that it does not change the order of later epochs.
            order = torch.randperm(len(self), generator=generator).tolist()
            drawn = torch.randint(2**62, (len(self),), generator=generator).tolist()
            seeds = drawn if (self.augmented if augment is None else augment) else None
        return self._stream(requests(order, seeds, slices(len(self), batch, drop_last)))

    def pictures(self, indices: Tensor) -> Tensor:
        """Of those that can be read, as far as is known: so they are counted where answers are."""
        known = [position for position, file in enumerate(self.files) if file not in self.skipped]
        images, _, failures = together([PictureFiles(self.files, self.size)[known[i], None] for i in indices.tolist()])
        for position, reason in failures:
            raise self._refused(position, reason)
        return images

    def _stream(self, asked: Iterator[list[Request]]) -> Iterator[Batch]:
        device = self.labels.device
        loader: DataLoader[Any] = DataLoader(
            PictureFiles(self.files, self.size),
            batch_sampler=asked,
            num_workers=min(self.workers, cores()),
            collate_fn=together,
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),  # its seed is not used, but torch's global one should not move either
        )
        before = len(self.skipped)
        shown = 0
        for images, positions, failures in loader:
            for position, reason in failures:
                if not self.skip_unreadable:
                    raise self._refused(position, reason)
                self.skipped[self.files[position]] = reason
            if len(positions):
                shown += len(positions)
                x = images.to(device, non_blocking=True)
                yield normalise(x, self.mean, self.std), self.labels[positions.to(device, non_blocking=True)]
        if new := len(self.skipped) - before:
            part = os.path.commonpath((self.files[0], self.files[-1]))
            such = next(iter(self.skipped))
            say_once(f"{new} of the {len(self)} pictures in {part} cannot be read and are left out, such as {such}")
        if not shown:
            raise NestlingError(f"none of the {len(self)} pictures can be read, such as {self.files[0]}")

    def _refused(self, position: int, reason: str) -> NestlingError:
        return NestlingError(
            f"cannot read the picture {self.files[position]} ({reason}); replace or remove it, or set "
            "data.skip_unreadable=true to leave such pictures out"
        )


def requests(order: list[int], seeds: list[int] | None, parts: Iterator[tuple[int, int]]) -> Iterator[list[Request]]:
    """What to read for each batch; made one by one, since an epoch may have a million pictures."""
    for start, stop in parts:
        yield [(order[i], seeds[i] if seeds else None) for i in range(start, stop)]


def cores() -> int:
    """How many this process may use: torch warns of more workers."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class PictureFiles(Dataset[tuple[int, Tensor | str]]):
    """What a worker process holds: the list of files. Failures come back as text, not as exceptions, which
    torch would wrap in a traceback of the worker."""

    def __init__(self, files: tuple[str, ...], size: int) -> None:
        self.files = files
        self.size = size

    def __getitem__(self, request: Request) -> tuple[int, Tensor | str]:
        from nestling.data.picture_file import Unreadable, read

        position, seed = request
        try:
            return position, read(self.files[position], self.size, seed)
        except Unreadable as error:
            return position, str(error)


def together(items: list[tuple[int, Tensor | str]]) -> Loaded:
    """Single pictures as one batch, failures apart."""
    good = [(position, image) for position, image in items if isinstance(image, Tensor)]
    failures = [(position, reason) for position, reason in items if isinstance(reason, str)]
    images = torch.stack([image for _, image in good]) if good else torch.empty(0, dtype=torch.uint8)
    return images, torch.tensor([position for position, _ in good], dtype=torch.long), failures


def load(recipe: DataRecipe, device: torch.device | str = "cpu") -> DataSet:
    need_pillow()
    root = place(recipe.root)
    classes = class_names(root / "train")
    if len(classes) < 2:
        raise NestlingError(
            f"{root / 'train'} has one class, {classes[0]}, so that no answer could be wrong; add others"
        )
    files, labels = scan(root / "train", classes)
    kept, held = choose(len(files), recipe)
    mean, std = (torch.tensor(values, device=device) for values in (MEAN, STD))

    def split(files: list[str], labels: Tensor, augmented: bool) -> FolderSplit:
        return FolderSplit(
            tuple(files), labels.to(device), recipe.size, recipe.workers, augmented, recipe.skip_unreadable, mean, std
        )

    train = split([files[i] for i in kept.tolist()], labels[kept], recipe.augment)
    if recipe.validation:
        test = split([files[i] for i in held.tolist()], labels[held], False)
    else:
        test = split(*scan(root / "val", classes), False)
    return DataSet(recipe.name, train, test, classes, MEAN, STD, (3, recipe.size, recipe.size))


def place(root: str) -> Path:
    if not root:
        raise NestlingError(
            "no folder of pictures was named; say which: --set data.root=FOLDER (nestling data: --root FOLDER)"
        )
    if not Path(root).is_dir():
        raise NestlingError(f"there is no folder {root}; data.root must hold train/CLASS/*.jpg and val/CLASS/*.jpg")
    return Path(root)


def shown(size: int) -> float:
    """How much of a picture's shorter side evaluation shows: the middle 224 of 256, or the same in proportion."""
    return size / round(size * 256 / 224)


def class_names(part: Path) -> tuple[str, ...]:
    """The class folders of one part, in alphabetical order: a class's number is its place there."""
    if not part.is_dir():
        raise NestlingError(f"there is no folder {part}; expected {part.name}/CLASS/*.jpg in {part.parent}")
    entries = [each for each in os.scandir(part) if not each.name.startswith(".")]
    if lost := sorted(each.path for each in entries if each.is_symlink() and not os.path.exists(each.path)):
        raise NestlingError(f"{lost[0]} is a link to what is not there; bring that back, or remove the link")
    names = tuple(sorted(each.name for each in entries if each.is_dir()))
    if not names:
        explain_annotations(part)
        raise NestlingError(f"{part} has no class folders; expected one folder of pictures per class")
    return names


def scan(part: Path, classes: tuple[str, ...]) -> tuple[list[str], Tensor]:
    """All pictures of one part, by class and name, and their labels; both parts must have the same classes."""
    found = class_names(part)
    if set(found).isdisjoint(classes):
        explain_annotations(part)
    if unknown := sorted(set(found) - set(classes)):
        near = nearest(unknown[0], classes)
        raise NestlingError(f"{part / unknown[0]} is no class of the training part; did you mean {near}?")
    if missing := sorted(set(classes) - set(found)):
        raise NestlingError(f"{part} lacks the class folder {missing[0]}; both parts need the same classes")
    files: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        here = sorted(pictures_below(part / name))
        if not here:
            raise NestlingError(
                f"the class folder {part / name} holds no pictures ({', '.join(SUFFIXES)}); fill or remove it"
            )
        files += here
        labels += [label] * len(here)
    return files, torch.tensor(labels)


def pictures_below(folder: Path) -> Iterator[str]:
    """The pictures of a class, in its folder or in folders inside it, as in train/CLASS/images of Tiny ImageNet. What is hidden
    (thumbnails, what macOS keeps beside files) is none."""
    for where, folders, files in os.walk(folder, followlinks=True, onerror=unread):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for inner in (Path(where, name) for name in folders if os.path.islink(os.path.join(where, name))):
            if Path(where).resolve().is_relative_to(inner.resolve()):  # the same again and again, and of other classes
                raise NestlingError(f"{inner} is a link to a folder that holds the link itself; remove it")
        shown = (name for name in files if not name.startswith("."))
        yield from (os.path.join(where, name) for name in shown if name.lower().endswith(SUFFIXES))


def unread(error: OSError) -> None:
    raise NestlingError(f"cannot read {error.filename} ({error.strerror}); make it readable, or remove it") from error


def explain_annotations(part: Path) -> None:
    """Say what to do with pictures that lie together, their classes in a text file, as in val of Tiny ImageNet."""
    lists = sorted(e.name for e in os.scandir(part) if e.name.lower().endswith((".txt", ".csv")) and e.is_file())
    if lists:
        raise NestlingError(
            f"{part} has no folder per class: its classes seem to stand in {lists[0]} instead. Put each picture into "
            f"{part.name}/CLASS/, with the same class names as in train, or use data.validation to hold out training pictures"
        )


def need_pillow() -> None:
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise NestlingError(
            "reading pictures needs Pillow, which is not installed; run: pip install 'nestling[data]'"
        ) from error
