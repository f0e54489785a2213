"""Stages in a process of their own, away from the interpreter's lock of the server: measured by benchmarks/serve.py.

In: the engine's contract (runtime/engine.py). Every call goes through a pipe to a child that holds the engine and the states;
a second pipe tells it to stop a step. What the lock costs is what this saves; what a pipe costs is what it adds.
"""

import multiprocessing
import threading
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from nestling.runtime.engine import Abandoned, Floats, Stop
from nestling.runtime.runtime import Runtime


class Handle:
    """A state that the child holds."""

    def __init__(self, number: int, gone: list[int]) -> None:
        self.number = number
        weakref.finalize(self, gone.append, number)


class EngineApart:
    """Runs the stages of a network by its name. For one thread at a time."""

    most, stops, jumps, places = 0, True, False, 1

    def __init__(self, source: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.calls, calls = spawn.Pipe()
        self.stopping, stopping = spawn.Pipe()
        self.child = spawn.Process(target=child, args=(source, calls, stopping), daemon=True)
        self.child.start()
        self.gone: list[int] = []
        self.name, self.stages, self.row_bytes = self.calls.recv()
        self.steps = 0

    def call(self, what: str, *given: Any) -> Any:
        gone = [self.gone.pop() for _ in range(len(self.gone))]
        self.calls.send((what, given, gone))
        failed, found = self.calls.recv()
        if failed:
            raise Abandoned if found == "abandoned" else RuntimeError(found)
        return found

    def start(self, x: Floats) -> Handle:
        return Handle(self.call("start", x), self.gone)

    def step(self, stage: int, state: Handle, stop: Stop) -> tuple[Floats, Handle]:
        self.steps += 1
        number = self.steps
        stop.call(lambda: self.stopping.send(number))
        return self.call("step", stage, state.number, number), state

    def take(self, state: Handle, places: Sequence[int]) -> Handle:
        return Handle(self.call("take", state.number, places), self.gone)

    def join(self, parts: Sequence[tuple[Handle, int]]) -> Handle:
        return Handle(self.call("join", [(state.number, place) for state, place in parts]), self.gone)

    def close(self) -> None:
        self.child.kill()
        self.child.join()


class Child:
    """What runs in the other process."""

    def __init__(self, source: str) -> None:
        self.runtime = Runtime(source, "cpu")
        self.engine: Any = self.runtime.engine
        self.states: dict[int, Any] = {}
        self.made = 0
        self.running: tuple[int, Stop] = (0, Stop())

    def keep(self, state: Any) -> int:
        self.made += 1
        self.states[self.made] = state
        return self.made

    def start(self, x: Floats) -> int:
        return self.keep(self.engine.start(x))

    def step(self, stage: int, number: int, step: int) -> Floats:
        self.running = (step, Stop())
        logits, self.states[number] = self.engine.step(stage, self.states[number], self.running[1])
        return logits

    def take(self, number: int, places: Sequence[int]) -> int:
        return self.keep(self.engine.take(self.states[number], places))

    def join(self, parts: Sequence[tuple[int, int]]) -> int:
        return self.keep(self.engine.join([(self.states[number], place) for number, place in parts]))

    def listen(self, stopping: Connection) -> None:
        while True:
            step = stopping.recv()
            running, stop = self.running
            if step == running:
                stop.set()


def child(source: str, calls: Connection, stopping: Connection) -> None:
    own = Child(source)
    calls.send((own.engine.name, own.engine.stages, own.engine.row_bytes))
    threading.Thread(target=own.listen, args=(stopping,), daemon=True).start()
    while True:
        try:
            what, given, gone = calls.recv()
        except EOFError:
            return
        for number in gone:
            del own.states[number]
        try:
            calls.send((False, getattr(own, what)(*given)))
        except Abandoned:
            calls.send((True, "abandoned"))
        except Exception as error:
            calls.send((True, str(error)))
