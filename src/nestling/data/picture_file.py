"""One picture file as square uint8 pixels: a random part of it for training, its middle for evaluation and answers. How much of
the middle follows the data that a network was evaluated on: all of it, or less, as is usual for ImageNet.

Comes in: a path, a side length or shape, and for training a seed. Goes out: (C,size,size) uint8, or Unreadable. The
seed alone decides what is cut out, so it does not matter which process reads the file. A file is opened only as
one of FORMATS, whatever it is called, and only up to MOST_PIXELS. Knows no data set.
"""

import io
import math
import random
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, TiffImagePlugin, UnidentifiedImageError
from torch import Tensor

from nestling.data.image_folder import shown
from nestling.errors import NestlingError

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")  # Pillow knows more, and runs programs for some of them
MOST_PIXELS = 2**26  # 67 million, a quarter of a gigabyte: a small file may hold far more
BILINEAR, AREA = Image.Resampling.BILINEAR, Image.Resampling.BOX
BITS, PHOTOMETRIC = TiffImagePlugin.BITSPERSAMPLE, TiffImagePlugin.PHOTOMETRIC_INTERPRETATION
TURNS = {  # EXIF's number for how a camera was held -> what sets the picture upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class Unreadable(Exception):
    """The file is not a picture, or its end is missing."""


def read(path: Path | str, size: int, seed: int | None = None) -> Tensor:
    """The picture at path, size x size: without a seed its middle, with one a random part, perhaps mirrored."""
    image = load_rgb(path)  # as stored: EXIF is ignored, as by the loaders that ImageNet's numbers come from
    if seed is None:
        square = image.resize((size, size), BILINEAR, box=middle(image.width, image.height, shown(size)))
    else:
        chance = random.Random(seed)
        square = image.resize((size, size), BILINEAR, box=random_part(image.width, image.height, chance))
        if chance.random() < 0.5:
            square = square.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(square)).permute(2, 0, 1).contiguous()


def fitted(
    path: Path | str | bytes,
    shape: tuple[int, ...],
    most: int = MOST_PIXELS,
    part: float = 1.0,
    formats: tuple[str, ...] = FORMATS,
) -> NDArray[np.uint8]:
    """The picture at path, or in these bytes, as a network takes it, uint8 (C,H,W): set upright; as it is where it has the
    network's size, else its middle, `part` of its shorter side, scaled. `most` pixels are read."""
    channels, height, width = shape if len(shape) == 3 else (0, 0, 0)
    if height != width or channels not in (1, 3):
        raise NestlingError(f"this network takes images of {shape}; pictures can only be square, grey or RGB")
    image = load_rgb(path, upright=True, most=most, formats=formats)
    square = image if image.size == (width, height) else scaled(image, height, part)
    pixels = np.array(square).transpose(2, 0, 1)
    if channels == 3:
        return np.ascontiguousarray(pixels)
    weights = np.array([0.299, 0.587, 0.114])[:, None, None]  # as Pillow turns colours into grey
    grey: NDArray[np.uint8] = np.rint((pixels * weights).sum(axis=0, keepdims=True)).astype(np.uint8)
    return grey


def load_rgb(
    path: Path | str | bytes, upright: bool = False, most: int = MOST_PIXELS, formats: tuple[str, ...] = FORMATS
) -> Image.Image:
    """The whole picture, three channels of 8 bits; `upright`: turned the way the camera was held (EXIF orientation)."""
    try:
        if not isinstance(path, bytes) and not Path(path).is_file():  # a pipe would never end
            raise FileNotFoundError(f"{path} is no file")
        with Image.open(io.BytesIO(path) if isinstance(path, bytes) else path, formats=formats) as file:
            if file.width * file.height > most:
                raise ValueError(f"it has {file.width} x {file.height} pixels, more than {most:,}; scale it down")
            check_depth(file)
            return to_rgb(turned(file) if upright else file)
    except UnidentifiedImageError as error:  # whose words hold an address in memory
        raise Unreadable(f"it is none of {', '.join(formats)}, or its beginning is spoilt") from error
    except (OSError, SyntaxError, ValueError, OverflowError, Image.DecompressionBombError) as error:
        raise Unreadable(str(error) or type(error).__name__) from error


def check_depth(file: Image.Image) -> None:
    """Of TIFFs with deep pixels Pillow tells neither how many bits are used nor whether black is the largest."""
    if isinstance(file, TiffImagePlugin.TiffImageFile) and file.mode.startswith("I;16"):
        bits, turned_round = file.tag_v2.get(BITS, (1,))[0], file.tag_v2.get(PHOTOMETRIC) == 0
        if bits != 16 or turned_round:
            found = "whose white is zero" if turned_round else f"of {bits} bits"
            raise ValueError(f"it is a TIFF {found}; expected 8 or 16 bits with black as zero, save it so")


def turned(file: Image.Image) -> Image.Image:
    """As the camera was held; as stored where it does not say. (ImageOps.exif_transpose writes the EXIF anew as well, and
    refuses pictures over any part of it that is spoilt.)"""
    file.load()  # if the pixels are spoilt, that is told here
    try:
        turn = TURNS.get(file.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # Pillow has no one kind of error for spoilt EXIF
        turn = None
    return file if turn is None else file.transpose(turn)


def to_rgb(file: Image.Image) -> Image.Image:
    """Three channels of 8 bits. Pillow cuts deeper pixels off at 255, which turns a 16-bit picture white: they are scaled."""
    if file.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(file) >> 8).astype(np.uint8)).convert("RGB")
    if file.mode == "I" and file.format == "PPM":  # Pillow scales these to 16 bits
        return Image.fromarray((np.asarray(file) >> 8).astype(np.uint8)).convert("RGB")
    if file.mode in ("I", "F"):
        raise ValueError(f"pixels of 32 bits (mode {file.mode}), of which nobody knows what is white; expected 8 or 16")
    if file.mode == "RGB":  # no copy: it may be large
        file.load()
        return file
    return file.convert("RGB")


def scaled(image: Image.Image, size: int, part: float) -> Image.Image:
    """The middle of a picture, size x size. Small pictures of whole scenes are means of areas, which keeps them sharper."""
    way = AREA if part == 1 and min(image.size) > size else BILINEAR
    return image.resize((size, size), way, box=middle(image.width, image.height, part))


def middle(width: int, height: int, part: float) -> tuple[float, float, float, float]:
    """The square (left, top, right, bottom) in the middle, part of the shorter side."""
    side = min(width, height) * part
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_part(width: int, height: int, chance: random.Random) -> tuple[float, float, float, float]:
    """8 to 100 % of the area at a ratio of 3:4 to 4:3, as usual for ImageNet; the middle if none fits."""
    for _ in range(10):
        area = width * height * chance.uniform(0.08, 1.0)
        ratio = math.exp(chance.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = chance.randint(0, width - w), chance.randint(0, height - h)
            return left, top, left + w, top + h
    # A strip of a picture: its middle, as near to the permitted ratios as it can be.
    across, down = min(width, height * 4 / 3), min(height, width * 4 / 3)
    left_most, top_most = (width - across) / 2, (height - down) / 2
    return left_most, top_most, left_most + across, top_most + down
