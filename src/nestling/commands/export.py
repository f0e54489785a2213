"""`nestling export`: a run's stages as files for other engines, verified before it says done.

In: a run's folder, or a trained network's name. Out: a folder with one graph per stage and a manifest.
"""

from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from nestling.commands import waiting
from nestling.data import DataSet
from nestling.errors import NestlingError
from nestling.files import OUTPUTS
from nestling.runs.open import OpenedRun, resolve
from nestling.runtime.confidence import Outcomes
from nestling.runtime.runtime import spec_of
from nestling.runtime.verified import export_int8, export_net

IMAGES = 64  # real images, at most, that every stage is verified on


def command(
    run: str,
    format: Literal["onnx", "pt2"] = "onnx",
    out: str = "",
    int8: bool = False,
    images: int = 1000,
    build: str = "",
    data: str = "",
) -> dict[str, Any]:
    """Write each stage of a run as its own graph, with a manifest, and verify them against the network.

    Args:
        run: the run's folder, or the name of a trained network that comes with nestling.
        format: onnx (for ONNX Runtime and nestling.runtime.portable) or pt2 (torch.export).
        out: the folder to write; RUN/export-onnx or the like if not given, NAME-export-onnx for a trained network. An
            earlier export is replaced.
        int8: quantise weights and activations to 8 bits, and say what that does to each stage's error (onnx only). Of a
            trained network that comes with nestling, without its data set here, by the 1,000 test images that come along.
        images: for int8, how many test images that is measured on; 0 = all.
        build: the function that builds a network of your own, such as my_file.py:build.
        data: for int8, the function that gives data of your own, such as my_file.py:loaders.
    """
    if int8 and format != "onnx":
        raise NestlingError(f"int8 is for onnx, found format {format!r}; leave out one of the two")
    if images < 0:
        raise NestlingError(f"found images {images}; expected how many test images, or 0 for all")
    waiting.at(f"writing the stages of {run} and verifying them")
    opened = resolve(run, build, data)
    net = opened.net()
    spec = spec_of(opened, net)
    place = Path(out) if out else opened.place_for(f"export-{format}{'-int8' if int8 else ''}")
    about = {"run": opened.path.name, "network": net.plan.name, "data": opened.recipe.data.name}
    if int8:
        manifest = export_int8(net, spec, place, here(opened), images, about)
    else:
        manifest = export_net(net, spec, place, opened.images(IMAGES), format, about, held_out(opened))
    found = manifest.to_dict()
    size = sum((place / stage.file).stat().st_size for stage in manifest.stages)
    return {"run": run, "folder": str(place), "bytes": size, **{k: v for k, v in found.items() if k != "shapes"}}


def held_out(opened: OpenedRun) -> Outcomes | None:
    """How sure and right the stages were of the test images; None where answers are no classes, or nothing was kept."""
    if not opened.has(OUTPUTS) or opened.results.get("task"):
        return None
    tensors = opened.outputs()
    return Outcomes.of(tensors["logits"].numpy(), tensors["labels"].numpy())


def here(opened: OpenedRun) -> DataSet:
    """The data of a run; where a network came with us and its data did not, the test images that did."""
    try:
        return opened.data()
    except NestlingError:
        if not opened.comes_with_us:
            raise
        return opened.data(sample=True)


def show(result: dict[str, Any]) -> Table:
    """A row per stage, for people."""
    about, errors = result["about"], result["network"]["errors"]
    verified, price = about["verified"], about.get("int8")
    kind = f"{result['form']}, {result['precision']}, {result['bytes']:,} bytes"
    table = Table("stage", "size", "takes", "gives", "ms", "error %", title=f"{result['network']['name']} ({kind})")
    for title in ("float32 ms", "float32 error %") if price else ("difference",):
        table.add_column(title)
    for index, row in enumerate(result["stages"]):
        cells = [str(row["stage"]), row["size"], str(len(row["takes"])), str(len(row["gives"]))]
        cells.append(f"{1e3 * result['latencies'][index]:.2f}")
        cells.append(f"{100 * errors[index]:.2f}" if errors else "")
        if price:
            cells += [f"{price['ms_before'][index]:.2f}", f"{100 * price['error_before'][index]:.2f}"]
        else:
            cells.append(f"{verified['largest_difference'][index]:.1e}")
        table.add_row(*cells)
    batches = " and ".join(map(str, verified["batches"]))
    table.caption = f"{result['folder']}: verified on {verified['images']} images at batch {batches}"
    if price:
        table.caption += (
            f"; calibrated on {price['calibration_images']} {price['calibrated_on']}, errors of {price['images']}"
        )
    if price and sum(price["ms_after"]) >= sum(price["ms_before"]):
        table.caption += (
            f"; in 8 bits all stages take {sum(price['ms_after']):.2f} ms here, in float32 {sum(price['ms_before']):.2f}: "
            "use float32 on this machine"
        )
    return table
