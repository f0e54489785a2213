"""`nestling evaluate`: error, loss and calibration of every stage of a run or of a network that comes with nestling."""

from typing import Any

from rich.table import Table

from nestling.commands import waiting
from nestling.commands.describe import amount
from nestling.errors import NestlingError
from nestling.runs.device import pick_device
from nestling.runs.evaluate import evaluate, keep
from nestling.runs.open import resolve


def command(run: str, device: str = "auto", sample: bool = False, build: str = "", data: str = "") -> dict[str, Any]:
    """Error, loss and calibration of every stage of a run, measured anew and stored with it.

    Args:
        run: the run's folder, or the name of a trained network that comes with nestling (nothing is stored then).
        device: auto, cpu or cuda.
        sample: only on test images that come with nestling (1,000 of CIFAR-10, 200 of Tiny ImageNet); nothing is stored then.
        build: the function that builds a network of your own, such as my_file.py:build.
        data: the function that gives data of your own, such as my_file.py:loaders.
    """
    waiting.at(f"opening {run}")
    chosen, opened = pick_device(device, "--device "), resolve(run, build, data)
    found_data = opened.data(chosen, sample)
    waiting.at(f"asking {run} about {len(found_data.test):,} pictures or the like")
    split = "validation" if opened.recipe.data.validation and not sample else "test"
    found, tensors = evaluate(opened.net(chosen, found_data), found_data, split, train=opened.recipe.train)
    if sample or opened.comes_with_us:
        seeds = opened.results.get("seeds", {})
        return {"run": run, "stored": False, **found, "card": card(opened.results, sample), "seeds": seeds}
    result = {"run": str(opened.path), "stored": True, **found}
    try:
        keep(opened, found_data, found, tensors)
    except NestlingError as error:
        # What was measured is shown. Still it has failed: reports read what is stored, and a script should not go on to one.
        result |= {"stored": False, "incomplete": f"measured, but not stored: {error}"}
    return result


def card(results: dict[str, Any], sample: bool) -> list[float]:
    """The errors that a run's own results promise; [] where they do not say."""
    if sample:
        return list(results.get("sample", {}).get("errors", []))
    return [row["error"] for row in results.get("stages", [])]


def show(result: dict[str, Any]) -> Table:
    """A row per stage, for people."""
    title = f"{result['network']} on {result['data']} ({result['split']}, n={result['n']})"
    if result.get("task"):
        return show_otherwise(result, title)
    second = "top-5 %" if "top5" in result["stages"][0] else "loss"  # 80 columns have no room for both
    table = Table("stage", "size", "error %", second, "ECE %", "MACs", "repaired %", "broken %", title=title)
    if not result.get("stored", True):
        told = " / ".join(f"{100 * error:.2f}" for error in result.get("card", ()))
        table.caption = (f"its card says {told} %; " if told else "") + of_seeds(result) + "nothing is stored"
    moves = {move["to"]: move for move in result["transitions"]}
    for row in result["stages"]:
        move = moves.get(row["stage"])
        changes = (f"{100 * move['repaired']:.2f}", f"{100 * move['broken']:.2f}") if move else ("", "")
        error, ece = f"{100 * row['error']:.2f}", f"{100 * row['ece']:.2f}"
        other = f"{100 * row['top5']:.2f}" if "top5" in row else f"{row['loss']:.3f}"
        table.add_row(str(row["stage"]), row["size"], error, other, ece, amount(row["macs"]), *changes)
    return table


def of_seeds(result: dict[str, Any]) -> str:
    """What the card says of all seeds of its recipe, on all test images."""
    if not result.get("seeds"):
        return ""
    n, means, spreads = (result["seeds"][key] for key in ("n", "mean", "std"))
    each = [f"{100 * m:.2f}" + (f" ± {100 * s:.2f}" if s else "") for m, s in zip(means, spreads, strict=True)]
    return f"{n} seed{'s' * (n > 1)} of its recipe, on all test images: {' / '.join(each)} %; "


def show_otherwise(result: dict[str, Any], title: str) -> Table:
    """Stages whose answers are classes of pixels, or numbers."""
    pixels = result["task"] == "pixels"
    table = Table(
        "stage", "size", "wrong pixels %" if pixels else "error %", *(["IoU %"] if pixels else []), "loss", "MACs"
    )
    table.title = title
    for row in result["stages"]:
        shares = [f"{100 * row[key]:.2f}" for key in ("error", "iou") if key in row]
        table.add_row(str(row["stage"]), row["size"], *shares, f"{row['loss']:.3f}", amount(row["macs"]))
    return table
