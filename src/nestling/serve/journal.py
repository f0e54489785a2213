"""What happens, in a file: one JSON document a line, written by a thread of its own.

In: a file such as stderr, events, and what libraries log (warnings and worse). Whoever reads the lines slowly, or not at all,
keeps no request waiting: where too many wait to be written, the newest are left out, and their number is told as soon as there
is room again.
"""

import json
import logging
import queue
import threading
import time
from typing import Any, Self, TextIO

ROOM = 10_000  # lines that may wait
LAST = 1.0  # seconds for what waits, in the end


class Journal:
    """Inside, what libraries log becomes lines, too."""

    def __init__(self, file: TextIO, room: int = ROOM) -> None:
        self.file, self.waiting, self.lost = file, queue.Queue[str | None](room), 0
        self.logs = Logs(self)
        self.thread = threading.Thread(target=self.write, name="nestling-journal", daemon=True)

    def say(self, event: dict[str, Any]) -> None:
        """From any thread; never waits."""
        now = round(time.time(), 3)
        try:
            if self.lost:
                self.waiting.put_nowait(json.dumps({"time": now, "event": "lines lost", "count": self.lost}))
                self.lost = 0
            self.waiting.put_nowait(json.dumps({"time": now, **event}))
        except queue.Full:
            self.lost += 1

    def write(self) -> None:
        while (line := self.waiting.get()) is not None:
            try:
                self.file.write(line + "\n")
                self.file.flush()
            except (OSError, ValueError):  # nobody can read it any more
                return

    def __enter__(self) -> Self:
        self.thread.start()
        logging.getLogger().addHandler(self.logs)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger().removeHandler(self.logs)
        try:
            self.waiting.put(None, timeout=LAST)
        except queue.Full:
            return
        self.thread.join(LAST)


class Logs(logging.Handler):
    """What libraries log, as events."""

    def __init__(self, journal: Journal) -> None:
        super().__init__(logging.WARNING)
        self.journal = journal

    def emit(self, record: logging.LogRecord) -> None:
        self.journal.say({"event": "log", "level": record.levelname, "from": record.name, "text": self.format(record)})
