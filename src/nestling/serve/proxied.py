"""Requests that come through Ray's proxies: their deadlines, and those whose token another replica keeps.

In: a Service, a replica's name, and how to reach the others. Out: who answers HTTP and gRPC there, in place of http.py's and
grpc.py's own. Ray's gRPC proxy says nothing of deadlines to replicas; `add_to_proxy`, which it calls, sends them beside the
bytes. What a token stands for is answered by the replica that keeps it, within the time there is.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from nestling.serve.grpc import Inference, handler_of
from nestling.serve.http import DEADLINE, Infer, header_limit, refused
from nestling.serve.model import Model
from nestling.serve.refusal import Refusal
from nestling.serve.service import Asked, Service

SERVICER = "nestling.serve.proxied.add_to_proxy"  # for Ray's gRPC options
PASSED = "nestling.passed"  # marks a request that another replica has passed on
SCOPE = (
    "type",
    "http_version",
    "method",
    "path",
    "raw_path",
    "query_string",
    "root_path",
    "scheme",
    "server",
    "client",
)


class Elsewhere(Exception):
    """What a token stands for is kept by another replica, `keeper`; a reply is wanted within `limit` seconds."""

    def __init__(self, keeper: str, limit: float, body: bytes = b"") -> None:
        super().__init__(keeper)
        self.keeper, self.limit, self.body = keeper, limit, body


def kept_elsewhere(asked: Asked, name: str, body: bytes = b"") -> None:
    """Raises Elsewhere for a token of another replica that has no images beside it."""
    token = asked.parameters.get("refine")
    if asked.images is None and isinstance(token, str):
        keeper, mark, _ = token.partition(".")
        if mark and keeper != name:
            raise Elsewhere(keeper, min(asked.limit, asked.timeout()), body)


# --- HTTP -------------------------------------------------------------------------------------------------------------


class InferThere(Infer):
    """Infer, where what a token stands for may be kept by another replica."""

    def __init__(self, service: Service, name: str, there: Callable[..., Any]) -> None:
        """`there(keeper, stream)` is the replica of that name."""
        super().__init__(service)
        self.name, self.there = name, there

    async def understood(self, model: Model, headers: Headers, body: bytes, scope: Scope) -> Asked:
        asked = await super().understood(model, headers, body, scope)
        if not scope.get(PASSED):
            asked.limit = header_limit(headers)
            kept_elsewhere(asked, self.name, body)
        return asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = self.service.server.clock()
        try:
            await super().__call__(scope, receive, send)
        except Elsewhere as other:
            await self.pass_on(other, scope, receive, send, began)

    async def pass_on(self, other: Elsewhere, scope: Scope, receive: Receive, send: Send, began: float) -> None:
        left = max(0.0, min(other.limit, self.service.longest) - (self.service.server.clock() - began))
        plain = {key: scope[key] for key in SCOPE if key in scope}
        headers = [pair for pair in scope["headers"] if pair[0] not in (DEADLINE.encode(), b"content-encoding")]
        plain["headers"] = [*headers, (DEADLINE.encode(), f"{1e3 * left:.3f}".encode())]
        begun = False
        try:
            async with asyncio.timeout(left):
                async for message in self.there(other.keeper, stream=True).passed_http.remote(plain, other.body):
                    await send(message)
                    begun = True
        except TimeoutError:
            if not begun:
                await refused(gone(other.keeper))(scope, receive, send)


def gone(keeper: str) -> Refusal:
    return Refusal(
        "no time", f"replica {keeper}, which keeps that answer, did not reply in time; send the images again"
    )


def whole(body: bytes) -> Receive:
    """A client that has sent this, and stays."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    return receive


# --- gRPC -------------------------------------------------------------------------------------------------------------


def add_to_proxy(servicer: Any, server: Any) -> None:
    """Called by Ray's gRPC proxy, which passes calls on to replicas: what is left of their time goes beside the bytes."""
    passes_on = server.service_handler_factory

    def timed(service_method: str, streaming_type: Any) -> Any:
        there = passes_on(service_method=service_method, streaming_type=streaming_type)

        async def one(raw: bytes, context: Any) -> Any:
            return await there((raw, context.time_remaining()), context)

        async def stream(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
            async def each() -> AsyncIterator[Any]:
                async for raw in messages:
                    yield raw, context.time_remaining()

            async for reply in there(each(), context):
                yield reply

        return {"UNARY_UNARY": one, "STREAM_STREAM": stream}.get(streaming_type.name, there)

    server.service_handler_factory = timed
    try:
        server.add_generic_rpc_handlers((handler_of(lambda name: None, None),))
    finally:
        server.service_handler_factory = passes_on


class InferenceThere(Inference):
    """Inference, where what a token stands for may be kept by another replica."""

    def __init__(self, service: Service, name: str) -> None:
        super().__init__(service)
        self.name = name

    def understood(self, message: Any, context: Any) -> tuple[Model, Asked]:
        model, asked = super().understood(message, context)
        if not context.passed:
            kept_elsewhere(asked, self.name)
        return model, asked


class Aborted(Exception):
    """A call has got its status."""


@dataclass(frozen=True)
class Written:
    """A reply that is bytes already, as Ray asks for it."""

    raw: bytes

    def SerializeToString(self) -> bytes:
        return self.raw


def from_ray(context: Any, left: float | None, clock: Callable[[], float]) -> "ProxiedCall":
    """The context of a call through Ray's proxy, with what was left of its time there."""

    def told(code: Any, details: str) -> None:
        context.set_code(code)
        context.set_details(details)

    made = ProxiedCall(context.invocation_metadata(), left, clock, told)
    made.passed = False
    return made


class ProxiedCall:
    """What grpc.py wants of a call's context. `passed`: by another replica, and not on to a third."""

    passed = True

    def __init__(
        self, metadata: Any, left: float | None, clock: Callable[[], float], told: Callable[[Any, str], Any]
    ) -> None:
        self.metadata, self.clock, self.told = metadata, clock, told
        self.begin(left)

    def begin(self, left: float | None) -> None:
        self.due = None if left is None else self.clock() + left

    def invocation_metadata(self) -> Any:
        return self.metadata

    def time_remaining(self) -> float | None:
        return None if self.due is None else self.due - self.clock()

    async def abort(self, code: Any, details: str) -> None:
        self.told(code, details)
        raise Aborted(details)
