"""The page at /: what it shows of the networks, the pictures that come with them, and the load that it can make.

In: a Service. Out: routes. The page itself is plain HTML, CSS and JavaScript (static/) and fetches nothing from elsewhere. Its
load is real: requests about the same pictures, at a rate that all stages could not keep up with, for a minute at most.
"""

import asyncio
import base64
import contextlib
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nestling.errors import NestlingError
from nestling.runtime.inputs import short
from nestling.serve.model import Model
from nestling.serve.refusal import Refusal
from nestling.serve.service import Asked, Service

STATIC = Path(__file__).parent / "static"
FILES = {"try.css": "text/css", "try.js": "text/javascript"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self' data:; img-src 'self' data: blob:; "
    "media-src blob:"
)
HEADERS = {"content-security-policy": POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
SAMPLES = 18  # pictures that are shown
LOAD = 3.0  # times what all stages could keep up with
LOAD_DEADLINE = 0.02  # seconds
LOAD_SECONDS = 60.0
FASTEST = 2000.0  # requests a second


class TryPage:
    """The page and what it asks for beside the protocol."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.loads: dict[str, asyncio.Task[None]] = {}

    def routes(self) -> list[Route]:
        return [
            Route("/", self.page),
            Route("/static/{name}", self.file),
            Route("/try/models", self.allowed(self.models)),
            Route("/try/samples/{name}", self.allowed(self.samples)),
            Route("/try/summary/{name}", self.allowed(self.summary)),
            Route("/try/busy/{name}", self.allowed(self.busy), methods=["POST"]),
        ]

    def allowed(self, what: Any) -> Any:
        async def endpoint(request: Request) -> Response:
            try:
                self.service.authorise(request.headers.get("authorization"))
                model = self.service.model(request.path_params["name"]) if "name" in request.path_params else None
                return JSONResponse(await what(request, model))
            except Refusal as refusal:
                return JSONResponse({"error": str(refusal)}, refusal.reason.http)

        return endpoint

    async def page(self, request: Request) -> Response:
        return Response((STATIC / "index.html").read_bytes(), headers=HEADERS, media_type="text/html")

    async def file(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in FILES:
            return JSONResponse({"error": "there is no such file"}, 404)
        return Response((STATIC / name).read_bytes(), headers=HEADERS, media_type=FILES[name])

    async def models(self, request: Request, model: None) -> Any:
        found = self.service.server.models.values()
        return [
            {
                "name": each.name,
                "sizes": each.spec.sizes,
                "classes": each.spec.classes,
                "side": min(each.spec.shape[1:]),
                "dark": dark(each),
            }
            for each in found
        ]

    async def samples(self, request: Request, model: Model) -> Any:
        images, names = pictures(model)
        return [{"name": name, "picture": png(image)} for image, name in zip(images, names, strict=True)]

    async def summary(self, request: Request, model: Model) -> Any:
        load = self.loads.get(model.name)
        busy = load is not None and not load.done()
        return {**self.service.metrics.summary(model.name, self.service.server.clock()), "busy": busy}

    async def busy(self, request: Request, model: Model) -> Any:
        origin = request.headers.get("origin", "")
        if origin and origin.partition("//")[2] != request.headers.get("host"):  # a browser says who asks
            raise Refusal(
                "another page", f"found a request from {short(origin)}; only this server's own page makes it busy"
            )
        on = request.query_params.get("on") == "true"
        if running := self.loads.pop(model.name, None):
            running.cancel()
        images, _ = pictures(model)
        if on and len(images):
            self.loads[model.name] = asyncio.ensure_future(self.load(model.name, images))
        return {"busy": on and bool(len(images))}

    async def load(self, name: str, images: np.ndarray[Any, Any]) -> None:
        """Requests at random times, whatever becomes of them."""
        chance, tasks = random.Random(0), set[asyncio.Task[None]]()
        clock = self.service.server.clock
        due = began = clock()
        while due < began + LOAD_SECONDS and not self.service.ending:
            model = self.service.model(name)
            rate = min(FASTEST, LOAD / sum(model.pace.predict(stage) for stage in range(1, model.spec.stages + 1)))
            due += chance.expovariate(rate)
            await asyncio.sleep(max(0.0, due - clock()))
            task = asyncio.ensure_future(self.one(model, images[chance.randrange(len(images))]))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def one(self, model: Model, image: np.ndarray[Any, Any]) -> None:
        began = self.service.server.clock()
        asked = Asked(image, parameters={"prior": True}, limit=LOAD_DEADLINE)
        try:
            request = self.service.begin(model, asked, began)
        except Refusal as refusal:
            return self.service.refused(model.name, refusal, began)
        with contextlib.suppress(Refusal):
            async for _ in request.each_stage_async():
                pass
            self.service.reply(model, asked, request)
            self.service.sent(model, request, 200)


def pictures(model: Model) -> tuple[np.ndarray[Any, Any], list[str]]:
    """Some test images of the network's data, uint8 (n,C,H,W), and what is on them; none where none come with it."""
    none = np.zeros((0, *model.spec.shape), np.uint8), list[str]()
    if model.runtime.run is None or not model.spec.mean or model.spec.shape[0] not in (1, 3):
        return none
    try:
        found = model.runtime.run.gallery()
        labels = model.runtime.run.outputs()["labels"][found["indices"][:SAMPLES].long()]
    except (NestlingError, KeyError):
        return none
    return found["images"][:SAMPLES].numpy(), [model.spec.classes[int(label)] for label in labels]


def dark(model: Model) -> bool:
    """Whether a network knows drawings as light on dark: so are the pictures of one channel that come with it."""
    images, _ = pictures(model)
    return model.spec.shape[0] == 1 and len(images) > 0 and float(images.mean()) < 128


def png(image: np.ndarray[Any, Any]) -> str:
    """A picture as an address that holds it."""
    pixels, file = image.transpose(1, 2, 0), io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
