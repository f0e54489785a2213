"""Server: several networks, answered for many threads and coroutines at a time by one scheduler each.

In: names of trained networks, run folders, folders of exported stages, networks. Out: Answers, as from a Runtime. Protocols are
clients of this. A network can be opened anew while others ask: who has asked is still answered by the old one.
"""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from nestling.errors import NestlingError, nearest
from nestling.runs.folder import RunDir
from nestling.runtime.answer import Answer
from nestling.runtime.caller import Sure
from nestling.runtime.inputs import seconds
from nestling.runtime.runtime import Runtime
from nestling.serve.model import MEMORY, ROOM, Model, Servable
from nestling.serve.request import ServedRequest
from nestling.serve.scheduler import Full
from nestling.serve.stages import Closed


class Server:
    """`Server("width-resnet42-cifar10", "runs/mine")`: answers by a deadline for everybody; overload costs stages."""

    def __init__(
        self,
        *sources: Servable,
        named: Mapping[str, Servable] | None = None,
        device: str = "auto",
        threads: int = 1,
        room: int = ROOM,
        memory: int = MEMORY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Networks under their own names, or, in `named`, under yours. `room` is how many images of each may be asked for at a
        time, `memory` how many bytes their states may take, `threads` what a stage may use on a CPU."""
        self.open: Callable[[str, Servable], Model] = lambda name, source: Model(
            name, source, device, threads, room, memory, clock
        )
        self.clock, self.models = clock, dict[str, Model]()
        try:
            for name, source in [*((own_name(each), each) for each in sources), *(named or {}).items()]:
                if name in self.models:
                    raise NestlingError(f"two networks are called {name}; give one of them another name (NAME=PATH)")
                self.models[name] = self.open(name, source)
            if not self.models:
                raise NestlingError("no network was named; give a run's folder or the name of a trained network")
        except BaseException:
            self.close()
            raise

    def model(self, name: str = "") -> Model:
        """The network of that name; without one, the only one."""
        if not name and len(self.models) == 1:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise NestlingError(f"there is no network {name!r} here; did you mean {nearest(name, self.models)}?")
        return self.models[name]

    def answer(self, x: Any, *, deadline: float | None = None, confident: Sure = None, model: str = "") -> Answer:
        """The best Answer to an image (C,H,W) within `deadline` seconds (None: the last stage's), as `Runtime.answer` gives it.
        Raises NestlingError where there is no room for another request."""
        return self.submitted(x, deadline, confident, model).wait()[0]

    def answers(
        self, x: Any, *, deadline: float | None = None, confident: Sure = None, model: str = ""
    ) -> Generator[Answer, None, None]:
        """Every stage's Answer as it finishes; stop whenever you like."""
        request = self.submitted(x, deadline, confident, model, every=True)
        for stage in request.each_stage():
            yield request.answers(stage)[0]

    async def answer_async(
        self, x: Any, *, deadline: float | None = None, confident: Sure = None, model: str = ""
    ) -> Answer:
        """`answer` for a coroutine: no thread waits."""
        request = self.submitted(x, deadline, confident, model)
        async for _ in request.each_stage_async():
            pass
        found = request.answers()[0]
        request.handed()
        return found

    def submitted(
        self, x: Any, deadline: float | None, confident: Sure, model: str, every: bool = False
    ) -> ServedRequest:
        chosen = self.model(model)
        chosen.intake.check(x := chosen.runtime._to_numpy(x), chosen.intake.sides)
        try:
            return chosen.ask(x[None], seconds(deadline), confident).submit(every)
        except Closed as error:
            raise NestlingError(f"{chosen.name} is closed; make a new server") from error
        except Full as error:
            raise NestlingError(f"{chosen.name} has no room for another request now; ask again later") from error

    def reload(self, name: str) -> None:
        """Open a network anew, as its folder is now. Who has asked before is answered by the old one."""
        old = self.model(name)
        if isinstance(old.source, Runtime):
            raise NestlingError(f"{name} was opened by somebody else, as a Runtime; give the server its folder instead")
        self.models[name] = self.open(name, old.source)
        old.retire()

    def close(self) -> None:
        """End at once; whoever waits gets what there is."""
        for model in self.models.values():
            model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def split(networks: Sequence[str]) -> dict[str, str]:
    """NAME=PATH, or a path or name by its own name: names, and what is to be opened under them."""
    found: dict[str, str] = {}
    for text in networks:
        name, mark, source = text.partition("=")
        if mark and not (name and source):
            raise NestlingError(f"found {text!r}; expected NAME=PATH, a run's folder or the name of a trained network")
        name, source = (name, source) if mark else (Path(text).resolve().name, text)
        if name in found:
            raise NestlingError(f"found two networks of one name in {', '.join(networks)}; name one of them: NAME=PATH")
        found[name] = source
    return found


def own_name(source: Servable) -> str:
    """A folder's or a network's own name."""
    if isinstance(source, str | Path):
        return Path(source).resolve().name
    if isinstance(source, RunDir):
        return source.path.name
    return source.spec.name if isinstance(source, Runtime) else source.plan.name
