"""What a person sees of a run: the steps of its start with their seconds, then a bar with each stage's error and speed.

In: names of steps, a Training, epoch and step. Out: a live line on stderr, and one line when the start is over. It only
reads; nothing depends on it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

INTERVAL = 0.1  # seconds between updates: a bar must not slow the loop
LONG = 5.0  # seconds of starting that are worth a line of their own
EVERY = 30.0  # seconds between lines where there is no terminal to show a bar


class Startup:
    """The named steps before the first batch: told to whoever shows them, and how long each took."""

    def __init__(
        self, tell: Callable[[str], None] = lambda text: None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.tell, self.clock = tell, clock
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        self.tell(name)
        started = self.clock()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self.clock() - started

    def say_if_long(self, console: Console) -> None:
        if sum(self.seconds.values()) >= LONG:
            console.print(str(self), markup=False, highlight=False)

    def __str__(self) -> str:
        steps = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items() if seconds >= 0.05)
        return f"started in {sum(self.seconds.values()):.1f} s ({steps})"


class Lines:
    """How far a run is, now and then, as lines in a file or a pipe."""

    def __init__(self, name: str, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self.console, self.clock = name, console, clock
        self.startup = Startup()
        self.first: tuple[float, int] | None = None  # when, and how many steps were done by then
        self.of = 0  # which training these are of, by id: holding it would hold its memory
        self.last = clock()

    def __call__(self, training: Any, epoch: int, index: int) -> None:
        now, done = self.clock(), epoch * training.steps + index + 1
        if self.first is None:
            self.startup.say_if_long(self.console)
        if self.first is None or id(training) != self.of:
            self.first, self.of = (now, done), id(training)
        if now - self.last < EVERY:
            return
        self.last = now
        began, before = self.first
        left = (now - began) / max(1, done - before) * (training.total * training.steps - done)
        text = f"{self.name}: {state(training, epoch, training.total)}  step {index + 1}/{training.steps}"
        self.console.print(f"{text}  about {timedelta(seconds=round(left))} left", markup=False, highlight=False)


class Shown:
    """Where a run tells how far it is. `startup` while it starts; called after every step."""

    def __init__(self, live: Progress | None = None, name: str = "") -> None:
        self.live, self.last, self.started = live, 0.0, False
        self.startup = Startup(self.starting)
        self.task = live.add_task(name, total=None, now="starting") if live is not None else None

    def starting(self, step: str) -> None:
        if self.live is not None and self.task is not None:
            self.live.update(self.task, now=f"starting: {step}")

    def __call__(self, training: Any, epoch: int, index: int) -> None:
        if self.live is None or self.task is None:
            return
        now = time.monotonic()
        if not self.started:
            self.started = True
            self.startup.say_if_long(self.live.console)
        if now - self.last < INTERVAL:
            return
        self.last = now
        done, epochs = epoch * training.steps + index + 1, training.total
        self.live.update(self.task, total=epochs * training.steps, completed=done, now=state(training, epoch, epochs))


@contextmanager
def bar(name: str, quiet: bool) -> Iterator[Shown | Lines]:
    """A live line for one run, or for several side by side; a line now and then where there is no terminal; nothing at all
    when quiet."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield Shown() if quiet else Lines(name, console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[now]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as live:
        yield Shown(live, name)


def state(training: Any, epoch: int, epochs: int) -> str:
    """Epoch, the newest test errors, and speed."""
    text = f"epoch {epoch + 1}/{epochs}"
    line = training.newest
    if line:
        errors = line.get("test_error")
        if errors:
            text += "  error " + " ".join(f"{100 * error:.1f}" for error in errors) + " %"
        text += f"  {line['images_per_second']:,.0f} img/s"
    return text
