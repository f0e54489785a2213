"""The gallery: real test images with what each stage said, shelved by the stage at which the answer settled.

Comes in: a run that kept its answers and some pictures. Goes out: a Gallery for the page, and the same as one
contact sheet. An image settles at the first stage from which on every answer is right.
"""

import io
from collections.abc import Sequence
from typing import Any

import matplotlib.image
import numpy as np
from numpy.typing import NDArray

from nestling.report.content import Card, Gallery, Picture, Said, Shelf, plural
from nestling.report.families import NEST, Family
from nestling.report.figures.panel import panel
from nestling.report.latency import times
from nestling.report.runs import Answers, Pictures, Run
from nestling.report.theme import BAD, GOOD

SHELF = 9  # cards on one shelf
SHEET = 6  # images of one shelf on the contact sheet


def gallery(family: Family, run: Run, label: str, name: str) -> Gallery | None:
    answers, pictures = run.answers, run.pictures
    if answers is None or pictures is None or len(answers.said) != len(family.sizes):
        return None
    settled, n = answers.settled(), len(answers.labels)
    shelves, shown = [], []
    for stage in (*family.stages, len(family.sizes) + 1):
        here = choose(settled, answers, pictures, stage)
        cards = tuple(make_card(family, answers, pictures, place) for place in here)
        count = int((settled == stage).sum())
        if count:
            shelves.append(Shelf(shelf_title(family, stage), stage, count, cards))
            shown += here[:SHEET]
    title = f"{family.name}, {label}"
    return Gallery(
        name=name,
        title=title,
        n=n,
        shelves=tuple(shelves),
        sizes=family.sizes,
        errors=tuple(float(1 - right.mean()) for right in answers.right),
        times=stage_times(family),
        sheet=sheet(family, answers, pictures, shown, name, f"{title}: {plural(len(shown), 'test image')}"),
    )


def stage_times(family: Family) -> tuple[float, ...]:
    measured = times(family)
    found = [measured.median(NEST, stage) for stage in family.stages] if measured else []
    return tuple(each for each in found if each is not None) if None not in found else ()


def shelf_title(family: Family, stage: int) -> str:
    if stage > len(family.sizes):
        return "Wrong to the end"
    size = family.sizes[stage - 1]
    return f"Right from the first stage on ({size})" if stage == 1 else f"Settled at stage {stage} ({size})"


def choose(settled: NDArray[np.int64], answers: Answers, pictures: Pictures, stage: int) -> list[int]:
    """Pictures that settle at this stage, of different classes as far as there are some."""
    places = [int(k) for k in np.flatnonzero(settled[pictures.indices] == stage)]
    times: dict[int, int] = {}
    turn = {}
    for place in places:
        label = int(answers.labels[pictures.indices[place]])
        turn[place] = times[label] = times.get(label, 0) + 1
    return sorted(sorted(places, key=lambda place: turn[place])[:SHELF])


def make_card(family: Family, answers: Answers, pictures: Pictures, place: int) -> Card:
    index = pictures.indices[place]
    said = tuple(
        Said(stage, word(family, answers.said[stage - 1, index]), float(answers.confidence[stage - 1, index]),
             bool(answers.right[stage - 1, index]))
        for stage in family.stages
    )  # fmt: skip
    return Card(to_png(pictures.images[place]), word(family, answers.labels[index]), said)


def word(family: Family, number: int) -> str:
    return family.classes[number] if number < len(family.classes) else str(number)


def to_pixels(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(C,H,W) as what imshow takes: (H,W) grey or (H,W,3)."""
    return image[0] if len(image) == 1 else np.moveaxis(image[:3], 0, 2)


def to_png(image: NDArray[np.uint8]) -> bytes:
    """One image at its own size; the browser enlarges it."""
    file = io.BytesIO()
    matplotlib.image.imsave(file, np.ascontiguousarray(to_pixels(image)), format="png", cmap="gray", vmin=0, vmax=255)
    return file.getvalue()


def sheet(
    family: Family, answers: Answers, pictures: Pictures, places: Sequence[int], name: str, title: str
) -> Picture:
    """A contact sheet: every image over what each stage said about it."""
    columns = min(8, max(1, len(places)))
    rows = -(-len(places) // columns)
    with panel(1.2 * columns, (1.25 + 0.15 * len(family.sizes)) * rows) as drawn:
        for number, place in enumerate(places, start=1):
            index = pictures.indices[place]
            axes: Any = drawn.figure.add_subplot(rows, columns, number)
            axes.imshow(to_pixels(pictures.images[place]), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
            axes.set_axis_off()
            axes.set_title(word(family, answers.labels[index]), fontsize=8, pad=3, loc="center")
            for stage in family.stages:
                right = answers.right[stage - 1, index]
                text = f"{stage}  {word(family, answers.said[stage - 1, index])} {'✓' if right else '✗'}"
                axes.text(
                    0.5, -0.06 - 0.16 * (stage - 1), text, transform=axes.transAxes, ha="center", va="top",
                    fontsize=7, color=GOOD if right else BAD,
                )  # fmt: skip
        return drawn.picture(name, title, "")
