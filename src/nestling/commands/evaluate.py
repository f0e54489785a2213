"""`nestling evaluate`: error, loss and calibration of every stage of a run or of a network that comes with nestling."""

from typing import Any

from rich.table import Table

from nestling.errors import NestlingError
from nestling.runs import shelf
from nestling.runs.device import pick_device
from nestling.runs.evaluate import evaluate, keep, trained


def command(run: str, device: str = "auto", sample: bool = False) -> dict[str, Any]:
    """Error, loss and calibration of every stage of a run, measured anew and stored with it.

    Args:
        run: the run's folder, or the name of a trained network that comes with nestling (nothing is stored then).
        device: auto, cpu or cuda.
        sample: on the first thousand test images, which come with nestling; for networks that come with it.
    """
    chosen = pick_device(device, "--device ")
    if shelf.holds(run):
        return shelf.evaluate_again(run, chosen, sample)
    if sample:
        known = ", ".join(shelf.names())
        raise NestlingError(f"--sample is for networks that come with nestling ({known}), and {run!r} is none of them.")
    shelf.open_run(run)
    folder, net, data = trained(run, chosen)
    split = "validation" if folder.read_recipe().data.validation else "test"
    found, tensors = evaluate(net, data, split)
    result = {"run": str(folder.path), **found}
    try:
        keep(folder, data, found, tensors)
    except NestlingError as error:
        # What was measured is shown. Still it has failed: reports read what is stored, and a script should not go on to one.
        result["incomplete"] = f"measured, but not stored: {error}"
    return result


def show(result: dict[str, Any]) -> Table:
    """A row per stage, for people."""
    title = f"{result['network']} on {result['data']} ({result['split']}, n={result['n']})"
    table = Table("stage", "size", "error %", "loss", "ECE %", "MACs", "repaired %", "broken %", title=title)
    if "card" in result:
        table.caption = "its card says " + " / ".join(f"{100 * error:.2f}" for error in result["card"]) + " %"
    moves = {move["to"]: move for move in result["transitions"]}
    for row in result["stages"]:
        move = moves.get(row["stage"])
        changes = (f"{100 * move['repaired']:.2f}", f"{100 * move['broken']:.2f}") if move else ("", "")
        error, ece = f"{100 * row['error']:.2f}", f"{100 * row['ece']:.2f}"
        table.add_row(str(row["stage"]), row["size"], error, f"{row['loss']:.3f}", ece, f"{row['macs']:,}", *changes)
    return table
