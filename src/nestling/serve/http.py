"""HTTP: the Open Inference Protocol v2 with JSON or binary tensors, pictures, and one message per stage as server-sent events.

In: a Service. Out: a Starlette application. The deadline is the smallest of the parameter `timeout` (microseconds) and the header
`Nestling-Deadline-Ms`, less a margin. A client that leaves is not worked for any more. How the protocol's tensors and
parameters are understood is tensors.py's and service.py's business.
"""

import asyncio
import io
import json
import time
import zlib
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from PIL import Image
from starlette.applications import Starlette
from starlette.datastructures import Headers, QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from nestling import __version__
from nestling.data.picture_file import Unreadable, fitted
from nestling.errors import NestlingError
from nestling.runtime.inputs import short
from nestling.serve import openapi
from nestling.serve.model import Model
from nestling.serve.refusal import Refusal
from nestling.serve.request import ServedRequest
from nestling.serve.service import INPUT, LEFT, VERSION, Asked, Reply, Service, Wanted, metadata, properties
from nestling.serve.tensors import Tensor, from_bytes, from_values, most_values, name_of, shape_of, to_bytes, to_values

CAME = "nestling.came"  # of a request's scope: when it came, by time.monotonic()
DEADLINE = "nestling-deadline-ms"
JSON_LENGTH = "inference-header-content-length"  # of the JSON before the binary tensors
BODY_SECONDS = 10.0  # in which a request's body must be here
PICTURES = {"image/jpeg": "JPEG", "image/png": "PNG"}
OPENINGS = (b"\xff\xd8\xff", b"\x89PNG")  # of these files; no JSON begins so
MOST_PIXELS = 2**24  # of a picture: small files may hold very many
AT_A_TIME = 2  # pictures that are read at a time, each in a thread
EVENTS = "text/event-stream"


def application(service: Service, more: Sequence[Route] = (), infer: "Infer | None" = None) -> Starlette:
    """`more`: routes of the page. `infer`: who answers, where that is more than one server's business."""
    infer = infer or Infer(service)

    def told(what: Any) -> Any:
        async def endpoint(request: Request) -> Response:
            try:
                service.authorise(request.headers.get("authorization"))
                return await what(request)
            except Refusal as refusal:
                return refused(refusal)

        return endpoint

    async def about(request: Request) -> Response:
        extensions = ["binary_tensor_data", "classification", "schedule_policy"]
        return JSONResponse({"name": "nestling", "version": __version__, "extensions": extensions})

    async def model(request: Request) -> Response:
        found = service.model(request.path_params["name"], request.path_params.get("version", ""))
        return JSONResponse({**metadata(found), "properties": properties(found)})

    async def model_ready(request: Request) -> Response:
        service.model(request.path_params["name"], request.path_params.get("version", ""))
        return Response(status_code=503 if service.ending else 200)

    async def live(request: Request) -> Response:
        return Response()

    async def ready(request: Request) -> Response:
        return Response(status_code=503 if service.ending else 200)

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    routes = [Route("/v2", told(about)), Route("/v2/health/live", live), Route("/v2/health/ready", ready)]
    for path in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        routes += [
            Route(path, told(model)),
            Route(f"{path}/ready", told(model_ready)),
            Route(f"{path}/infer", infer, methods=["POST"]),
        ]

    async def described(request: Request) -> Response:
        return JSONResponse(openapi.document())

    routes += [Route("/metrics", told(metrics)), Route("/openapi.json", described), *more]
    return Starlette(routes=routes, exception_handlers={HTTPException: not_found, Exception: broken})


async def not_found(request: Request, error: Exception) -> Response:
    """Paths and methods that there are not."""
    assert isinstance(error, HTTPException)
    said = f"{request.method} {short(request.url.path)}: {error.detail}"
    return JSONResponse({"error": said}, error.status_code, error.headers)


async def broken(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": f"the server failed: {type(error).__name__}"}, 500)


def refused(refusal: Refusal) -> Response:
    headers = {"full": {"retry-after": "1"}, "unknown client": {"www-authenticate": "Bearer"}}.get(refusal.why)
    return JSONResponse({"error": str(refusal)}, refusal.reason.http, headers)


class Infer:
    """POST /v2/models/NAME/infer."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.reading = asyncio.Semaphore(AT_A_TIME)
        read_once()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, headers, place = self.service, Headers(scope=scope), scope["path_params"]
        began = service.server.clock() - waited(scope)
        try:
            service.authorise(headers.get("authorization"))
            service.model(place["name"], place.get("version", ""))  # else nothing need be read
            body = await read_body(receive, headers, service.most_bytes)
            model = service.model(place["name"], place.get("version", ""))  # it may have been opened anew meanwhile
            asked = await self.understood(model, headers, body, scope)
            asked.limit, asked.traceparent = header_limit(headers), headers.get("traceparent", "")
            events = EVENTS in headers.get("accept", "")
            request = service.begin(model, asked, began, every=events)
        except Refusal as refusal:
            service.refused(place["name"], refusal, began)
            return await refused(refusal)(scope, receive, send)
        watching = asyncio.ensure_future(until_gone(receive, request))
        try:
            if events:
                status = await self.stream(model, asked, request, send)
            else:
                async for _ in request.each_stage_async():
                    pass
                response = self.response(model, asked, request)
                status = response.status_code
                if not request.left:
                    await response(scope, receive, send)
        finally:
            watching.cancel()
        service.sent(model, request, LEFT if request.left else status)

    def response(self, model: Model, asked: Asked, request: ServedRequest) -> Response:
        try:
            return written(self.service.reply(model, asked, request))
        except Refusal as refusal:
            return refused(refusal)

    async def stream(self, model: Model, asked: Asked, request: ServedRequest, send: Send) -> int:
        """One message per stage; where there is none by the deadline, an event `error` (or the prior). Who wants a token to
        refine with gets it with the last: at the deadline that is the best once more."""
        kind = [(b"content-type", EVENTS.encode()), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        status, said, last = 200, 0, False
        async for stage in request.each_stage_async():
            last = request.over and stage == request.stage
            message = self.event(model, asked, request, None if last else stage)
            await send({"type": "http.response.body", "body": message, "more_body": True})
            said = stage
        wants_token = asked.parameters.get("refine") is True and not last
        if not request.left and (not said or wants_token):
            message = self.event(model, asked, request, None)
            status = 200 if message.startswith(b"data") else 504
            await send({"type": "http.response.body", "body": message, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return status

    def event(self, model: Model, asked: Asked, request: ServedRequest, stage: int | None) -> bytes:
        try:
            return b"data: " + as_json(self.service.reply(model, asked, request, stage)) + b"\n\n"
        except Refusal as refusal:
            return b"event: error\ndata: " + json.dumps({"error": str(refusal)}).encode() + b"\n\n"

    async def understood(self, model: Model, headers: Headers, body: bytes, scope: Scope) -> Asked:
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        query = QueryParams(scope["query_string"])
        if kind not in PICTURES:
            if ignored := sorted({"id", *openapi.PARAMETERS["properties"]} & set(query)):
                raise Refusal(
                    "wrong",
                    f"found {', '.join(ignored)} in the query; beside tensors they stand in the body's parameters",
                )
            if body.startswith(OPENINGS):
                raise Refusal(
                    "wrong", f"found a picture and Content-Type {short(kind)!r}; expected {' or '.join(PICTURES)}"
                )
            return from_json(body, headers.get(JSON_LENGTH), model)
        names = ["id", *(each["name"] for each in openapi.QUERY)]
        if unknown := sorted(set(query) - set(names)):  # a timeout that is misspelt would be none
            raise Refusal(
                "wrong", f"found {short(', '.join(unknown))} in the query; expected some of {', '.join(names)}"
            )
        async with self.reading:
            try:
                image = await asyncio.to_thread(
                    fitted, body, model.spec.shape, MOST_PIXELS, model.spec.part, tuple(PICTURES.values())
                )
            except Unreadable as error:
                why = error if body else "it is empty; curl sends a file by --data-binary @FILE"
                raise Refusal("wrong", f"the body cannot be read as a picture ({why})") from error
            except NestlingError as error:
                raise Refusal("unknown form", str(error)) from error
        known = {"true": True, "false": False}
        parameters: dict[str, Any] = {k: known.get(value, value) for k, value in query.items() if k != "id"}
        if "confident" in parameters:
            parameters["confident"] = number(parameters["confident"])
        return Asked(image, query.get("id", ""), parameters)


def read_once() -> None:
    """Pillow loads what it reads pictures with when the first one comes, whose deadline would pay for it: read one before."""
    for kind in PICTURES.values():
        file = io.BytesIO()
        Image.new("RGB", (8, 8)).save(file, kind)
        fitted(file.getvalue(), (3, 4, 4))


def waited(scope: Scope) -> float:
    """Seconds that a request has waited to be read, where that is known."""
    return time.monotonic() - scope[CAME] if CAME in scope else 0.0


async def until_gone(receive: Receive, request: ServedRequest) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    request.cancel()


async def read_body(receive: Receive, headers: Headers, most: int) -> bytes:
    """The whole body, unpacked, if it is not too large and comes soon enough."""
    too_large = Refusal(
        "too large", f"found a body of more than {most:,} bytes, which is the most that this server takes"
    )
    if headers.get("content-length", "0").isdigit() and int(headers.get("content-length", "0")[:20]) > most:
        raise too_large
    chunks, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refusal("too slow", "the client left before its request was here")
                chunks.append(message.get("body", b""))
                size += len(chunks[-1])
                if size > most:
                    raise too_large
                if not message.get("more_body", False):
                    break
    except TimeoutError as error:
        raise Refusal("too slow", f"the body was not here within {BODY_SECONDS:g} seconds") from error
    return unpacked(b"".join(chunks), headers.get("content-encoding", "identity").lower(), most, too_large)


def unpacked(body: bytes, encoding: str, most: int, too_large: Refusal) -> bytes:
    if encoding == "identity":
        return body
    if encoding not in ("gzip", "deflate"):
        raise Refusal("unknown form", f"found content encoding {short(encoding)}; expected gzip, deflate or none")
    try:
        unpacker = zlib.decompressobj(47)  # either, by its beginning
        found = unpacker.decompress(body, most + 1)
    except zlib.error as error:
        raise Refusal("wrong", f"the body is not {encoding} ({error})") from error
    if len(found) > most:
        raise too_large
    if not unpacker.eof:
        raise Refusal("wrong", f"the end of the body's {encoding} is missing")
    return found


def header_limit(headers: Headers) -> float:
    text = headers.get(DEADLINE)
    if text is None:
        return inf
    found = number(text)
    if not 0 <= found < inf:
        raise Refusal("wrong", f"found the header {DEADLINE}: {short(text)}; expected milliseconds, such as 20")
    return found / 1e3


def number(text: Any) -> float:
    try:
        return float(text)
    except (ValueError, TypeError):
        return -1.0


def from_json(body: bytes, length: str | None, model: Model) -> Asked:
    """The protocol's JSON, perhaps with binary tensors behind it."""
    size = len(body)
    if length is not None:
        if not length.isdigit() or len(length) > 18 or int(length) > len(body):
            raise Refusal(
                "wrong", f"found {JSON_LENGTH}: {short(length)}; expected at most the {len(body):,} bytes of the body"
            )
        size = int(length)
    try:
        found = json.loads(body[:size])
    except (ValueError, RecursionError) as error:
        raise Refusal("wrong", f"the request is not JSON ({short(error)})") from error
    asked = mapping(found, "the request")
    parameters = mapping(asked.get("parameters", {}), "its parameters")
    name = asked.get("id", "")
    if not isinstance(name, str):
        raise Refusal("wrong", f"found the id {short(name)}; expected text")
    inputs = sequence(asked.get("inputs", []), "its inputs")
    raw = memoryview(body)[size:]
    images, used = None, 0
    if len(inputs) > 1:
        raise Refusal("wrong", f"found {len(inputs)} inputs, expected one, called {INPUT}")
    for each in inputs:
        images, used = tensor(mapping(each, "an input"), raw, model)
    if used != len(raw):
        raise Refusal("wrong", f"found {len(raw):,} bytes of binary tensors, of which the inputs name {used:,}")
    binary = parameters.get("binary_data_output", False) is True
    outputs = [wanted(mapping(each, "an output"), binary) for each in sequence(asked.get("outputs", []), "its outputs")]
    return Asked(images, name, parameters, outputs or (Wanted.all(True) if binary else ()))


def tensor(found: Mapping[str, Any], raw: memoryview, model: Model) -> tuple[Tensor, int]:
    """An input, and how many of the binary bytes it took."""
    if found.get("name") != INPUT:
        raise Refusal("wrong", f"found the input {short(found.get('name'))}; expected one called {INPUT}")
    shape, datatype = (
        shape_of(found.get("shape"), most_values(model.spec.shape, model.stages.scheduler.room)),
        found.get("datatype"),
    )
    size = mapping(found.get("parameters", {}), "an input's parameters").get("binary_data_size")
    if size is not None and "data" in found:
        raise Refusal("wrong", "found data and a binary_data_size in one input; send the one or the other")
    if size is None:
        return from_values(found.get("data"), datatype, shape), 0
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= len(raw):
        raise Refusal(
            "wrong", f"found binary_data_size {short(size)}; expected at most the {len(raw):,} bytes that follow"
        )
    return from_bytes(raw[:size], datatype, shape), size


def wanted(found: Mapping[str, Any], binary: bool) -> Wanted:
    parameters = mapping(found.get("parameters", {}), "an output's parameters")
    best = parameters.get("classification", 0)
    if isinstance(best, bool) or not isinstance(best, int) or best < 0:
        raise Refusal("wrong", f"found classification {short(best)}; expected how many classes")
    name = found.get("name")
    return Wanted(name if isinstance(name, str) else repr(name), parameters.get("binary_data", binary) is True, best)


def mapping(found: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(found, dict):
        raise Refusal("wrong", f"found {short(found)} for {what}; expected a JSON object")
    return found


def sequence(found: Any, what: str) -> Sequence[Any]:
    if not isinstance(found, list):
        raise Refusal("wrong", f"found {short(found)} for {what}; expected a JSON array")
    return found


def document(reply: Reply) -> tuple[dict[str, Any], list[bytes]]:
    """The reply as JSON, and the binary tensors behind it."""
    outputs, parts = [], []
    for output, array in reply.outputs:
        about: dict[str, Any] = {"name": output.name, "datatype": name_of(array), "shape": list(array.shape)}
        if output.binary:
            parts.append(to_bytes(array))
            about["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            about["data"] = to_values(array)
        outputs.append(about)
    found: dict[str, Any] = {"model_name": reply.model, "model_version": VERSION}
    if reply.id:
        found["id"] = reply.id
    return {**found, "parameters": reply.parameters, "outputs": outputs}, parts


def as_json(reply: Reply) -> bytes:
    for output, _ in reply.outputs:
        output.binary = False  # a message of a stream is text
    return json.dumps(document(reply)[0]).encode()


def written(reply: Reply) -> Response:
    found, parts = document(reply)
    text = json.dumps(found).encode()
    if not parts:
        return Response(text, media_type="application/json")
    headers = {JSON_LENGTH: str(len(text))}
    return Response(b"".join([text, *parts]), headers=headers, media_type="application/octet-stream")
