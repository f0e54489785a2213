"""The news of a stage: each image's best answer so far, whether it is the last, and what forecasts learn from it.

In: images and the logits of the stage they have in common now. Out: nothing; images are written to and listeners are told.
"""

from collections.abc import Sequence
from math import isfinite

from nestling.runtime.answer import softmax
from nestling.runtime.engine import Floats
from nestling.runtime.forecast import Recent
from nestling.runtime.work import ImageWork, News


def publish(images: Sequence[ImageWork], stage: int, last: bool, logits: Floats, now: float, recent: Recent) -> None:
    """What a stage answered, to everybody who has not more already; a question that is over is remembered."""
    for image, row in zip(images, logits, strict=True):
        if image.final or stage <= image.best[0]:
            continue  # an earlier stage again, after its state had to go
        if not isfinite(row.item(row.argmax())):  # NaN and infinity are where argmax looks first
            image.fail(ArithmeticError("its logits are not numbers (NaN or infinite); check the weights and the image"))
            continue
        image.best = (stage, row)
        if image.due < image.deadline:
            image.deadline = image.due
        if last or (image.thresholds and softmax(row).max() >= image.thresholds[stage - 1]):
            image.final, image.work = True, None
        if image.trail is not None:
            done = image.trail.done
            done += [now - image.trail.began] * (stage - len(done))  # who has stage s does not wait for those before
            if image.final:
                remember(image, now, recent)
        if image.listeners:  # last: who is told finds everything written down
            image.tell(News(image, stage, row, image.final, now))


def remember(image: ImageWork, now: float, recent: Recent) -> None:
    """A question's first time is over: how it went until somebody looked is for forecasts. Later stages do not count, not
    even when they were done: of those only the fast ones are, the others are called off, and so they would all look
    faster than they are."""
    trail, image.trail = image.trail, None
    if trail is not None and trail.counts:
        ended = min(now, image.deadline) - trail.began
        if ended > 0:  # who has no time at all tells nothing of it
            recent.add([at for at in trail.done if at <= ended], ended, trail.slowdown, trail.first)
