"""What a command says while nothing else is heard of it: what it is at, after a moment, and then every half minute.

In: a command's name, and what it is at (`at`). Out: lines on stderr, where that is a terminal, from a thread that sleeps in
between. Lines and no spinner: some commands measure time meanwhile. A command that is done sooner says nothing.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

FIRST = 1.5  # seconds in which nobody is missed
EVERY = 30.0

_doing = [""]  # by the command that runs now


def at(doing: str) -> None:
    """What the command is at from now on."""
    _doing[0] = doing


def somebody_waits() -> bool:
    """Whether a person looks on; programs that read what a command says need nothing more."""
    return sys.stderr.isatty()


@contextmanager
def heard_of(name: str, doing: str = "starting") -> Iterator[None]:
    """While inside, whoever waits hears of the command."""
    at(doing)
    if not somebody_waits():
        yield
        return
    over, began = threading.Event(), time.monotonic()

    def tell() -> None:
        wait = FIRST
        while not over.wait(wait):
            took = f"{time.monotonic() - began:.0f} s so far"
            print(f"nestling {name}: {_doing[0]} ({took})", file=sys.stderr, flush=True)
            wait = EVERY

    thread = threading.Thread(target=tell, name="nestling-heard-of", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
