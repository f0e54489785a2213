"""The stages that a caller runs in its own thread: which are begun, and when each is told to end.

In: a worker whose engine this thread holds, one image, and what was promised about its deadline. Ending a stage takes a while,
too: so a guard tells it as much before the deadline as that usually takes. Where there is an answer already, that one is there
in time then. Where there is none, ending it helps nobody who might still be in time: it goes on unless it would probably be
late. How long stages take is pace.py's business, how bad late is promise.py's.
"""

from math import inf
from typing import TYPE_CHECKING

from nestling.runtime.beginning import A_LITTLE
from nestling.runtime.promise import HOPE, USUAL, Promise
from nestling.runtime.work import ImageWork, Work

if TYPE_CHECKING:
    from nestling.runtime.worker import Worker


def stages_here(worker: "Worker", image: ImageWork, work: Work, promise: Promise) -> bool:
    """Run what will be in time by all experience, and what may be with a guard; what can hardly be is not begun, but the first
    is tried. False: others came, or a stage may overrun that cannot be stopped, so let the worker's thread go on."""
    pace, engine, soon = worker.pace, worker.engine, promise.late is None
    easy = soon or (promise.budget.affords and engine.stops)  # one more may be late: no need to be careful
    pace.crowded = image.deadline < inf and worker.processor.crowded()
    by = image.deadline + A_LITTLE - pace.ending  # who is told to end by then is at most a little late
    while not image.final and not work.stop.asked and (left := image.deadline - (now := worker.clock())) > 0:
        if worker.fresh or worker.begun:
            return False
        early, price = (0.0, 1.0) if easy else (promise.early.value, promise.price.value)
        stage, first = worker.next_stage(work, left - early, price), not image.best[0]
        straight = stage > work.done + 1
        if image.trail is not None and not work.done:
            image.trail.first = stage
        likely = pace.quantile(stage, HOPE, straight)
        fits = likely <= left + A_LITTLE
        sure = left == inf or pace.quantile(stage, USUAL, straight) * promise.caution.value <= left
        # Too late to be ended in time, but none took so long lately:
        certain = sure and by <= now and sum(pace.overruns(stage, left, straight)) == 0
        room = left if soon or certain else min(left, by - now)
        hopeless = not sure and (soon or (easy and likely >= 0) or likely > room)  # NaN: not known
        if not first and left < inf and (hopeless or not worker.beginnings.goes_on(stage - 1, room, price)):
            pace.skip(stage)
            break
        image.tried = ("jump" if straight else "first") if first else "sure" if sure else "guarded"
        if not (sure or soon or engine.stops):
            return False
        alone = image.tried == "first" and fits  # whoever is interrupted then has nothing less to give
        guarded = not soon and left < inf and engine.stops and not (pace.crowded and alone)
        patient = first and fits and (easy or pace.may_be_in_time(stage, by - now, left + A_LITTLE, straight, price))
        until = image.deadline + likely if patient or certain else by
        if guarded and until <= now and not easy:
            break
        if guarded:
            worker.guard.until(until, work.stop)
        began = worker.clock()
        done = worker.advance(work, stage)
        rang = worker.guard.off() and guarded
        image.waited += worker.wait[0]
        if not done and worker.fresh and image.deadline > worker.clock():  # stage 1 for everybody first
            return image.final
        if not done:
            image.told = until if rang else inf
            pace.gave_up(stage, min(worker.clock(), max(began, image.told)) - began, straight, worker.wait)
            break
    return True
