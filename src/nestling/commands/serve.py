"""`nestling serve`: networks behind HTTP and gRPC, until SIGTERM or Ctrl-C.

What happens is told on stderr, one JSON document a line: what listens where, networks opened anew, requests if that is wanted.
"""

import asyncio
import gc
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nestling.errors import NestlingError

if TYPE_CHECKING:
    from nestling.serve.listen import Place, Sockets
    from nestling.serve.replicas import Replicated
    from nestling.serve.server import Server

SWITCHING = 0.0005  # seconds a thread may keep the interpreter while others want it


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
        page: show the page at / where everybody can try it; not on Ray.
        on: local: this process; ray: replicas on a Ray cluster (RAY_ADDRESS, the one that runs here, or one for the time being)
            behind Ray Serve's proxies. Folders and the token's file must be there on every node; gRPC, which Ray opens at all
            addresses, only where --host is not this machine.
        replicas: how many, on Ray; each takes --threads cores, and with --device cuda a GPU.
        most_replicas: as many as are needed up to this, on Ray, by the share of requests that get less than their time allows.
    """
    began = time.monotonic()
    if not longest > 0 or room < 1 or memory_mb < 1 or body_mb < 1 or reload < 0:
        raise NestlingError(f"found longest {longest}, room {room}, memory_mb {memory_mb}, body_mb {body_mb}, reload {reload}; "
                            "expected positive numbers (reload may be 0)")  # fmt: skip
    try:
        from nestling.serve.http import application
        from nestling.serve.listen import Place, Sockets
        from nestling.serve.service import Service, read_token
        from nestling.serve.timers import run
        from nestling.serve.traces import exported
        from nestling.serve.trypage import TryPage
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("nestling"):
            raise
        raise NestlingError(f"serving needs {error.name}; run: pip install 'nestling[serve]'") from error
    from nestling.serve.server import Server, split

    place = Place(host, port, None if grpc_port < 0 else grpc_port, certificate, key)
    sources = split(networks)
    if on == "ray":
        from nestling.serve.replicas import Replicated

        there = {name: Path(each).resolve() if Path(each).exists() else each for name, each in sources.items()}
        what = Replicated(
            tuple(f"{name}={each}" for name, each in there.items()), replicas, most_replicas, device, threads, room, memory_mb,
            body_mb, longest, str(Path(token_file).resolve()) if token_file else "", log_requests, traces,
        )  # fmt: skip
        return live_on_ray(what, place, began)
    token = read_token(token_file)
    with Server(named=sources, device=device, threads=threads, room=room, memory=memory_mb * 2**20) as server:
        service = Service(
            server,
            log=say if log_requests else None,
            token=token,
            longest=longest,
            most_bytes=body_mb * 2**20,
            traces=exported(traces) if traces else None,
        )
        listener = Sockets(service, application(service, TryPage(service).routes() if page else ()), place)
        sys.setswitchinterval(SWITCHING)
        gc.collect()
        gc.freeze()  # what is there now stays: collecting garbage need not look at it again and again
        try:
            run(live(listener, server, reload, began))
        finally:
            if service.traces is not None:
                service.traces.close()
        return {"networks": list(sources), "seconds": time.monotonic() - began, "answered": service.metrics.count()}


def live_on_ray(what: "Replicated", place: "Place", began: float) -> dict[str, Any]:
    """Until SIGTERM or Ctrl-C."""
    from nestling.serve.replicas import running

    told = threading.Event()
    before = {number: signal.signal(number, lambda *_: told.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with running(what, place) as ports:
            seconds = round(time.monotonic() - began, 2)
            say(
                {
                    "event": "ready",
                    **ports,
                    "networks": list(what.networks),
                    "replicas": what.replicas,
                    "seconds": seconds,
                }
            )
            told.wait()
            say({"event": "ending", "longest_s": what.longest})
        say({"event": "ended"})
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return {"networks": list(what.networks), "seconds": time.monotonic() - began, "answered": None}


def show(result: dict[str, Any]) -> str:
    if result["answered"] is None:
        return f"ended after {result['seconds']:.0f} s"
    return f"answered {result['answered']} requests in {result['seconds']:.0f} s"


async def live(listener: "Sockets", server: "Server", reload: float, began: float) -> None:
    loop = asyncio.get_running_loop()

    def end(number: int) -> None:
        if listener.service.ending:
            os._exit(128 + number)  # twice: at once
        say({"event": "ending", "longest_s": listener.service.longest})
        listener.end()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number)
    watching = asyncio.ensure_future(watch(server, reload)) if reload else None
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


async def watch(server: "Server", seconds: float) -> None:
    """Open a network anew when its folder has changed, and has not changed again since the last look."""
    stamps = {name: model.stamp() for name, model in server.models.items()}
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
            except (NestlingError, OSError) as error:
                say({"event": "not reloaded", "network": name, "error": str(error)})


def say(event: dict[str, Any]) -> None:
    print(json.dumps({"time": round(time.time(), 3), **event}), file=sys.stderr, flush=True)
