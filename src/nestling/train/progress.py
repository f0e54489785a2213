"""What a person sees while a run trains: a bar with each stage's error, images per second and the time left.

In: a Training, epoch and step. Out: a live line on stderr. It only reads; nothing depends on it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

INTERVAL = 0.1  # seconds between updates: a bar must not slow the loop


@contextmanager
def bar(name: str, quiet: bool) -> Iterator[Callable[[Any, int, int], None]]:
    """A function to call after every step."""
    if quiet:
        yield lambda training, epoch, index: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[now]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as live:
        task = live.add_task(name, total=None, now="starting")
        last = [0.0]

        def shown(training: Any, epoch: int, index: int) -> None:
            now = time.monotonic()
            if now - last[0] < INTERVAL:
                return
            last[0] = now
            done, epochs = epoch * training.steps + index + 1, training.total
            live.update(task, total=epochs * training.steps, completed=done, now=state(training, epoch, epochs))

        yield shown


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
