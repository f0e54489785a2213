"""The ways to make somebody's module anytime, as text that a recipe can hold: `keep()`, `exits(at=(0.25, 0.5))`,
`nest("w,w", uneven=True)`.

In: such a call without the module, and the module. Out: a NestedNet. The text is read, never run: a name of WAYS, and numbers,
words and lists of them.
"""

import ast
from importlib import import_module
from typing import TYPE_CHECKING, Any

from nestling.errors import NestlingError, join, nearest
from nestling.recipes.code import handed
from nestling.recipes.recipe import NetworkRecipe

if TYPE_CHECKING:
    from torch import nn

    from nestling.nets.net import NestedNet

WAYS = {
    "nest": "nestling.nets.nest:nest",
    "keep": "nestling.nets.keep:keep",
    "exits": "nestling.nets.exits:exits",
}  # imported when used


def parsed(way: str) -> tuple[str, list[Any], dict[str, Any]]:
    """A way and its arguments."""
    expected = 'expected a way and its arguments, such as exits(at=(0.25, 0.5)) or nest("w,w")'
    try:
        call = ast.parse(way if "(" in way else f"{way}()", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError("no call")
        listed = [value_of(value) for value in call.args]
        named = {str(word.arg): value_of(word.value) for word in call.keywords if word.arg}
    except (SyntaxError, ValueError) as error:
        raise NestlingError(f"network.way is {way!r}; {expected}") from error
    if call.func.id not in WAYS:
        raise NestlingError(
            f"network.way is {way!r}; did you mean {nearest(call.func.id, WAYS)}? There are {join(list(WAYS))}"
        )
    return call.func.id, listed, named


def value_of(text: ast.expr) -> Any:
    """What an argument says: numbers, also as 1 / 8, words, and lists of them."""
    if isinstance(text, ast.Tuple | ast.List):
        return tuple(value_of(part) for part in text.elts)
    if isinstance(text, ast.BinOp) and isinstance(text.op, ast.Div):
        above, below = ast.literal_eval(text.left), ast.literal_eval(text.right)
        if type(above) in (int, float) and type(below) in (int, float) and below:
            return above / below
        raise ValueError("no fraction")
    return ast.literal_eval(text)


def made_anytime(module: "nn.Module", way: str, shape: tuple[int, ...] | None) -> "NestedNet":
    """The module, nested in a way. `shape`: of the images, where the way's own arguments do not say it."""
    name, listed, named = parsed(way)
    room, _, function = WAYS[name].partition(":")
    if shape is not None:
        named = {"shape": tuple(shape), **named}
    try:
        net: NestedNet = getattr(import_module(room), function)(module, *listed, **named)
    except TypeError as error:
        raise NestlingError(f"network.way is {way!r}: {error}; see the arguments of nestling.{name}") from error
    return net


def own_net(recipe: NetworkRecipe, shape: tuple[int, ...] | None) -> "NestedNet":
    """The network that a function of the user's makes, nested here if it is not yet; its weights are as they come."""
    from torch import nn

    from nestling.nets.modes import unhooked
    from nestling.nets.net import NestedNet

    made = handed(recipe.name, "its network", "--build {0} (in Python nestling.resolve(run, build=...))")()
    if isinstance(made, NestedNet):
        if recipe.way:
            raise NestlingError(f"{recipe.name} gives a nested network already; leave out network.way ({recipe.way!r})")
        unhooked(made, made.plan.name)
        return made
    if not isinstance(made, nn.Module):
        raise NestlingError(f"{recipe.name} gives a {type(made).__name__}; expected a torch module or a nested network")
    if not recipe.way:
        raise NestlingError(
            f"{recipe.name.removeprefix(':')} gives a plain module; let it return the nested network, or, where it is trained, "
            "say how it becomes anytime, such as --way 'exits(at=(0.25, 0.5))' or --way 'nest(\"w,w\")'"
        )
    return made_anytime(made, recipe.way, shape)
