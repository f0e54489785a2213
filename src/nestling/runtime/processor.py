"""What other programs do to a thread that works: whether there are processors for all, and how long it had to wait for one.

Linux tells both at once, in a microsecond each (/proc/loadavg, /proc/thread-self/schedstat). Elsewhere nobody waits, as far as
is known: then a stage that was interrupted is a slow one. A thread's own time (time.thread_time) would tell, too, but Linux then
looks whether it is another's turn: who has worked longer than its share loses the processor by asking. Knows nothing of stages.
"""

import os
import threading

from nestling.runtime.descriptor import Descriptor

PROCESSORS = os.cpu_count() or 1  # of the whole machine, as its load is
NANOSECONDS = 1e-9


class Numbers(Descriptor):
    """A small file of the kernel's, read again and again."""

    def __init__(self, path: str) -> None:
        self.file = -1
        try:
            self.file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self.read()
        except (OSError, AttributeError):
            self.close()

    def read(self) -> list[bytes]:
        """Its words; none if there is no such file."""
        return os.pread(self.file, 128, 0).split(b" ", 4) if self.file >= 0 else []


class Processor:
    """Asked by any thread, about itself."""

    def __init__(self) -> None:
        self.load = Numbers("/proc/loadavg")  # ... running/all ...
        self.own = threading.local()

    def crowded(self) -> bool:
        """Whether more threads want a processor now than there are."""
        words = self.load.read()
        return len(words) > 3 and int(words[3].partition(b"/")[0]) > PROCESSORS

    def waited(self) -> float:
        """Seconds that this thread has been ready to run so far while others ran."""
        times = getattr(self.own, "times", None)
        if times is None:
            times = self.own.times = Numbers(
                "/proc/thread-self/schedstat"
            )  # nanoseconds running, waiting; times let in
        words = times.read()
        return int(words[1]) * NANOSECONDS if len(words) > 1 else 0.0

    def close(self) -> None:
        """Let the files go. Who reads one meanwhile keeps it until then."""
        self.load, self.own = Numbers(""), threading.local()
