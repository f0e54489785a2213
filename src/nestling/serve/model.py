"""One network under a name: images in, a ServedRequest out.

In: what a Runtime takes (a run's folder, the name of a trained network, a folder of exported stages, a network). The runtime
opens it, checks images and knows how long stages take; its engine belongs to the thread of stages.py, so the runtime itself
is not asked. Answers that may be refined are kept under a token for a while, up to a number of bytes.
"""

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from nestling.errors import NestlingError
from nestling.files import MANIFEST, RESULTS, WEIGHTS
from nestling.nets import NestedNet
from nestling.runs.folder import RunDir
from nestling.runtime.caller import Sure
from nestling.runtime.engine import JoiningEngine, Stop
from nestling.runtime.inputs import short
from nestling.runtime.promise import Margin
from nestling.runtime.runtime import Runtime
from nestling.serve.request import ServedRequest
from nestling.serve.scheduler import Scheduler, Ticket
from nestling.serve.stages import Stages

Servable = NestedNet | RunDir | str | Path | Runtime
ROOM = 256  # images at a time
MEMORY = 256 * 2**20  # bytes of state, of images that are being answered
KEPT_BYTES = 64 * 2**20  # of answers that may be refined
KEPT_SECONDS = 30.0
RETIRING = 0.05  # seconds between two looks whether anybody still asks
READING = 1.0  # seconds in which a request is read and submitted
TOGETHER = 8  # images of the batch by which it is learnt what each further one costs


class Model:
    """Answers for many clients at a time. Thread-safe."""

    def __init__(
        self,
        name: str,
        source: Servable,
        device: str = "auto",
        threads: int = 1,
        room: int = ROOM,
        memory: int = MEMORY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.source = source
        self.files = self.stamp()  # before they are read: what is written meanwhile is news
        runtime = source if isinstance(source, Runtime) else opened(source, device, threads)
        if not hasattr(runtime.engine, "join"):
            raise NestlingError(f"the engine {runtime.engine.name} cannot be served; open {name} with engine='eager'")
        if runtime.spec.output:
            raise NestlingError(
                f"{name} answers with no classes, which is all that is served; ask nestling.Runtime in Python"
            )
        self.name, self.runtime, self.clock = name, runtime, clock
        self.spec, self.intake, self.pace = runtime.spec, runtime.intake, runtime.pace
        engine = cast(JoiningEngine, runtime.engine)
        self.learn_batches(engine)
        keep = max(1, memory // max(1, engine.row_bytes))
        scheduler = Scheduler(self.pace, self.spec.stages, room, keep, min(64, keep), engine.jumps and engine.stops)
        self.stages = Stages(engine, scheduler, self.pace, clock)
        self.kept = KeptAnswers(engine.row_bytes, clock)
        self.margin = Margin()  # of those who ask from Python

    def learn_batches(self, engine: JoiningEngine) -> None:
        """See what images cost together, so that the scheduler knows whether to join them."""
        x = np.zeros((TOGETHER, *self.spec.shape), np.float32)
        for _ in range(2):  # the first allocates
            state = engine.start(x)
            for stage in range(1, engine.stages + 1):
                began = self.clock()
                _, state = engine.step(stage, state, Stop())
                took = self.clock() - began
                self.pace.steps[stage - 1].more = max(0.0, took - self.pace.predict(stage)) / (TOGETHER - 1)

    def ask(
        self, x: Any, limit: float, confident: Sure = None, margin: Margin | None = None, began: float | None = None
    ) -> ServedRequest:
        """A request about images (N,C,H,W), uint8 or normalised float32, by `limit` seconds from when it `began`; not yet
        submitted. Raises NestlingError for what is no such image."""
        began = self.clock() if began is None else began
        self.intake.check(x, self.intake.sides + 1)
        if not len(x):
            raise NestlingError(f"the batch is empty; give at least one image {self.intake.wanted()}")
        if len(x) > self.stages.scheduler.room:
            raise NestlingError(f"found {len(x)} images in one request, expected at most {self.stages.scheduler.room}")
        images = self.intake.prepare(x)
        sure = self.runtime._check_thresholds(confident)
        tickets = [Ticket(images[i : i + 1], began + limit, sure) for i in range(len(images))]
        return ServedRequest(self.stages, self.spec, self.runtime.prior, tickets, began, limit, margin or self.margin)

    def more(self, token: str, limit: float, margin: Margin | None = None, began: float | None = None) -> ServedRequest:
        """A request to go on with what is kept under a token, which is used up by this."""
        began = self.clock() if began is None else began
        tickets = self.kept.take(token)
        return ServedRequest(self.stages, self.spec, self.runtime.prior, tickets, began, limit, margin or self.margin)

    def stamp(self) -> tuple[int, ...]:
        """When the files were written that it was opened from; () of what is no folder."""
        if not isinstance(self.source, str | Path | RunDir):
            return ()
        folder = self.source.path if isinstance(self.source, RunDir) else Path(self.source)
        files = (folder / name for name in (WEIGHTS, RESULTS, MANIFEST))
        return tuple(file.stat().st_mtime_ns if file.is_file() else 0 for file in files)

    def retire(self) -> None:
        """Close when nobody is asking any more: another model has taken this one's name."""

        def wait() -> None:
            time.sleep(READING)
            while self.stages.scheduler.open:
                time.sleep(RETIRING)
            self.close()

        threading.Thread(target=wait, name="nestling-retiring", daemon=True).start()

    def close(self) -> None:
        """End at once; whoever waits gets what there is."""
        self.stages.close()
        self.runtime.close()


class KeptAnswers:
    """Jobs that may be gone on with, by token: for a time, and up to a number of bytes; the oldest go first."""

    def __init__(
        self,
        row_bytes: int,
        clock: Callable[[], float],
        most_bytes: int = KEPT_BYTES,
        seconds: float = KEPT_SECONDS,
    ) -> None:
        self.row_bytes, self.clock, self.most_bytes, self.seconds = row_bytes, clock, most_bytes, seconds
        self.keeper = ""  # of several servers behind one address, this one: every token begins with it
        self.found: OrderedDict[str, tuple[float, int, Sequence[Ticket]]] = OrderedDict()
        self.bytes = 0

    def put(self, tickets: Sequence[Ticket], token: str = "") -> str:
        """Keep tickets, and the token for them (a new one, if none is given); "" where they are too large to be kept or there is
        nothing to refine."""
        size = sum(map(self.size, tickets))
        if size > self.most_bytes or all(ticket.final for ticket in tickets):
            return ""
        token = token or (f"{self.keeper}." if self.keeper else "") + secrets.token_urlsafe(16)
        self.found[token] = (self.clock() + self.seconds, size, tickets)
        self.bytes += size
        self.purge()
        return token

    def size(self, ticket: Ticket) -> int:
        """Bytes that a ticket holds, or will when the stage is done in which it is."""
        if ticket.running or ticket.state is not None:
            return ticket.beside * self.row_bytes
        return int(ticket.x.nbytes)

    def has(self, token: str) -> bool:
        self.purge()
        return token in self.found

    def take(self, token: Any) -> Sequence[Ticket]:
        self.purge()
        _, size, tickets = self.found.pop(token, (0.0, 0, ())) if isinstance(token, str) else (0.0, 0, ())
        if not tickets:
            raise NestlingError(
                f"nothing is kept under the token {short(token)}: it was used, is older than {self.seconds:g} s, or made room "
                "for others; send the images again"
            )
        self.bytes -= size
        return tickets

    def purge(self) -> None:
        """Let go what is too old or too much."""
        now = self.clock()
        while self.found and (self.bytes > self.most_bytes or next(iter(self.found.values()))[0] <= now):
            self.bytes -= self.found.popitem(last=False)[1][1]


def opened(source: NestedNet | RunDir | str | Path, device: str, threads: int) -> Runtime:
    """On a GPU the eager engine: a captured graph is of one image, and images must go together there."""
    from nestling.runs.device import pick_device

    on_gpu = pick_device(device, "device=").type == "cuda"
    return Runtime(source, device, "eager" if on_gpu else "auto", threads)
