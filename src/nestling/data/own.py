"""Data of the user's own: tensors, a torch Dataset or a DataLoader for training, and one of them for the test.

In: (inputs, targets) tensors, or anything that gives such pairs. Out: a DataSet. uint8 images in tensors lie on the device and
are normalised by the training images' statistics, as ours are; whatever else comes is taken as the network takes it. A
DataLoader keeps its own order and batches: torch's randomness is seeded for each epoch, so that a resumed run sees the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from nestling.data.dataset import DataSet, channel_statistics
from nestling.data.split import Batch, MemorySplit, Split, check_batch, slices
from nestling.errors import NestlingError
from nestling.recipes.code import handed
from nestling.recipes.recipe import DataRecipe

HOW = "--data {0} (in Python nestling.resolve(run, data=...))"
EXPECTED = "expected (inputs, targets) tensors, a torch Dataset of such pairs, or a DataLoader of batches of them"
SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def load(recipe: DataRecipe, device: torch.device | str = "cpu") -> DataSet:
    """The data that the recipe's function gives: (training, test)."""
    given = handed(recipe.root, "its data", HOW)()
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise NestlingError(
            f"{recipe.root} gives a {type(given).__name__}; expected a pair (training, test), {EXPECTED}"
        )
    if recipe.validation or recipe.limit:
        raise NestlingError(
            "data.validation and data.limit choose among our data sets; hand over the part you mean instead"
        )
    return dataset(given[0], given[1], torch.device(device))


def dataset(train: Any, test: Any, device: torch.device) -> DataSet:
    """Both parts as splits. Classes are named by the data (`.classes`, as in torchvision), or not at all."""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    # A class made of TensorDataset may give other samples than its tensors, such as augmented ones.
    train, test = (part.tensors if type(part) is TensorDataset else part for part in (train, test))
    if isinstance(test, DataLoader) and any(isinstance(each, SHUFFLING) for each in samplers(test)):
        raise NestlingError(
            "the test loader shuffles, so that no answer could be told to its picture; make it with shuffle=False"
        )
    if is_pictures(train):
        mean, std = channel_statistics(train[0].cpu())
        std = tuple(max(value, 1 / 255) for value in std)  # a channel of one colour
    splits = [split_of(part, device, mean, std, name) for part, name in ((train, "training"), (test, "test"))]
    if is_pictures(train) != is_pictures(test):
        one, other = ("training", "test") if is_pictures(train) else ("test", "training")
        raise NestlingError(
            f"the {one} data are tensors with uint8 images, which are normalised here, and the {other} data are not; hand over "
            "both in one form"
        )
    first = next(iter(splits[1].batches(1)), None)
    if first is None:
        raise NestlingError("the test data give no batch; hand over at least one sample")
    named = [names_in(part) or names_in(getattr(part, "dataset", None)) for part in (train, test)]
    if all(named) and named[0] != named[1]:
        raise NestlingError(
            f"the classes of the training data are {shortly(named[0])}, those of the test data {shortly(named[1])}: a number "
            "would mean another class there; hand over data that number the same classes"
        )
    classes = named[0] or named[1]
    return DataSet("own", splits[0], splits[1], classes, mean, std, tuple(first[0].shape[1:]))


def samplers(loader: Any) -> tuple[Any, ...]:
    """What tells a loader the order of its samples."""
    return loader.sampler, getattr(loader.batch_sampler, "sampler", None)


def names_in(data: Any) -> tuple[str, ...]:
    """The names of the classes that a Dataset tells; none where `classes` is something else, such as how many there are."""
    found = getattr(data, "classes", ())
    if isinstance(found, np.ndarray):
        found = found.tolist()
    return tuple(map(str, found)) if isinstance(found, tuple | list) else ()


def shortly(names: tuple[str, ...]) -> str:
    return f"{len(names)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"


def is_pictures(part: Any) -> bool:
    return is_pair(part) and part[0].dtype == torch.uint8 and part[0].dim() == 4


def is_pair(part: Any) -> bool:
    return isinstance(part, tuple | list) and len(part) == 2 and all(isinstance(each, Tensor) for each in part)


def split_of(part: Any, device: torch.device, mean: tuple[float, ...], std: tuple[float, ...], name: str) -> Split:
    if isinstance(part, DataLoader):
        return LoaderSplit(part, device, name)
    if isinstance(part, Dataset):
        return ItemSplit(part, device, name)
    if is_pair(part):
        inputs, targets = part[0], whole(part[1])
        counts = [len(each) if each.dim() else 1 for each in (inputs, targets)]
        if not inputs.dim() or not targets.dim() or counts[0] != counts[1] or not counts[0]:
            raise NestlingError(
                f"the {name} data have {counts[0]} inputs and {counts[1]} targets; expected as many of both"
            )
        if mean and is_pictures(part):
            centre, scale = (torch.tensor(value, device=device) for value in (mean, std))
            return MemorySplit(inputs.contiguous().to(device), targets.to(device), centre, scale)
        return TensorSplit(inputs.to(device), targets.to(device))
    inside = f" of {', '.join(type(each).__name__ for each in part[:3])}" if isinstance(part, tuple | list) else ""
    raise NestlingError(f"the {name} data are a {type(part).__name__}{inside}; {EXPECTED}")


def whole(targets: Tensor) -> Tensor:
    """Classes as torch's losses take them, however narrow they lie in files."""
    return targets if targets.is_floating_point() else targets.long()


@dataclass(frozen=True, eq=False)
class TensorSplit:
    """Inputs as the network takes them, and their targets, on the device."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def batches(
        self, batch: int, generator: torch.Generator | None = None, augment: bool | None = None, drop_last: bool = False
    ) -> Iterator[Batch]:
        check_batch(batch, len(self), generator, augment, drop_last)
        order = None if generator is None else torch.randperm(len(self), generator=generator).to(self.inputs.device)
        for start, stop in slices(len(self), batch, drop_last):
            chosen = slice(start, stop) if order is None else order[start:stop]
            yield self.inputs[chosen], self.labels[chosen]

    def pictures(self, indices: Tensor) -> Tensor:
        return as_pictures(self.inputs[indices.to(self.inputs.device)].cpu())


@dataclass(frozen=True, eq=False)
class ItemSplit:
    """A torch Dataset of (input, target), read while it is used."""

    items: Any
    device: torch.device
    name: str

    def __len__(self) -> int:
        try:
            return len(self.items)
        except TypeError as error:
            raise NestlingError(
                f"the {self.name} data are a {type(self.items).__name__} without a length; hand over a DataLoader that has one"
            ) from error

    @property
    def labels(self) -> Tensor:
        return labels_of(self.items, self.device)

    def batches(
        self, batch: int, generator: torch.Generator | None = None, augment: bool | None = None, drop_last: bool = False
    ) -> Iterator[Batch]:
        check_batch(batch, len(self), generator, augment, drop_last)
        order = list(range(len(self))) if generator is None else torch.randperm(len(self), generator=generator).tolist()
        parts = [order[start:stop] for start, stop in slices(len(self), batch, drop_last)]
        loader: DataLoader[Any] = DataLoader(
            self.items, batch_sampler=parts, generator=torch.Generator(), collate_fn=self.together
        )
        yield from (on_device(each, self.device, self.name) for each in loader)

    def together(self, samples: list[Any]) -> Any:
        """Samples as a batch."""
        try:
            return default_collate(samples)
        except (TypeError, RuntimeError) as error:
            raise NestlingError(
                f"samples of the {self.name} data cannot be put together in a batch ({str(error).splitlines()[0]}); expected "
                "inputs that are tensors of one shape, or hand over a DataLoader that makes the batches"
            ) from error

    def pictures(self, indices: Tensor) -> Tensor:
        return as_pictures(torch.stack([torch.as_tensor(self.items[int(i)][0]) for i in indices]))


@dataclass(frozen=True, eq=False)
class LoaderSplit:
    """A DataLoader with its own batches, whose size and order are its own business."""

    loader: Any
    device: torch.device
    name: str

    def __len__(self) -> int:
        try:
            return len(self.loader.dataset)
        except TypeError:
            return self.steps * (self.loader.batch_size or 1)

    @property
    def steps(self) -> int:
        """Batches of an epoch."""
        try:
            found = len(self.loader)
        except TypeError as error:
            raise NestlingError(
                f"the {self.name} loader has no length; give it one (__len__), so that epochs end"
            ) from error
        if not found:
            raise NestlingError(
                f"the {self.name} loader gives no batch: it has {len(self)} samples, batches of {self.loader.batch_size} and "
                "drop_last; make its batches smaller"
            )
        return found

    @property
    def labels(self) -> Tensor:
        return labels_of(self.loader.dataset, self.device)

    def batches(
        self, batch: int, generator: torch.Generator | None = None, augment: bool | None = None, drop_last: bool = False
    ) -> Iterator[Batch]:
        """With a generator, one that the loader draws its order from is seeded, too: so a resumed run sees what it would have."""
        if generator is not None:
            for own in self.generators():
                own.manual_seed(generator.initial_seed())
        count = 0
        for count, each in enumerate(self.loader, start=1):
            if generator is not None and count > self.steps:
                raise NestlingError(
                    f"the {self.name} loader gives more than the {self.steps} batches that it says it has; let __len__ tell all"
                )
            yield on_device(each, self.device, self.name)
        if not count:
            raise NestlingError(
                f"the {self.name} data give no batch; hand over at least one sample, and what can be gone through again"
            )

    def generators(self) -> list[torch.Generator]:
        """Those of the user's own from which the order of the samples is drawn."""
        found = [getattr(each, "generator", None) for each in (self.loader, *samplers(self.loader))]
        return [each for each in found if isinstance(each, torch.Generator) and each is not torch.default_generator]

    def pictures(self, indices: Tensor) -> Tensor:
        """Of a test loader, which is taken to come in the same order each time."""
        wanted, kept, at = set(indices.tolist()), [], 0
        for x, _ in self.batches(0):
            kept += [x[i].cpu() for i in range(len(x)) if at + i in wanted]
            at += len(x)
        return as_pictures(torch.stack(kept))


def on_device(batch: Any, device: torch.device, name: str) -> Batch:
    """A batch as (inputs, targets) on the device."""
    if not isinstance(batch, tuple | list) or len(batch) != 2 or not isinstance(batch[0], Tensor):
        raise NestlingError(f"the {name} data give a {type(batch).__name__}; {EXPECTED}")
    x, y = batch
    if not isinstance(y, Tensor):
        raise NestlingError(f"the {name} data give targets of type {type(y).__name__}; expected a tensor of them")
    return x.to(device, non_blocking=True), whole(y).to(device, non_blocking=True)


def labels_of(items: Any, device: torch.device) -> Tensor:
    """The targets of a Dataset that keeps them in one place (as torchvision's do); empty where it does not, or gives others."""
    none = torch.zeros(0, dtype=torch.int64)
    found = getattr(items, "targets", getattr(items, "labels", None))
    if found is None and type(items) is TensorDataset and len(items.tensors) == 2:
        found = items.tensors[1]
    if found is None or getattr(items, "target_transform", None) is not None:
        return none
    try:
        labels = whole(torch.as_tensor(found, device=device))
        return labels if labels.dim() and len(labels) == len(items) else none
    except (TypeError, ValueError, RuntimeError):
        return none


def as_pictures(x: Tensor) -> Tensor:
    """Inputs as people can look at them: from the darkest to the brightest value of each image."""
    if x.dtype == torch.uint8:
        return x
    flat = x.float().flatten(1)
    low, high = flat.min(1).values, flat.max(1).values
    shape = (-1, *[1] * (x.dim() - 1))
    scaled = (x.float() - low.view(shape)) / (high - low).clamp(min=1e-12).view(shape)
    return (255 * scaled).round().to(torch.uint8)
