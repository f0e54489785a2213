"""Journal on stderr: JSON, in order, and nobody waits for whoever reads them."""

import io
import json
import logging
import os
import threading

from nestling.serve.journal import Journal


def test_events_and_what_libraries_log_are_lines_of_json() -> None:
    file = io.StringIO()
    with Journal(file) as lines:
        lines.say({"event": "ready"})
        logging.getLogger("some.library").warning("found %s", "this")
        logging.getLogger("some.library").info("unheard")
    logging.getLogger("some.library").warning("too late")
    said = [json.loads(line) for line in file.getvalue().splitlines()]
    assert [each["event"] for each in said] == ["ready", "log"] and all(each["time"] > 0 for each in said)
    assert said[1]["from"] == "some.library" and said[1]["text"] == "found this"


def test_where_nobody_reads_lines_are_left_out_and_counted() -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as file, Journal(file, room=10) as lines:
        for number in range(5000):  # a pipe holds 64 KiB
            lines.say({"event": "x" * 100, "number": number})
        assert lines.lost
        found: list[str] = []
        reading = threading.Thread(target=lambda: found.extend(os.fdopen(read)), daemon=True)
        reading.start()
        while not lines.waiting.empty():
            pass
        lines.say({"event": "last"})
        lines.waiting.put(None)
        lines.thread.join(20)
    reading.join(20)
    said = [json.loads(line) for line in found]
    assert said[-1]["event"] == "last"
    lost = [each["count"] for each in said if each["event"] == "lines lost"]
    assert sum(lost) > 1000 and len(said) - 1 - len(lost) + sum(lost) == 5000
