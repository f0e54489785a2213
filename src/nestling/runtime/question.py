"""Questions that somebody else works on: waiting for their answers, looking at the best so far, calling them off.

In: images that were given to the worker, and when to look at each. Out: Answers, by then. The waiting thread sleeps on a timer of
its own, less the margin by which this machine wakes threads late, and never waits for a stage. Runs nothing itself.
"""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol

from nestling.runtime.answer import Answer
from nestling.runtime.mailbox import Mailbox
from nestling.runtime.promise import Promise
from nestling.runtime.prompt import Promptly
from nestling.runtime.work import ImageWork, News
from nestling.runtime.worker import Worker

LONGEST_SLEEP = 3600.0  # seconds; a timer cannot hold every number


class Former(Protocol):
    """What is known of an image now (or was, when the news came), as an Answer; `began` is when it was asked for."""

    def __call__(self, image: ImageWork, began: float, news: News | None = None) -> Answer: ...


class Waiting:
    """Rows that are being worked on, and a thread that waits for them."""

    def __init__(
        self,
        worker: Worker,
        form: Former,
        images: list[ImageWork],
        due: list[float],
        began: float,
        promise: Promise,
        every: bool = False,
    ) -> None:
        """`due`: when to look at each image, on the clock. `every`: be woken up by every stage, not only by a last one."""
        self.worker, self.form, self.images, self.due, self.began = worker, form, images, due, began
        self.promise, self.clock = promise, worker.clock
        self.rang: float | None = None  # when the timer that woke us last was due
        self.signal: Mailbox[News | None] = Mailbox()  # None = do not wait any longer
        for image in images:
            image.listeners = (*image.listeners, (self.signal, every))
        if worker.closing or any(image.final for image in images):  # it happened before we listened
            self.signal.put(None)

    def cancel(self) -> None:
        """Stop working on this. Whoever waits gets the best so far, at once."""
        self.worker.cancel([image for image in self.images if not image.final])
        self.signal.put(None)

    def one(self) -> Answer:
        """The answer to a question about one image, by its time."""
        try:
            self.wait(self.images, self.due[0])
            if self.rang is not None:
                self.wait_for_any(self.images[0])
        finally:
            self.leave()
        return self.form(self.images[0], self.began)

    def wait_for_any(self, image: ImageWork) -> None:
        """The timer has rung, before the deadline: whoever has nothing yet waits on for the first stage."""
        image.listeners = (*image.listeners, (self.signal, True))
        while not (image.best[0] or image.final) and self.clock() < image.deadline:
            self.rang = None  # what the margin covers is something else
            try:
                if self.sleep(image.deadline) is None:
                    break
            except TimeoutError:
                break
        image.deadline = min(image.deadline, self.clock())
        self.worker.expire()

    def all(self, until: float) -> None:
        """Sleep until a time, or until nothing better can come for any image, or waiting was called off."""
        left = self.unfinished()
        try:
            while left and self.clock() < until:
                try:
                    news = self.sleep(until)
                except TimeoutError:
                    self.rang = until
                    break
                if news is None and (self.worker.closing or any(image.error for image in self.images)):
                    break
                left -= news is not None and news.final
                if left <= 0 or news is None:  # some were counted twice: those that were done before we looked
                    left = self.unfinished()
            self.worker.expire()
        finally:
            self.leave()

    def unfinished(self) -> int:
        return sum(not image.final for image in self.images)

    def each(self) -> Iterator[tuple[int, Answer]]:
        """(position, Answer) by each one's own deadline, or sooner where nothing better can come."""
        due = {id(image): at for image, at in zip(self.images, self.due, strict=True)}
        places = {id(image): index for index, image in enumerate(self.images)}
        waiting = sorted(self.images, key=lambda image: due[id(image)])
        try:
            while waiting:
                ready = self.wait(waiting, due[id(waiting[0])])
                for image in ready:
                    waiting.remove(image)
                    answer = self.form(image, self.began)
                    self.learn()
                    yield places[id(image)], answer
        finally:
            self.leave()

    def stages(self) -> Iterator[list[Answer]]:
        """The answers of each stage as it finishes, all images together, until the deadline."""
        latest: dict[int, News] = {}  # by image
        ahead: list[News] = []  # of stages not yet shown
        until, stage = max(self.due), 0
        try:
            while True:
                stage += 1
                waiting = {id(image) for image in self.images if not (id(image) in latest and latest[id(image)].final)}
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
                    latest[id(news.image)] = news
                    waiting.discard(id(news.image))
                answers = [self.form(image, self.began, latest[id(image)]) for image in self.images]
                yield answers
                if all(answer.final for answer in answers):
                    return
        finally:
            self.leave()

    def wait(self, waiting: list[ImageWork], until: float) -> list[ImageWork]:
        """Sleep until some image needs no more waiting: it is final, its time is up, or waiting was called off."""
        while not (ready := [image for image in waiting if image.final]):
            if self.clock() >= until:
                self.worker.expire()
                return [waiting[0]]
            try:
                news = self.sleep(until)
            except TimeoutError:
                self.rang = until
                self.promise.timer.looked(self.clock() - until)
                continue
            if news is None and not any(image.error for image in waiting):
                return list(waiting)
        return ready

    def next_news(self, until: float) -> News | None:
        """The next stage that some image finishes; None at the deadline, or when waiting was called off."""
        while self.signal.post or self.clock() < until:
            try:
                news = self.sleep(until)
            except TimeoutError:
                continue
            if news is None:
                for image in self.images:
                    self.form(image, self.began)  # raises if it failed
            return news
        self.worker.expire()
        return None

    def sleep(self, until: float) -> News | None:
        """Wait for news; raises TimeoutError when the time is up."""
        self.worker.check_process()
        longest = self.clock() + LONGEST_SLEEP
        if until > longest:  # no deadline to speak of
            return self.signal.wait(longest, self.clock)
        with Promptly():
            return self.signal.wait(until, self.clock)

    def learn(self) -> None:
        """An answer is on its way out: how long that took after its timer was due is what the margin must cover."""
        if self.rang is not None:
            self.promise.timer.observe(self.clock() - self.rang)
        self.rang = None

    def leave(self) -> None:
        for image in self.images:
            image.listeners = tuple(each for each in image.listeners if each[0] is not self.signal)


class Question:
    """A question about one image that is being worked on. Any thread may look, stop it or wait."""

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting

    def best(self) -> Answer:
        """The best answer so far, at once; false if no stage is done yet."""
        return self._waiting.form(self._waiting.images[0], self._waiting.began)

    def stop(self) -> None:
        """Stop working on it. Whoever waits for the result gets the best so far, at once."""
        self._waiting.cancel()

    def result(self) -> Answer:
        """Wait until the deadline, the last stage, or until it is stopped."""
        answer = self._waiting.one()
        self._waiting.learn()
        return answer

    async def result_async(self) -> Answer:
        """The same for a coroutine: no thread waits."""
        loop, waiting = asyncio.get_running_loop(), self._waiting
        done = asyncio.Event()
        image, bell = waiting.images[0], Ring(loop, done)
        image.listeners = (*image.listeners, (bell, False))
        left = waiting.due[0] - waiting.clock()
        timer = loop.call_later(max(0.0, left), done.set) if left < LONGEST_SLEEP else None
        try:
            if not image.final and not waiting.signal.post and not waiting.worker.closing:
                await done.wait()
        except asyncio.CancelledError:
            self.stop()
            raise
        finally:
            image.listeners = tuple(each for each in image.listeners if each[0] is not bell)
            waiting.leave()
            if timer is not None:
                timer.cancel()
        waiting.worker.expire()
        return self.best()


class Ring:
    """A mailbox that keeps nothing and wakes a coroutine, if its loop still runs: that may end while news is on its way."""

    def __init__(self, loop: asyncio.AbstractEventLoop, done: asyncio.Event) -> None:
        self.loop, self.done = loop, done

    def put(self, item: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(self.done.set)
