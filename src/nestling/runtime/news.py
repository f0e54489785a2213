"""The news of a stage: each image's best answer so far, whether it is the last, and what forecasts learn from it.

In: images and the logits of the stage they have in common now. Out: nothing; images are written to and listeners are told.
"""

import math
from collections.abc import Sequence

import numpy as np

from nestling.runtime.answer import softmax
from nestling.runtime.engine import Floats
from nestling.runtime.forecast import Recent
from nestling.runtime.work import ImageWork, News


def publish(images: Sequence[ImageWork], stage: int, last: bool, logits: Floats, now: float, recent: Recent) -> None:
    """What a stage answered, to everybody who has not more already; a question that is over is remembered."""
    numbers = [finite(row) for row in logits]
    sure = None
    if not last and any(image.thresholds for image in images):
        sure = softmax(np.where(np.array(numbers)[:, None], logits, 0)).max(axis=1)
    for index, image in enumerate(images):
        if image.final or stage <= image.best[0]:
            continue  # an earlier stage again, after its state had to go
        if not numbers[index]:
            image.fail(ArithmeticError("its logits are not numbers (NaN or infinite); check the weights and the image"))
            continue
        image.best = (stage, logits[index])
        image.deadline = min(image.deadline, image.due)
        if last or (sure is not None and image.thresholds and sure[index] >= image.thresholds[stage - 1]):
            image.final, image.work = True, None
        if image.trail is not None:
            done = image.trail.done
            done.extend(
                [now - image.trail.began] * (stage - len(done))
            )  # who has stage s does not wait for those before
            if image.final:
                remember(image, now, recent)
        if image.listeners:  # last: who is told finds everything written down
            image.tell(News(image, stage, logits[index], image.final, now))


def finite(row: Floats) -> bool:
    """Whether the largest number of an answer is one: NaN and infinity are where argmax looks first."""
    return math.isfinite(row.item(int(row.argmax())))


def remember(image: ImageWork, now: float, recent: Recent) -> None:
    """A question's first time is over: how it went until somebody looked is for forecasts. Later stages do not count, not
    even when they were done: of those only the fast ones are, the others are called off, and so they would all look
    faster than they are."""
    trail, image.trail = image.trail, None
    if trail is not None and trail.counts:
        ended = min(now, image.deadline) - trail.began
        if ended > 0:  # who has no time at all tells nothing of it
            recent.add([at for at in trail.done if at <= ended], ended, trail.slowdown, trail.first)
