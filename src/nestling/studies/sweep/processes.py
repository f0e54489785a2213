"""Runs of a sweep as processes of this machine: each its own, so that one that is killed takes no other with it.

In: runs. Out: how each ended. A process trains as `nestling train` does, with as many threads as this one has, on which the bits
of a result depend. It stops, with a checkpoint, when this process is gone, however that came about.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from typing import IO

import torch

from nestling.errors import NestlingError
from nestling.studies.sweep.driver import Ending, SweepRun

PER_GPU = 3  # runs at the same time, unless told
STOPPING = 60.0  # seconds for a checkpoint, before a process is killed


@dataclasses.dataclass(frozen=True, eq=False)
class Child:
    """A process at work on a run."""

    one: SweepRun
    process: "subprocess.Popen[bytes]"
    said: IO[bytes]  # stdout: why it failed
    told: IO[bytes]  # stderr
    slot: str  # the GPU, "" without

    def ending(self) -> Ending:
        """Exit codes: 0 finished, 1 refused, all else it was stopped or killed."""
        code = self.process.returncode
        self.said.seek(0)
        self.told.seek(0)
        answer, last = self.said.read().decode(errors="replace"), self.told.read().decode(errors="replace").strip()
        if code == 0:
            return Ending(self.one)
        if code == 1:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                return Ending(self.one, wrong=str(json.loads(answer)["error"]))
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return Ending(self.one, lost=f"{self.one.where} {how}{': ' + last.splitlines()[-1] if last else ''}")


class Processes:
    """A Workplace: so many processes at the same time, on each GPU or, without one, in all."""

    def __init__(self, beside: int = 0) -> None:
        if beside < 0:
            raise NestlingError(f"--beside is {beside}: expected how many runs to train at the same time, 1 or more")
        count = torch.cuda.device_count()
        named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        gpus = (named if len(named) == count else [str(each) for each in range(count)]) if count else []
        each = beside or (PER_GPU if gpus else 1)
        self.slots = deque((gpus or [""]) * each)  # GPU by GPU: the first runs are spread over all
        self.at_work: list[Child] = []

    def room(self) -> bool:
        return bool(self.slots)

    def start(self, one: SweepRun, command: str) -> str:
        slot = self.slots.popleft()
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": slot} if slot else None
        said, told = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 (leave closes them)
        process = subprocess.Popen(
            [sys.executable, "-m", "nestling.studies.sweep.child"],
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=told,
            env=environment,
            start_new_session=True,  # Ctrl-C is the driver's business
        )
        task = {"recipe": dataclasses.asdict(one.recipe), "path": str(one.run.path), "command": command}
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it may be gone already, which is found later
            process.stdin.write((json.dumps({**task, "threads": torch.get_num_threads()}) + "\n").encode())
            process.stdin.flush()  # and stays open: when it closes, the driver is gone
        self.at_work.append(Child(one, process, said, told, slot))
        return f"{f'GPU {slot}, ' if slot else ''}process {process.pid}"

    def ended(self) -> list[Ending]:
        over = [child for child in self.at_work if child.process.poll() is not None]
        return [self.leave(child) for child in over]

    def leave(self, child: Child) -> Ending:
        self.at_work.remove(child)
        self.slots.append(child.slot)
        ending = child.ending()
        assert child.process.stdin is not None
        for file in (child.said, child.told, child.process.stdin):
            with contextlib.suppress(OSError):
                file.close()
        return ending

    def close(self) -> None:
        for child in self.at_work:
            child.process.terminate()
        for child in list(self.at_work):
            try:
                child.process.wait(STOPPING)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            self.leave(child)
