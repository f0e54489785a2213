"""Signals that ask a training to stop: Ctrl-C, and the SIGTERM of a machine taken back or a job whose time is up.

In: signals, while `on_signal` lasts. Out: `Stop.asked`, which a training looks at after every step, and `Stopped`, which
ends the command with one line and the exit code that shells expect. It does not know what there is to save.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Signals are taken over only from these: a caller who listens, or who told us not to, has a reason.
USUAL = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class Stopped(KeyboardInterrupt):
    """A training was stopped by a signal, and says how to go on with it."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message, code)
        self.message, self.code = message, code  # 128 and the signal's number

    def __str__(self) -> str:
        return self.message


class Stop:
    """Whether a signal has asked to stop. While `waits`, it is for the training to notice; else it is raised at once."""

    def __init__(self) -> None:
        self.number, self.waits, self.process = 0, False, os.getpid()

    @property
    def asked(self) -> bool:
        return self.number != 0

    def stopped(self, text: str = "") -> Stopped:
        return Stopped(f"stopped by {signal.Signals(self.number).name}{text}", 128 + self.number)

    def __call__(self, number: int, frame: object) -> None:
        if os.getpid() != self.process:  # a forked worker: Ctrl-C, which reaches it too, is its parent's business
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        again, self.number = self.asked, number
        if not self.waits or (again and number == signal.SIGINT):  # SIGTERM may come twice: from a job and its launcher
            raise self.stopped()


@contextmanager
def on_signal() -> Iterator[Stop]:
    """While it lasts, SIGINT and SIGTERM ask to stop; a second Ctrl-C does not wait. Only a main thread hears signals."""
    stop = Stop()
    main = threading.current_thread() is threading.main_thread()
    taken = {number: usual for number, usual in USUAL.items() if main and signal.getsignal(number) is usual}
    for number in taken:
        signal.signal(number, stop)
    try:
        yield stop
    finally:
        for number, usual in taken.items():
            signal.signal(number, usual)
