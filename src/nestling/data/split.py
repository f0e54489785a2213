"""One part of a data set (train or test), as batches of normalised images and labels.

`Split` is what every data set offers. `MemorySplit` holds all images as uint8 on the device; the streaming
one is in image_folder.py. Randomness comes from a CPU generator passed in; without one, batches come in order and
plain. Knows neither where the images come from nor what is trained on them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nestling.data.augment import Draws, augment, cutmix, draws, normalise
from nestling.errors import NestlingError

# x (b,C,H,W) float32 normalised; y (b,) int64, or with CutMix (b,classes) shares; both on the split's device
Batch = tuple[Tensor, Tensor]


class Split(Protocol):
    """What every split offers, in memory or streaming."""

    @property
    def labels(self) -> Tensor:
        """(n,) int64, on the device, in the order of plain batches."""

    def __len__(self) -> int: ...

    def batches(
        self, batch: int, generator: torch.Generator | None = None, augment: bool | None = None, drop_last: bool = False
    ) -> Iterator[Batch]:
        """One epoch. With a generator: shuffled, and augmented unless augment=False (None = as the recipe
        says). Without: in order, plain. drop_last leaves out a last batch that is not full.
        """

    def pictures(self, indices: Tensor) -> Tensor:
        """The images at these positions as plain uint8 (k,C,H,W) on the CPU, for people to look at."""


@dataclass(frozen=True, eq=False)
class MemorySplit:
    """A split that lies as uint8 on the device.

    A fast engine may do without `batches`: `epoch(generator)` gives one epoch's random numbers, and `shown` of a slice of
    them is what `batches` yields there.
    """

    images: Tensor  # (n,C,H,W) uint8
    labels: Tensor  # (n,) int64
    mean: Tensor  # (C,) float32, of [0,1] pixels
    std: Tensor
    pad: int = 0  # largest shift of a training crop; 0 and no flip = no augmentation
    flip: bool = False
    cutmix: float = 0.0  # share of images that get a box of another one
    classes: int = 0  # for CutMix

    def __len__(self) -> int:
        return len(self.labels)

    def epoch(self, generator: torch.Generator, augment: bool | None = None) -> Draws:
        """One epoch's random numbers, drawn on the CPU and moved to the device at once."""
        return self.drawn(generator, augment).to(self.images.device)

    def drawn(self, generator: torch.Generator, augment: bool | None = None) -> Draws:
        """The same, still on the CPU."""
        wanted = augment is not False
        return draws(len(self), generator, self.pad * wanted, self.flip and wanted, self.cutmix * wanted)

    def shown(self, chosen: Tensor, offsets: Tensor, flips: Tensor, boxes: Tensor | None) -> Batch:
        """A batch of these images, by random numbers that lie on the device. A captured CUDA graph may contain it."""
        x = augment(self.images[chosen], offsets, flips, self.mean, self.std)
        return (x, self.labels[chosen]) if boxes is None else cutmix(x, self.labels[chosen], boxes, self.classes)

    def batches(
        self, batch: int, generator: torch.Generator | None = None, augment: bool | None = None, drop_last: bool = False
    ) -> Iterator[Batch]:
        check_batch(batch, len(self), generator, augment, drop_last)
        if generator is None:
            return self._plain(batch, drop_last)
        return self._shuffled(batch, self.epoch(generator, augment), drop_last)

    def pictures(self, indices: Tensor) -> Tensor:
        return self.images[indices.to(self.images.device)].cpu()

    def _plain(self, batch: int, drop_last: bool) -> Iterator[Batch]:
        for start, stop in slices(len(self), batch, drop_last):
            yield normalise(self.images[start:stop], self.mean, self.std), self.labels[start:stop]

    def _shuffled(self, batch: int, drawn: Draws, drop_last: bool) -> Iterator[Batch]:
        for start, stop in slices(len(self), batch, drop_last):
            boxes = None if drawn.boxes is None else drawn.boxes[start:stop]
            yield self.shown(drawn.order[start:stop], drawn.offsets[start:stop], drawn.flips[start:stop], boxes)


def slices(n: int, batch: int, drop_last: bool) -> Iterator[tuple[int, int]]:
    """(start, stop) of every batch of an epoch over n images."""
    end = n - n % batch if drop_last else n
    return ((start, min(start + batch, end)) for start in range(0, end, batch))


def check_batch(batch: int, n: int, generator: torch.Generator | None, augment: bool | None, drop_last: bool) -> None:
    """Refuse, before the first batch, an epoch that cannot be what was asked for."""
    if batch < 1:
        raise NestlingError(f"batch size {batch} is not possible; ask for at least 1")
    if drop_last and batch > n:
        raise NestlingError(f"no full batch of {batch} in a split of {n} images; lower train.batch")
    if augment and generator is None:
        raise NestlingError("augmentation was asked for without a generator; pass generator=torch.Generator()")
    if generator is not None and generator.device.type != "cpu":
        raise NestlingError(
            f"the generator lives on {generator.device}; pass a CPU one: its draws are moved to the device, "
            "so that a seed gives the same batches everywhere"
        )
