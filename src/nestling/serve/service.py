"""What all protocols share: from what a client asked for to a request, and from its answers to outputs and parameters.

In: `Asked`, which a protocol reads from its bytes. Out: replies, or a Refusal. Parameters that a client may send: `timeout`
(microseconds, as Triton's), `confident`, `prior`, and `refine`: true to be given a token, or such a token, to go on; with
images beside it, where it is not kept any more it is computed again from these.
"""

import hmac
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np

from nestling.errors import NestlingError
from nestling.runtime.answer import Answer
from nestling.runtime.inputs import short
from nestling.serve.metrics import Metrics
from nestling.serve.model import Model
from nestling.serve.refusal import Refusal
from nestling.serve.request import ServedRequest
from nestling.serve.scheduler import Full
from nestling.serve.server import Server
from nestling.serve.stages import Closed
from nestling.serve.tensors import Tensor
from nestling.serve.traces import Traces, trace_of
from nestling.serve.way import Way

INPUT = "input"
LONGEST = 10.0  # seconds: deadlines are at most this, and so is the time in which the server ends
MOST_BYTES = 8 * 2**20  # of a request
VERSION = "1"
LEFT = 499  # the status of who has left before there was a reply
OUTPUTS: dict[str, Callable[[Sequence[Answer]], Tensor]] = {
    "probabilities": lambda answers: np.stack([answer.probabilities for answer in answers]),
    "label": lambda answers: np.array([answer.label for answer in answers], np.int64),
    "class": lambda answers: np.array([answer.name.encode() for answer in answers], object),
    "confidence": lambda answers: np.array([answer.confidence for answer in answers], np.float32),
    "stage": lambda answers: np.array([answer.stage for answer in answers], np.int32),
    "final": lambda answers: np.array([answer.final for answer in answers], np.bool_),
}
Log = Callable[[dict[str, Any]], None]
PARAMETERS = ("timeout", "confident", "prior", "refine")  # who misspells one is told: a deadline would be none
# What clients of Triton's and KServe's send of themselves
THEIRS = ("binary_data_output", "priority", "sequence_id", "sequence_start", "sequence_end", "content_type", "headers")


@dataclass
class Wanted:
    """An output that a client wants, perhaps as binary, perhaps as the names of its best so many classes."""

    name: str
    binary: bool = False
    best: int = 0

    def __post_init__(self) -> None:
        if self.name not in OUTPUTS:
            raise Refusal("wrong", f"there is no output {short(self.name)}; expected some of {', '.join(OUTPUTS)}")
        if self.best and self.name != "probabilities":
            raise Refusal("wrong", f"found a classification of {self.name}; expected one of probabilities")

    @classmethod
    def all(cls, binary: bool = False) -> "list[Wanted]":
        return [cls(name, binary) for name in OUTPUTS]


@dataclass
class Asked:
    """One inference, as a client asked for it."""

    images: Tensor | None = None  # None: goes on with what is kept under `refine`
    id: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    outputs: Sequence[Wanted] = ()
    limit: float = inf  # seconds, as the protocol itself has it
    traceparent: str = ""  # W3C Trace Context, as the client sent it

    def timeout(self) -> float:
        """Seconds, of the parameter; 0 is none, as with Triton."""
        found = self.parameters.get("timeout", 0)
        if isinstance(found, bool) or not isinstance(found, int | float | str):
            found = "nothing of the kind"
        try:
            microseconds = float(found)
        except (ValueError, OverflowError):
            microseconds = -1.0
        if not (microseconds >= 0 and isfinite(microseconds)):
            shown = short(self.parameters.get("timeout"))
            raise Refusal("wrong", f"found the timeout {shown}; expected microseconds, such as 20000 for 20 ms")
        return microseconds / 1e6 or inf

    def flag(self, name: str) -> bool:
        found = self.parameters.get(name, False)
        if not isinstance(found, bool):
            raise Refusal("wrong", f"found {name}={short(found)}; expected true or false")
        return found


@dataclass
class Reply:
    """Answers as every protocol sends them."""

    model: str
    id: str
    parameters: dict[str, bool | int | float | str]
    outputs: list[tuple[Wanted, Tensor]]


class Service:
    """A server, and the rules for its clients."""

    def __init__(
        self,
        server: Server,
        metrics: Metrics | None = None,
        log: Log | None = None,
        token: str = "",
        longest: float = LONGEST,
        most_bytes: int = MOST_BYTES,
        traces: Traces | None = None,
    ) -> None:
        """`token`: what clients must send as `Authorization: Bearer TOKEN`; "" = nothing. `log` and `traces` are told of every
        request."""
        self.server, self.log, self.token, self.longest, self.most_bytes = server, log, token, longest, most_bytes
        self.metrics, self.traces = metrics or Metrics(server), traces
        self.way = Way(server.clock)  # one event loop serves all clients
        self.ending = False

    def authorise(self, header: str | None) -> None:
        if self.token and not hmac.compare_digest((header or "").encode(), f"Bearer {self.token}".encode()):
            raise Refusal("unknown client", "found no valid token; expected the header Authorization: Bearer TOKEN")

    def model(self, name: str, version: str = "") -> Model:
        if version not in ("", VERSION):
            raise Refusal("not here", f"there is no version {short(version)} of {short(name)}; expected {VERSION}")
        try:
            return self.server.model(name)
        except NestlingError as error:
            raise Refusal("not here", str(error)) from error

    def begin(self, model: Model, asked: Asked, began: float, every: bool = False) -> ServedRequest:
        """Submit what was asked for; `began` is when that came in."""
        if self.ending:
            raise Refusal("ending", "this server is ending; ask another one, or this one again when it is back")
        known = {name for name in asked.parameters if name in (*PARAMETERS, *THEIRS) or name.startswith("triton_")}
        if unknown := sorted(set(asked.parameters) - known):
            raise Refusal(
                "wrong",
                f"found the parameter {short(unknown[0])}, which means nothing here; expected some of {', '.join(PARAMETERS)}",
            )
        limit = min(asked.limit, asked.timeout(), self.longest)
        token, confident = asked.parameters.get("refine", False), asked.parameters.get("confident")
        if "confident" in asked.parameters and (isinstance(confident, bool) or not isinstance(confident, int | float)):
            raise Refusal("wrong", f"found confident={short(confident)}; expected a probability from 0 to 1")
        asked.flag("prior")
        request = None
        try:
            again = isinstance(token, str) and token
            if again and (asked.images is None or model.kept.has(token)):
                request = model.more(token, limit, self.way, began)
            elif not (again or isinstance(token, bool)) or asked.images is None:
                raise Refusal(
                    "wrong", f"found no {INPUT} and refine={short(token)}; send images, or a token of a reply"
                )
            else:
                images = asked.images[None] if asked.images.ndim == len(model.spec.shape) else asked.images
                request = model.ask(images, limit, confident, self.way, began)
            request.traceparent = asked.traceparent
            return request.submit(every)
        except (Refusal, Full) as error:
            if again and request is not None:  # who is to come back finds what was kept
                model.kept.put(request.tickets, token)
            if isinstance(error, Closed):
                raise Refusal("ending", f"{model.name} is being opened anew; ask again") from error
            if isinstance(error, Full):
                raise Refusal("full", f"{model.name} has no room for another request now; ask again later") from error
            raise
        except NestlingError as error:
            raise Refusal("wrong", str(error)) from error

    def reply(self, model: Model, asked: Asked, request: ServedRequest, stage: int | None = None) -> Reply:
        """The answers there are; of a request that is over, with a token to refine them if that was asked for."""
        try:
            answers = request.answers(stage)
        except NestlingError as error:
            raise Refusal("failed", str(error)) from error
        request.told = [answer.stage for answer in answers]
        reached = min(request.told)
        if not reached and not asked.flag("prior"):
            waited = f"{1e3 * (request.clock() - request.began):.1f} ms"
            raise Refusal(
                "no time", f"no stage of {model.name} was done by the deadline ({waited}); prior=true sends the prior"
            )
        parameters: dict[str, bool | int | float | str] = {
            "stage": reached,
            "final": all(answer.final for answer in answers),
            "confidence": min(answer.confidence for answer in answers),
            "elapsed_ms": round(1e3 * max(answer.elapsed for answer in answers), 3),
        }
        if (
            stage is None
            and not request.left
            and asked.parameters.get("refine")
            and (token := model.kept.put(request.tickets))
        ):
            parameters["refine"] = token
        outputs = [(wanted, made(wanted, answers, model)) for wanted in asked.outputs or Wanted.all()]
        return Reply(model.name, asked.id, parameters, outputs)

    def sent(self, model: Model, request: ServedRequest, status: int) -> None:
        """A reply has left."""
        request.handed()
        now = request.clock()
        took, late = now - request.began, now > request.deadline
        if status != LEFT:
            self.metrics.answered(model.name, request, took, late)
        elif late:
            self.metrics.missed.labels(model.name).inc()
        if self.traces is not None:
            self.traces.request(model.name, request, status)
        if self.log is not None:
            line = {"model": model.name, "status": status, "images": len(request.tickets), "stage": min(request.told)}
            trace = trace_of(request.traceparent)
            self.log({**line, "ms": round(1e3 * took, 3), "late": late, **({"trace": trace} if trace else {})})

    def refused(self, name: str, refusal: Refusal, began: float) -> None:
        """A request was not taken."""
        if name in self.server.models:
            self.metrics.refused(name, full=refusal.why == "full")
        if self.log is not None:
            took = 1e3 * (self.server.clock() - began)
            line = {"model": name[:100], "status": refusal.reason.http, "ms": round(took, 3), "error": str(refusal)}
            self.log(line)


def read_token(file: str) -> str:
    """What clients must send: a file's text, or that of NESTLING_TOKEN; "" = nothing."""
    if not file:
        return os.environ.get("NESTLING_TOKEN", "")
    try:
        found = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise NestlingError(
            f"cannot read the token in {file} ({error}); expected a file with the token as text"
        ) from error
    if not found:
        raise NestlingError(f"{file} is empty; expected the token that clients must send")
    return found


def made(wanted: Wanted, answers: Sequence[Answer], model: Model) -> Tensor:
    """An output, or Triton's form of its best classes: "probability:label:name"."""
    found = OUTPUTS[wanted.name](answers)
    if not wanted.best:
        return found
    order = np.argsort(-found, axis=1, kind="stable")[:, : wanted.best]
    rows = [
        [f"{row[i]:f}:{i}:{model.spec.classes[i]}".encode() for i in best]
        for row, best in zip(found, order, strict=True)
    ]
    return np.array(rows, object)


def metadata(model: Model) -> dict[str, Any]:
    """What is told of a network."""
    spec, classes = model.spec, len(model.spec.classes)
    shapes = {"probabilities": [-1, classes]}
    datatypes = {"probabilities": "FP32", "label": "INT64", "class": "BYTES", "confidence": "FP32", "stage": "INT32"}
    return {
        "name": model.name,
        "versions": [VERSION],
        "platform": f"nestling_{model.stages.engine.name.replace(' ', '_')}",
        "inputs": [{"name": INPUT, "datatype": "UINT8" if spec.mean else "FP32", "shape": [-1, *spec.shape]}],
        "outputs": [
            {"name": name, "datatype": datatypes.get(name, "BOOL"), "shape": shapes.get(name, [-1])} for name in OUTPUTS
        ],
    }


def properties(model: Model) -> dict[str, str]:
    """More of it, each as a JSON array in text: what its stages are called and expected to err, and its classes."""
    spec = model.spec
    found = {"sizes": spec.sizes, "errors": spec.errors, "classes": spec.classes, "mean": spec.mean, "std": spec.std}
    return {name: json.dumps(values, ensure_ascii=False) for name, values in found.items() if values}
