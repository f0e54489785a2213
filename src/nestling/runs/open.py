"""Opening a network: the one way from a name or a path to a run, what is known of it, its network and its data.

In: the folder of a run, or the name of a trained network that comes with nestling, which is a run's folder, too (in shipped/:
convolutions and outputs in float16, results of the weights as they lie there). Out: an OpenedRun; what it is asked for is read
then. Beside the shipped runs lie the first test images of their data, so that they can be tried anywhere.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from nestling.data import DataSet, MemorySplit
from nestling.data import load as load_data
from nestling.data.augment import normalise
from nestling.errors import NestlingError
from nestling.files import GALLERY, NETWORK, OUTPUTS, RESULTS, WEIGHTS, is_text
from nestling.nets import NestedNet, build
from nestling.nets.told import difference, rebuilt
from nestling.recipes.code import HANDED, UserFunction, hand_over
from nestling.recipes.recipe import Recipe
from nestling.runs.evaluate import about
from nestling.runs.folder import SHIPPED, RunDir


def listed(right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda found: isinstance(found, list) and all(map(right, found))


def is_number(found: Any) -> bool:
    return isinstance(found, int | float) and not isinstance(found, bool)


# What results.json says by name has this form, or is not there
FORMS: dict[str, Callable[[Any], bool]] = {
    "classes": listed(is_text),
    "shape": listed(lambda side: type(side) is int and 1 <= side < 2**28),
    "stages": listed(
        lambda row: (
            isinstance(row, dict)
            and is_number(row.get("error"))
            and type(row.get("stage")) is int
            and is_text(row.get("size"))
        )
    ),
    "transitions": listed(lambda row: isinstance(row, dict)),
    "n": lambda found: type(found) is int,
    **dict.fromkeys(("data", "split"), is_text),
    **dict.fromkeys(("mean", "std", "prior"), listed(is_number)),
}


class OpenedRun(RunDir):
    """A run's folder, and what its files mean."""

    named = False  # whether somebody said which function builds its network

    @cached_property
    def recipe(self) -> Recipe:
        return self.read_recipe()

    @cached_property
    def results(self) -> dict[str, Any]:
        """What results.json says; {} where the run has not been evaluated."""
        found = self.read_facts(RESULTS)
        if wrong := next((key for key in found if key in FORMS and not FORMS[key](found[key])), None):
            raise NestlingError(
                f"{self.path / RESULTS} is damaged: {wrong} is {found[wrong]!r:.60}; {self._remedy(RESULTS)}"
            )
        return found

    @cached_property
    def known(self) -> dict[str, Any]:
        """The results, with classes, shape, mean, std and prior: where older results do not tell these, the data do."""
        if {"classes", "shape", "mean", "std", "prior"} <= self.results.keys():
            return self.results
        try:
            return self.results | about(self.data())
        except NestlingError:
            if "shape" not in self.results:  # a network of another shape would be a guess
                raise
            return self.results

    def net(self, device: torch.device | str = "cpu", data: DataSet | None = None) -> NestedNet:
        """The network with its weights, ready to answer. `data`: tell its classes and shape, in place of the results."""
        if not self.has(WEIGHTS):
            raise NestlingError(
                f"{self.path} has no {WEIGHTS} yet: the run did not finish. First finish the run: {self.going_on()}"
            )
        net = self.untrained(data)
        self.load_weights(net)
        if self.named:
            self.check_named(net)
        return net.to(device).eval()

    def check_named(self, net: NestedNet) -> None:
        """Refuse a network that a function built, whose weights fit, but which is not the one that was trained."""
        told = self.read_facts(NETWORK)
        if not told or "missing" in told:
            return
        try:
            trained = rebuilt(told, self.shapes(WEIGHTS))
        except NestlingError:  # of another version of torch: then the function is what there is
            return
        types = [[tensor.dtype for tensor in each.state_dict().values()] for each in (net, trained)]
        if net.plan != trained.plan or (types[0] == types[1] and difference(net, trained)):
            raise NestlingError(
                f"{self.recipe.network.name} builds another network than the one that was trained: its weights have the same "
                f"names and shapes, but its plan or its layers are not those of {self.path / NETWORK}. Open the folder without "
                "that function (--build), which it does not need, or name the one it was trained with"
            )

    def untrained(self, data: DataSet | None = None) -> NestedNet:
        """The network without its weights: by its recipe; of the user's own by what the folder tells of it, unless somebody names
        a function. (What another run of this process was given may have the same name.)"""
        network = self.recipe.network
        told = self.read_facts(NETWORK) if network.own else {}
        if told and "missing" not in told and not self.named:
            try:
                return rebuilt(told, self.shapes(WEIGHTS))
            except NestlingError as error:
                raise NestlingError(f"{self.path / NETWORK}: {error}") from error
        known = about(data) if data else self.known
        try:
            return build(network, classes=len(known["classes"]), shape=tuple(known["shape"]))
        except NestlingError as error:
            if "missing" not in told or network.name in HANDED:
                raise
            raise NestlingError(
                f"{error}. ({NETWORK} cannot tell it without that function: {told['missing']})"
            ) from error

    def data(self, device: torch.device | str = "cpu", sample: bool = False) -> DataSet:
        """The data it was trained on; as a `sample` only its first test images, which come with nestling."""
        if not sample:
            found = load_data(self.recipe.data, device)
            names = () if found.classes else tuple(self.results.get("classes", ()))
            return replace(found, classes=names) if names else found
        stored, known, name = stored_sample(self.recipe.data.name), self.known, self.recipe.data.name
        mean, std = (torch.tensor(known[key], device=device) for key in ("mean", "std"))
        images, labels = stored["images"].to(device), stored["labels"].long().to(device)
        none, test = MemorySplit(images[:0], labels[:0], mean, std), MemorySplit(images, labels, mean, std)
        classes, means, stds = (tuple(known[key]) for key in ("classes", "mean", "std"))
        return DataSet(name, none, test, classes, means, stds, tuple(known["shape"]))

    def outputs(self) -> dict[str, Tensor]:
        """The logits of every stage for the whole test set, (stages, N, classes), and its labels."""
        if self.results.get("task"):
            raise NestlingError(f"{self.path} answers with no classes, and keeps only the errors of its answers")
        tensors, _ = self.load_tensors(OUTPUTS)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if len(shapes.get("logits", ())) != 3 or shapes.get("labels") != shapes["logits"][1:2]:
            raise NestlingError(
                f"{self.path / OUTPUTS} holds {shapes}; expected logits (stages, N, classes) and labels (N); "
                f"{self._remedy(OUTPUTS)}"
            )
        return {"logits": tensors["logits"].float(), "labels": tensors["labels"].long()}

    def gallery(self) -> dict[str, Tensor]:
        """Some test images as people see them, (K, C, H, W) uint8, and their indices in the test set. Runs that come with
        nestling keep the indices only: the images are among the sample."""
        tensors, _ = self.load_tensors(GALLERY)
        if "images" in tensors or "inputs" in tensors:
            return tensors
        return {**tensors, "images": stored_sample(self.recipe.data.name)["images"][tensors["indices"]]}

    def images(self, count: int) -> Tensor:
        """Up to `count` real test images, normalised: of the sample or the gallery, so that the data need not be here; of the
        data where there is neither."""
        if self.has(GALLERY) and "inputs" in (kept := self.gallery()):
            return kept["inputs"][:count]
        sampled = sample_file(self.recipe.data.name).is_file()
        if not sampled and self.has(GALLERY) and "mean" in self.results:
            mean, std = (torch.tensor(self.results[key]) for key in ("mean", "std"))
            return normalise(self.gallery()["images"][:count], mean, std)
        data = self.data(sample=sampled)
        for x, _ in data.test.batches(min(count, len(data.test))):
            return x
        raise NestlingError(f"{data.name} has no test images")

    def place_for(self, kind: str) -> Path:
        """Where something that is made of this run goes: into its folder, or, as that is not ours to fill, beside us."""
        return Path(f"{self.path.name}-{kind}") if self.comes_with_us else self.path / kind


def resolve(
    source: str | Path | RunDir, build: str | UserFunction | None = None, data: str | UserFunction | None = None
) -> OpenedRun:
    """The run of that name or at that path; a path goes first.

    Of a network, or data, of your own the folder holds only the name: `build` and `data` are the functions that give them, or
    `my_file.py:function`. Nothing that a folder names is run unless it was named here, or trained with in this process."""
    run = opened(source)
    if build:
        if not run.recipe.network.own:
            raise NestlingError(
                f"{run.path} is of {run.recipe.network.name}, which comes with us; build is for a network of your own"
            )
        hand_over(build, run.recipe.network.name)
        run.named = True
    theirs = run.recipe.data
    if data and theirs.name == "own":
        hand_over(data, theirs.root)
    elif data and data not in (theirs.name, theirs.root):
        raise NestlingError(
            f"{run.path} was trained on {theirs.name}{' in ' + theirs.root if theirs.root else ''}, and is judged there, not on "
            f"{data}; other data are for runs that were trained on a function's"
        )
    return run


def opened(source: str | Path | RunDir) -> OpenedRun:
    if isinstance(source, OpenedRun):
        return source
    if isinstance(source, RunDir):
        return OpenedRun(source.path)
    if not isinstance(source, str | Path):
        raise NestlingError(
            f"found a {type(source).__name__}; expected a run's folder or the name of a trained network "
            "(of a module, nestling.nest makes a nested network)"
        )
    return OpenedRun.open(source)


def load(
    name: str | Path | RunDir, device: torch.device | str = "cpu", build: str | UserFunction | None = None
) -> NestedNet:
    """The trained network of that name, or that of a run's folder, ready to answer. `net.answers(x)` takes images normalised
    as its results say. `build`: of a network of your own, the function that builds it."""
    return resolve(name, build).net(device)


def sample_file(data: str) -> Path:
    return SHIPPED / f"{data}-first.safetensors"


def stored_sample(data: str) -> dict[str, Tensor]:
    """The first test images of a data set (uint8) and their labels: a thousand of CIFAR-10, 200 of Tiny ImageNet."""
    path = sample_file(data)
    if not path.is_file():
        raise NestlingError(f"no sample of {data} comes with nestling; use the whole test set instead")
    return safetensors.torch.load_file(path)
