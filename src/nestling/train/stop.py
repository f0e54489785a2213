"""Signals that ask a training to stop: Ctrl-C, and the SIGTERM of a machine taken back or a job whose time is up.

In: signals, while `on_signal` lasts. Out: `StopRequest.asked`, which a training looks at after every step, and `Stopped`, which
ends the command with one line and the exit code that shells expect. It does not know what there is to save.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from nestling.errors import CtrlC

# Signals are taken over only from these, and the command line: a caller who listens, or told us not to, has a reason.
USUAL = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class Stopped(KeyboardInterrupt):
    """A training was stopped by a signal, and says how to go on with it."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message, code)
        self.message, self.code = message, code  # 128 and the signal's number

    def __str__(self) -> str:
        return self.message


class StopRequest:
    """Whether a signal has asked to stop. While `waits`, it is for the training to notice; else it is raised at once."""

    def __init__(self, ctrl_c: CtrlC | None = None) -> None:
        """`ctrl_c`: what listened before."""
        self.number, self.waits, self.process, self.ctrl_c = 0, False, os.getpid(), ctrl_c

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
            if self.ctrl_c is not None:
                self.ctrl_c.once(number)
            raise self.stopped()


@contextmanager
def on_signal() -> Iterator[StopRequest]:
    """While it lasts, SIGINT and SIGTERM ask to stop; a second Ctrl-C does not wait. Only a main thread hears signals."""
    heard = signal.getsignal(signal.SIGINT)
    stop = StopRequest(heard if isinstance(heard, CtrlC) else None)
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in USUAL}
    taken = {
        number: handler
        for number, handler in before.items()
        if main and (handler is USUAL[number] or isinstance(handler, CtrlC))
    }
    for number in taken:
        signal.signal(number, stop)
    try:
        yield stop
    finally:
        for number, usual in taken.items():
            signal.signal(number, usual)
