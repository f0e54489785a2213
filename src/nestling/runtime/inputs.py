"""Bad input is refused here, before it reaches a stage: images and deadlines, checked and in one form.

In: an image (C,H,W) or a batch (N,C,H,W), uint8 as in files or float32 already normalised, and seconds. Out: float32
(N,C,H,W) of the runtime's own (the caller may reuse its memory at once), and one deadline per image. The pixels of a large
batch are looked at when their turn comes: that may take longer than the time there is.
"""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np

from nestling.errors import NestlingError
from nestling.export.spec import Spec
from nestling.runtime.engine import Floats
from nestling.runtime.work import ImageArray

AT_ONCE = 2**17  # values that are normalised in a fraction of a millisecond
MOST_THREADS = 1024  # more than any machine has cores: a hundred thousand take all memory
BEYOND_WHITE = 4  # float32 pixels so many times brighter than white were never normalised; noise and filters stay below


class Intake:
    """Checks and normalises images for one network."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        # float32 in the same order as data.augment.normalise, so that both agree to the last bit
        self.sides = len(spec.shape)
        channel = (-1, *[1] * (self.sides - 1))
        self.centre = (np.array(spec.mean, np.float32) * np.float32(255)).reshape(channel)
        self.scale = (np.float32(1) / (np.array(spec.std, np.float32) * np.float32(255))).reshape(channel)
        self.white = max(((1 - mean) / std for mean, std in zip(spec.mean, spec.std, strict=True)), default=math.inf)

    def one(self, x: Any) -> Floats:
        """One image (C,H,W) as float32 (1,C,H,W) of our own, normalised."""
        self.check(x, self.sides)
        return self.prepare(x[None])

    def batch(self, x: Any) -> tuple[ImageArray, bool]:
        """A batch (N,C,H,W) of our own, and whether it is normalised. A large one is left as it was given: it is normalised
        part by part, when its turn comes."""
        self.check(x, self.sides + 1)
        if not len(x):
            raise NestlingError(f"the batch is empty; give at least one image {self.wanted()}")
        return (np.array(x, order="C"), False) if x.size > AT_ONCE else (self.prepare(x), True)

    def check(self, x: Any, dimensions: int) -> None:
        """What can be told of images without looking at their pixels."""
        if not isinstance(x, np.ndarray):
            raise NestlingError(f"found {type(x).__name__}, expected an array of images {self.wanted()}")
        if x.shape[-self.sides :] != self.spec.shape or x.ndim != dimensions:
            if x.shape[-self.sides :] == self.spec.shape and x.ndim in (self.sides, self.sides + 1):
                batch = x.ndim > self.sides
                hint = "answer, answers and ask take one image" if batch else "answer_batch and the like take batches"
                raise NestlingError(f"found {'a batch' if batch else 'one image'}, shape {x.shape}; {hint}")
            raise NestlingError(f"{self.spec.name} takes images {self.wanted()}; found shape {x.shape}")
        if x.dtype == np.uint8:
            if not self.spec.mean:
                raise NestlingError(
                    "found uint8 images, but this runtime does not know how to normalise them: make it with "
                    "spec=nestling.Spec(..., mean=..., std=...), or give normalised float32 images"
                )
        elif x.dtype != np.float32:
            raise NestlingError(
                f"found images of {x.dtype}, expected uint8 (0 to 255) or float32 (normalised); convert them first"
            )

    def prepare(self, batch: ImageArray, first: int = 0) -> Floats:
        """Images that were checked, as float32 of our own, normalised; `first` is the number of the first of them."""
        if batch.dtype == np.uint8:
            pixels: Floats = batch.astype(np.float32)
            pixels -= self.centre
            pixels *= self.scale
            return pixels
        brightest = float(np.abs(batch).max())  # NaN where any pixel is
        if not brightest < math.inf:
            bad = first + int((~np.isfinite(batch)).reshape(len(batch), -1).any(axis=1).argmax())
            raise NestlingError(f"image {bad} has pixels that are not numbers (NaN or infinite); repair or drop it")
        if brightest > BEYOND_WHITE * self.white and (brightest := float(batch.max())) > BEYOND_WHITE * self.white:
            raise NestlingError(
                f"found float32 pixels up to {brightest:.4g}, but a normalised white pixel of {self.spec.name} is "
                f"{self.white:.2g}; give the pictures as uint8 (0 to 255), or normalise them: (x / 255 - mean) / std with "
                "the mean and std of runtime.spec"
            )
        return np.array(batch, np.float32, order="C")

    def wanted(self) -> str:
        return f"(N, {', '.join(map(str, self.spec.shape))}) or ({', '.join(map(str, self.spec.shape))})"


def seconds(deadline: Any) -> float:
    """One deadline: None is infinite; zero and less mean "now"."""
    if deadline is None:
        return math.inf
    if type(deadline) is float and deadline >= 0:  # the usual case: asking an abstract class takes longer than all else
        return deadline
    try:
        found = (
            float(deadline) if isinstance(deadline, Real | np.number) and not isinstance(deadline, bool) else math.nan
        )
    except OverflowError:  # a whole number that no float can hold
        found = math.nan
    if math.isnan(found):
        raise NestlingError(
            f"deadline {short(deadline)} is not a number of seconds; write 0.005 for 5 ms, None for no deadline"
        )
    return max(0.0, found)


def short(value: Any) -> str:
    """A value as a message can show it, however long it is."""
    try:
        text = repr(value)
    except ValueError:  # a whole number with more digits than Python prints
        text = f"a {type(value).__name__}"
    return text if len(text) <= 40 else text[:37] + "..."


def check_threads(threads: int) -> None:
    if isinstance(threads, bool) or not isinstance(threads, int) or not 0 <= threads <= MOST_THREADS:
        raise NestlingError(
            f"threads={threads!r}; expected how many threads a stage may use (1 to {MOST_THREADS:,}), or 0 for all cores"
        )


def deadlines(deadline: Any, count: int) -> list[float]:
    """One deadline per image, from one for all or a sequence of them."""
    if (
        type(deadline) is not float
        and isinstance(deadline, Sequence | np.ndarray)
        and not isinstance(deadline, str | bytes)
    ):
        found = [seconds(each) for each in deadline]
        if len(found) != count:
            raise NestlingError(f"found {len(found)} deadlines for {count} images; give one, or one per image")
        return found
    return [seconds(deadline)] * count
