"""`nestling serve`: networks behind HTTP and gRPC, until SIGTERM or Ctrl-C.

What happens is told on stderr, one JSON document a line: what listens where, networks opened anew, requests if that is wanted.
"""

import asyncio
import contextlib
import ctypes
import gc
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from nestling.errors import NestlingError

if TYPE_CHECKING:
    from nestling.serve.listen import Place, Sockets
    from nestling.serve.server import Server
    from nestling.serve.service import Service

SWITCHING = 0.0005  # seconds a thread may keep the interpreter while others want it
PATIENCE = 5.0  # seconds beyond the longest deadline after which the end is forced
Tell = Callable[[dict[str, Any]], None]


class Limits(NamedTuple):
    """What each server gets, here or on Ray, as `command` says it."""

    device: str
    threads: int
    room: int
    memory_mb: int
    body_mb: int
    longest: float
    token_file: str
    log_requests: bool
    traces: str


def command(
    networks: tuple[str, ...],
    host: str = "127.0.0.1",
    port: int = 8000,
    grpc_port: int = 8001,
    device: str = "auto",
    threads: int = 1,
    room: int = 256,
    memory_mb: int = 256,
    body_mb: int = 8,
    longest: float = 10.0,
    token_file: str = "",
    certificate: str = "",
    key: str = "",
    reload: float = 2.0,
    log_requests: bool = False,
    traces: str = "",
    page: bool = True,
    on: Literal["local", "ray"] = "local",
    replicas: int = 1,
    most_replicas: int = 0,
    proxy: Literal["ray", "haproxy"] = "ray",
) -> dict[str, Any]:
    """Answer over HTTP and gRPC (Open Inference Protocol v2) by each request's deadline. Overload costs stages, not answers.

    Args:
        networks: run folders, folders of exported stages or names of trained networks; NAME=PATH gives one another name.
        host: where to listen; only this machine can ask unless you say otherwise.
        port: of HTTP; 0 is any that is free.
        grpc_port: of gRPC; 0 is any that is free, -1 none.
        device: auto, cpu or cuda.
        threads: that a stage may use on a CPU.
        room: images of each network that may be asked for at a time; beyond that clients are told to come back (429).
        memory_mb: that the states of these may take, MiB for each network.
        body_mb: the largest request, MiB.
        longest: seconds; deadlines are at most this, and ending takes no longer.
        token_file: holds the token that clients must send (Authorization: Bearer TOKEN).
        certificate: for TLS, a file in PEM form.
        key: its key.
        reload: seconds between two looks whether a folder has changed and must be opened anew; 0 = never.
        log_requests: a line for every request.
        traces: where OpenTelemetry's spans go (OTLP over HTTP), such as http://localhost:4318/v1/traces.
        page: without the page at / where everybody can try it, which there never is on Ray.
        on: local: this process; ray: replicas on a Ray cluster (RAY_ADDRESS, the one that runs here, or one for the time being)
            behind Ray Serve's proxies. Folders and the token's file must be there on every node; gRPC, which Ray opens at all
            addresses, only where --host is not this machine.
        replicas: how many, on Ray; each takes --threads cores, and with --device cuda a GPU.
        most_replicas: as many as are needed up to this, on Ray, by the share of requests that get less than their time allows.
        proxy: before the replicas on Ray; ray: Ray's own, in Python; haproxy: faster (Linux), but it shows its statistics at all
            addresses, ports 8404 and 9101, and has no TLS.
    """
    began = time.monotonic()
    if not longest > 0 or room < 1 or memory_mb < 1 or body_mb < 1 or reload < 0:
        raise NestlingError(f"found longest {longest}, room {room}, memory_mb {memory_mb}, body_mb {body_mb}, reload {reload}; "
                            "expected positive numbers (reload may be 0)")  # fmt: skip
    if not 0 <= port <= 65535 or not -1 <= grpc_port <= 65535:
        raise NestlingError(
            f"found port {port}, grpc_port {grpc_port}; expected at most 65535 (0: any; grpc_port -1: none)"
        )
    check_extra()
    from nestling.serve.listen import Place

    place = Place(host, port, None if grpc_port < 0 else grpc_port, certificate, key)
    limits = Limits(device, threads, room, memory_mb, body_mb, longest, token_file, log_requests, traces)
    if on == "ray":
        return serve_on_ray(networks, replicas, most_replicas, limits, place, proxy == "haproxy", began)
    return serve_here(networks, limits, place, page, reload, began)


def check_extra() -> None:
    """What serving needs beyond nestling itself is installed."""
    try:
        from nestling.serve import listen, trypage  # noqa: F401
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("nestling"):
            raise
        raise NestlingError(f"serving needs {error.name}; run: pip install 'nestling[serve]'") from error


def serve_here(
    networks: tuple[str, ...], limits: Limits, place: "Place", page: bool, reload: float, began: float
) -> dict[str, Any]:
    """In this process, until SIGTERM or Ctrl-C."""
    from nestling.serve.ending import LastResort
    from nestling.serve.journal import Journal
    from nestling.serve.server import Server, split
    from nestling.serve.service import Service, read_token
    from nestling.serve.traces import exported

    device, threads, room, memory_mb, body_mb, longest, token_file, log_requests, traces = limits
    sources, token = split(networks), read_token(token_file)
    with (
        Journal(sys.stderr) as journal,
        LastResort(longest + PATIENCE, journal.say) as last,
        Server(named=sources, device=device, threads=threads, room=room, memory=memory_mb * 2**20) as server,
    ):
        log, spans = journal.say if log_requests else None, exported(traces) if traces else None
        service = Service(server, None, log, token, longest, body_mb * 2**20, spans)
        try:
            listen(service, place, page, reload, began, journal.say, last.begin)
        finally:
            if spans is not None:
                spans.close()
        seconds = time.monotonic() - began
        return {"networks": list(sources), "seconds": seconds, "answered": service.metrics.count()}


def listen(
    service: "Service", place: "Place", page: bool, reload: float, began: float, say: Tell, ending: Callable[[], None]
) -> None:
    """Until a signal comes; `ending` is called at once when it does."""
    from nestling.serve.http import application
    from nestling.serve.listen import Sockets
    from nestling.serve.timers import run
    from nestling.serve.trypage import TryPage

    listener = Sockets(service, application(service, TryPage(service).routes() if page else ()), place)
    sys.setswitchinterval(SWITCHING)
    gc.collect()
    gc.freeze()  # what is there now stays: collecting garbage need not look at it again and again
    give_back_memory()
    run(live(listener, reload, began, say, ending))


def give_back_memory() -> None:
    """What opening the networks took beside them, more than a hundred MiB, which glibc keeps; elsewhere nothing."""
    with contextlib.suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def serve_on_ray(
    networks: tuple[str, ...],
    replicas: int,
    most_replicas: int,
    limits: Limits,
    place: "Place",
    haproxy: bool,
    began: float,
) -> dict[str, Any]:
    """On a Ray cluster, until SIGTERM or Ctrl-C."""
    from nestling.serve.ending import told_to_end
    from nestling.serve.journal import Journal
    from nestling.serve.replicas import Replicated, running
    from nestling.serve.server import split

    sources = split(networks).items()
    there = tuple(f"{name}={Path(each).resolve() if Path(each).exists() else each}" for name, each in sources)
    if limits.token_file:
        limits = limits._replace(token_file=str(Path(limits.token_file).resolve()))
    what, told = Replicated(there, replicas, most_replicas, *limits), threading.Event()
    with Journal(sys.stderr) as journal, told_to_end(told.set):
        with running(what, place, haproxy) as ports:
            took = round(time.monotonic() - began, 2)
            about = {"networks": list(what.networks), "replicas": what.replicas, "seconds": took}
            journal.say({"event": "ready", **ports, **about})
            told.wait()
            journal.say({"event": "ending", "longest_s": what.longest})
        journal.say({"event": "ended"})
    return {"networks": list(what.networks), "seconds": time.monotonic() - began, "answered": None}


def show(result: dict[str, Any]) -> str:
    if result["answered"] is None:
        return f"ended after {result['seconds']:.0f} s"
    return f"answered {result['answered']} requests in {result['seconds']:.0f} s"


async def live(listener: "Sockets", reload: float, began: float, say: Tell, ending: Callable[[], None]) -> None:
    from nestling.serve.ending import told_to_end

    loop, server = asyncio.get_running_loop(), listener.service.server

    def end() -> None:
        say({"event": "ending", "longest_s": listener.service.longest})
        listener.end()

    def tell() -> None:
        ending()
        loop.call_soon_threadsafe(end)

    watching = asyncio.ensure_future(watch(server, reload, say)) if reload else None
    with told_to_end(tell):
        try:
            await listener.run(lambda started: say(ready(started, server, began)))
        finally:
            if watching is not None:
                watching.cancel()
            say({"event": "ended"})


def ready(listener: "Sockets", server: "Server", began: float) -> dict[str, Any]:
    place, ports = listener.place, listener.ports
    scheme = "https" if place.certificate else "http"
    found: dict[str, Any] = {"event": "ready", "http": f"{scheme}://{place.host}:{ports['http']}"}
    if "grpc" in ports:
        found["grpc"] = f"{place.host}:{ports['grpc']}"
    took = {"seconds": round(time.monotonic() - began, 2), "cpu_seconds": round(time.process_time(), 2)}
    return {**found, "networks": list(server.models), **took}


async def watch(server: "Server", seconds: float, say: Tell) -> None:
    """Open a network anew when its folder has changed, and has not changed again since the last look."""
    stamps = {name: model.files for name, model in server.models.items()}
    changing: dict[str, Any] = {}
    while True:
        await asyncio.sleep(seconds)
        for name, model in list(server.models.items()):
            model.kept.purge()
            stamp = model.stamp()
            if stamp == stamps[name]:
                continue
            if changing.get(name) != stamp:
                changing[name] = stamp
                continue
            stamps[name] = stamp
            try:
                await asyncio.to_thread(server.reload, name)
                say({"event": "reloaded", "network": name})
            except Exception as error:  # whatever is wrong with it, the others are still looked at
                known = isinstance(error, NestlingError | OSError)
                say({"event": "not reloaded", "network": name, "error": str(error) if known else repr(error)})
