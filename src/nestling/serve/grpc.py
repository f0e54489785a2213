"""gRPC: the Open Inference Protocol v2, and Triton's stream with one message per stage.

In: a Service. Out: a gRPC server of its own. The deadline is the smallest of gRPC's own and the parameter `timeout`
(microseconds), less a margin; a client that cancels is not worked for any more. Bytes that are no such message are refused in
words, so messages are read here and not by the library.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from math import inf
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from nestling import __version__
from nestling.serve.messages import CLASSES, PACKAGE
from nestling.serve.model import Model
from nestling.serve.refusal import Refusal
from nestling.serve.service import INPUT, LEFT, VERSION, Asked, Reply, Service, Wanted, metadata, properties
from nestling.serve.tensors import from_bytes, from_values, most_values, name_of, shape_of, to_bytes

CONTENTS = {"UINT8": "uint_contents", "FP32": "fp32_contents"}
FINAL = "triton_final_response"  # tells a stream's client that no more comes for its request
AT_A_TIME = 256  # requests of one stream
UNARY = {
    "ServerLive": "server_live",
    "ServerReady": "server_ready",
    "ServerMetadata": "server_metadata",
    "ModelReady": "model_ready",
    "ModelMetadata": "model_metadata",
    "ModelInfer": "model_infer",
}  # calls with one reply, and the methods below that answer them
Context = Any  # grpc.aio.ServicerContext
Method = Callable[[Any, Context], Awaitable[Any]]


class Inference:
    """GRPCInferenceService."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def handler(self) -> grpc.GenericRpcHandler:
        return handler_of(self.one, self.stream)

    def one(self, name: str) -> Callable[[bytes, Context], Awaitable[bytes]]:
        """A call with one reply, from bytes to bytes."""
        method: Method = getattr(self, UNARY[name])

        async def call(raw: bytes, context: Context) -> bytes:
            try:
                if name not in ("ServerLive", "ServerReady"):
                    self.authorise(context)
                return bytes((await method(parsed(f"{name}Request", raw), context)).SerializeToString())
            except Refusal as refusal:
                status, said = getattr(grpc.StatusCode, refusal.reason.grpc), str(refusal)
            await context.abort(
                status, said
            )  # raises; the library keeps that for a while, so not with all that led to it
            raise AssertionError

        return call

    def authorise(self, context: Context) -> None:
        self.service.authorise(header(context, "authorization"))

    async def server_live(self, request: Any, context: Context) -> Any:
        return CLASSES["ServerLiveResponse"](live=True)

    async def server_ready(self, request: Any, context: Context) -> Any:
        return CLASSES["ServerReadyResponse"](ready=not self.service.ending)

    async def server_metadata(self, request: Any, context: Context) -> Any:
        extensions = ["classification", "schedule_policy"]
        return CLASSES["ServerMetadataResponse"](name="nestling", version=__version__, extensions=extensions)

    async def model_ready(self, request: Any, context: Context) -> Any:
        self.service.model(request.name, request.version)
        return CLASSES["ModelReadyResponse"](ready=not self.service.ending)

    async def model_metadata(self, request: Any, context: Context) -> Any:
        model = self.service.model(request.name, request.version)
        return CLASSES["ModelMetadataResponse"](**metadata(model), properties=properties(model))

    async def model_infer(self, message: Any, context: Context) -> Any:
        began = self.service.server.clock()
        try:
            model, asked = self.understood(message, context)
            request = self.service.begin(model, asked, began)
        except Refusal as refusal:
            self.service.refused(message.model_name, refusal, began)
            raise
        status = LEFT  # where the client cancels
        try:
            async for _ in request.each_stage_async():
                pass
            reply = written(self.service.reply(model, asked, request))
            status = 200
            return reply
        except Refusal as refusal:
            status = refusal.reason.http
            raise
        finally:
            self.service.sent(model, request, status)

    async def stream(self, messages: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        """Requests come, and the answers of every stage of each go back as they are done."""
        said = ""
        try:
            self.authorise(context)
        except Refusal as refusal:
            said = str(refusal)
        if said:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, said)
        replies: asyncio.Queue[bytes] = asyncio.Queue(AT_A_TIME)  # who reads none is not worked for
        tasks: set[asyncio.Task[None]] = set()
        room = asyncio.Semaphore(AT_A_TIME)

        async def listen() -> None:
            async for raw in messages:
                await room.acquire()
                task = asyncio.ensure_future(self.streamed(raw, context, replies))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                task.add_done_callback(lambda _: room.release())
            while tasks:
                await asyncio.wait(tasks)

        listening = asyncio.ensure_future(listen())
        reply: asyncio.Future[bytes] | None = None
        try:
            while not (listening.done() and replies.empty()):
                reply = asyncio.ensure_future(replies.get())
                await asyncio.wait((reply, listening), return_when=asyncio.FIRST_COMPLETED)
                if reply.done():
                    yield reply.result()
        finally:
            listening.cancel()
            if reply is not None:
                reply.cancel()
            for task in list(tasks):
                task.cancel()

    async def streamed(self, raw: bytes, context: Context, replies: asyncio.Queue[bytes]) -> None:
        """One request of a stream."""
        kind, name, asked_of, request, status = CLASSES["ModelStreamInferResponse"], "", "", None, LEFT
        began = self.service.server.clock()
        try:
            message = parsed("ModelInferRequest", raw)
            name, asked_of = message.id, message.model_name
            model, asked = self.understood(message, context)
            request = self.service.begin(model, asked, began, every=True)
            told = False
            async for stage in request.each_stage_async():
                told = last = request.over and stage == request.stage
                reply = self.service.reply(model, asked, request, None if last else stage)
                reply.parameters[FINAL] = last
                await replies.put(kind(infer_response=written(reply)).SerializeToString())
            if not told:  # time was up: the best there is, once more, as the last word
                reply = self.service.reply(model, asked, request)
                reply.parameters[FINAL] = True
                await replies.put(kind(infer_response=written(reply)).SerializeToString())
            status = 200
        except Refusal as refusal:
            status = refusal.reason.http
            if request is None:
                self.service.refused(asked_of, refusal, began)
            said = CLASSES["ModelInferResponse"](id=name)
            await replies.put(kind(error_message=str(refusal), infer_response=said).SerializeToString())
        finally:
            if request is not None:
                self.service.sent(model, request, status)

    def understood(self, message: Any, context: Context) -> tuple[Model, Asked]:
        model = self.service.model(message.model_name, message.model_version)
        if len(message.inputs) > 1 or len(message.raw_input_contents) > len(message.inputs):
            raise Refusal("wrong", f"found {len(message.inputs)} inputs, expected one, called {INPUT}")
        images = None
        for tensor in message.inputs:
            if tensor.name != INPUT:
                raise Refusal("wrong", f"found the input {tensor.name!r:.40}; expected one called {INPUT}")
            shape = shape_of(tuple(tensor.shape), most_values(model.spec.shape, model.stages.scheduler.room))
            if message.raw_input_contents:
                images = from_bytes(message.raw_input_contents[0], tensor.datatype, shape)
            else:
                field = CONTENTS.get(tensor.datatype, "fp32_contents")
                images = from_values(list(getattr(tensor.contents, field)), tensor.datatype, shape)
        outputs = [Wanted(each.name, best=best_of(plain(each.parameters))) for each in message.outputs]
        left = context.time_remaining()
        limit = inf if left is None else max(0.0, left)
        return model, Asked(
            images, message.id, plain(message.parameters), outputs, limit, header(context, "traceparent")
        )


def header(context: Context, name: str) -> str:
    """What the client sent beside its message, "" for nothing."""
    return str(dict(context.invocation_metadata() or ()).get(name, ""))


def parsed(name: str, raw: bytes) -> Any:
    try:
        return CLASSES[name].FromString(raw)
    except DecodeError as error:
        raise Refusal("wrong", f"the request is no {name} ({error})") from error


def plain(parameters: Any) -> dict[str, Any]:
    """Parameters by name; of one that says nothing, nothing."""
    found = {name: each.WhichOneof("parameter_choice") for name, each in parameters.items()}
    return {name: getattr(parameters[name], choice) for name, choice in found.items() if choice}


def best_of(parameters: dict[str, Any]) -> int:
    found = parameters.get("classification", 0)
    if isinstance(found, bool) or not isinstance(found, int) or found < 0:
        raise Refusal("wrong", f"found classification {found!r:.40}; expected how many classes")
    return found


def written(reply: Reply) -> Any:
    message = CLASSES["ModelInferResponse"](model_name=reply.model, model_version=VERSION, id=reply.id)
    for name, value in reply.parameters.items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
        setattr(message.parameters[name], kind, value)
    for output, array in reply.outputs:
        message.outputs.add(name=output.name, datatype=name_of(array), shape=array.shape)
        message.raw_output_contents.append(to_bytes(array))
    return message


def handler_of(one: Callable[[str], Any], stream: Any) -> grpc.GenericRpcHandler:
    """The protocol's calls: `one(name)` answers those with one reply, `stream` the others."""
    handlers = {name: grpc.unary_unary_rpc_method_handler(one(name)) for name in UNARY}
    handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(stream)
    return grpc.method_handlers_generic_handler(f"{PACKAGE}.GRPCInferenceService", handlers)


async def listening(service: Service, address: str, credentials: grpc.ServerCredentials | None) -> tuple[Any, int]:
    """A gRPC server that listens, and its port."""
    options = [("grpc.max_receive_message_length", service.most_bytes), ("grpc.so_reuseport", 0)]
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers((Inference(service).handler(),))
    port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    await server.start()
    return server, port
