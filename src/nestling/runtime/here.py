"""The stages that a caller runs in its own thread: which are begun, and when each is told to end.

In: a worker, the lane that this thread has, one image, and what was promised about its deadline. Ending a stage takes a while,
too: so a guard tells it as much before the deadline as that usually takes. Where there is an answer already, that one is there
in time then. Where there is none, ending it helps nobody who might still be in time: it goes on unless it would probably be late;
or, if no share was promised, for as long again as it usually takes. How long that is, is pace.py's business.
"""

from math import inf
from typing import TYPE_CHECKING

from nestling.runtime.beginning import A_LITTLE
from nestling.runtime.promise import HOPE, USUAL, Promise
from nestling.runtime.work import ImageWork, Work

TURNS = 4  # times what a first stage likely takes it may be late where others want the processor

if TYPE_CHECKING:
    from nestling.runtime.lane import Lane
    from nestling.runtime.worker import Worker


def stages_here(
    worker: "Worker", lane: "Lane", image: ImageWork, work: Work, promise: Promise, one: bool = False
) -> bool:
    """Run what will be in time by all experience, and what may be with a guard; what can hardly be is not begun, but the first
    is tried. False: others came, or a stage may overrun that cannot be stopped, so let the worker's thread go on. `one`: no more
    than one stage, for somebody looks at every answer."""
    pace, stops, limited = worker.pace, worker.engine.stops, image.deadline < inf
    soon = promise.late is None and stops
    easy = soon or (promise.budget.affords and stops)  # one more may be late: no need to be careful
    early, price = (0.0, 1.0) if easy else (promise.early.value, promise.price.value)
    pace.crowded = limited and worker.processor.crowded()
    by = image.deadline + A_LITTLE - pace.ending  # who is told to end by then is at most a little late
    while not (image.final or worker.closing) and (left := image.deadline - (now := worker.clock())) > 0:
        if work.stop.asked or worker.queues.somebody:
            return False
        stage, first = worker.next_stage(work, left - early, price), not image.best[0]
        straight, guarded, until = stage > work.done + 1, False, inf
        if first and image.trail is not None and not work.done:
            image.trail.first = stage
        if limited:
            likely = pace.quantile(stage, HOPE, straight)
            sure = pace.quantile(stage, USUAL, straight) * promise.caution.value <= left
            # Too late to be ended in time, but none took so long lately:
            certain = sure and by <= now and sum(pace.overruns(stage, left, straight)) == 0
            if not first:
                room = left if certain else min(left, by - now)
                hopeless = not sure and ((easy and likely >= 0) or likely > room)  # NaN: not known
                if hopeless or not worker.beginnings.goes_on(stage - 1, room, price):
                    pace.skip(stage)
                    break
            if not (sure or stops):
                return False
            image.tried = ("jump" if straight else "first") if first else "sure" if sure else "guarded"
            fits = first and likely <= left + A_LITTLE
            alone = pace.crowded and fits  # whoever is interrupted then has nothing less to give
            if stops and (soon or straight or not alone):
                patient = fits and (easy or pace.may_be_in_time(stage, by - now, left + A_LITTLE, straight, price))
                until = image.deadline + likely * (TURNS if alone else 1) if patient or certain else by
                if until <= now and not easy:
                    break
                lane.guard.until(until, work.stop)
                guarded = True
        began = worker.clock()
        done = worker.advance(lane, work, stage)
        rang = guarded and lane.guard.off()
        image.waited += lane.wait
        if not (done or rang or worker.closing) and image.deadline > worker.clock():  # stage 1 for everybody first
            return image.final
        if not done:
            image.told = until if rang else inf
            pace.gave_up(stage, min(worker.clock(), max(began, image.told)) - began, straight, lane.wait)
        if one or rang or not done:
            break
    return True
