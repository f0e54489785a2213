"""A process that trains one run of a sweep: `python -m nestling.studies.sweep.child`, started by processes.py.

In: one line of JSON on stdin (recipe, folder, command, threads), which stays open as long as the driver lives. Out: the run's
folder; exit code 0, or 1 and {"error": ...} on stdout. When stdin closes it stops like one that is sent SIGTERM.
"""

import json
import os
import signal
import sys
import threading
from typing import Any

import torch

from nestling.errors import NestlingError
from nestling.files import RECIPE
from nestling.recipes.recipe import from_dict
from nestling.runs.folder import RunDir
from nestling.train import train
from nestling.train.stop import Stopped


def work(task: dict[str, Any]) -> None:
    """Train the run, or go on with it."""
    torch.set_num_threads(task["threads"])
    path = task["path"]
    train(from_dict(task["recipe"]), path, resume=RunDir(path).has(RECIPE), command=task["command"], quiet=True)


def stop_when_alone() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    task = json.loads(sys.stdin.readline())
    threading.Thread(target=stop_when_alone, daemon=True).start()
    try:
        work(task)
    except NestlingError as error:
        os.write(1, json.dumps({"error": str(error)}).encode())
        return 1
    except Stopped as stop:
        return stop.code
    return 0


if __name__ == "__main__":
    os._exit(main())  # the thread that waits for stdin would keep the interpreter from ending
