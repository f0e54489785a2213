"""Trained networks that come with nestling: load one by name and ask it.

In: a name (or a run's folder). Out: the network with its weights, and its card (recipe, errors, costs, where it came from).
Weights lie in the package as safetensors, convolutions in float16; the errors on the card are those of the weights as they
lie there, measured on a CPU. Beside them lie their outputs for the test set, by which answers are called sure enough, and the
first thousand test images of CIFAR-10, so that a card can be checked anywhere. `pack` puts a run on the shelf.
"""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from nestling.data import DataSet, MemorySplit
from nestling.data import load as load_data
from nestling.data.augment import normalise
from nestling.errors import NestlingError, nearest
from nestling.files import to_text, write_atomically
from nestling.nets import NestedNet, build
from nestling.recipes.recipe import from_dict
from nestling.runs.evaluate import GALLERY, errors, evaluate, network, trained
from nestling.runs.folder import PROVENANCE, RECIPE, RESULTS, RunDir

PROFILE = "profile.json"  # of a run, written by `nestling profile`, which stands further down the house
FIRST = 1000  # test images on which a card can be checked quickly
SHELF = Path(str(files("nestling"))) / "runs" / "shipped"


def names() -> list[str]:
    return sorted(path.stem for path in SHELF.glob("*.json"))


def holds(source: object) -> bool:
    """Whether this is the name of a trained network; a file or folder of that name goes first."""
    return isinstance(source, str) and source in names() and not Path(source).exists()


def open_run(path: str | Path) -> RunDir:
    """A run's folder, for who takes names of trained networks as well."""
    try:
        return RunDir.open(path)
    except NestlingError as error:
        raise NestlingError(f"{error} (trained networks that come with nestling: {', '.join(names())})") from error


def card(name: str) -> dict[str, Any]:
    """What is known about a network: recipe, results, provenance."""
    if name not in names():
        raise NestlingError(
            f"there is no trained network {name!r}, and no run's folder; did you mean {nearest(name, names())}?"
        )
    found: dict[str, Any] = json.loads((SHELF / f"{name}.json").read_text(encoding="utf-8"))
    return found


def load(name: str, device: torch.device | str = "cpu") -> NestedNet:
    """A trained network, or that of a run's folder, ready to answer. `net.answers(x)` takes images normalised as its card
    or the run's results say."""
    run = RunDir(name)
    if run.has(RECIPE):
        told = run.has(RESULTS) and "shape" in run.read_json(RESULTS)  # older results do not tell it, but the data do
        return (network(run) if told else trained(name)[1]).to(device)
    known = card(name)
    recipe = from_dict(known["recipe"])
    shape: Any = tuple(known["shape"])
    net = build(recipe.network, classes=len(known["results"]["classes"]), shape=shape)
    tensors = safetensors.torch.load_file(SHELF / f"{name}.safetensors")
    net.load_state_dict({key: value.float() if value.is_floating_point() else value for key, value in tensors.items()})
    return net.to(device).eval()


def outputs(name: str) -> dict[str, Tensor]:
    """The logits of every stage for the whole test set, (stages, N, classes), and its labels."""
    found = safetensors.torch.load_file(SHELF / f"{card(name)['name']}-outputs.safetensors")
    return {"logits": found["logits"].float(), "labels": found["labels"].long()}


def sample(name: str, device: torch.device | str = "cpu") -> DataSet:
    """The first thousand test images of the data set a network was trained on, as a data set without training images."""
    known = card(name)
    data = from_dict(known["recipe"]).data.name
    path = SHELF / f"{data}-first.safetensors"
    if not path.is_file():
        raise NestlingError(f"no sample of {data} comes with nestling; evaluate {name} on the whole test set instead")
    found = safetensors.torch.load_file(path)
    mean, std = (torch.tensor(known[key], device=device) for key in ("mean", "std"))
    images, labels = found["images"].to(device), found["labels"].long().to(device)
    none, test = MemorySplit(images[:0], labels[:0], mean, std), MemorySplit(images, labels, mean, std)
    classes, shape = tuple(known["results"]["classes"]), known["shape"]
    return DataSet(data, none, test, classes, tuple(known["mean"]), tuple(known["std"]), (shape[0], shape[1], shape[2]))


def some_images(source: RunDir | str, count: int) -> Tensor:
    """Up to `count` real test images, normalised: of a trained network's sample; of a run's gallery, so that its data need
    not be here; of its data where it has none."""
    known = source.read_json(RESULTS) if isinstance(source, RunDir) and source.has(RESULTS) else {}
    if isinstance(source, RunDir) and source.has(GALLERY) and "mean" in known:
        mean, std = (torch.tensor(known[key]) for key in ("mean", "std"))
        return normalise(source.load_tensors(GALLERY)[0]["images"][:count], mean, std)
    data = load_data(source.read_recipe().data) if isinstance(source, RunDir) else sample(source)
    for x, _ in data.test.batches(min(count, len(data.test))):
        return x
    raise NestlingError(f"{data.name} has no test images")


def evaluate_again(name: str, device: torch.device | str = "cpu", small: bool = False) -> dict[str, Any]:
    """What `evaluate` says of a network on the whole test set or on the sample, and what its card says."""
    known = card(name)
    data = sample(name, device) if small else load_data(from_dict(known["recipe"]).data, device)
    found, _ = evaluate(load(name, device), data)
    promised = known["first"]["errors"] if small else [stage["error"] for stage in known["results"]["stages"]]
    return {"run": name, **found, "card": promised}


def latency(run: RunDir) -> dict[str, Any]:
    """What a run's profile says of every stage, and where it was measured; {} for a run without one."""
    found: dict[str, Any] = run.read_json(PROFILE) if run.has(PROFILE) else {}
    return {key: found[key] for key in ("device", "engine", "threads", "batch", "dtype", "repeats", "stages") if found}


def pack(run: str, name: str) -> dict[str, Any]:
    """Put a finished run on the shelf: round its convolutions to float16, measure what that gives, write the card."""
    folder, net, data = trained(run)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() == 4:
                parameter.copy_(parameter.half())
    results, tensors = evaluate(net, data)
    first = errors(tensors["logits"][:, :FIRST], tensors["labels"][:FIRST])
    state = {key: value.half() if value.dim() == 4 else value for key, value in net.state_dict().items()}
    said = {"logits": tensors["logits"].half(), "labels": tensors["labels"].to(torch.int16)}
    SHELF.mkdir(exist_ok=True)
    for file, kept in ((name, {k: v.contiguous() for k, v in state.items()}), (f"{name}-outputs", said)):
        write_atomically(SHELF / f"{file}.safetensors", safetensors.torch.save(kept))
    text = {
        "name": name,
        "recipe": folder.read_json(RECIPE),
        "shape": data.shape,
        "mean": data.mean,
        "std": data.std,
        "results": results,
        "first": {"n": FIRST, "errors": [round(float(error), 6) for error in first]},  # for a quick check
        "latency": latency(folder),
        "provenance": folder.read_json(PROVENANCE),
    }
    write_atomically(SHELF / f"{name}.json", (to_text(text) + "\n").encode())
    return text
