"""What a runtime knows about its network: input shape, classes, normalisation, sizes, prior, expected errors.

Comes in: a run folder, a network or a manifest, through those who read them. It holds no weights and runs nothing.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nestling.errors import NestlingError


@dataclass(frozen=True)
class Spec:
    name: str
    shape: tuple[int, int, int]  # C,H,W
    classes: tuple[str, ...]
    sizes: tuple[str, ...]  # one per stage
    mean: tuple[float, ...] = ()  # per channel, of [0,1] pixels; empty: uint8 images are not accepted
    std: tuple[float, ...] = ()
    prior: tuple[float, ...] = ()  # probability of each class before looking; empty = equal
    errors: tuple[float, ...] = ()  # expected error of each stage, a fraction; empty = not known

    def __post_init__(self) -> None:
        channels, classes, stages = self.shape[0], len(self.classes), len(self.sizes)
        if len(self.shape) != 3 or min(self.shape) < 1 or not classes or not stages:
            raise NestlingError(
                f"{self.name}: shape {self.shape}, {classes} classes and {stages} stages are no network"
            )
        for what, found, expected in (
            ("means", self.mean, channels),
            ("deviations", self.std, channels),
            ("prior probabilities", self.prior, classes),
            ("expected errors", self.errors, stages),
        ):
            if found and len(found) != expected:
                raise NestlingError(f"{self.name}: found {len(found)} {what}, expected {expected}")
        if any(value <= 0 for value in self.std) or bool(self.mean) != bool(self.std):
            raise NestlingError(f"{self.name}: mean {self.mean} and std {self.std} do not normalise anything")
        if self.prior and (min(self.prior) < 0 or abs(sum(self.prior) - 1) > 1e-3):
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
        channels, height, width = (int(v) for v in found["shape"])
        classes, sizes = (tuple(str(v) for v in found[key]) for key in ("classes", "sizes"))
        return Spec(
            str(found["name"]), (channels, height, width), classes, sizes,
            numbers("mean"), numbers("std"), numbers("prior"), numbers("errors"),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise NestlingError(f"this does not describe a network ({type(error).__name__}: {error})") from error
