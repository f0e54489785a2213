"""The caller's side of a runtime: questions with deadlines in, answers on time out.

In: an engine and a Spec. `answer` comes back by the deadline with the best stage that was done, `answers` yields each stage
as it finishes, `submit` can be cancelled from elsewhere. The calling thread sleeps on a timer of its own, less the margin
by which this machine wakes threads late, and never waits for a stage. Runs nothing itself: that is worker.py.
"""

import time
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from math import inf, nan
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nestling.errors import NestlingError
from nestling.export.spec import Spec
from nestling.runtime.answer import Answer, softmax
from nestling.runtime.engine import Engine, Floats
from nestling.runtime.forecast import Forecast
from nestling.runtime.inputs import Intake, deadlines, seconds, short
from nestling.runtime.mailbox import Mailbox
from nestling.runtime.pace import Margin, Pace
from nestling.runtime.prompt import Promptly
from nestling.runtime.work import News, Row, Trail, Work
from nestling.runtime.worker import Worker

Limit = float | Sequence[float | None] | None  # seconds for all images, or one for each; None = no deadline
Sure = float | Sequence[float] | None  # a probability for all stages, or one for each; None = the runtime's own
MEMORY = 64 * 2**20  # bytes of state kept for unfinished answers
LONGEST_SLEEP = 3600.0  # seconds; a timer cannot hold every number
FAR_TOO_LONG = 100  # times what all stages take: who gives a deadline like this may mean milliseconds
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
        self.engine, self.spec, self.clock = engine, spec, clock
        self.pace = pace or Pace(stages=engine.stages)
        self.margin = Margin()
        self.intake = Intake(spec)
        prior = np.array(spec.prior or [1 / len(spec.classes)] * len(spec.classes), np.float32)
        self.prior: Floats = prior
        self.thresholds: tuple[float, ...] = ()
        self.warned = False  # of a deadline that is far too long
        self.trace: NDArray[np.float64] | None = (
            None  # seconds until each stage's answer on the quiet device, if profiled
        )
        keep = max(1, memory // max(1, engine.row_bytes))
        if engine.most:  # those queued and those parked, each at most `keep`, and the one that runs
            keep = max(1, min(keep, (engine.most - 1) // 2))
        self.together = MOST_TOGETHER if engine.most else min(MOST_TOGETHER, keep)
        self.worker = Worker(engine, self.pace, keep, clock)
        # The worker's thread does not know this object: when it is forgotten or Python ends, the thread ends too.
        self._finalizer = weakref.finalize(self, self.worker.close)

    def close(self) -> None:
        """End the worker and free the engine. Calls that wait come back with what they have; later ones are refused."""
        self._finalizer()

    def warm(self) -> None:
        """Answer a black image twice, so that the first real question does not pay for what is set up on first use."""
        for _ in range(2):
            self.answer(np.zeros(self.spec.shape, np.float32))

    def timeline(self, x: Any) -> list[float]:
        """Seconds from a question about one image until each stage's answer was there: for measuring. Nobody is woken but by
        the last, so that the stages take as long as they do for a caller who waits for his deadline."""
        pending = self.ask(x, None, None, every=False, counts=False)
        if pending.trail is None:
            pending.cancel()
            raise NestlingError(f"a timeline is that of one image; found {len(pending.rows)}")
        pending.result()
        return list(pending.trail.done)

    def forecast(self, deadline: float) -> tuple[list[float], float | None]:
        """What to expect of a deadline now: the share of single questions that the prior and each stage will answer, and
        the expected error where the errors of all stages are known. From the profile, the slow-down of the moment, and the
        last questions that were asked when the machine was about as slow as now."""
        trace = np.cumsum(self.pace.base)[None] if self.trace is None else self.trace
        forecast = Forecast(trace, self.spec.errors, 1 - float(self.prior.max()), self.worker.recent)
        shares = forecast.shares(self.margin.looks(seconds(deadline)), self.pace.slowdown)
        return [float(share) for share in shares], float(shares @ forecast.errors) if self.spec.errors else None

    # --- the four ways to ask ------------------------------------------------------------------------------------

    def answer(self, x: Any, deadline: Limit = None, confident: Sure = None) -> Any:
        """The best Answer within `deadline` seconds (None: the last stage's); a list of them for a batch (N,C,H,W).

        A batch may have one deadline per image, and the call returns at the last one. `confident` is the
        probability at which an answer is sure enough to be final, for all stages or one per stage (nestling.runtime.confidence
        finds them).
        """
        began = self.clock()
        with Promptly():  # from the start: waking the worker may already cost this thread its processor
            pending = self.ask(x, deadline, confident, every=False, began=began)
            found = pending.collect()
        pending.learn_margin()
        return found

    def answers(self, x: Any, confident: Sure = None, deadline: float | None = None) -> Generator[Any, None, None]:
        """Yield the Answer of each stage as it finishes (lists of them for a batch); stop whenever you like.

        With a deadline it ends then, and what it yielded last is the answer; if that was nothing, not even stage 1 was done.
        """
        pending = self.ask(x, seconds(deadline), confident, every=True)
        try:
            yield from pending.stages()
        finally:
            pending.cancel()

    def each(self, x: Any, deadline: Limit, confident: Sure = None) -> Generator[tuple[int, Answer], None, None]:
        """(position, Answer) of every image of a batch, each by its own deadline, the earliest first."""
        pending = self.submit(x, deadline, confident)
        try:
            yield from pending.each()
        finally:
            pending.cancel()

    def submit(self, x: Any, deadline: Limit = None, confident: Sure = None) -> "Pending":
        """Ask now, take the answer later: `pending.result()`. Another thread may `pending.cancel()`."""
        return self.ask(x, deadline, confident, every=False)

    # --- what the above share ------------------------------------------------------------------------------------

    def ask(
        self,
        x: Any,
        deadline: Limit,
        confident: Sure,
        every: bool,
        counts: bool = True,
        began: float | None = None,
    ) -> "Pending":
        """`every`: wake the caller at every stage. `counts`: forecasts learn from it. `began`: when the caller's clock
        started, if that was not now."""
        began = self.clock() if began is None else began
        self.check_open()
        x = self.to_numpy(x)
        images, single = self.intake.images(x)
        limits = deadlines(deadline, len(images))
        self.warn_of_seconds(max(limits))
        thresholds = self.check_thresholds(confident)
        rows = [Row(began + self.margin.before(limit), thresholds) for limit in limits]
        pending = Pending(self, rows, [row.deadline for row in rows], began, single, every)
        if len(rows) == 1:
            rows[0].trail = pending.trail = Trail(began, self.pace.slowdown, counts)
        for start in range(0, len(rows), self.together):
            part = slice(start, start + self.together)
            self.worker.submit(Work(rows[part], images[part]))
        if self.worker.closing:  # closed meanwhile by another thread: nobody would wake us
            pending.signal.put(None)
        return pending

    def refine(self, row: Row, deadline: float | None) -> Answer:
        began = self.clock()
        due = began + self.margin.before(seconds(deadline))
        self.check_open()
        if due > began:
            self.worker.extend(row, due)
        pending = Pending(self, [row], [due], began, True)  # after waking the worker: meanwhile it gets going
        if row.final or self.worker.closing:
            pending.signal.put(None)
        answer: Answer = pending.result()
        return answer

    def to_numpy(self, x: Any) -> Any:
        """Where a runtime takes more than arrays, it makes them arrays here."""
        return x

    def check_open(self) -> None:
        self.worker.check_process()
        if self.worker.closing:
            raise NestlingError(f"this runtime of {self.spec.name} is closed; make a new one")

    def warn_of_seconds(self, limit: float) -> None:
        """Once, where a deadline is so long that milliseconds may have been meant."""
        full = sum(self.pace.base)
        if self.warned or not full * FAR_TOO_LONG < limit < inf or not all(self.pace.base):  # 0: not known yet
            return
        self.warned = True
        warnings.warn(
            f"a deadline of {limit:g} seconds is more than {FAR_TOO_LONG} times the {full * 1e3:.3g} ms that all stages of "
            f"{self.spec.name} take; deadlines are seconds: write {limit / 1e3:g} for {limit:g} ms, None for no deadline",
            stacklevel=4,
        )

    def check_thresholds(self, confident: Sure) -> tuple[float, ...]:
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

    def form(self, row: Row, began: float, news: News | None = None) -> Answer:
        """What is known of a row now (or was, when the news came), as an Answer."""
        if row.error is not None:
            raise NestlingError(f"stage {row.best[0] + 1} of {self.spec.name} failed: {row.error}") from row.error
        final = row.final if news is None else news.final  # read before the logits: they may only be newer
        stage, logits = row.best if news is None else (news.stage, news.logits)
        label = int((self.prior if logits is None else logits).argmax())
        probabilities = partial(np.copy, self.prior) if logits is None else partial(softmax, logits)
        name, size = (self.spec.classes[label], self.spec.sizes[stage - 1]) if stage else ("", "")
        refine = partial(self.refine, row)
        return Answer(label, name, stage, size, self.clock() - began, final, probabilities, refine)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Pending:
    """A question that is being worked on."""

    def __init__(
        self, runtime: Anytime, rows: list[Row], due: list[float], began: float, single: bool, every: bool = False
    ) -> None:
        """`due`: when to look at each row, on the clock. `every`: be woken up by every stage, not only by a last one."""
        self.runtime, self.rows, self.due, self.began, self.single = runtime, rows, due, began, single
        self.trail: Trail | None = None  # of a question about one image
        self.rang: float | None = None  # when the timer that woke us last was due
        self.signal: Mailbox[News | None] = Mailbox()  # None = do not wait any longer
        for row in rows:
            row.listeners = (*row.listeners, (self.signal, every))

    def cancel(self) -> None:
        """Stop working on this. Whoever waits for the result gets the best so far, at once."""
        self.runtime.worker.cancel([row for row in self.rows if not row.final])
        self.signal.put(None)

    def result(self) -> Any:
        """Wait until the deadline or the last stage: an Answer, or a list of them."""
        found = self.collect()
        self.learn_margin()
        return found

    def collect(self) -> Any:
        if len(self.rows) == 1:  # the usual case, without the bookkeeping of several
            try:
                self.wait(self.rows, self.due[0])
            finally:
                self.leave()
            answer = self.runtime.form(self.rows[0], self.began)
            return answer if self.single else [answer]
        found: list[Answer | None] = [None] * len(self.rows)
        for index, answer in self.each():
            found[index] = answer
        return found[0] if self.single else found

    def each(self) -> Iterator[tuple[int, Answer]]:
        """(position, Answer) by each one's own deadline, or sooner where nothing better can come."""
        due = {id(row): at for row, at in zip(self.rows, self.due, strict=True)}
        places = {id(row): index for index, row in enumerate(self.rows)}
        waiting = sorted(self.rows, key=lambda row: due[id(row)])
        try:
            while waiting:
                ready = self.wait(waiting, due[id(waiting[0])])
                for row in ready:
                    waiting.remove(row)
                    answer = self.runtime.form(row, self.began)
                    self.learn_margin()
                    yield places[id(row)], answer
        finally:
            self.leave()

    def wait(self, waiting: list[Row], until: float) -> list[Row]:
        """Sleep until some row needs no more waiting: it is final, its time is up, or waiting was called off."""
        runtime = self.runtime
        while not (ready := [row for row in waiting if row.final]):
            if runtime.clock() >= until:
                runtime.worker.expire()
                return [waiting[0]]
            try:
                news = self.sleep(until)
            except TimeoutError:
                self.rang = until
                runtime.margin.looked(runtime.clock() - until)
                continue
            if news is None and not any(row.error for row in waiting):
                return list(waiting)
        return ready

    def learn_margin(self) -> None:
        """An answer is on its way out: how long that took after its timer was due is what the margin must cover."""
        if self.rang is not None:
            self.runtime.margin.observe(self.runtime.clock() - self.rang)
            self.rang = None

    def stages(self) -> Iterator[Any]:
        """The answers of each stage as it finishes, all images together, until the deadline."""
        latest: dict[int, News] = {}  # by row
        ahead: list[News] = []  # of stages not yet shown
        until = max(self.due)
        try:
            for stage in range(1, self.runtime.spec.stages + 1):
                waiting = {id(row) for row in self.rows if not (id(row) in latest and latest[id(row)].final)}
                while waiting:
                    ready = next((news for news in ahead if news.stage == stage), None)
                    if ready is not None:
                        ahead.remove(ready)
                    news = ready or self.next_news(until)
                    if news is None:
                        return
                    if news.stage > stage:
                        ahead.append(news)
                        continue
                    latest[id(news.row)] = news
                    waiting.discard(id(news.row))
                answers = [self.runtime.form(row, self.began, latest[id(row)]) for row in self.rows]
                yield answers[0] if self.single else answers
                if all(answer.final for answer in answers):
                    return
        finally:
            self.leave()

    def next_news(self, until: float) -> News | None:
        """The next stage that some row finishes; None at the deadline, or when waiting was called off."""
        while self.runtime.clock() < until:
            try:
                news = self.sleep(until)
            except TimeoutError:
                continue
            if news is None:
                for row in self.rows:
                    self.runtime.form(row, self.began)  # raises if it failed
            return news
        self.runtime.worker.expire()
        return None

    def sleep(self, until: float) -> News | None:
        """Wait for news; raises TimeoutError when the time is up."""
        self.runtime.worker.check_process()
        longest = self.runtime.clock() + LONGEST_SLEEP
        if until > longest:  # no deadline to speak of
            return self.signal.wait(longest, self.runtime.clock)
        with Promptly():
            return self.signal.wait(until, self.runtime.clock)

    def leave(self) -> None:
        for row in self.rows:
            row.listeners = tuple(each for each in row.listeners if each[0] is not self.signal)
