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

from nestling.report.content import Card, Gallery, Picture, Said, Shelf
from nestling.report.families import NEST, Family
from nestling.report.figures.panel import panel
from nestling.report.records import Answers, GalleryImages, Run
from nestling.report.theme import BAD, GOOD, INK
from nestling.report.times import times

SHELF = 9  # cards on one shelf


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
            if here:
                shown.append((f"{shelf_title(family, stage)}: {count:,} of {n:,}", here[:ACROSS]))
    title = f"{family.name}, {label}"
    return Gallery(
        name=name,
        title=title,
        n=n,
        shelves=tuple(shelves),
        sizes=family.sizes,
        errors=tuple(float(1 - right.mean()) for right in answers.right),
        times=stage_times(family),
        sheet=sheet(family, answers, pictures, shown, name, f"{title}: what each stage said"),
    )


def stage_times(family: Family) -> tuple[float, ...]:
    measured = times(family)
    found = [measured.median(NEST, stage) for stage in family.stages] if measured else []
    return tuple(each for each in found if each is not None) if None not in found else ()


def shelf_title(family: Family, stage: int) -> str:
    if stage > len(family.sizes):
        return "Wrong at the last stage"
    size = family.sizes[stage - 1]
    return f"Right from the first stage on ({size})" if stage == 1 else f"Settled at stage {stage} ({size})"


def choose(settled: NDArray[np.int64], answers: Answers, pictures: GalleryImages, stage: int) -> list[int]:
    """Pictures that settle at this stage, of different classes as far as there are some."""
    places = [int(k) for k in np.flatnonzero(settled[pictures.indices] == stage)]
    times: dict[int, int] = {}
    turn = {}
    for place in places:
        label = int(answers.labels[pictures.indices[place]])
        turn[place] = times[label] = times.get(label, 0) + 1
    return sorted(sorted(places, key=lambda place: turn[place])[:SHELF])


def make_card(family: Family, answers: Answers, pictures: GalleryImages, place: int) -> Card:
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
    """(C,H,W) as what imshow takes: (H,W) grey, of two channels the first, or (H,W,3)."""
    return image[0] if len(image) < 3 else np.moveaxis(image[:3], 0, 2)


def to_png(image: NDArray[np.uint8]) -> bytes:
    """One image at its own size; the browser enlarges it."""
    file = io.BytesIO()
    matplotlib.image.imsave(file, np.ascontiguousarray(to_pixels(image)), format="png", cmap="gray", vmin=0, vmax=255)
    return file.getvalue()


ACROSS, CELL = 8, 1.2  # images in a row of the contact sheet, inches from one to the next


def sheet(
    family: Family,
    answers: Answers,
    pictures: GalleryImages,
    shelves: Sequence[tuple[str, Sequence[int]]],
    name: str,
    title: str,
) -> Picture:
    """A contact sheet: shelf by shelf, every image over what each stage said about it."""
    line, head = 0.16, 0.34  # inches of a line of text, and of a shelf's title
    tall = 0.9 * CELL + line * (len(family.sizes) + 1.6)
    rows = [-(-len(places) // ACROSS) for _, places in shelves]
    width, height = ACROSS * CELL + 0.2, sum(rows) * tall + len(shelves) * head
    with panel(width, height) as drawn:
        drawn.figure.set_layout_engine("none")
        top = height  # of what is still free, in inches from below
        for (words, places), count in zip(shelves, rows, strict=True):
            drawn.figure.text(0.1 / width, (top - 0.22) / height, words, fontsize=10, fontweight="bold", va="center")
            top -= head
            for number, place in enumerate(places):
                left, up = 0.1 + CELL * (number % ACROSS), top - tall * (number // ACROSS)
                box = (left / width, (up - line - 0.9 * CELL) / height, 0.9 * CELL / width, 0.9 * CELL / height)
                axes: Any = drawn.figure.add_axes(box)
                axes.imshow(to_pixels(pictures.images[place]), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
                axes.set_axis_off()
                index, middle = pictures.indices[place], (left + 0.45 * CELL) / width
                lines = [(word(family, answers.labels[index]), INK, up - 0.5 * line)]
                for stage in family.stages:
                    right = answers.right[stage - 1, index]
                    text = f"{family.sizes[stage - 1]}: {word(family, answers.said[stage - 1, index])} {'✓' if right else '✗'}"
                    lines.append((text, GOOD if right else BAD, up - 0.9 * CELL - line * (stage + 0.6)))
                for text, colour, y in lines:
                    drawn.figure.text(middle, y / height, text, color=colour, fontsize=7, ha="center", va="center")
            top -= count * tall
        return drawn.picture(name, title, "")
