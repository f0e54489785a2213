"""Functions of the user's own that a recipe names: `my_file.py:build` or `package.module:function`.

In: functions, or names that the user has written down in this very process. Out: the functions. A recipe that was read from
a folder is data: what it names is neither imported nor run unless it was handed over here, as an object or by its name.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from nestling.errors import NestlingError, nearest

UserFunction = Callable[..., Any]
HANDED: dict[str, UserFunction] = {}  # what this process may call, by the name that recipes use


def hand_over(given: str | UserFunction, name: str = "") -> str:
    """Let this process use a function, under its own name or another; a name is looked up now, which runs its file."""
    function = function_at(given) if isinstance(given, str) else given
    known = name or (given if isinstance(given, str) else name_of(function))
    HANDED[known] = function
    return known


def hand_object(given: Any, label: str, before: str = "") -> str:
    """Let this process use an object that no file names, under a label of its own; or under the one it had `before`."""
    name, count = before or f":{label}", 2
    while not before and name in HANDED and getattr(HANDED[name], "given", None) is not given:
        name, count = f":{label} {count}", count + 1
    HANDED[name] = HandedObject(given)
    return name


class HandedObject:
    """An object in the place of the function that would give it."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def __call__(self) -> Any:
        return self.given


def handed(name: str, what: str, how: str) -> UserFunction:
    """The function of that name, if it was handed over. `what` it is and `how` to name it, for the message."""
    if name in HANDED:
        return HANDED[name]
    where = f"{name}, in a file of yours" if name.partition(":")[0] else "an object of another process"
    again = name if name.partition(":")[0] else "my_file.py:function"
    raise NestlingError(
        f"{what} is {where}: a folder holds no code, and what it names is not run unasked. Name it: {how.format(again)}"
    )


def name_of(function: UserFunction) -> str:
    """Where a function can be found again: `my_file.py:build` for a script, else `package.module:function`."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", type(function).__name__)
    if module != "__main__":
        return f"{module}:{name}"
    file = getattr(sys.modules["__main__"], "__file__", None)
    return f"{shown(Path(file))}:{name}" if file else f":{name}"  # nothing before the colon: no file has it


def shown(file: Path) -> str:
    """A path as people write it: from here, if it is below."""
    try:
        return str(file.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(file.resolve())


def function_at(name: str) -> UserFunction:
    """The function at `my_file.py:function` (the file is run, its folder may be imported from, as when Python runs it) or at
    `package.module:function` (imported; the current folder counts)."""
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise NestlingError(
            f"{name!r} names no function; write my_file.py:function or package.module:function, such as my_file.py:build"
        )
    module = run_file(Path(place)) if place.endswith(".py") else imported(place, name)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
            raise NestlingError(f"{place} has no {attribute!r}; did you mean {nearest(attribute, known)}?")
        found = getattr(found, part)
    if not callable(found):
        raise NestlingError(f"{name} is a {type(found).__name__}; expected a function")
    function: UserFunction = found
    return function


def run_file(path: Path) -> ModuleType:
    """A Python file as a module, run once in a process."""
    if not path.is_file():
        raise NestlingError(f"there is no file {path}; name a Python file, such as my_file.py:build")
    file = str(path.resolve())
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) and os.path.abspath(str(module.__file__)) == file:
            return module
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else f"file_{len(sys.modules)}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise NestlingError(f"{path} cannot be imported; expected a Python file")
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.insert(0, folder)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise NestlingError(f"running {path} failed: {type(error).__name__}: {error}") from error
    return module


def imported(place: str, name: str) -> ModuleType:
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(place)
    except Exception as error:
        raise NestlingError(
            f"{name}: {place} cannot be imported ({type(error).__name__}: {error}); install it, or name a file: my_file.py:build"
        ) from error
