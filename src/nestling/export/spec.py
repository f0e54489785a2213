"""What a runtime knows about its network: input shape, classes, normalisation, sizes, prior, expected errors.

Comes in: a run folder, a network or a manifest, through those who read them. It holds no weights and runs nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from nestling.errors import NestlingError

MOST_VALUES = 2**28  # that an image, or all that is kept of one, may have: a gigabyte in float32


def sides_of(shape: Sequence[Any], what: str, dimensions: int | None = None) -> tuple[int, ...]:
    """A shape whose sides are whole numbers, and which memory can hold."""
    right = all(isinstance(side, int) and not isinstance(side, bool) and side >= 1 for side in shape)
    if not right or (dimensions is not None and len(shape) != dimensions) or prod(shape) > MOST_VALUES:
        many = "" if dimensions is None else f"{dimensions} "
        raise NestlingError(f"{what} is {shape!r}; expected {many}whole numbers from 1, at most {MOST_VALUES:,} values")
    return tuple(shape)


@dataclass(frozen=True)
class Spec:
    """A network's input shape, classes, normalisation, sizes, prior and errors: what a runtime must know of it."""

    name: str
    shape: tuple[int, int, int]  # C,H,W
    classes: tuple[str, ...]
    sizes: tuple[str, ...]  # one per stage
    mean: tuple[float, ...] = ()  # per channel, of [0,1] pixels; empty: uint8 images are not accepted
    std: tuple[float, ...] = ()
    prior: tuple[float, ...] = ()  # probability of each class before looking; empty = equal
    errors: tuple[float, ...] = ()  # expected error of each stage, a fraction; empty = not known

    def __post_init__(self) -> None:
        sides_of(self.shape, f"{self.name}: the shape", 3)
        channels, classes, stages = self.shape[0], len(self.classes), len(self.sizes)
        if not classes or not stages:
            raise NestlingError(f"{self.name}: {classes} classes and {stages} stages are no network")
        for text in (self.name, *self.classes, *self.sizes):
            if not isinstance(text, str) or "\0" in text:
                raise NestlingError(f"{self.name!r}: {text!r} is no name; expected text without NUL")
        for what, found, expected, least, most in (
            ("means", self.mean, channels, -1e6, 1e6),
            ("deviations", self.std, channels, 1e-6, 1e6),  # a smaller one would make every image infinite
            ("prior probabilities", self.prior, classes, 0.0, 1.0),
            ("expected errors", self.errors, stages, 0.0, 1.0),
        ):
            if found and len(found) != expected:
                raise NestlingError(f"{self.name}: found {len(found)} {what}, expected {expected}")
            if not all(least <= value <= most for value in found):  # False also for NaN
                raise NestlingError(f"{self.name}: found {what} {found}; expected numbers from {least:g} to {most:g}")
        if bool(self.mean) != bool(self.std):
            raise NestlingError(f"{self.name}: mean {self.mean} and std {self.std} do not normalise anything")
        if self.prior and abs(sum(self.prior) - 1) > 1e-3:
            raise NestlingError(f"{self.name}: the prior {self.prior} is not a distribution over the classes")

    @property
    def stages(self) -> int:
        return len(self.sizes)

    def to_dict(self) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


def from_dict(found: Mapping[str, Any]) -> Spec:
    """The Spec that to_dict wrote."""

    def numbers(key: str) -> tuple[float, ...]:
        return tuple(float(value) for value in found.get(key, ()))

    try:
        channels, height, width = found["shape"]
        classes, sizes = (tuple(found[key]) for key in ("classes", "sizes"))
        return Spec(
            found["name"], (channels, height, width), classes, sizes,
            numbers("mean"), numbers("std"), numbers("prior"), numbers("errors"),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise NestlingError(f"this does not describe a network ({type(error).__name__}: {error})") from error
