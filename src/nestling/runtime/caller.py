"""The caller's side of a runtime: questions with deadlines in, answers on time out.

In: an engine and a Spec. `answer` runs the stages of an image in the calling thread as long as they are in time; where others
ask, too, and for batches, `ask` and coroutines, the worker's thread does, and the caller waits (question.py). Runtime, with a
network, and Portable, with exported stages, are this and how they are opened. How stages are run is worker.py's business.
"""

import time
import warnings
import weakref
from collections.abc import Callable, Generator, Sequence
from functools import partial
from itertools import chain
from math import inf, nan
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nestling.errors import NestlingError
from nestling.export.spec import Spec
from nestling.runtime.answer import Answer, made, told
from nestling.runtime.beginning import A_LITTLE, Beginnings
from nestling.runtime.confidence import Confidence, Outcomes, find_thresholds
from nestling.runtime.engine import Engine, Floats
from nestling.runtime.forecast import Forecast, straight_to
from nestling.runtime.inputs import Intake, deadlines, seconds, short
from nestling.runtime.pace import ENDED, NOTICED, Pace
from nestling.runtime.promise import LATE, Promise, check_late, wakeups
from nestling.runtime.question import Question, Waiting
from nestling.runtime.work import Collected, ImageArray, ImageWork, News, Trail, Work
from nestling.runtime.worker import Worker

Limit = float | Sequence[float | None] | None  # seconds for all images, or one for each; None = no deadline
Sure = float | Sequence[float] | None  # a probability for all stages, or one for each; None = the runtime's own
MEMORY = 64 * 2**20  # bytes of state kept for unfinished answers
HANDING = 30e-6  # seconds from the end of a stage until its answer is in the caller's hands
PARTS = 3  # a batch is cut so that its first part needs at most this part of the time
FORMING_GAIN = 0.2
FAR_TOO_LONG = 100  # times what all stages take: who gives a deadline like this may mean milliseconds,
MILLISECONDS = 0.5  # which are seldom fewer than this
MOST_TOGETHER = 64  # images that go through a stage together


class Anytime:
    """Answers by a deadline. Thread-safe; use it as a context manager, or close it."""

    def __init__(
        self,
        engine: Engine,
        spec: Spec,
        pace: Pace | None = None,
        memory: int = MEMORY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`memory` bounds the state kept for refining, in bytes; `clock` must be the one that sleeping follows."""
        if engine.stages != spec.stages:
            raise NestlingError(f"{spec.name}: the engine has {engine.stages} stages, expected {spec.stages}")
        if isinstance(memory, bool) or not isinstance(memory, int) or memory < 0:
            raise NestlingError(f"memory={memory!r}; expected the bytes that the states of unfinished answers may take")
        self.engine, self.spec, self.clock = engine, spec, clock
        self.pace = pace or Pace(stages=engine.stages)
        self._promises: dict[float | None, Promise] = {}
        self._forming = 10e-6  # seconds to make one Answer of a batch
        self.intake = Intake(spec)
        count = 0 if spec.output else len(spec.classes)
        prior = np.array((spec.prior or [1 / count] * count) if count else [], np.float32)
        self.prior: Floats = prior
        self.thresholds: tuple[float, ...] = ()
        self._warned = False  # of a deadline that is far too long
        self.trace: NDArray[np.float64] | None = (
            None  # seconds until each stage's answer on the quiet device, if profiled
        )
        keep = max(1, memory // max(1, engine.row_bytes))
        if engine.most:  # those queued and those parked, each at most `keep`, and the one that runs
            keep = max(1, min(keep, (engine.most - 1) // 2))
        self.together = MOST_TOGETHER if engine.most else min(MOST_TOGETHER, keep)
        self.beginnings = Beginnings(self.pace, spec.errors, 1 - float(prior.max(initial=0.0)))
        self.worker = Worker(engine, self.pace, keep, clock, self.intake.prepare, self.beginnings)
        # The worker's thread does not know this object: when it is forgotten or Python ends, the thread ends too.
        self._finalizer = weakref.finalize(self, self.worker.close)

    def close(self) -> None:
        """End the worker and free the engine. Calls that wait come back with what they have; later ones are refused."""
        self._finalizer()

    def timeline(self, x: Any) -> list[float]:
        """Seconds from a question about one image until each stage's answer was there: for measuring."""
        began = self.clock()
        self._check_open()
        image = ImageWork(inf)
        work = Work([image], self.intake.one(self._to_numpy(x)))
        trail = image.trail = Trail(began, self.pace.slowdown, counts=False)
        self._answer(image, work, began, inf, self._promise(LATE))
        return list(trail.done)

    def forecast(self, deadline: float) -> tuple[list[float], float | None]:
        """What to expect of a deadline now: the share of single questions that the prior and each stage will answer, and
        the expected error where the errors of all stages are known. From the profile, the slow-down of the moment, and the
        last questions that were asked when the machine was about as slow as now."""
        trace = np.cumsum(self.pace.base)[None] if self.trace is None else self.trace
        first, limit = 1, seconds(deadline)
        if self.engine.jumps:
            first = self.beginnings.best(limit) if limit < inf else self.spec.stages
            trace = straight_to(first, trace, self.pace.jumps[first - 1].base)
        forecast = Forecast(trace, self.spec.errors, 1 - float(self.prior.max(initial=0.0)), self.worker.recent, first)
        shares = forecast.shares(self._promise(LATE).timer.looks(limit), self.pace.slowdown)
        return [float(share) for share in shares], float(shares @ forecast.errors) if self.spec.errors else None

    def stop_when_sure(self, loss: float = 0.005) -> Confidence:
        """From now on answers are final when they are sure enough: thresholds are found on held-out outputs of the network, half
        to choose them and half to judge them, so that at most `loss` accuracy goes."""
        if self.spec.output:
            raise NestlingError(f"{self.spec.name} answers with no classes, so none of them is more or less sure")
        found = find_thresholds(self._held_out(), loss, self.pace.base)
        self.thresholds = found.thresholds
        return found

    # --- one image -----------------------------------------------------------------------------------------------

    def answer(
        self, x: Any, *, deadline: float | None = None, confident: Sure = None, late: float | None = LATE
    ) -> Answer:
        """The best Answer to an image (C,H,W) within `deadline` seconds (None: the last stage's).

        `confident` is the probability at which an answer is sure enough to be final, for all stages or one per stage
        (nestling.runtime.confidence finds them). `late` is the share of answers that may come more than 0.3 ms after their
        deadline, kept by feedback whatever the load; None promises no share, and begins what is usually in time.
        """
        began = self.clock()
        self._check_open()
        limit = seconds(deadline)
        self._warn_of_seconds(limit, 3)
        image = ImageWork(inf, self._check_thresholds(confident))
        work = Work([image], self.intake.one(self._to_numpy(x)), straight=not image.thresholds)
        image.trail = Trail(began, self.pace.slowdown)
        return self._answer(image, work, began, limit, self._promise(late))

    def answers(
        self, x: Any, *, deadline: float | None = None, confident: Sure = None
    ) -> Generator[Answer, None, None]:
        """Yield the Answer of each stage as it finishes; stop whenever you like.

        With a deadline it ends then, and what it yielded last is the answer; if that was nothing, not even stage 1 was done.
        """
        began = self.clock()
        self._check_open()
        limit = seconds(deadline)
        self._warn_of_seconds(limit, 3)
        image, promise = ImageWork(inf, self._check_thresholds(confident)), self._promise(LATE)
        work: Work | None = Work([image], self.intake.one(self._to_numpy(x)))
        image.trail = Trail(began, self.pace.slowdown)
        image.deadline, due = done_by(began, limit), began + promise.timer.before(limit)
        seen, stage = Collected(), 0
        image.listeners = ((seen, True),)
        try:
            while work is not None and self.worker.run_here(image, work, promise, due, one=True):
                answer = self._form(image, began)
                if answer.stage == stage:
                    return
                stage = answer.stage
                yield answer
                if answer.final or self.clock() >= image.deadline:
                    return
                work = self.worker.resume(image, image.deadline)
            # others want the engine, too: a thread of ours goes on with it
            waiting = Waiting(self.worker, self._form, [image], [due], began, promise, every=True)
            for news in chain(seen, iter(partial(waiting.next_news, due), None)):
                if news.stage > stage:
                    stage = news.stage
                    yield self._form(image, began, news)
                if news.final:
                    return
        finally:
            self.worker.cancel([image])

    def ask(self, x: Any, *, deadline: float | None = None, confident: Sure = None) -> Question:
        """Ask now, and look later: `question.best()` at any moment, `question.stop()`, or `question.result()`, which waits."""
        return Question(self._ask(self.intake.one(self._to_numpy(x)), True, seconds(deadline), confident))

    async def answer_async(self, x: Any, *, deadline: float | None = None, confident: Sure = None) -> Answer:
        """`answer` for a coroutine: the event loop goes on meanwhile, and no thread waits."""
        return await self.ask(x, deadline=deadline, confident=confident).result_async()

    # --- batches -------------------------------------------------------------------------------------------------

    def answer_batch(self, x: Any, *, deadline: Limit = None, confident: Sure = None) -> list[Answer]:
        """The best Answer to each image of a batch (N,C,H,W). Where one deadline is for all and they cannot all be done, as many
        as possible get an answer of the first stage. With one deadline per image, the call returns at the last."""
        waiting = self._ask(*self.intake.batch(self._to_numpy(x)), deadline, confident, straight=True)
        if len(set(waiting.due)) > 1:
            found = dict(waiting.each())
            return [found[index] for index in range(len(waiting.images))]
        waiting.all(waiting.due[0])
        began = self.clock()
        answers = [self._form(image, waiting.began) for image in waiting.images]
        waiting.learn()
        self._forming += FORMING_GAIN * ((self.clock() - began) / len(answers) - self._forming)
        return answers

    def answers_batch(
        self, x: Any, *, deadline: Limit = None, confident: Sure = None
    ) -> Generator[list[Answer], None, None]:
        """Yield the Answers of each stage, once it is done for all images of a batch."""
        waiting = self._ask(*self.intake.batch(self._to_numpy(x)), deadline, confident, every=True)
        try:
            yield from waiting.stages()
        finally:
            waiting.cancel()

    def each(
        self, x: Any, *, deadline: Limit = None, confident: Sure = None
    ) -> Generator[tuple[int, Answer], None, None]:
        """(position, Answer) of every image of a batch, each by its own deadline, the earliest first."""
        waiting = self._ask(*self.intake.batch(self._to_numpy(x)), deadline, confident)
        try:
            yield from waiting.each()
        finally:
            waiting.cancel()

    # --- what the above share ------------------------------------------------------------------------------------

    def _answer(self, image: ImageWork, work: Work | None, began: float, limit: float, promise: Promise) -> Answer:
        """Run an image's next stages in this thread, or wait for those who do."""
        end, due = began + limit, began + promise.timer.before(limit)
        if work is not None:
            image.deadline = done_by(began, limit)
            if self.worker.run_here(image, work, promise, due):
                answer = self._form(image, began)
                if 0 < limit < inf:
                    now, interrupted = self.clock(), image.waited > NOTICED
                    if promise.late is not None:
                        promise.observe(now - end - A_LITTLE, image.tried, interrupted)
                    if image.told < now and not interrupted:
                        self.pace.ended(now - image.told)
                return answer
        waiting = Waiting(self.worker, self._form, [image], [due], began, promise)
        answer = waiting.one()
        waiting.learn()
        return answer

    def _ask(
        self,
        images: ImageArray,
        normalised: bool,
        deadline: Limit,
        confident: Sure,
        every: bool = False,
        straight: bool = False,
    ) -> Waiting:
        """Leave images to the worker's thread. `every`: wake the caller at every stage; `straight`: it looks at the last only."""
        began = self.clock()
        self._check_open()
        count = len(images)
        limits = deadlines(deadline, count)
        self._warn_of_seconds(max(limits), 4)
        thresholds, promise = self._check_thresholds(confident), self._promise(LATE)
        handing = count * self._forming if count > 1 else 0.0
        due = [began + max(0.0, promise.timer.before(limit) - handing) for limit in limits]
        asked = [ImageWork(at, thresholds) for at in due]
        waiting = Waiting(self.worker, self._form, asked, due, began, promise, every)
        if count == 1:
            asked[0].trail = Trail(began, self.pace.slowdown)
        size = self._together(min((limit for limit in limits if limit > 0), default=inf))
        self.worker.submit(
            *(
                Work(
                    asked[start : start + size],
                    images[start : start + size],
                    first=None if normalised else start,
                    straight=straight and not thresholds,
                )
                for start in range(0, count, size)
            )
        )
        if self.worker.closing:  # closed meanwhile by another thread: nobody would wake us
            waiting.signal.put(None)
        return waiting

    def _together(self, limit: float) -> int:
        """How many images to run at a time so that as many as possible have an answer: a part that is late is all lost."""
        one = self.pace.predict(1)
        more = self.pace.predict(1, 2) - one
        if limit == inf or not more > 0:
            return self.together
        return max(1, min(self.together, 1 + int((limit / PARTS - one) / more)))

    def _refine(self, image: ImageWork, deadline: float | None) -> Answer:
        began = self.clock()
        limit = seconds(deadline)
        self._check_open()
        work = self.worker.resume(image, began + limit)
        return self._answer(image, work, began, limit, self._promise(LATE))

    def _warm(self) -> None:
        """Answer black images, so that the first real question does not pay for what is set up on first use, and a batch's
        price is known; and see how late this machine wakes a thread up now."""
        black = np.zeros(self.spec.shape, np.float32)
        for deadline in (None, None, 10 * sum(self.pace.base)):  # with a deadline there is a guard
            self.answer(black, deadline=deadline)
        for _ in range(ENDED if self.engine.stops else 0):  # and how long it takes to end a stage
            image, limit, began = ImageWork(inf), self.pace.base[0] / 4, self.clock()
            self._answer(image, Work([image], self.intake.one(black)), began, limit, Promise())
        self.answer_batch(np.stack([black] * 4))
        most = wakeups(self.clock)
        for late in (LATE, None):
            timer = self._promise(late).timer
            timer.value = max(timer.value, most)

    def _held_out(self) -> Outcomes:
        """What is known of images the network was not trained on; where a runtime knows that, it says it here."""
        raise NestlingError(
            "a network alone has no outputs to choose thresholds on, as a run's folder, its export and a trained network have; "
            "pass confident=... instead"
        )

    def _to_numpy(self, x: Any) -> Any:
        """Where a runtime takes more than arrays, it makes them arrays here."""
        return x

    def _promise(self, late: float | None) -> Promise:
        found = self._promises.get(late) if type(late) is float else None  # the usual case
        if found is None:
            late = check_late(late)
            found = self._promises.setdefault(late, Promise(late))
        return found

    def _check_open(self) -> None:
        self.worker.check_process()
        if self.worker.closing:
            raise NestlingError(f"this runtime of {self.spec.name} is closed; make a new one")

    def _warn_of_seconds(self, limit: float, depth: int) -> None:
        """Once, where a deadline is so long that milliseconds may have been meant; to whom called so many calls above."""
        if limit < MILLISECONDS or self._warned or limit == inf:
            return
        full = sum(timing.base for timing in self.pace.steps)
        if limit < max(MILLISECONDS, full * FAR_TOO_LONG) or not all(self.pace.base):  # 0: not known yet
            return
        self._warned = True
        warnings.warn(
            f"a deadline of {limit:g} seconds is more than {FAR_TOO_LONG} times the {full * 1e3:.3g} ms that all stages of "
            f"{self.spec.name} take; deadlines are seconds: write {limit / 1e3:g} for {limit:g} ms, None for no deadline",
            stacklevel=depth,
        )

    def _check_thresholds(self, confident: Sure) -> tuple[float, ...]:
        if confident is not None and self.spec.output:
            raise NestlingError(
                f"{self.spec.name} answers with no classes, so none is more or less sure; leave out confident"
            )
        if confident is None:
            return self.thresholds
        try:
            each = [confident] * self.spec.stages if isinstance(confident, int | float | np.number) else confident
            found = tuple(float(value) for value in each)
        except (TypeError, ValueError, OverflowError):
            found = (nan,)
        per_stage = len(found) in (self.spec.stages, self.spec.stages - 1) and not isinstance(confident, str | bytes)
        never = not isinstance(confident, int | float | np.number)  # a stage of its own may never be sure enough
        right = all(0 <= value <= 1 or (never and value == inf) for value in found)
        if not per_stage or not right or isinstance(confident, bool):
            raise NestlingError(
                f"found confident={short(confident)}, expected a probability from 0 to 1 for all stages, or one number per stage "
                f"but the last ({self.spec.stages - 1}), infinite where that stage shall never be sure enough"
            )
        return found

    def _form(self, image: ImageWork, began: float, news: News | None = None) -> Answer:
        """What is known of an image now (or was, when the news came), as an Answer."""
        if isinstance(image.error, NestlingError):
            raise image.error
        if image.error is not None:
            raise NestlingError(f"stage {image.best[0] + 1} of {self.spec.name} failed: {image.error}") from image.error
        final = image.final if news is None else news.final  # read before the logits: they may only be newer
        stage, logits = image.best if news is None else (news.stage, news.logits)
        label, name, size, probabilities = told(self.spec, self.prior, stage, logits)
        refine = partial(self._refine, image)
        return made(label, name, stage, size, self.clock() - began, final, probabilities, refine, logits)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def done_by(began: float, limit: float) -> float:
    """When stages must be done, so that their answer is in the caller's hands by its deadline."""
    return began + limit - min(HANDING, limit / 5)
