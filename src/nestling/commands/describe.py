"""`nestling describe NET`: a network's stages, what each adds and costs, and a picture of the nest.

In: the name of a network, of a trained one or of a recipe, or a run's folder, and what to change. Out: per stage its size, new
and total parameters and MACs, its share of the un-nested network and the connections the rule drops; of a recipe also every
field that --set changes; with --draw an SVG. Works on plans: makes no tensors.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from nestling.errors import NestlingError, nearest
from nestling.files import write_atomically
from nestling.nets.plan import Plan
from nestling.nets.registry import NETS, TINY, ImageShape, plan
from nestling.nets.svg import draw as picture_of
from nestling.recipes import RECIPES
from nestling.recipes.recipe import NetworkRecipe, Recipe, flat, keys, override
from nestling.recipes.rules import says

# Classes and images of data sets whose networks have another number of classes or another size of images by themselves.
SEEN: dict[str, tuple[int, ImageShape]] = {"tiny-imagenet": (200, TINY)}


def command(
    net: str,
    growth: str = "",
    stripes: str = "",
    widths: str = "",
    blocks: str = "",
    alone: int = 0,
    ensemble: bool = False,
    classes: int = 0,
    shape: str = "",
    draw: str = "",
) -> dict[str, Any]:
    """Show a network's stages: what each adds, what it costs, and a picture of the nest.

    Networks: the paper's width-resnet42, even-resnet42, depth-sparse98, alternate-sparse98, together-sparse98,
    cascade-sparse98 (CIFAR-10), width-resnet50, depth-sparse66 (ImageNet); width-resnet18 (Tiny ImageNet); msdnet (for
    comparison); width-digits, even-digits, depth-digits, alternate-digits, together-digits, cascade-digits. Trained:
    width-resnet42-cifar10, depth-sparse98-cifar10, width-resnet42-kept-cifar10, width-resnet18-tiny-imagenet.

    Parameters and MACs count what is there: connections that the rule drops do not count. One MAC is one
    multiply-accumulate of a convolution or linear layer (torch's FlopCounterMode counts two).

    Of a recipe, such as digits-width (nestling train --help lists all), every field that --set changes is listed, too.

    Args:
        net: a network's name, such as width-resnet42, of a trained one, or of a recipe; or a run's folder.
        growth: another order of growing, such as w,d,w,d.
        stripes: how wide each stripe is, such as 1,1,2; without it every w doubles the width.
        widths: channels of each group at full width, such as 32,64,128.
        blocks: blocks of each group at full depth, such as 7,7,7.
        alone: only the independent network of this stage's size.
        ensemble: independent networks of all sizes, run one after another.
        classes: how many classes; 0 is the network's own number.
        shape: channels, height and width of the images, such as 3,32,32.
        draw: write a picture of the nest to this file (.svg).
    """
    if classes < 0:
        raise NestlingError(f"classes {classes}; expected how many, or 0 for the network's own number")
    given = {"growth": growth, "stripes": stripes, "widths": widths, "blocks": blocks}
    settings = [f"network.{key}={value}" for key, value in given.items() if value]
    image = image_shape(shape)
    if net in RECIPES or net in NETS:
        made = RECIPES[net]() if net in RECIPES else Recipe(net, network=NetworkRecipe(name=net))
    else:
        run = opened(net)
        made, classes = run.recipe, classes or len(run.known["classes"])
        image = image or tuple(run.known["shape"])
    if net in RECIPES and made.data.name in SEEN:
        seen, shown = SEEN[made.data.name]
        classes, image = classes or seen, image or shown
    base = made.network
    base = replace(base, alone=alone or base.alone, ensemble=ensemble or base.ensemble)
    recipe = override(replace(made, network=base), settings)
    drawn = plan(recipe.network, classes or None, image)
    result = {"network": net, **described(drawn, unnested(recipe.network, classes, image))}
    if net in RECIPES:
        result |= {"network": recipe.network.name, "recipe": net, "fields": described_fields(recipe)}
    if draw:
        result["picture"] = write_picture(drawn, draw)
    return result


def opened(name: str) -> Any:
    """A trained network or a run's folder."""
    from nestling.runs.folder import shipped  # here, because it brings torch, which plans are made without
    from nestling.runs.open import resolve

    if name not in shipped() and not Path(name).exists():
        raise NestlingError(f"unknown network {name!r}; did you mean {nearest(name, [*NETS, *shipped()])}?")
    return resolve(name)


def described_fields(recipe: Recipe) -> list[dict[str, Any]]:
    """Every field that --set changes: its value in this recipe, and which others it takes."""
    return [{"key": key, "value": value, "expected": says(keys()[key])} for key, value in flat(recipe).items()]


def image_shape(text: str) -> ImageShape | None:
    if not text:
        return None
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 3 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise NestlingError(f"shape {text!r}; expected channels, height and width, such as 3,32,32.")
    return (int(parts[0]), int(parts[1]), int(parts[2]))


def unnested(recipe: NetworkRecipe, classes: int, shape: ImageShape | None) -> Plan:
    """The full-size network with every connection and one head."""
    if recipe.alone:
        return plan(recipe, classes or None, shape)
    plain = replace(recipe.without_early(), ensemble=False)
    return plan(replace(plain, alone=plan(plain, classes or None, shape).stages), classes or None, shape)


def described(drawn: Plan, whole: Plan) -> dict[str, Any]:
    """The counts of every stage, beside those of the un-nested network."""
    stages = []
    for number, (stage, size) in enumerate(zip(drawn.answering, drawn.sizes, strict=True), start=1):
        kept, dense = drawn.connections(stage)
        stages.append(
            {
                "stage": number,
                "size": size,
                "new_macs": drawn.new_macs(stage),
                "macs": drawn.macs(stage),
                "new_params": drawn.new_params(stage),
                "params": drawn.params(stage),
                "own_params": drawn.task_params(number - 1),  # of D_s by itself, without the heads of earlier stages
                "macs_share": drawn.macs(stage) / whole.macs(whole.stages),
                "params_share": drawn.params(stage) / whole.params(whole.stages),
                "dropped_connections": dense - kept,
                "dropped_share": 1 - kept / dense,
            }
        )
    unnested = {"macs": whole.macs(whole.stages), "params": whole.params(whole.stages)}
    shape = [drawn.input.channels, *drawn.input.size]
    return {"shape": shape, "classes": drawn.by_name[drawn.heads[0]].channels, "stages": stages, "unnested": unnested}


def write_picture(drawn: Plan, file: str) -> str:
    path = Path(file)
    if path.suffix.lower() != ".svg":
        raise NestlingError(f"--draw {file}: pictures are written as SVG; give a name that ends in .svg.")
    if not path.parent.is_dir():
        raise NestlingError(f"--draw {file}: there is no folder {path.parent}; make it first.")
    write_atomically(path, picture_of(drawn).encode())
    return str(path)


def show(result: dict[str, Any]) -> RenderableType:
    """The stages as a table; of a recipe its fields as another one."""
    shape = "x".join(map(str, result["shape"]))
    table = Table(title=f"{result['network']}, images {shape}, {result['classes']} classes", title_justify="left")
    table.add_column("stage", justify="right")
    table.add_column("size")
    for heading in ("new params", "params", "new MACs", "MACs", "of un-nested", "dropped"):
        table.add_column(heading, justify="right")
    for row in result["stages"]:
        counts = [amount(row[key]) for key in ("new_params", "params", "new_macs", "macs")]
        shares = [f"{row[key]:.1%}" for key in ("macs_share", "dropped_share")]
        table.add_row(str(row["stage"]), row["size"], *counts, *shares)
    whole = result["unnested"]
    lines = [
        f"un-nested, all connections: {amount(whole['params'])} params, {amount(whole['macs'])} MACs",
        "dropped: of the connections that a network of the stage's size has by itself",
    ]
    if "picture" in result:
        lines.append(f"picture: {result['picture']}")
    return Group(table, *lines, *([fields_table(result)] if "fields" in result else []))


def fields_table(result: dict[str, Any]) -> Table:
    title = f"nestling train {result['recipe']} --set FIELD=VALUE"
    table = Table("field", "value", "expected", title=title, title_justify="left")
    for row in result["fields"]:
        table.add_row(row["key"], as_text(row["value"]), row["expected"])
    return table


def as_text(value: Any) -> str:
    """A value as --set takes it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def amount(count: int) -> str:
    """A count with three or four digits: 24.4 M, 1,234, 3.86 G."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**4)):
        if count >= size:
            value = count / (10**3 if unit == "k" else size)
            return f"{value:.1f} {unit}" if value >= 10 else f"{value:.2f} {unit}"
    return f"{count:,}"
