"""What a runtime knows about its network: input shape, classes, normalisation, sizes, prior, expected errors.

Comes in: a run folder, a network or a manifest, through those who read them. It holds no weights and runs nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import prod
from numbers import Real
from typing import Any

from nestling.errors import NestlingError
from nestling.files import is_text

MOST_VALUES = 2**28  # that an image, or all that is kept of one, may have: a gigabyte in float32

LEAST_PART = 0.01  # of a picture's shorter side: less would be no pixel


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
    shape: tuple[int, ...]  # of one input: C,H,W of an image, C,L of a sequence
    classes: tuple[str, ...]  # empty where the answers are no classes
    sizes: tuple[str, ...]  # one per stage
    mean: tuple[float, ...] = ()  # per channel, of [0,1] pixels; empty: uint8 images are not accepted
    std: tuple[float, ...] = ()
    prior: tuple[float, ...] = ()  # probability of each class before looking; empty = equal
    errors: tuple[
        float, ...
    ] = ()  # expected error of each stage, a fraction (left of a variance: perhaps above 1); empty = not known
    output: tuple[
        int, ...
    ] = ()  # the shape of one answer that is no row of class scores, such as classes,H,W of a mask
    part: float = 1.0  # of a picture's shorter side, how much its middle shows; less where evaluation showed less

    def __post_init__(self) -> None:
        for field in fields(self)[1:-1]:
            if not isinstance(found := getattr(self, field.name), tuple | list):
                raise NestlingError(f"{self.name}: {field.name} is {found!r}; expected a tuple")
        if not self.shape:
            raise NestlingError(f"{self.name}: the shape is empty; expected that of one input, such as (3, 32, 32)")
        sides_of(self.shape, f"{self.name}: the shape")
        sides_of(self.output, f"{self.name}: the output")
        channels, classes, stages = self.shape[0], len(self.classes), len(self.sizes)
        if not (classes or self.output) or not stages:
            raise NestlingError(f"{self.name}: {classes} classes and {stages} stages are no network")
        if self.output and classes not in (0, self.output[0]):
            raise NestlingError(
                f"{self.name}: {classes} class names for answers of shape {self.output}; name each, or none"
            )
        for text in (self.name, *self.classes, *self.sizes):
            if not is_text(text):
                raise NestlingError(f"{self.name!r}: {text!r} is no name; expected text without NUL")
        for what, found, expected, least, most in (
            ("means", self.mean, channels, -1e6, 1e6),
            ("deviations", self.std, channels, 1e-6, 1e6),  # a smaller one would make every image infinite
            ("prior probabilities", self.prior, classes, 0.0, 1.0),
            (
                "expected errors",
                self.errors,
                stages,
                0.0,
                1.0 if classes else 1e6,
            ),  # more than all of a variance may be left
        ):
            if found and len(found) != expected:
                raise NestlingError(f"{self.name}: found {len(found)} {what}, expected {expected}")
            real = all(isinstance(value, Real) and not isinstance(value, bool) for value in found)
            if not real or not all(least <= value <= most for value in found):  # False also for NaN
                raise NestlingError(f"{self.name}: found {what} {found}; expected numbers from {least:g} to {most:g}")
        if isinstance(self.part, bool) or not isinstance(self.part, Real) or not LEAST_PART <= self.part <= 1:
            raise NestlingError(f"{self.name}: part is {self.part!r}; expected a number from {LEAST_PART} to 1")
        if bool(self.mean) != bool(self.std):
            raise NestlingError(f"{self.name}: mean {self.mean} and std {self.std} do not normalise anything")
        if self.prior and abs(sum(self.prior) - 1) > 1e-3:
            raise NestlingError(f"{self.name}: the prior {self.prior} is not a distribution over the classes")

    @property
    def stages(self) -> int:
        return len(self.sizes)

    @property
    def answer(self) -> tuple[int, ...]:
        """The shape of one answer: a score for each class, or what `output` says."""
        return self.output or (len(self.classes),)

    def to_dict(self) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


def from_dict(found: Mapping[str, Any]) -> Spec:
    """The Spec that to_dict wrote."""

    def several(key: str) -> tuple[Any, ...]:
        values = found[key] if key in ("shape", "classes", "sizes") else found.get(key, ())
        if not isinstance(values, tuple | list):
            raise TypeError(f"{key} is {values!r}, expected a list")
        number = key in ("mean", "std", "prior", "errors")
        return tuple(float(value) if number and type(value) is int else value for value in values)

    try:
        lists = {field.name: several(field.name) for field in fields(Spec)[1:-1]}
        return Spec(found["name"], **lists, part=found.get("part", 1.0))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise NestlingError(f"this does not describe a network ({type(error).__name__}: {error})") from error
