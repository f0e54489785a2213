"""Sockets: a service behind HTTP and gRPC, in one event loop, until it is told to end.

In: a Service and where to listen. Out: nothing, when it has ended: told to, it takes no new requests, answers those it has, and
closes; whoever has not sent or read everything by the longest deadline is let go. Connections on which no whole request comes are
closed after a while.
"""

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nestling.errors import NestlingError
from nestling.runtime.prompt import Promptly
from nestling.serve import timers
from nestling.serve.grpc import listening
from nestling.serve.http import CAME
from nestling.serve.service import Service

IDLE = 20.0  # seconds after which a connection without a whole request is closed
LAST = 1.0  # seconds in which those go who were let go


@dataclass(frozen=True)
class Place:
    """Where to listen; port 0 is any that is free."""

    host: str = "127.0.0.1"
    http: int = 8000
    grpc: int | None = None  # None: no gRPC
    certificate: str = ""  # files, for TLS
    key: str = ""


class Patient(HttpToolsProtocol):
    """uvicorn's, which waits for ever for the rest of a request's head: closed after a while."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.whole = 0
        self.later = self.loop.call_later(IDLE, self.look, -1)

    def on_headers_complete(self) -> None:
        self.whole += 1
        self.scope[CAME] = timers.since()  # type: ignore[literal-required]
        super().on_headers_complete()

    def look(self, before: int) -> None:
        """Nothing whole has come since the last look, and nothing is being answered: the client is slow on purpose."""
        busy = self.cycle is not None and not self.cycle.response_complete
        if self.whole == max(before, 0) and not busy:
            self.transport.close()
        else:
            self.later = self.loop.call_later(IDLE, self.look, self.whole)

    def connection_lost(self, exc: Exception | None) -> None:
        self.later.cancel()
        super().connection_lost(exc)
        if (
            self.timeout_keep_alive_task is not None
        ):  # uvicorn lets it run where a client broke off, and all it holds with it
            self.timeout_keep_alive_task.cancel()


class Sockets:
    """The sockets of one service."""

    def __init__(self, service: Service, app: Starlette, place: Place) -> None:
        if bool(place.certificate) != bool(place.key):
            raise NestlingError("TLS needs both a certificate and its key; give --certificate FILE and --key FILE")
        for file in filter(None, (place.certificate, place.key)):
            if not Path(file).is_file():
                raise NestlingError(f"there is no file {file}; expected a certificate or key in PEM form")
        self.service, self.place = service, place
        config = uvicorn.Config(
            app, place.host, place.http, http=Patient, ws="none", lifespan="off", log_config=None, access_log=False,
            timeout_keep_alive=60, ssl_certfile=place.certificate or None, ssl_keyfile=place.key or None, loop="none",
            server_header=False, date_header=False, backlog=2048,
        )  # fmt: skip
        try:
            config.load()
        except (ssl.SSLError, OSError) as error:
            raise NestlingError(
                f"{place.certificate} and {place.key} are no certificate and its key: {error}"
            ) from error
        self.http = Quiet(config)
        self.ports: dict[str, int] = {}
        self.told = asyncio.Event()  # to end

    async def run(self, started: Callable[["Sockets"], Any]) -> None:
        """Until `end` is called; `started` is told when everything listens."""
        serving = asyncio.ensure_future(self.http.serve())
        serving.add_done_callback(lambda _: self.told.set())
        try:
            while not self.http.started and not serving.done():
                await asyncio.sleep(0.005)
            if not self.http.started:
                serving.result()
                raise NestlingError(f"cannot listen at {self.place.host}:{self.place.http}; is the port taken?")
            self.ports["http"] = self.http.servers[0].sockets[0].getsockname()[1]
            rpc = await self.open_grpc()
            started(self)
            beating = asyncio.ensure_future(self.service.way.beat())
            with Promptly():  # the stages' thread would keep this one from the processor, a slice at a time
                await self.told.wait()
                await self.drain([serving, *([asyncio.ensure_future(rpc.stop(self.service.longest))] if rpc else [])])
            beating.cancel()
            if serving.done():
                serving.result()
        finally:
            self.service.ending = True
            serving.cancel()
            for server in getattr(self.http, "servers", ()):  # none where it could not begin
                server.close()

    async def open_grpc(self) -> Any:
        """gRPC beside HTTP, where that was asked for."""
        if self.place.grpc is None:
            return None
        credentials = None
        if self.place.certificate:
            pair = Path(self.place.key).read_bytes(), Path(self.place.certificate).read_bytes()
            credentials = grpc.ssl_server_credentials([pair])
        address = f"{self.place.host}:{self.place.grpc}"
        try:
            server, self.ports["grpc"] = await listening(self.service, address, credentials)
        except RuntimeError as error:
            raise NestlingError(f"cannot listen at {address}; is the port taken? ({error})") from error
        return server

    async def drain(self, endings: list[asyncio.Future[Any]]) -> None:
        """Both protocols end at the same time: when everybody has been answered, or with the longest deadline, from which on
        nothing can be answered in time any more."""
        await asyncio.wait(endings, timeout=self.service.longest)
        for connection in list(self.http.server_state.connections):
            connection.transport.abort()
        await asyncio.wait(endings, timeout=LAST)
        for ending in endings:
            ending.cancel()

    def end(self) -> None:
        """Take no more requests, answer those there are, and come back from `run`."""
        self.service.ending = self.http.should_exit = True
        self.told.set()


class Quiet(uvicorn.Server):
    """Signals are the command's business, and a port that is taken is no reason to end the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: Any = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit as error:
            raise NestlingError(
                f"cannot listen at {self.config.host}:{self.config.port}; is the port taken?"
            ) from error
