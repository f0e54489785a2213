"""The rules of a recipe's fields: a field's annotation says its type, bounds and choices.

In: a value, or text from the command line, with its annotation and key. Out: the value as that type, or NestlingError that says
what was expected. `says` puts a rule into words. Which fields there are is recipe.py's business.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from nestling.errors import NestlingError, join


@dataclass(frozen=True)
class Bounds:
    """The range a number must lie in; `above` excludes its own value, the others include theirs."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf

    def admit(self, value: float) -> bool:
        return self.least <= value <= self.most and value > self.above

    def __str__(self) -> str:
        parts = [f"at least {self.least:g}"] if self.least > -math.inf else []
        parts += [f"above {self.above:g}"] if self.above > -math.inf else []
        parts += [f"at most {self.most:g}"] if self.most < math.inf else []
        return " and ".join(parts)


@dataclass(frozen=True)
class OneOf:
    """The names of a registry, looked up when asked."""

    registry: Mapping[str, object]

    def admit(self, value: str) -> bool:
        return value in self.registry

    def __str__(self) -> str:
        return join(list(self.registry))


Count = Annotated[int, Bounds(least=0)]
Positive = Annotated[int, Bounds(least=1)]
MOST = 1e30  # of what is multiplied in float32
Amount = Annotated[float, Bounds(least=0, most=MOST)]
AboveZero = Annotated[float, Bounds(above=0, most=MOST)]
Share = Annotated[float, Bounds(least=0, most=1)]


class RecipeSection:
    """A part of a recipe; on creation every field is checked against its annotation."""

    def __post_init__(self) -> None:
        for name, hint in hints(type(self)).items():
            value = checked(getattr(self, name), hint, f"{section_key(type(self))}{name}")
            object.__setattr__(self, name, value)  # the one place where a list becomes a tuple, 1 becomes 1.0


def hints(kind: Any) -> dict[str, Any]:
    """Field name -> annotation, bounds included."""
    every = get_type_hints(kind, include_extras=True)
    return {f.name: every[f.name] for f in dataclasses.fields(kind)}


def section_key(kind: type) -> str:
    """ "train." for TrainRecipe, "" for Recipe itself: what stands before a field's name in messages."""
    part = kind.__name__.removesuffix("Recipe").lower()
    return f"{part}." if part else ""


def parsed(text: str, hint: Any, key: str) -> Any:
    """text as a value of the annotated type; NestlingError if it is not one."""
    kind, _ = split(hint)
    if get_origin(kind) is tuple:
        items = [part.strip() for part in text.strip("()[]").split(",")]
        return tuple(parsed(part, get_args(kind)[0], key) for part in items if part)
    if kind is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if text.lower() not in words:
            raise wrong(text, hint, key)
        return words[text.lower()]
    if kind in (int, float):
        try:
            return checked(kind(text), hint, key)
        except ValueError as error:
            raise wrong(text, hint, key) from error
    return checked(text, hint, key)


def checked(value: Any, hint: Any, key: str) -> Any:
    """value as the annotated type (lists become tuples, ints floats); NestlingError if it does not fit."""
    kind, bounds = split(hint)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise wrong(value, hint, key)
        return value
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise wrong(value, hint, key)
        return tuple(checked(item, get_args(kind)[0], key) for item in value)
    if kind is float and type(value) is int:
        value = float(value)
    # bool is a subclass of int, but train.epochs=True is a mistake.
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise wrong(value, hint, key)
    if kind is float and not math.isfinite(value):
        raise wrong(value, hint, key)
    if bounds is not None and not bounds.admit(value):
        raise wrong(value, hint, key)
    return value


def split(hint: Any) -> tuple[Any, Any]:
    """Annotated[int, Bounds(...)] as (int, Bounds(...)), and so with OneOf; a plain type as (type, None)."""
    if get_origin(hint) is Annotated:
        kind, bounds = get_args(hint)
        return kind, bounds
    return hint, None


def says(hint: Any) -> str:
    """The annotation in words: "a whole number, at least 1"."""
    kind, bounds = split(hint)
    if isinstance(bounds, OneOf):
        return str(bounds)
    if get_origin(kind) is Literal:
        return join([str(choice) for choice in get_args(kind)])
    if get_origin(kind) is tuple:
        return f"a list such as 3,1,2 whose every item is {says(get_args(kind)[0])}"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return f"{words.get(kind, kind.__name__)}{f', {bounds}' if bounds else ''}"


def show(value: Any) -> str:
    return ",".join(str(item) for item in value) if isinstance(value, tuple) else repr(value)


def wrong(value: Any, hint: Any, key: str) -> NestlingError:
    return NestlingError(f"{key} is {show(value)}; expected {says(hint)}")
